"""The ``server_args=`` line that SGLang prints when it starts, read back into flags."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from warnings import catch_warnings, simplefilter

from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.options import Option

_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs)?\s?(?P<open>[({])")
_KEY = re.compile(
    r"""\s*(?:'(?P<quoted>\w{1,80})'\s*:|"(?P<double>\w{1,80})"\s*:|(?P<plain>\w{1,80})\s*=)\s*"""
)
_VERSION = re.compile(
    r"\bsglang(?:[_ -]?version)?\s*(?:[=:]|==)\s*['\"]?v?(\d+\.\d+\.\d+[\w.+]{0,60})", re.IGNORECASE
)
_LONGEST = 1 << 17
_SECRET_FIELDS = frozenset({"api_key", "admin_api_key"})
_OPENING, _CLOSING = "([{", ")]}"


def has_server_args(text: str) -> bool:
    """The text holds the line."""
    return _ARGUMENTS.search(text) is not None


def logged_version(text: str) -> str | None:
    """SGLang's version, where the log tells it."""
    match = _VERSION.search(text)
    return match[1] if match else None


def server_args(text: str) -> dict[str, object] | None:
    """The settings of the last start in a log, None where it tells none. Secrets are left out."""
    starts = list(_ARGUMENTS.finditer(text))
    if not starts:
        return None
    last = starts[-1]
    end = text.find("\n", last.end())
    inside = text[last.end() : min(len(text) if end < 0 else end, last.end() + _LONGEST)]
    return dict(_fields(inside))


def flags_of(arguments: dict[str, object], table: FlagTable) -> dict[str, FlagValue]:
    """Settings as flags. Those at their defaults are left out; the others may be SGLang's own choice."""
    flags: dict[str, FlagValue] = {}
    for option in table.options:
        if option.is_old or option.dest not in arguments or option.name in flags:
            continue
        value = arguments[option.dest]
        if value is None or value == option.default:
            continue
        flag = _flag_value(option, value)
        if flag is not None:
            flags[option.name] = flag
    return flags


def _flag_value(option: Option, value: object) -> FlagValue | None:
    if not option.takes_value:
        return value if isinstance(value, bool) and (value or option.kind == "toggle") else None
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float | str):
        return (value,) if option.nargs in ("+", "*") and isinstance(value, str) else value
    if isinstance(value, list | tuple):
        kinds = {type(one) for one in value}
        return tuple(value) if len(kinds) == 1 and kinds <= {int, float, str} else None
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            return None
    return None


def _fields(text: str) -> Iterator[tuple[str, object]]:
    """``'key': value`` or ``key=value`` pairs; a value that is no plain literal is passed over."""
    at = 0
    while key := _KEY.match(text, at):
        name = key["quoted"] or key["double"] or key["plain"]
        end = _end_of_value(text, key.end())
        if name not in _SECRET_FIELDS:
            literal, value = _literal(text[key.end() : end])
            if literal:
                yield name, value
        if text[end : end + 1] != ",":
            return
        at = end + 1


def _end_of_value(text: str, at: int) -> int:
    """Place of the comma or bracket that ends the value beginning at ``at``."""
    depth = 0
    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            at += 1
            while at < len(text) and text[at] != letter:
                at += 2 if text[at] == "\\" else 1
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
            if depth < 0:
                return at
        elif letter == "," and depth == 0:
            return at
        at += 1
    return len(text)


def _literal(text: str) -> tuple[bool, object]:
    if len(text) > 1 << 14:
        return False, None
    try:
        with catch_warnings():
            simplefilter("ignore")  # of odd escapes in what others wrote
            return True, ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None
