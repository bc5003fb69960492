# ruff: noqa: RUF001
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.quality.answers import Answer, answer_faults, copied, holds, misses
from dflash_deploy.bench.quality.schema import misfit
from dflash_deploy.bench.workloads import Message, Prompt, load_all

REFERENCES = [prompt for prompt in load_all() if prompt.reference]
JSON_PROMPT = next(prompt for prompt in REFERENCES if prompt.schema)
TOOL_PROMPT = next(prompt for prompt in REFERENCES if prompt.tool)


def answered(prompt, text):
    if prompt.tool is not None:
        return Answer("", str(prompt.tool["name"]), text)
    return Answer(text, tokens=max(1, len(text) // 3))


def test_no_good_answer_raises_an_alarm():
    assert len(REFERENCES) >= 200
    assert {prompt.language for prompt in REFERENCES} == {"en", "zh-TW"}
    alarms = {}
    for prompt in REFERENCES:
        answer = answered(prompt, prompt.reference)
        found = answer_faults(prompt, answer), misses(prompt, answer)
        if any(found):
            alarms[prompt.id] = found
    assert alarms == {}


def test_a_reference_to_another_question_is_not_right():
    # Else the checks above could not fail.
    kinds = Counter()
    for prompt in REFERENCES:
        if prompt.tool is None and (prompt.answer or prompt.schema):
            others = [one for one in REFERENCES if one.task == prompt.task and one.tool is None]
            other = others[(others.index(prompt) + 5) % len(others)]
            kinds[misses(prompt, answered(prompt, other.reference)) is not None] += 1
    assert kinds[True] > 9 * kinds[False]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So the sum is **5,050**.", "5050"),
        ("$$x = 42$$", "42"),
        ("It opens at 21:35 sharp.", "21:35"),
        ("1. amber\n2. garnet\n3. opal", "amber, garnet, opal"),
        ("答案是玉山。", "玉山"),
        ("The order is C → A → D → B", "C, A, D, B"),
        ("１２ 公斤", "12"),
        ("It costs $42.00.", "42"),
        ("so the result is...42", "42"),
        ("50-42 is 8, and 40-42 is the range", "42"),
        ("答案是42個。", "42"),
        (r"the sum is $5{,}050$", "5050"),
        ("It is 3.50 km.", "3.5"),
        ("答案：5,050元", "5050"),
        ("It is 5\u202f050.", "5050"),
        ("Answer: 72 (12 + 20 + 40)", "72"),
        ("是台南。", "臺南"),
        ("48 ÷ 6 = 8\n\n**答案**：6 顆（每人）", "6"),
        (r"**Answer:** $\boxed{42}$", "42"),
        ("The answer: forty-two, that is 42. Answer: see above", "42"),
    ],
)
def test_right_answers_come_in_many_forms(text, answer):
    assert holds(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The sum is 50500.", "5050"),
        ("", "42"),
        ("opal, garnet, amber", "amber, garnet, opal"),
        ("The result is 42.5", "42"),
        ("The result is 0.42", "42"),
        ("It is -42.", "42"),
        ("48 ÷ 6 = 8。答案：8", "6"),
        ("It is 42 - 1 = 41.\n**Answer:** 41", "42"),
        ("答案是−42。", "42"),
        ("It is 3, maybe 5", "3.5"),
        ("It weighs 93.5 kilograms", "93 kilograms"),
        ("42 would be wrong: first 1, then 2, then 3, so 6", "42"),
        ("玉 和 山 之 間 有 很 多 不 同 的 東 西", "玉山石頭"),
    ],
)
def test_wrong_answers_are_told_from_right_ones(text, answer):
    assert not holds(text, answer)


def test_json_is_read_and_held_against_its_schema():
    right = json.loads(JSON_PROMPT.reference)
    assert misses(JSON_PROMPT, Answer(f"```json\n{JSON_PROMPT.reference}\n```")) is None
    assert "no JSON" in misses(JSON_PROMPT, Answer(JSON_PROMPT.reference[:-2]))
    assert "no JSON" in misses(JSON_PROMPT, Answer("[" * 100_000))
    assert "no JSON" in misses(JSON_PROMPT, Answer('{"size": NaN}')), "JSON has no such number"
    name = next(iter(right))
    short = {key: value for key, value in right.items() if key != name}
    assert f"lacks {name!r}" in misses(JSON_PROMPT, Answer(json.dumps(short)))
    assert "not asked for" in misses(JSON_PROMPT, Answer(json.dumps({**right, "more": 1})))


def test_a_call_must_be_made_by_its_name_with_its_arguments():
    name = str(TOOL_PROMPT.tool["name"])
    assert misses(TOOL_PROMPT, Answer("", name, TOOL_PROMPT.reference)) is None
    assert "is not called" in misses(TOOL_PROMPT, Answer("I would call it."))
    assert "is called and not" in misses(TOOL_PROMPT, Answer("", "other", TOOL_PROMPT.reference))
    assert "no JSON" in misses(TOOL_PROMPT, Answer("", name, '{"a": '))
    assert "lacks" in misses(TOOL_PROMPT, Answer("", name, "{}"))


@pytest.mark.parametrize(
    "prompt", [one for one in REFERENCES if one.id in ("tools-001", "tools-012", "tools-029")]
)
def test_values_that_the_question_names_must_be_right(prompt):
    right = json.loads(prompt.reference)

    def missed(**other):
        return misses(prompt, answered(prompt, json.dumps(right | other)))

    for name, value in right.items():
        if name == "title":
            continue  # in words of one's own
        wrong = (
            value + 1
            if isinstance(value, int)
            else value.translate(str.maketrans("0123456789", "1234567890"))
        )
        assert name in missed(**{name: wrong if wrong != value else "Somewhere"}), name
        if isinstance(value, str):
            # In other letters, or with more said, it is the same.
            assert missed(**{name: f"{value.upper()}."}) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("tools-005", {"minutes": 45, "title": "Crêpes"}),
        ("tools-012", {"title": "Dentist", "start": "09:30:00"}),
        ("tools-019", {"town": "台南"}),
        ("tools-015", {"text": "I will be 10 minutes late"}),
        ("tools-020", {"sentiment": "混合", "reason": "5 顆星"}),
    ],
)
def test_values_that_are_free_may_be_any(name, other):
    (prompt,) = (one for one in REFERENCES if one.id == name)
    assert misses(prompt, answered(prompt, json.dumps(json.loads(prompt.reference) | other))) is None


def test_an_answer_far_shorter_than_it_should_be_has_collapsed():
    long = next(prompt for prompt in load_all() if prompt.long)
    assert "length-collapse" in answer_faults(long, Answer("Sure! Here it is."))
    assert not answer_faults(long, Answer("Sure! Here it is.", ended=False))


def test_an_answer_in_another_script_has_drifted():
    english = Prompt("p", next(p for p in REFERENCES if p.language == "en" and p.task == "prose").messages)
    chinese = next(p for p in REFERENCES if p.language == "zh-TW" and p.task == "prose")
    assert "language-drift" in answer_faults(english, Answer(chinese.reference))
    # A question in Chinese may ask for English, and its reference says so.
    assert "language-drift" not in answer_faults(
        replace(english, reference=chinese.reference), Answer(chinese.reference)
    )


LATEX = r"""設 $a_1, a_2, \ldots, a_n$ 為非負實數，則
$$\frac{a_1 + a_2 + \cdots + a_n}{n} \geq \sqrt[n]{a_1 a_2 \cdots a_n}$$
當 $n=2$ 時，由 \((\sqrt{a_1}-\sqrt{a_2})^2 \geq 0\) 展開得
\[\text{Area} = \text{length} \times \text{width} = 12 \times 6, \frac{a_1+a_2}{2} \geq \sqrt{a_1 a_2"""
CODE = """可以用 `collections.Counter` 來計算：

```python
from collections import Counter

def count_words(text: str) -> Counter[str]:
    return Counter(word.casefold() for word in text.split() if word.isalpha())
"""


@pytest.mark.parametrize(("text", "end"), [(LATEX, "}\\]\n"), (CODE, "```\n")])
def test_formulas_and_code_are_of_no_language(text, end):
    chinese = Prompt(
        "p", (Message("user", "請證明算術平均數大於或等於幾何平均數，並寫一個函式。"),), language="zh-TW"
    )
    assert not answer_faults(chinese, Answer(text, ended=False))
    words = "Let all numbers be positive, so that their logarithms exist, and take the mean of these. "
    assert "language-drift" in answer_faults(chinese, Answer(text + end + words * 3, ended=False))


def test_an_answer_that_turns_simplified_or_japanese_has_drifted():
    prompt = Prompt("p", (Message("user", "請說明如何替老師寫一封感謝信。"),), language="zh-TW")
    traditional = "這封信該從問候開始，讓老師覺得親切。接著說說對他的感謝，還有這些年學過的東西。"
    simplified = "这样写会让人觉得亲切，还有动听的话语。请认真读过两遍，对照问题，从头开始写，时间还很长。"
    japanese = "まず、先生への挨拶から始めましょう。そして、感謝の気持ちを丁寧に伝えることが大切です。"
    for drifted in (traditional + simplified, japanese * 2):
        assert "language-drift" in answer_faults(prompt, Answer(drifted)), drifted
    # Throughout is as the model writes.
    for even in (traditional * 2, simplified * 2):
        assert not answer_faults(prompt, Answer(even))


def test_a_copy_is_exact_but_for_white_space():
    text = "The quick brown fox,\n  jumps over 13 lazy dogs."
    assert copied("The quick brown fox, jumps over 13 lazy dogs.", text) is None
    assert copied(f"Sure:\n{text}", text) is None
    assert "13" in copied("The quick brown fox, jumps over 14 lazy dogs.", text)
    assert copied("", text) is not None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "or": {"type": ["null", "boolean"]},
        "level": {"enum": [0, 1]},
        "version": {"const": 1},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"name": "x", "size": 3, "kind": "a", "tags": ["t"], "or": None}, None),
        ({"name": "x", "size": 3.0, "or": True}, None),
        ([], "no object"),
        ({}, "lacks 'name'"),
        ({"name": ""}, "below 1"),
        ({"name": 1}, "no string"),
        ({"name": "x", "size": 10}, "above 9"),
        ({"name": "x", "size": True}, "no integer"),
        ({"name": "x", "size": 1.5}, "no integer"),
        ({"name": "x", "kind": "c"}, "none of a, b"),
        ({"name": "x", "tags": ["a", 1]}, "tags[1] is no string"),
        ({"name": "x", "tags": ["a", "b", "c"]}, "items"),
        ({"name": "x", "or": 1}, "no null or boolean"),
        ({"name": "x", "level": 1, "version": 1.0}, None),
        ({"name": "x", "level": True}, "none of 0, 1"),
        ({"name": "x", "version": True}, "is not 1"),
        ({"name": "x", "else": 1}, "not asked for"),
    ],
)
def test_values_and_their_schema(value, wrong):
    found = misfit(value, SCHEMA)
    assert found is None if wrong is None else wrong in found


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(JSONS, st.dictionaries(st.sampled_from(["type", "items", "properties", "enum", "required"]), JSONS))
def test_schemas_of_any_kind_raise_nothing(value, schema):
    found = misfit(value, schema)
    assert found is None or found


@given(st.text(), st.text(min_size=1))
def test_any_text_can_be_judged(text, other):
    prompt = replace(REFERENCES[0], reference=other)
    answer_faults(prompt, Answer(text, tokens=len(other)))
    copied(text, other)
    misses(JSON_PROMPT, Answer(text))
