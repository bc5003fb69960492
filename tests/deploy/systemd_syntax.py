"""How systemd reads a unit, written from its manual pages: what the escaping is checked against everywhere.

``tests/real/test_unit_in_systemd.py`` asks systemd itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}


def settings(unit: str) -> dict[str, list[str]]:
    """Every setting with its values in order; continued lines are joined, comments dropped."""
    found: dict[str, list[str]] = {}
    pending = ""
    for raw in unit.split("\n"):
        line = raw.lstrip(" \t")
        if line.startswith(("#", ";")):
            continue
        if (len(line) - len(line.rstrip("\\"))) % 2:
            pending += line[:-1] + " "
            continue
        line, pending = pending + line, ""
        if line and not line.startswith("["):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value.strip(" \t"))
    assert not pending
    return found


def words(value: str) -> list[str]:
    """Split into words, quotes and C escapes undone."""
    return list(_words(value))


def _words(value: str) -> Iterator[str]:
    word, started, quote, position = "", False, "", 0
    while position < len(value):
        character = value[position]
        position += 1
        if character == "\\":
            assert value[position] in _ESCAPES, value[position:]
            word, started = word + _ESCAPES[value[position]], True
            position += 1
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "\"'":
            quote, started = character, True
        elif character in " \t":
            if started:
                yield word
            word, started = "", False
        else:
            word, started = word + character, True
    assert not quote
    if started:
        yield word


def specifiers_expanded(word: str) -> str:
    """``%%`` undone; any other specifier stays visible as ``<x>``."""
    return re.sub(r"%(.)", lambda match: "%" if match[1] == "%" else f"<{match[1]}>", word)


def variables_expanded(word: str) -> str:
    """``$$`` undone; anything else after a dollar sign would be a variable."""
    assert not re.search(r"\$", word.replace("$$", "")), word
    return word.replace("$$", "$")


def command(value: str) -> list[str]:
    """The argv of an ``Exec*=`` value."""
    # By itself and bare it would begin another command.
    assert ";" not in re.sub(r"""\"(?:\\.|[^"\\])*\"|'[^']*'""", "''", value).split()
    program, *arguments = map(specifiers_expanded, words(value))
    return [program, *map(variables_expanded, arguments)]


def engine(words: list[str]) -> list[str]:
    """The command that the program in front of it becomes (``gate.past_proxies``)."""
    return words[words.index("os.execvp(program, sys.argv[2:])") + 2 :]
