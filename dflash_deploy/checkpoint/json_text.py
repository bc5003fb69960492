"""JSON that nobody vouches for: size, depth and count are bounded, and every mistake is told by its key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.yaml_file import describe

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 64
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def shown(name: str) -> str:
    """A name out of a file, short and without control characters, for a message."""
    short = name if len(name) <= 100 else f"{name[:60]}...{name[-37:]}"
    return _UNPRINTABLE.sub("?", short)


def invalid(source: str, what: str, *, fix: str | None = None) -> DeployError:
    """The error for a file whose content is wrong."""
    return DeployError(f"{source}: {what}", fix=fix, exit_code=ExitCode.INVALID_INPUT)


def parse(data: bytes, source: str, *, max_values: int) -> Json:
    """Read one JSON text.

    Args:
        data: UTF-8, as read.
        source: what it is called in messages.
        max_values: more values than this are refused before any is made.

    Raises:
        DeployError: not JSON, too deep, too many values, a key given twice, or a number that is none.
    """
    # Each value but the first follows one of these signs, also counted inside texts: never too few.
    if sum(data.count(sign) for sign in (b",", b"[", b"{", b":")) > max_values:
        raise invalid(source, f"holds more than {max_values:,} values")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(source, f"is not UTF-8 text (byte {error.start:,})") from error
    try:
        value: Json = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except _WrongJsonError as error:
        raise invalid(source, str(error)) from error
    except json.JSONDecodeError as error:
        raise invalid(
            source, f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise invalid(source, "is not usable JSON: a number is too long") from error
    except RecursionError as error:
        raise invalid(source, "is nested too deeply") from error
    if _deeper_than(value, MAX_DEPTH):
        raise invalid(source, f"is nested deeper than {MAX_DEPTH} levels")
    return value


def parse_object(data: bytes, source: str, *, max_values: int) -> dict[str, Json]:
    """Read a JSON text that holds one object (as ``parse``)."""
    value = parse(data, source, max_values=max_values)
    if not isinstance(value, dict):
        raise invalid(source, f"expected an object, found {shown(describe(value))}")
    return value


@dataclass(frozen=True)
class Fields:
    """An object's values by key, of the kind that is wanted.

    A key with ``null`` counts as absent. Every getter raises DeployError naming the file and the key.

    Attributes:
        source: what the file is called in messages.
        prefix: keys above this object, as ``text_config.``.
    """

    values: Mapping[str, Json]
    source: str
    prefix: str = field(default="")

    def whole(self, key: str, *, least: int = 1, most: int = 1 << 40) -> int | None:
        """An integer within bounds."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"expected a whole number of at least {least}", value)
        return value

    def need(self, *keys: str, why: str) -> int:
        """The first of these integers that is there."""
        for key in keys:
            value = self.whole(key)
            if value is not None:
                return value
        raise invalid(self.source, f"{self.prefix}{keys[0]} is missing: {why}")

    def text(self, key: str) -> str | None:
        """A text."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "expected text", value)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "expected true or false", value)
        return value

    def inner(self, key: str) -> Fields | None:
        """An object within."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "expected an object", value)
        return Fields(value, self.source, f"{self.prefix}{shown(key)}.")

    def texts(self, key: str, *, most: int = 100_000) -> tuple[str, ...] | None:
        """A list of texts."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(key, f"expected a list of at most {most:,}", value)
        found = tuple(item for item in value if isinstance(item, str))
        if len(found) != len(value):
            raise self.wrong(key, "expected a list of texts", value)
        return found

    def wholes(self, key: str, *, most: int = 1 << 40) -> tuple[int, ...] | None:
        """A list of integers, none negative."""
        value = self.values.get(key)
        if value is None:
            return None
        found = tuple(
            item
            for item in (value if isinstance(value, list) else ())
            if isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= most
        )
        if not isinstance(value, list) or len(found) != len(value):
            raise self.wrong(key, "expected a list of whole numbers, none negative", value)
        return found

    def wrong(self, key: str, expected: str, value: Json) -> DeployError:
        """The error for a value of the wrong kind."""
        return invalid(self.source, f"{self.prefix}{key}: {expected}, found {shown(describe(value))}")


class _WrongJsonError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _WrongJsonError(f"gives the key {shown(twice)!r} twice")
    return values


def _no_number(constant: str) -> Json:
    raise _WrongJsonError(f"holds {constant}, which is no number")


def _deeper_than(value: Json, depth: int) -> bool:
    level: list[Json] = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True
