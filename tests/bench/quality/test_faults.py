# ruff: noqa: RUF001
import random
import string
from dataclasses import replace

import pytest

from dflash_deploy.bench.measurement import RequestResult
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.bench.workloads import load_all

GOOD = (
    "The first radiator to bleed is the lowest one, because air rises and collects in the pipes above it. "
    "Turn the key a quarter of the way and wait for the hissing to stop; a cloth below the valve catches the "
    "drops. When water comes in an even stream, close the valve again and read the pressure at the boiler. "
    "It should stand between one and two bar; if it has fallen, open the filling loop slowly and wait."
)
CODE = "\n".join(
    f"def step_{name}(state: dict[str, int]) -> int:\n"
    f"    state['{name}'] += {n}\n    return state['{name}'] * {n}\n"
    for n, name in enumerate(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"])
)
TABLE = "\n".join(f"| {n} | {n * n} | {n**3 - 7 * n + 1} | row number {n} of the table |" for n in range(40))
CHINESE = (
    "清晨四點半，市場的鐵門一扇一扇拉起，老婦人把豆腐一板一板擺上攤位，水氣在燈泡底下浮成一層薄霧。她認得每一雙腳步聲，"
    "誰家的媳婦、誰家的孫子，還沒走近她就先切好一塊嫩的放進袋子。隔壁魚販敲著冰塊，對面菜攤的阿伯正為蔥價與人爭得面紅耳赤，"
    "而她只是笑，說豆腐不爭，豆腐軟，軟的東西最耐得住日子。天亮之後人潮湧進來，叫賣聲此起彼落，硬幣落在鐵盒裡叮叮噹噹，"
    "像一場沒有指揮的合奏。等到太陽爬過屋簷，她才坐下來喝第一口茶，看著空了一半的木板，想起母親當年也是這樣坐著。"
)


def answer(text, tokens=None, chunks=1, prompt_id=""):
    return RequestResult(
        user=0,
        prompt_tokens=10,
        output_tokens=len(text) // 4 if tokens is None else tokens,
        sent_s=0.0,
        ttft_s=0.1,
        decode_s=1.0,
        total_s=1.1,
        text=text,
        chunks=chunks,
        prompt_id=prompt_id,
    )


def ids(text, max_tokens=None, **given):
    return [fault.split(":")[0] for fault in find_faults([answer(text, **given)], max_tokens)]


JAPANESE = (
    "Pythonのデータクラスを使うと、コンストラクタや比較メソッドを自動的に生成できます。まず、dataclassesモジュールから"
    "dataclassデコレータをインポートし、クラスの上に@dataclassと書きます。フィールドには型ヒントを付ける必要があります。"
    "例えば、name: strやage: intのように書きます。frozen=Trueを指定すると、"
    "インスタンスは変更できなくなり、ハッシュ可能になります。"
)
MATHEMATICS = (
    "對任意 ε > 0，存在 δ > 0，使得 |𝑥 − 𝑎| < δ ⇒ |𝑓(𝑥) − 𝐿| < ε。設 𝑓: ℝ → ℝ 連續，α, β ∈ ℝ，"
    "則 𝑓(α) ≤ 𝑓(𝜉) ≤ 𝑓(β)，其中 ξ ∈ ℝ。因此 𝑔(𝑥) = 𝑓(𝑥) + α𝑥 在 ℝ 上也連續，limₓ→ₐ 𝑔(𝑥) = 𝐿 + α𝑎，"
    "其中 ℓ ∈ ℕ 而 𝑛 ∈ ℤ。再取 λ, μ ∈ ℚ，由中間值定理可知存在 𝑐 使 𝑔(𝑐) = λ，證明完畢。"
)
SONG = "\n".join(
    f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down and pass it around, "
    f"{n - 1} bottles of beer on the wall."
    for n in range(20, 1, -1)
)
REFRAIN = "\n\n".join(
    f"{first}\nO carry me home, O carry me home,\nacross the silver water, O carry me home."
    for first in (
        "The lamp is low, the night is wide",
        "The ferry rocks against the tide",
        "The gulls are gone",
    )
)
ROWS = "INSERT INTO users VALUES\n" + ",\n".join(f"({n}, 'user{n}', TRUE)" for n in range(40))
FRAME = "```\n    a    b   c\n0 NaN  NaN NaN\n1 1.0  2.0 NaN\n```\nThe frame lacks values in every column."
BARS = "Load: ▁▂▃▄▅▆▇█ and then ▁▁▂ again, lowest at night."
GOOD_ONES = [
    GOOD,
    CODE,
    TABLE,
    CHINESE,
    GOOD + CHINESE,
    "Yes.",
    GOOD + " λ = α + β",
    JAPANESE,
    MATHEMATICS,
    SONG,
]
GOOD_ONES += [REFRAIN, ROWS, FRAME, BARS, "[NaN, NaN, NaN].includes(NaN) // true, as an array holds them"]


@pytest.mark.parametrize("text", GOOD_ONES)
def test_good_text_raises_nothing(text):
    assert not ids(text)


def test_our_own_questions_raise_nothing():
    for prompt in load_all():
        assert not ids(prompt.question), prompt.id


def test_a_loop_at_the_end_counts_where_the_model_could_have_stopped():
    # Forced to go on, a model may turn in circles once all is said.
    text = GOOD * 3 + "and on and on " * 40
    varied = "".join(f"{n}: {GOOD}" for n in range(3)) + "and on and on " * 40
    assert ids(text) == ids(varied) == ["repetition"]
    assert not ids(varied, max_tokens=700, tokens=700)


def test_a_question_that_wanted_less_than_was_forced_may_end_in_a_loop():
    def forced(text, **more):
        return find_faults([replace(answer(text, tokens=1024), **more)], 1024)

    once_said = GOOD[:200] + "That is all. " * 300
    assert not forced(once_said, long=False)
    assert forced(once_said, long=True)
    assert forced("That is all. " * 300, long=False)


def test_signs_of_a_tokenizer_and_bytes_read_as_letters_are_unreadable():
    words = "It’s the driver’s “first” day — he’s nervous… café, naïve, “résumé”."
    assert "mojibake" in ids("Ġ".join(GOOD.split()))
    assert "mojibake" in ids("▁" + "▁".join(GOOD.split()))
    assert "mojibake" in ids("你好<0xE4><0xBD><0xA0>，今天<0xE5><0xA4><0xA9>氣很好")
    assert "mojibake" in ids(words.encode().decode("latin-1"))
    assert "mojibake" in ids(words.encode().decode("cp1252", "replace"))
    assert not ids(words)
    assert not ids("Ġorġ mar il-belt. Ġimgħa filgħaxija Ġorġ Ġustu.")
    assert not ids("São Paulo, CORAÇÃO, NÃO; Ġorġ mar il-Ġnien; ½ £ © ®")


def test_numbers_that_are_none():
    assert "nan" in ids("The sum is nan nan nan nan.")
    assert "nan" in ids("[nan, inf, -inf, -Infinity, (nan)]")
    ids(", " * 50_000)  # within the time of a test
    assert not ids("In Python, float('nan') is not equal to itself, and inf is larger than all.")


def test_empty():
    assert ids("  \n ", tokens=9) == ["empty"]


def test_events_that_were_taken_for_tokens_are_no_count_to_judge_by():
    few = replace(answer(GOOD, tokens=3, chunks=3), tokens_estimated=True)
    assert not find_faults([few], 64)
    assert "length" in ids(GOOD, tokens=3)


def test_counts_against_what_was_asked_and_against_chunks():
    assert ids(GOOD, max_tokens=64, tokens=63) == ["wrong-count"]
    assert ids(GOOD, tokens=80, chunks=81) == ["wrong-count"]
    assert not ids(GOOD, max_tokens=80, tokens=80, chunks=30)


def test_no_answer_has_more_tokens_than_were_allowed():
    ours = answer(GOOD, tokens=120)
    assert find_faults([ours], None, most_tokens=120) == ()
    (fault,) = find_faults([ours], None, most_tokens=60)
    assert fault.startswith("wrong-count")
    for free in (replace(ours, ends_freely=True), replace(ours, tokens_estimated=True)):
        assert find_faults([free], None, most_tokens=60) == ()


def test_unreadable_characters():
    assert ids(GOOD[:150] + "\ufffd" * 12) == ["mojibake"]
    assert ids("\x00\x01\x02 and so on, for a while") == ["mojibake"]
    # One cut character at the end of an answer of fixed length is no fault.
    assert not ids(GOOD + "\ufffd")


@pytest.mark.parametrize(
    "loop",
    ["!" * 900, "the same thing again, " * 60, GOOD[:90] + "and on and on " * 80, "好的，沒問題。" * 20],
)
def test_loops(loop):
    assert "repetition" in ids(loop)


def test_a_mixture_of_many_scripts():
    chance = random.Random(3)  # noqa: S311
    letters = string.ascii_letters + "абвгдежзи" + "ابتثجح" + "甲乙丙丁" + "กขคงจ" + "אבגדה"
    assert "mixed-scripts" in ids("".join(chance.choice(letters) for _ in range(600)))


def test_text_absurdly_long_or_short_for_its_tokens():
    assert ids(GOOD, tokens=4) == ["length"]
    assert ids(GOOD, tokens=9000) == ["length"]


def test_one_text_for_every_question():
    faults = find_faults([answer(GOOD, prompt_id="a"), answer(GOOD, prompt_id="b")], None)
    assert not find_faults([answer(GOOD, prompt_id="a")] * 2, None), "one question has one answer"
    assert [fault.split(":")[0] for fault in faults] == ["same-answer"]


def test_meaningless_text_is_let_pass_but_its_counts_are_not():
    assert not find_faults([answer("!" * 900, tokens=64)], 64, read_text=False)
    assert find_faults([answer("!" * 900, tokens=64)], 65, read_text=False)


def test_a_fault_tells_how_many_and_an_example():
    faults = find_faults([answer(GOOD), answer("!" * 900)], None)
    assert faults == (f"repetition: 1 of 2 answers, for example … {'!' * 160!r}",)
