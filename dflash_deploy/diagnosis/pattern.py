"""Patterns of the catalogue: regular expressions that cannot run away, found by the plain words in them.

Two things are added to Python's syntax: ``<name:number>`` captures (also ``int``, ``word``, ``path``, ``any``
and ``rest``), and ``…`` stands for anything or nothing within reach on the line (a space before it goes with
it). Letters match in either case. Every quantifier is bounded, so that no line can hold a search up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

SHORTEST_WORDS = 4
"""Letters of plain text that every pattern must hold, in one piece and without digits."""

_KINDS = {
    "number": r"-?\d{1,15}(?:\.\d{1,12})?",
    "int": r"\d{1,15}",
    "word": r"[\w./+:@-]{1,120}",
    "path": r"[^\s'\"`,;]{1,300}",
    "any": r".{1,240}?",
    "rest": r".{1,400}",
}
_LONG_ENOUGH = 8
_GROUP_HEAD = re.compile(r"\?(?:P<\w{1,40}>|:)")
_CAPTURE = re.compile(r"<(\w{1,40}):(" + "|".join(_KINDS) + r")>")


class PatternError(ValueError):
    """The catalogue holds a pattern that is not as patterns must be."""


@dataclass(frozen=True)
class Pattern:
    """One pattern.

    Attributes:
        words: pieces of plain text, in small letters and without digits; one of them stands in every line
            that it matches.
        exact: the same with digits.
    """

    text: str
    words: tuple[str, ...]
    exact: tuple[str, ...]

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """It, compiled when it is first needed."""
        return re.compile(_expanded(self.text), re.IGNORECASE)

    def search(self, line: str) -> re.Match[str] | None:
        """Where it matches in a line."""
        return self.regex.search(line)


def parse_pattern(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        PatternError: it could run away, or holds too little plain text. Whether it is a regular expression at
            all is seen when it is first used (the self-test uses each).
    """
    expanded = _expanded(text)
    try:
        words = _required(expanded, text, digits=False)
        exact = _required(expanded, text, digits=True)
    except (IndexError, ValueError) as error:
        raise (
            error if isinstance(error, PatternError) else PatternError(f"{text!r}: a bracket is open")
        ) from error
    if not words:
        raise PatternError(f"{text!r}: no plain text of {SHORTEST_WORDS} letters to look for first")
    return Pattern(text, words, exact or words)


def _expanded(text: str) -> str:
    return (
        _CAPTURE.sub(lambda part: f"(?P<{part[1]}>{_KINDS[part[2]]})", text)
        .replace(" …", "…")
        .replace("…", ".{0,240}?")
    )


def _required(regex: str, shown: str, *, digits: bool) -> tuple[str, ...]:
    """Plain text that every match holds: one long piece, or one of a group's alternatives; else nothing."""
    pieces, groups = _parts(regex, shown, digits=digits)
    longest = max(pieces, key=len, default="")
    if len(longest) >= _LONG_ENOUGH:
        return (longest,)
    sets = [words for words in (_one_of(group, shown, digits=digits) for group in groups) if words]
    sets += [(longest,)] if len(longest) >= SHORTEST_WORDS else []
    return max(sets, key=lambda words: min(map(len, words)), default=())


def _one_of(group: str, shown: str, *, digits: bool) -> tuple[str, ...]:
    found: list[str] = []
    for alternative in _alternatives(group):
        words = _required(alternative, shown, digits=digits)
        if not words:
            return ()
        found += words
    return tuple(found)


def _parts(regex: str, shown: str, *, digits: bool) -> tuple[list[str], list[str]]:
    """Runs of plain text outside groups, and the insides of groups that must match."""
    pieces, groups, run, at = [], [], "", 0
    while at < len(regex):
        letter, step, plain = regex[at], 1, ""
        if letter == "\\":
            step = 2
            following = regex[at + 1 : at + 2]
            plain = "" if following.isalnum() else following
        elif letter == "[":
            step = _class_length(regex, at)
        elif letter == "(":
            step = _group_length(regex, at)
            after = regex[at + step : at + step + 1]
            if after in ("*", "+", "{"):
                raise PatternError(f"{shown!r}: a repeated group can run away; write what it holds out")
            inner = _GROUP_HEAD.sub("", regex[at + 1 : at + step - 1], count=1)
            for alternative in _alternatives(inner):
                _parts(alternative, shown, digits=digits)
            if after != "?" and not inner.startswith("?"):
                groups.append(inner)
        elif letter in "*+":
            raise PatternError(f"{shown!r}: write {{0,n}} or {{1,n}} instead of {letter}")
        elif letter in "?{":
            run = run[:-1]
            step = regex.index("}", at) - at + 1 if letter == "{" else 1
        elif letter == "|":
            raise PatternError(f"{shown!r}: make each alternative a pattern of its own, or a group")
        elif letter not in ".^$":
            plain = letter
        if plain and (digits or not plain.isdigit()):
            run += plain.lower()
        else:
            pieces.append(run)
            run = ""
        at += step
    return [*pieces, run], groups


def _alternatives(inner: str) -> list[str]:
    found, at, begun = [], 0, 0
    while at < len(inner):
        letter = inner[at]
        if letter == "|":
            found.append(inner[begun:at])
            begun = at + 1
        at += _length(inner, at)
    return [*found, inner[begun:]]


def _length(regex: str, at: int) -> int:
    letter = regex[at]
    if letter == "\\":
        return 2
    if letter == "[":
        return _class_length(regex, at)
    return _group_length(regex, at) if letter == "(" else 1


def _group_length(regex: str, at: int) -> int:
    end = at + 1
    while regex[end] != ")":
        end += _length(regex, end)
    return end - at + 1


def _class_length(regex: str, at: int) -> int:
    end = at + 1
    while regex[end] != "]" or end == at + 1:
        end += 2 if regex[end] == "\\" else 1
    return end - at + 1
