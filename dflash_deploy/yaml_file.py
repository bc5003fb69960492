"""YAML written by people, read so that every mistake is told with its file, line and key.

The dialect is YAML with what a settings file never needs left out: no anchors, tags, dates or base-60
numbers, no ``NaN``, one document, keys are text. Files are untrusted: size, depth and count are bounded.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 20_000
_SHOWN_PROBLEMS = 50
_LONGEST_INTEGER = 18
"""Digits of a whole number: more fit in no 64 bits."""

KeyPath = tuple[str | int, ...]
YamlValue = None | bool | int | float | str | list["YamlValue"] | dict[str, "YamlValue"]
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, order=True)
class Origin:
    """Where a value was written; ``line`` and ``column`` count from one, zero where there are none."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """One mistake in a document: where, under which key, what was expected and found."""

    key: KeyPath
    message: str
    origin: Origin

    def __str__(self) -> str:
        key = dotted(self.key)
        return f"{self.origin}: {key}: {self.message}" if key else f"{self.origin}: {self.message}"


class InvalidDocument(DeployError):  # noqa: N818 - named for what it says, like DeployError's other uses
    """A document with mistakes, all of them told at once."""

    def __init__(self, problems: Iterable[Problem], *, fix: str | None = None) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:_SHOWN_PROBLEMS]]
        if len(self.problems) > _SHOWN_PROBLEMS:
            lines.append(f"... and {len(self.problems) - _SHOWN_PROBLEMS} more")
        super().__init__("\n".join(lines), fix=fix, exit_code=ExitCode.INVALID_INPUT)


@dataclass(frozen=True)
class Document:
    """A value, and for every key path in it where it was written (of a mapping entry: its key)."""

    value: YamlValue
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)

    def origin(self, key: KeyPath) -> Origin:
        """Where ``key``, or the nearest thing around it that exists, was written."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, Origin("?"))

    def problem(self, key: KeyPath, message: str) -> Problem:
        """A mistake at ``key``, with its place."""
        return Problem(key, message, self.origin(key))


def dotted(key: KeyPath) -> str:
    """``("known", 0, "flags")`` as ``known[0].flags``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'users'?``, or nothing where no known word is like it."""
    close = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def read(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        InvalidDocument: the content is wrong.
        DeployError: there is no such file, or it cannot be read.
    """
    try:
        data = read_regular(path, most_bytes=MAX_BYTES)
    except FileNotFoundError as error:
        raise DeployError(f"{path}: no such file", exit_code=ExitCode.MISSING) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DeployError(f"{path}: cannot be read: {reason}", exit_code=ExitCode.INVALID_INPUT) from error
    return parse(data, str(path))


def parse(data: bytes | str, source: str) -> Document:
    """Read YAML from memory; ``source`` stands in messages where a file would be named.

    Raises:
        InvalidDocument: the content is wrong.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        raise InvalidDocument([Problem((), f"larger than {MAX_BYTES >> 10} KiB", Origin(source))])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise InvalidDocument([Problem((), "expected UTF-8 text", Origin(source, line, column))]) from error
    builder = _Builder(source)
    try:
        value = builder.build(yaml.parse(text, Loader=_Parser))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = Origin(source, mark.line + 1, mark.column + 1) if mark else Origin(source)
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise InvalidDocument([Problem((), f"not YAML: {said}", origin)]) from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())[:200]
        raise InvalidDocument([Problem((), f"not YAML: {said}", Origin(source))]) from error
    if builder.problems:
        raise InvalidDocument(builder.problems)
    return Document(value, builder.origins)


_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE = re.compile(r"yes|Yes|YES|true|True|TRUE|on|On|ON")
_FALSE = re.compile(r"no|No|NO|false|False|FALSE|off|Off|OFF")
# Only what YAML 1.1 and 1.2 both take as the same number is one. 1e5, 012, 0x10 and 1_000 are text: PyYAML
# writes text of some of these forms without quotes, and people mean different things by the others.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"([-+]?[0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LIKE_A_NUMBER = re.compile(r"[-+]?\.?[0-9][0-9a-fA-FxXoO_.+-]*")
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


class _Builder:
    """Values from parser events, with origins and problems on the way."""

    def __init__(self, source: str) -> None:
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self._source = source
        self._values = 0

    def build(self, events: Iterator[Event]) -> YamlValue:
        value: YamlValue = None
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse((), event, "expected one document, found another")
                value = self._value(events, next(events), ())
        if not documents:
            self.origins[()] = Origin(self._source, 1, 1)
        return value

    def _value(self, events: Iterator[Event], event: Event, key: KeyPath) -> YamlValue:
        self.origins.setdefault(key, self._origin(event))
        self._values += 1
        if self._values > MAX_VALUES:
            self._refuse(key, event, f"more than {MAX_VALUES} values")
        if len(key) > MAX_DEPTH:
            self._refuse(key[:4], event, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, AliasEvent):
            self._refuse(key, event, "aliases (*name) are not supported: write the value out")
        if getattr(event, "tag", None) is not None:
            self._refuse(key, event, f"tags ({str(event.tag)[:60]}) are not supported: write plain values")  # type: ignore[attr-defined]
        if isinstance(event, MappingStartEvent):
            return self._mapping(events, key)
        if isinstance(event, SequenceStartEvent):
            items: list[YamlValue] = []
            while not isinstance(event := next(events), SequenceEndEvent):
                items.append(self._value(events, event, (*key, len(items))))
            return items
        assert isinstance(event, ScalarEvent)  # noqa: S101 - the parser gives nothing else here
        return self._scalar(event, key)

    def _mapping(self, events: Iterator[Event], key: KeyPath) -> dict[str, YamlValue]:
        entries: dict[str, YamlValue] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            if not isinstance(event, ScalarEvent):
                self._refuse(key, event, "expected a key of plain text")
            name = str(event.value)  # type: ignore[attr-defined]
            if not name.isprintable():
                self._refuse(key, event, "a key holds control characters")
            here = (*key, name)
            if name in entries:
                first = self.origins[here]
                message = f"given twice; the first is in line {first.line}"
                self.problems.append(Problem(here, message, self._origin(event)))
                _Builder(self._source)._value(events, next(events), here)
                continue
            self.origins[here] = self._origin(event)
            entries[name] = self._value(events, next(events), here)
        return entries

    def _scalar(self, event: ScalarEvent, key: KeyPath) -> YamlValue:
        text = str(event.value)
        if _UNUSABLE.search(text):
            self.problems.append(Problem(key, "holds a NUL or half a character", self._origin(event)))
            return ""
        if not event.implicit[0]:
            return text
        try:
            return _plain(text)
        except ValueError as error:
            self.problems.append(Problem(key, str(error), self._origin(event)))
            return 0

    def _origin(self, event: Event) -> Origin:
        mark = event.start_mark
        return Origin(self._source, mark.line + 1, mark.column + 1) if mark else Origin(self._source)

    def _refuse(self, key: KeyPath, event: Event, message: str) -> None:
        raise InvalidDocument([*self.problems, Problem(key, message, self._origin(event))])


def _plain(text: str) -> bool | int | float | str | None:
    """What a text without quotes stands for.

    Raises:
        ValueError: a number that nothing here can hold.
    """
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INTEGER.fullmatch(text):
        if len(text) > _LONGEST_INTEGER:
            raise ValueError(f"expected a number of at most {_LONGEST_INTEGER} digits, found {text[:40]}")
        return int(text)
    if _NOT_FINITE.fullmatch(text) or (_NUMBER.fullmatch(text) and not math.isfinite(float(text))):
        raise ValueError(f"expected a finite number, found {text[:40]}")
    return float(text) if _NUMBER.fullmatch(text) else text


def is_plain_text(text: str) -> bool:
    """Without quotes, ``text`` would not be read as a number, a switch or nothing."""
    try:
        return isinstance(_plain(text), str)
    except ValueError:
        return False


def validate(document: Document, schema: type[Schema]) -> Schema:
    """The document as ``schema``.

    Raises:
        InvalidDocument: with every mistake, each at its place.
    """
    if not isinstance(document.value, dict):
        found = describe(document.value)
        raise InvalidDocument([document.problem((), f"expected keys with values, found {found}")])
    try:
        return schema.model_validate(document.value)
    except ValidationError as error:
        raise InvalidDocument(_problems(document, schema, error)) from error


def like(pattern: str, words: str) -> AfterValidator:
    """A text of this form, told in words where it is not."""
    form = re.compile(pattern)

    def check(text: str) -> str:
        if not form.fullmatch(text):
            raise ValueError(f"expected {words}, found {describe(text)}")
        return text

    return AfterValidator(check)


def describe(value: object) -> str:
    """What was found, in words for a message."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case str():
            return repr(value if len(value) <= 60 else value[:57] + "...")
        case list():
            return "a list"
        case _:
            return "keys with values"


_EXPECTED = {
    "string_type": "text (put it in quotes where it looks like a number)",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "path_type": "a path",
}


def _problems(document: Document, schema: type[BaseModel], error: ValidationError) -> list[Problem]:
    problems: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        key = _real_path(document.value, detail["loc"])
        if detail["type"] == "missing":
            key = (*key, detail["loc"][-1])
        problems.setdefault(key, document.problem(key, _message(detail, key, schema)))
    return sorted(problems.values(), key=lambda problem: problem.origin)


def _real_path(value: YamlValue, location: tuple[int | str, ...]) -> KeyPath:
    """A pydantic location without the parts that name a union's member or ``[key]``."""
    key: KeyPath = ()
    for part in location:
        match value, part:
            case dict(), str() if part in value:
                key, value = (*key, part), value[part]
            case list(), int() if part < len(value):
                key, value = (*key, part), value[part]
            case _:
                continue
    return key


def _message(detail: ErrorDetails, key: KeyPath, schema: type[BaseModel]) -> str:
    found = describe(detail["input"])
    match detail["type"]:
        case "missing":
            return "this key is required and missing"
        case "extra_forbidden":
            known = _keys_at(schema, key[:-1])
            hint = nearest(str(key[-1]), known)
            return f"unknown key{hint}" if hint else f"unknown key; expected one of {', '.join(known)}"
        case "literal_error":
            expected = detail.get("ctx", {}).get("expected", "")
            choices = re.findall(r"'([^']*)'", expected)
            word = str(key[-1]) if "[key]" in detail["loc"] else str(detail["input"])
            return f"expected one of {', '.join(choices)}, found {describe(word)}{nearest(word, choices)}"
        case "value_error":
            return str(detail.get("ctx", {}).get("error", detail["msg"]))
        case "int_type" | "float_type" as kind if _LIKE_A_NUMBER.fullmatch(str(detail["input"])):
            like = "; write it without quotes, as 20000" if kind == "int_type" else ", as 20000 or 0.001"
            return f"expected {_EXPECTED[kind]}, found {found}{like}"
        case kind if kind in _EXPECTED:
            return f"expected {_EXPECTED[kind]}, found {found}"
        case _:
            said = detail["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
            said = f"a number {said}" if said.startswith(("greater", "less")) else said
            return f"expected {said}, found {found}" if said != detail["msg"] else f"{said} (found {found})"


def _keys_at(schema: type[BaseModel], key: KeyPath) -> list[str]:
    """Keys that may stand in the mapping at ``key``."""
    models = [schema]
    for part in key:
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if annotations:
            models = [found for annotation in annotations for found in _models_in(annotation)]
        # Otherwise `part` is an entry of a list or a free mapping: its models are those found already.
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
