"""What chat windows, web pages and terminals do to a command, undone. Every change is told."""

from __future__ import annotations

import re
from functools import partial

from dflash_deploy.engine.sglang.pasted.words import MAX_CHARS, Notes, too_large

_DASHES = "\u2010-\u2015\u2212\ufe58\uff0d"
# Quotes: curly, low, reversed, angular, full width.
_DASH_FLAG = re.compile(rf"(?<![^\s\"'=(])-?[{_DASHES}]+-?(?=[A-Za-z]{{2}})")
_DASH = re.compile(f"[{_DASHES}]")
_DOUBLE_QUOTES = re.compile("[\u201c-\u201f\xab\xbb\uff02]")
_SINGLE_QUOTES = re.compile("(?<![^\\s=(])[\u2018-\u201b]|[\u2018-\u201b](?!\\S)")
_BLANKS = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad\x00]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)?)")
_FENCE = re.compile(r"(?m)^[ \t]*(?:```|~~~)[\w+-]{0,20}[ \t]*$")
# Variables as other shells and make set them, and as a Linux shell does.
_VALUE = r"(?P<value>[^-\s=(@][^\n]{0,4000})$"
_SETTINGS = (
    (
        re.compile(rf"(?m)^(?P<name>[A-Za-z_]\w{{0,60}})[ \t]*(?:\?|:{{1,2}})=[ \t]*{_VALUE}"),
        r"\g<name>=",
        True,
    ),
    (
        re.compile(
            rf"(?m)^[ \t]*set[ \t]+(?:-\w{{1,8}}[ \t]+){{0,4}}(?P<name>[A-Za-z_]\w{{0,60}})[ \t]+{_VALUE}"
        ),
        r"export \g<name>=",
        False,
    ),
    (re.compile(rf"(?mi)^[ \t]*set[ \t]+(?P<name>[A-Za-z_]\w{{0,60}})={_VALUE}"), r"export \g<name>=", True),
    (
        re.compile(rf"(?mi)^[ \t]*\$env:(?P<name>[A-Za-z_]\w{{0,60}})[ \t]*=[ \t]*{_VALUE}"),
        r"export \g<name>=",
        False,
    ),
    (re.compile(rf"(?m)^[ \t]*\$(?P<name>[A-Za-z_]\w{{0,60}})[ \t]*=[ \t]*{_VALUE}"), r"\g<name>=", False),
)
_MAKE = re.compile(r"\$\((?P<name>[A-Za-z_]\w{0,60})\)")
# `$ `, `% `, `> ` and the like; `# ` only behind a user's name, as it begins a comment otherwise.
_PROMPT = re.compile(
    r"^[ \t]*(?:\([\w.-]{1,60}\)[ \t]+)?"
    r"(?:[\w.-]{1,60}@[\w.-]{1,60}[^\n#$%]{0,120}[#$%]|(?:PS [^\n>]{0,120})>|[$%\u276f\u279c])[ \t]+(?=\S)"
)


def decoded(data: bytes) -> str:
    """Text of a file; what is no text comes out as replacement characters."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def cleaned(text: str, notes: Notes) -> str:
    """A text as its author meant it.

    Raises:
        DeployError: it is too long.
    """
    if len(text) > MAX_CHARS:
        raise too_large("the pasted text")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _FENCE.sub("", _ESCAPES.sub("", text))
    if _BLANKS.search(text) or _INVISIBLE.search(text):
        notes.add("unusual blanks (such as the non-breaking space) are read as plain ones")
        text = _INVISIBLE.sub("", _BLANKS.sub(" ", text))
    return _settings_as_meant(_without_prompts(word_as_meant(text, notes)))


def word_as_meant(text: str, notes: Notes) -> str:
    """Typographic dashes and quotes as the plain ones that a shell knows."""
    if _DASH.search(text):
        notes.add("typographic dashes are read as plain ones, before a flag as --; SGLang knows only --")
        text = _DASH.sub("-", _DASH_FLAG.sub("--", text))
    if _DOUBLE_QUOTES.search(text) or _SINGLE_QUOTES.search(text):
        notes.add("curly quotes are read as plain ones; a shell would hand them on as letters")
        text = _SINGLE_QUOTES.sub("'", _DOUBLE_QUOTES.sub('"', text))
    return text


def _settings_as_meant(text: str) -> str:
    """What make, fish, cmd and PowerShell write to set a variable, as a Linux shell has it."""
    names: set[str] = set()

    def setting(match: re.Match[str], front: str, quote: bool) -> str:
        names.add(match["name"])
        value = match["value"].rstrip()
        quoted = quote and "'" not in value and not value.startswith('"')
        return match.expand(front) + (f"'{value}'" if quoted else value)

    for pattern, front, quote in _SETTINGS:
        text = pattern.sub(partial(setting, front=front, quote=quote), text)
    # make's $(NAME) is a command to a shell.
    return _MAKE.sub(lambda match: f"${{{match['name']}}}" if match["name"] in names else match[0], text)


def _without_prompts(text: str) -> str:
    lines = text.split("\n")
    continued = False
    for at, line in enumerate(lines):
        plain = line
        if continued:
            plain = re.sub(r"^[ \t]*>[ \t]+", "", line)
        elif _PROMPT.match(line):
            plain = _PROMPT.sub("", line)
        continued = line.rstrip().endswith("\\")
        lines[at] = plain
    return "\n".join(lines)
