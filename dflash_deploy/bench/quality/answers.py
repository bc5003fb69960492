"""Whether an answer is one to its question: right, well-formed, in its language, of some length."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from dflash_deploy.bench.quality.schema import misfit
from dflash_deploy.bench.quality.text import excerpt, script_shares, text_faults
from dflash_deploy.bench.workloads import Prompt

_WORD = re.compile(r"[0-9]+\.[0-9]+|[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+")
_NUMBER = re.compile(r"(?<![0-9A-Za-z_])(?<![0-9]\.)(?:(?<![)\]}])[-−])?[0-9]+(?:\.[0-9]+)?")  # noqa: RUF001
_THOUSANDS = re.compile(r"(?<=\d)(?:[,\u2009\u202f\u00a0]|\{,\}|\\,)(?=\d{3}(?!\d))")
_FENCED = re.compile(r"```[\w-]*\n(.*?)\n?```", re.DOTALL)
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z)|\$[^$\n]*\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)|\\[A-Za-z]+",
    re.DOTALL,
)
"""Code and formulas, which are written alike in every language; an answer may be cut within one."""

_MOST_BETWEEN = 6
"""Words that may stand between those of an answer that is a list."""

_RESULT = re.compile(r"(?:answer|答案)[\s*_]*:")
"""What stands before the result, as questions want it."""

_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}:[0-9]{2}")
_LONGEST_NAME, _NAME_WORDS = 24, 2
"""Letters and words of a name; what is longer may be said in another way."""

_LAST_NUMBERS = 3
"""A result is among the last numbers that a text names; others may come in the same sentence."""

_LEAST_LETTERS = 40
_OWN_SHARE = 0.1
"""Share of the letters from which a script belongs to a text."""

_TAKES_OVER = 0.5
"""Share of the letters from which a script has taken over a text."""

_KANA_TAKES_OVER = 0.25
"""The same of Japan's, which stand among as many of China's."""

_TRADITIONAL = (
    "這們來對時會說國為學過還樣經發問間開關長門見車東書點邊頭讓給覺實現從種產應該話誰認愛處電動體氣萬與業兩聲變親聽讀寫"
    "買賣錢線紅綠語請謝難熱風飛魚鳥馬"
)
_SIMPLIFIED = (
    "这们来对时会说国为学过还样经发问间开关长门见车东书点边头让给觉实现从种产应该话谁认爱处电动体气万与业两声变亲听读写"
    "买卖钱线红绿语请谢难热风飞鱼鸟马"
)
"""The same letters, common ones that each form alone has."""

_LEAST_FORMS = 6
_COLLAPSED = 0.08
_LEAST_EXPECTED = 300
_LONG_CHARS = 300
"""An answer of a thousand tokens was asked for."""

_LARGEST_JSON = 1 << 20


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        text: in words.
        thoughts: before it, of a model that thinks although it was asked not to.
        tool: name of the function that it calls, and ``arguments`` as it wrote them; None without a call.
        tokens: by the server's count, None where it does not say.
        ended: the model ended it; False where it was cut at the wanted length.
    """

    text: str
    tool: str | None = None
    arguments: str | None = None
    tokens: int | None = None
    ended: bool = True
    thoughts: str = ""

    @property
    def begun(self) -> bool:
        """It did not end within its thoughts."""
        return not self.thoughts or bool(self.text) or self.tool is not None


def answer_faults(prompt: Prompt, answer: Answer) -> dict[str, str]:
    """What is wrong with an answer, whatever model gave it: an id and an example each.

    Args:
        prompt: what was asked. Its reference, where there is one, says in what language and how long.
        answer: what came.
    """
    if prompt.tool is not None and answer.tool is not None:
        # The call is the answer; ``misses`` looks at it.
        return {}
    faults = text_faults(answer.thoughts + answer.text, answer.tokens, free_end=answer.ended)
    if "empty" in faults or not answer.begun:
        return faults
    if (drift := _foreign(prompt, answer.text)) is not None:
        faults["language-drift"] = f"{drift}: {excerpt(answer.text)}"
    expected = len(prompt.reference or "")
    if answer.ended and (
        (expected >= _LEAST_EXPECTED and len(answer.text) < _COLLAPSED * expected)
        or (prompt.long and _length(answer.text) < _LONG_CHARS)
    ):
        faults["length-collapse"] = f"all that came: {excerpt(answer.text)}"
    return faults


def misses(prompt: Prompt, answer: Answer) -> str | None:
    """Why an answer is not the right one, None where it is or where no one right answer is known.

    A good model misses some, so this is for counting, not for condemning a server over one answer.
    """
    if prompt.tool is not None:
        return _wrong_call(prompt, prompt.tool, answer)
    if prompt.schema is not None:
        value, problem = _parsed(answer.text)
        problem = problem or misfit(value, prompt.schema) or _not_as_asked(value, prompt, prompt.schema)
        return None if problem is None else f"{problem}: {excerpt(answer.text)}"
    if prompt.answer is not None and not holds(answer.text, prompt.answer):
        return f"no {prompt.answer!r} in {excerpt(answer.text)}"
    return None


def holds(text: str, answer: str) -> bool:
    """Whether the words of an answer stand in the text, in their order and near each other."""
    if _NUMBER.fullmatch(_plainly(answer)):
        # Any number may turn up on the way to the result.
        *way, result = _RESULT.split(_plainly(text))
        stated = _numbers(result) if way else []
        # What follows its first number may be how it came about.
        return _numbers(answer)[0] in (*stated[:1], *(stated or _numbers(text))[-_LAST_NUMBERS:])
    wanted, said = _words(answer), _words(text)
    for start, word in enumerate(said):
        if word != wanted[0]:
            continue
        at, left = start, wanted[1:]
        while left and left[0] in (window := said[at + 1 : at + 2 + _MOST_BETWEEN]):
            at, left = at + 1 + window.index(left[0]), left[1:]
        if not left:
            return True
    return False


def copied(text: str, original: str) -> str | None:
    """Where a copy departs from its original, in words; None where it does not. White space may differ."""
    ours, theirs = _plain(text), _plain(original)
    if theirs in ours:
        return None
    match = SequenceMatcher(None, ours, theirs, autojunk=False)
    for kind, at, to, other_at, other_to in match.get_opcodes():
        if kind != "equal":
            start = max(0, other_at - 10)
            return f"{theirs[start : other_to + 20]!r} became {ours[max(0, at - 10) : to + 20]!r}"
    return None


def _wrong_call(prompt: Prompt, tool: Mapping[str, object], answer: Answer) -> str | None:
    if answer.tool is None:
        return f"{tool.get('name')} is not called: {excerpt(answer.text)}"
    if answer.tool != tool.get("name"):
        return f"{answer.tool!r} is called and not {tool.get('name')!r}"
    value, problem = _parsed(answer.arguments or "")
    schema = tool.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    problem = problem or misfit(value, schema, "the call") or _not_as_asked(value, prompt, schema)
    return None if problem is None else f"{problem}: {excerpt(answer.arguments or '')}"


def _not_as_asked(value: object, prompt: Prompt, schema: Mapping[str, object]) -> str | None:
    """A value other than the reference's, where the question leaves no choice."""
    wanted, _ = _parsed(prompt.reference or "")
    if not isinstance(value, dict) or not isinstance(wanted, dict):
        return None
    described = schema.get("properties")
    for name, right in wanted.items():
        what = described.get(name) if isinstance(described, dict) else None
        # Which of several fits may be a matter of opinion.
        open_to_choice = isinstance(what, dict) and "enum" in what
        if name in value and not open_to_choice and _differs(value[name], right, prompt):
            return f"{name} is {value[name]!r} and not {right!r}"
    return None


def _differs(said: object, right: object, prompt: Prompt) -> bool:
    """From a number, a moment or a name of the question; all numbers of a call are from its question."""
    if isinstance(right, int | float):
        named = prompt.tool is not None or isinstance(right, bool) or str(right) in _numbers(prompt.question)
        return named and said != right
    if not isinstance(right, str) or not isinstance(said, str):
        return False
    if _MOMENT.fullmatch(right):
        # Seconds that nobody asked for are none.
        wanted, given = _digits(right), _digits(said)
        return given[: len(wanted)] != wanted or any(given[len(wanted) :])
    # What the question has in other letters is a phrase, and may be shorter.
    named = len(right) <= _LONGEST_NAME and right.count(" ") < _NAME_WORDS and right in prompt.question
    return named and "".join(_words(right)) not in "".join(_words(said))


def _digits(text: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", _plainly(text))]


def _parsed(text: str) -> tuple[object, str | None]:
    fenced = _FENCED.search(text)
    try:
        written = (fenced.group(1) if fenced else text).strip()[:_LARGEST_JSON]
        return json.loads(written, parse_constant=_refuse), None
    except (ValueError, RecursionError):
        return None, "no JSON"


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no number")


def _foreign(prompt: Prompt, text: str) -> str | None:
    """A script that took over the text or its end, and that neither question nor reference is written in."""
    expected = script_shares(f"{prompt.question} {prompt.reference or ''}")
    own = {script for script, share in expected.items() if share >= _OWN_SHARE}
    if not own:
        return None
    letters = "".join(char for char in _NO_LANGUAGE.sub(" ", text) if char.isalpha())
    for part, where in ((letters, "the answer"), (letters[-len(letters) // 3 :], "the end")):
        if len(part) < _LEAST_LETTERS:
            continue
        for script, share in script_shares(part).items():
            if script not in own and share > (_KANA_TAKES_OVER if script == "KANA" else _TAKES_OVER):
                return f"{where} is in {script}"
    if prompt.language == "zh-TW" and _turns_simplified(letters):
        return "the end is in simplified characters"
    return None


def _turns_simplified(letters: str) -> bool:
    """It begins in traditional characters; a text that is simplified throughout is as its model writes."""
    begin, end = letters[: len(letters) // 2], letters[-len(letters) // 3 :]
    kept, lost = (sum(char in _TRADITIONAL for char in part) for part in (begin, end))
    before, after = (sum(char in _SIMPLIFIED for char in part) for part in (begin, end))
    return kept > 9 * before and after > 9 * lost and min(kept, after) >= _LEAST_FORMS


def _words(text: str) -> list[str]:
    return _WORD.findall(_plainly(text))


def _numbers(text: str) -> list[str]:
    """Each in its shortest form, with its sign and what stands behind the point."""
    found = (number.replace("−", "-") for number in _NUMBER.findall(_plainly(text)))  # noqa: RUF001
    return [number.rstrip("0").rstrip(".") if "." in number else number for number in found]


def _plainly(text: str) -> str:
    # Before NFKC, which makes a narrow blank one like any other. Taiwan writes its name with either letter.
    return unicodedata.normalize("NFKC", _THOUSANDS.sub("", text)).casefold().replace("臺", "台")


def _length(text: str) -> int:
    # A letter of Chinese says as much as two or three of English.
    return sum(3 if "㐀" <= char <= "鿿" else 1 for char in text)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
