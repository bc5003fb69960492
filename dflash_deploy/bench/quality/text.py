"""What can be wrong with a text whatever was asked: nothing there, unreadable, a loop, a babel."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_GRAM = 12
_LEAST_TEXT = 200
"""Characters below which a text says nothing about scripts."""

_LEAST_LOOP = 100
"""Characters below which it says nothing about loops."""

_LEAST_NEW = 0.2
"""Distinct share of 12-character pieces: prose has over 0.9, tables and code over 0.4, a loop under 0.1."""

_TAIL = 400
_MOST_UNREADABLE = 0.02
_MOST_SCRIPTS = 3
_CHARS_PER_TOKEN = (0.2, 25.0)
_NUMBERLESS = re.compile(r"(?:-?\b(?:nan|inf(?:inity)?)\b[\s\[\](),]*){3,}", re.IGNORECASE)
"""Words that a program prints when its arithmetic broke down, one after the other."""

_MOST_NUMBERLESS = 0.4
"""Share of a text; code and tables have a few of such words."""

_UNDECODED = re.compile(
    # A tokenizer's own signs for a blank, a line's end and a byte; words of Maltese begin with the first too.
    "(?<=\\S)[Ġ▁](?=\\w)|Ċ|<0x[0-9A-F]{2}>"
    # UTF-8 read as one byte a letter: quotation marks and dashes, letters with accents.
    "|â€.|Ã[\u00a0-\u00bf]"
)
_KANA = {"HIRAGANA", "KATAKANA"}


def text_faults(
    text: str, tokens: int | None, *, free_end: bool = False, forced_on: bool = False
) -> dict[str, str]:
    """What is wrong with one answer: an id and an example each.

    Args:
        text: the answer.
        tokens: that it took by the server's count, None where that is not known.
        free_end: the answer ended where the model wanted, or could have. One of forced length may go round in
            circles once all is said; that is no fault of the server.
        forced_on: to a length that its question may not want: only a beginning that loops is a fault then.
    """
    if not text.strip():
        return {"empty": "no text" + ("" if tokens is None else f" in {tokens} tokens")}
    faults: dict[str, str] = {}
    unreadable = sum(_unreadable(char) for char in text)
    unreadable += sum(len(found) for found in _UNDECODED.findall(text))
    if unreadable > max(2, _MOST_UNREADABLE * len(text)):
        faults["mojibake"] = f"{unreadable} unreadable characters in {excerpt(text)}"
    if sum(len(found) for found in _NUMBERLESS.findall(text)) > _MOST_NUMBERLESS * len(text):
        faults["nan"] = f"no numbers in {excerpt(text)}"
    least, most = _CHARS_PER_TOKEN
    if tokens and not least <= len(text) / tokens <= most:
        faults["length"] = f"{len(text)} characters in {tokens} tokens: {excerpt(text)}"
    judged = text[: 2 * _TAIL] if forced_on else text
    if _loops(judged) or (free_end and len(text) >= 2 * _TAIL and _loops(text[-_TAIL:])):
        faults["repetition"] = f"… {excerpt(text[-160:])}"
    if len(text) >= _LEAST_TEXT:
        scripts = {script for script, share in script_shares(text).items() if share > 0.02}
        if len(scripts) > _MOST_SCRIPTS:
            faults["mixed-scripts"] = f"{', '.join(sorted(scripts))} in {excerpt(text)}"
    return faults


def script_shares(text: str) -> dict[str, float]:
    """Writing systems of a text's letters, as shares of all letters, largest first; Japan's own are KANA."""
    # A letter's name begins with its script; a text has far fewer letters than places. Those that mathematics
    # writes in another way, and those of full width, are of the script that they stand for.
    letters = Counter(char for char in unicodedata.normalize("NFKC", text) if char.isalpha())
    counts: Counter[str] = Counter()
    for char, count in letters.items():
        script = unicodedata.name(char, "UNNAMED").split()[0].split("-")[0]
        counts["KANA" if script in _KANA else script] += count
    return {script: count / letters.total() for script, count in counts.most_common()}


def excerpt(text: str, length: int = 160) -> str:
    """The beginning of a text as one line that hides nothing."""
    short = text if len(text) <= length else f"{text[: length - 1]}…"
    return repr(short)


def _loops(text: str) -> bool:
    pieces = len(text) - _GRAM + 1
    if len(text) < _LEAST_LOOP:
        return False
    return len({text[at : at + _GRAM] for at in range(pieces)}) < _LEAST_NEW * pieces


def _unreadable(char: str) -> bool:
    return char == "\ufffd" or (
        unicodedata.category(char) in {"Cc", "Co", "Cn", "Cs"} and char not in "\n\r\t"
    )
