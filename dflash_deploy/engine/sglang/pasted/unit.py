"""systemd units (and Podman's ``.container`` files) read as systemd reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dflash_deploy.engine.sglang.pasted.launch import Found, in_container
from dflash_deploy.engine.sglang.pasted.words import MAX_WORDS, Growth, Notes, Word, shown, too_large

_SECTION = re.compile(r"^\[(?P<name>[A-Za-z-]{1,40})\]\s*$")
_UNIT = re.compile(r"(?m)^\[(?:Unit|Service|Container|Install)\][ \t]*$")
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_NUMBERED = re.compile(
    r"x(?P<hex>[0-9A-Fa-f]{2})|u(?P<u4>[0-9A-Fa-f]{4})|U(?P<u8>[0-9A-Fa-f]{8})|(?P<oct>[0-7]{3})"
)
_VARIABLE = re.compile(r"\$\$|\$\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|\$(?P<plain>[A-Za-z_][A-Za-z0-9_]*)")
_SPECIFIER = re.compile(r"%(.)")


def looks_like_unit(text: str) -> bool:
    """It has a unit's sections."""
    return _UNIT.search(text) is not None


def in_unit(text: str, notes: Notes) -> Iterator[Found]:
    """The commands of a unit that start SGLang."""
    env: dict[str, str] = {}
    growth = Growth("the unit's command")
    commands: list[tuple[str, int]] = []
    image = ""
    for section, key, value, line in _settings(text):
        if section not in ("Service", "Container"):
            continue
        if key == "Environment":
            if not value:
                env.clear()
            for word in _words(value, line):
                name, equals, text_of = _specified(word.text).partition("=")
                if equals:
                    env[name] = text_of
        elif key == "EnvironmentFile":
            notes.add(f"the variables in EnvironmentFile={shown(value)} are not read")
        elif key in ("ExecStart", "Exec"):
            commands = [*commands, (value, line)] if value else []
        elif key == "Image":
            image = value
    for command, line in commands:
        words = [
            expanded
            for word in _words(command.lstrip("@-:+!|"), line)
            for expanded in _expanded(word, env, growth)
        ]
        found = in_container(words, env, image, notes)
        if found is not None:
            yield found


def _settings(text: str) -> Iterator[tuple[str, str, str, int]]:
    """Section, key, value and line of each setting; a backslash at a line's end goes on in the next."""
    section = ""
    pending = ""
    began = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        # Comments may stand between the lines of one setting.
        if line.startswith(("#", ";")) or (not line and not pending):
            continue
        began = began if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        whole, pending = pending + line, ""
        heading = _SECTION.match(whole)
        if heading is not None:
            section = heading["name"]
            continue
        key, equals, value = whole.partition("=")
        if equals:
            yield section, key.strip(), value.strip(), began
    key, equals, value = pending.partition("=")
    if equals:
        yield section, key.strip(), value.strip(), began


def _words(text: str, line: int) -> list[Word]:
    """Words of a setting, quotes and escapes resolved."""
    words: list[Word] = []
    current: list[str] = []
    begun = False
    quote = ""
    at = 0
    while at < len(text):
        letter = text[at]
        at += 1
        if letter == "\\" and at < len(text):
            numbered = _NUMBERED.match(text, at)
            if numbered is not None:
                digits = numbered["hex"] or numbered["u4"] or numbered["u8"]
                code = int(digits, 16) if digits else int(numbered["oct"], 8)
                current.append(chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else "?")
                at = numbered.end()
            else:
                current.append(_ESCAPES.get(text[at], text[at]))
                at += 1
            begun = True
        elif quote:
            if letter == quote:
                quote = ""
            else:
                current.append(letter)
        elif letter in "'\"" and text.find(letter, at) >= 0:
            quote, begun = letter, True
        elif letter.isspace():
            if begun:
                words.append(Word("".join(current), (), line))
            current, begun = [], False
        else:
            current.append(letter)
            begun = True
        if len(words) > MAX_WORDS:
            raise too_large("the unit's command")
    if begun:
        words.append(Word("".join(current), (), line))
    return words


def _specified(text: str) -> str:
    """``%%`` is a percent sign; other specifiers are the machine's to know and stay."""
    return _SPECIFIER.sub(lambda match: "%" if match[1] == "%" else match[0], text)


def _expanded(word: Word, env: Mapping[str, str], growth: Growth) -> list[Word]:
    """A word of a command with its variables replaced; ``$NAME`` alone becomes as many words as it holds."""
    text = _specified(word.text)
    alone = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", text)
    if alone is not None and alone[1] in env:
        growth.add(len(env[alone[1]]))
        return [Word(part, (), word.line) for part in env[alone[1]].split()]
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match["braced"]
        if name is None and not alone:
            return match[0]
        name = name or match["plain"]
        if name not in env:
            unknown.append(match[0])
            return match[0]
        growth.add(len(env[name]))
        return env[name]

    return [Word(_VARIABLE.sub(value, text), tuple(unknown), word.line)]
