"""The one pass over a log: which entries show, where the start stood, what figures were told.

A line is looked at closely only if a line of its kind (the same but for digits) holds words of the catalogue.
Most lines of a long log are of few kinds, so most cost one look-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dflash_deploy.diagnosis import stage as stages
from dflash_deploy.diagnosis.entry import Entry, read_value
from dflash_deploy.diagnosis.expression import Value
from dflash_deploy.diagnosis.pattern import Pattern
from dflash_deploy.diagnosis.stage import Stage
from dflash_deploy.diagnosis.text import clean_lines
from dflash_deploy.diagnosis.trace import Traceback, alone, begin
from dflash_deploy.engine.sglang.bootlog import BootLog
from dflash_deploy.engine.sglang.logline import LogLine

SEARCHED_CHARACTERS = 4096
EXCERPT_BEFORE, EXCERPT_AFTER = 12, 8

_DIGITS = b"0123456789"
_KINDS_KEPT = 200_000
_LINES_KEPT = 5
_ENOUGH = 200
_STARTS_KEPT = 64
_ECHO_OF_ARGUMENTS = "server_args="
# What people wrote to the model, and it to them: no failure of the server, whatever it says.
_SPOKEN = (b"Receive: obj=", b"Finish: obj=", b"Received request ")
_ESCAPES = re.compile(rb"\x1b(?:\[[;?]{0,20}[@-~]|[@-Z\\-_])")
_MARKS = (
    *stages.MARKS,
    "traceback (most recent",
    "launch_server",
    "sglang serve",
    "scheduled restart job",
    "error: ",
    "exception: ",
)
_ARGUMENT = re.compile(
    r"""['"]?\b(?P<name>[a-z]\w{2,60})['"]?\s?[=:]\s?"""
    r"""(?:'(?P<text>[^']{0,200})'|"(?P<quoted>[^"]{0,200})"|(?P<number>-?\d{1,12}(?:\.\d{1,9})?)\b|(?P<word>True|False))"""
)
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]{2,60})(?:[= ](?P<value>[^\s'\"-][^\s'\"]{0,200}))?")

_WORD = re.compile(rb"[a-z]{3,}")
_PART = 3
_MARK = -1

_Held = tuple[int, int]
"""An entry's index, and which of its pattern lists: shown by, needed, or excluded by."""
_SHOWS, _NEEDS, _UNLESS = range(3)


@dataclass
class Seen:
    """An entry in one start: its lines, the figures, and where the start stood when it first showed."""

    entry: Entry
    number: int
    text: str
    span: int
    stage: Stage
    trace: Traceback | None
    names: dict[str, Value]
    lines: list[tuple[int, str]]
    count: int = 1
    last: int = 0


@dataclass
class Start:
    """One start of a server, or what there is of it."""

    number: int
    seen: dict[int, Seen] = field(default_factory=dict)
    context: set[tuple[int, int, int]] = field(default_factory=set)
    arguments: dict[str, Value] = field(default_factory=dict)
    has_arguments: bool = False
    boot: BootLog = field(default_factory=BootLog)
    stage: Stage = Stage.UNKNOWN
    ready_at: int | None = None
    ended: bool = False
    traces: list[Traceback] = field(default_factory=list)

    @property
    def told_its_end(self) -> bool:
        """A process of it said that it ended, or why."""
        return self.ended or any(trace.fatal for trace in self.traces)

    def figures(self) -> dict[str, Value]:
        """What the log told of this start, by the names that the catalogue uses."""
        record = self.boot.record()
        found: dict[str, Value] = dict(self.arguments)
        told = {
            "free_before_load_gib": record.free_before_load_gib,
            "weights_gib": sum(weights.memory_gib for weights in record.weights) or None,
            "pool_tokens": record.kv_tokens,
            "free_after_pools_gib": record.free_after_pools_gib,
            "running_requests": record.max_running_requests,
            "state_slots": record.state_cache.slots if record.state_cache else None,
        }
        found.update({name: value for name, value in told.items() if value is not None})
        return found


class _Kind(NamedTuple):
    """What lines of one kind may hold: patterns, and words (with digits) of which one stands in the line."""

    patterns: tuple[int, ...]
    words: tuple[bytes, ...]


def _holds(raw: bytes, words: tuple[bytes, ...]) -> bool:
    small = raw.lower()
    return any(word in small for word in words)


class Index:
    """The patterns of a catalogue, made ready to be looked for; one serves any number of logs."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.held: list[tuple[Pattern, _Held, int]] = [
            (pattern, (index, which), at)
            for index, entry in enumerate(entries)
            for which, patterns in enumerate((entry.patterns, entry.needs, entry.unless))
            for at, pattern in enumerate(patterns)
        ]
        self.by_key = self._keys()

    def _keys(self) -> Mapping[bytes, list[tuple[int, bytes]]]:
        """Every pattern's words by a word, or an end of one, that a line with them must hold."""
        words = [(number, text) for number, (pattern, _, _) in enumerate(self.held) for text in pattern.words]
        words += [(_MARK, text) for text in _MARKS]
        found: dict[bytes, list[tuple[int, bytes]]] = {}
        for number, text in words:
            found.setdefault(_key(text.encode()), []).append((number, text.encode()))
        return found

    def candidates(self, line: bytes) -> tuple[tuple[int, ...], bool]:
        """Patterns that may match a line in small letters, and whether it may tell a stage."""
        held: dict[int, None] = {}
        for key in _keys_of(line) & self.by_key.keys():
            for number, words in self.by_key[key]:
                if words in line:
                    held[number] = None
        mark = _MARK in held
        held.pop(_MARK, None)
        return tuple(sorted(held)), mark


def _key(words: bytes) -> bytes:
    """The longest word within; else the end of the first word, or the beginning of the last."""
    inner = [match[0] for match in _WORD.finditer(words) if match.start() > 0 and match.end() < len(words)]
    if inner:
        return max(inner, key=len)
    first, last = next(_WORD.finditer(words)), list(_WORD.finditer(words))[-1]
    if first.end() < len(words) and len(first[0]) >= len(last[0]):
        return b"-" + first[0][-_PART:]
    # One word alone is taken to begin a word of the line.
    return last[0][:_PART] + b"-"


def _keys_of(line: bytes) -> set[bytes]:
    words = set(_WORD.findall(line))
    return words | {word[:_PART] + b"-" for word in words} | {b"-" + word[-_PART:] for word in words}


class Scanner:
    """Reads lines in blocks; ``starts`` holds what was seen."""

    def __init__(self, index: Index) -> None:
        self.entries = index.entries
        self.starts: list[Start] = [Start(1)]
        self.lines_read = 0
        self.excerpts: dict[int, list[tuple[int, str]]] = {}
        self.tail: list[tuple[int, str]] = []
        self._held = index.held
        self._index = index
        self._kinds: dict[bytes, _Kind | None] = {}
        self._trace: Traceback | None = None
        self._block: Sequence[bytes] = ()
        self._before: Sequence[bytes] = ()

    def feed(self, lines: Sequence[bytes]) -> None:
        """Take the next lines."""
        kinds, first = self._kinds, self.lines_read
        self._before, self._block = self._block, lines
        for at, raw in enumerate(lines):
            kind = raw.translate(None, _DIGITS)
            try:
                held = kinds[kind]
            except KeyError:
                held = self._classify(kind, raw)
            if held is None:
                if self._trace is not None:
                    self._look(first + at + 1, at, raw, ())
            elif self._trace is not None or not held.words or _holds(raw, held.words):
                self._look(first + at + 1, at, raw, held.patterns)
        self.lines_read = first + len(lines)

    def finish(self) -> None:
        """The log is over."""
        self._close_trace()
        known = (*self._before[-EXCERPT_BEFORE - EXCERPT_AFTER :], *self._block)[
            -EXCERPT_BEFORE - EXCERPT_AFTER :
        ]
        self.tail = [
            (self.lines_read - len(known) + at + 1, _shown(raw))
            for at, raw in enumerate(known)
            if raw.strip()
        ]

    def say(self, text: str) -> None:
        """Add a line of our own, such as the exit status."""
        raw = text.encode()
        held = self._classify(raw.translate(None, _DIGITS), raw)
        if held is not None:
            self._look(0, -1, raw, held.patterns)

    @property
    def start(self) -> Start:
        """The start that is being read."""
        return self.starts[-1]

    def _classify(self, kind: bytes, raw: bytes) -> _Kind | None:
        """What a line of this kind may hold; None for nothing that matters."""
        found: _Kind | None = None
        if not any(words in raw for words in _SPOKEN):
            escaped = b"\x1b" in raw
            limit = len(raw) if _ECHO_OF_ARGUMENTS.encode() in raw else SEARCHED_CHARACTERS
            small = (_ESCAPES.sub(b"", raw) if escaped else raw)[:limit].lower()
            patterns, mark = self._index.candidates(small)
            if mark:
                found = _Kind(patterns, ())
            elif patterns:
                exact = {words.encode() for number in patterns for words in self._held[number][0].exact}
                fewest = tuple(words for words in exact if not any(w in words for w in exact if w != words))
                found = _Kind(patterns, () if escaped else fewest)
        if len(self._kinds) < _KINDS_KEPT:
            self._kinds[kind] = found
        return found

    def _look(self, number: int, at: int, raw: bytes, held: Iterable[int]) -> None:
        for line in clean_lines(raw):
            text = line.text
            echo = _ECHO_OF_ARGUMENTS in text
            small = text if echo else text[:SEARCHED_CHARACTERS]
            if self._trace is not None and not self._trace.takes(number, line):
                self._close_trace()
            if self._trace is None:
                self._trace = begin(number, small)
            elif self._trace.raised and self._trace.raised[-1].number == number:
                self._excerpt(self._trace, number, at)
            self._read_mark(number, text, dated=line.dated)
            told = self._benign(held, number, small)
            if not told:
                for index in held:
                    # What was asked for is no failure, whatever its names and values look like.
                    if not (echo and self._shows_failure(index)):
                        told |= self._match(index, number, small)
            if not told and self._trace is None:
                self._keep_loose(number, at, line)

    def _shows_failure(self, index: int) -> bool:
        entry_index, which = self._held[index][1]
        return which == _SHOWS and self.entries[entry_index].severity == "error"

    def _benign(self, held: Iterable[int], number: int, text: str) -> bool:
        """The line looks bad and is not, so that no entry may take it for a failure."""
        found = False
        for index in held:
            entry = self.entries[self._held[index][1][0]]
            # One that hangs on other lines is not known to be benign yet.
            if entry.severity == "benign" and not entry.needs and self._match(index, number, text):
                found = True
                if self._trace is not None:
                    self._trace.benign = True
        return found

    def _match(self, index: int, number: int, text: str) -> bool:
        pattern, (entry_index, which), at = self._held[index]
        entry, start = self.entries[entry_index], self.start
        if which != _SHOWS:
            if (entry_index, which, at) not in start.context and pattern.search(text):
                start.context.add((entry_index, which, at))
            return False
        seen = start.seen.get(entry_index)
        if seen is not None and seen.count >= _ENOUGH:
            seen.count += 1
            return True
        match = pattern.search(text)
        if match is None:
            return False
        names = {name: read_value(value) for name, value in match.groupdict().items() if value is not None}
        standing = self._standing(text)
        if entry.at and standing not in entry.at:
            return False
        if entry.when is not None and not entry.when.holds({**start.arguments, **names}):
            return False
        if seen is not None and not (seen.trace and seen.trace.benign and seen.trace is not self._trace):
            _add(seen, number, text, names)
            return True
        start.seen[entry_index] = Seen(
            entry,
            number,
            text,
            match.end() - match.start(),
            standing,
            self._trace,
            names,
            [(number, text)],
            last=number,
        )
        if entry.role == "symptom" and entry.severity == "error":
            start.ended = True
        return True

    def _standing(self, text: str) -> Stage:
        standing = stages.told_by_message(text, self.start.stage)
        if self._trace is not None and standing in (Stage.UNKNOWN, Stage.ARGUMENTS, Stage.ENVIRONMENT):
            standing = stages.told_by_frames(self._trace.frames) or standing
        return standing

    def _read_mark(self, number: int, text: str, *, dated: bool) -> None:
        small = text[:SEARCHED_CHARACTERS].lower()
        if "server_args=" in small:
            if self.start.has_arguments or self.start.ended:
                self._begin_start(number)
            self.start.has_arguments = True
            self.start.arguments.update(_arguments(text))
        elif "launch_server" in small or "sglang serve" in small:
            for name, value in _options(text).items():
                self.start.arguments.setdefault(name, value)
        elif "scheduled restart job" in small:
            self.start.ended = True
        start = self.start
        stage = stages.begins(small, start.stage)
        if stage is Stage.SERVING and "application startup" in small and (dated or start.has_arguments):
            # In SGLang that is its web server alone; it serves once its warm-up is through.
            stage = Stage.FIRST_REQUEST
        if stage is not None:
            start.boot.feed(text[:20_000])
            # A request for the same figure while it serves does not lead back into the start.
            if start.stage is not Stage.SERVING or stage is Stage.SHUTDOWN:
                start.stage = stage
            if stage is Stage.SERVING and start.ready_at is None:
                start.ready_at = number

    def _keep_loose(self, number: int, at: int, line: LogLine) -> None:
        """An exception's line without its traceback, as people paste it."""
        if self.start.traces or self.start.ready_at is not None:
            return
        trace = alone(number, line)
        if trace is not None:
            self.start.traces.append(trace)
            self._excerpt(trace, number, at)

    def _begin_start(self, number: int) -> None:
        self._close_trace()
        self.starts.append(Start(number))
        if len(self.starts) > _STARTS_KEPT:
            del self.starts[1]

    def _close_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None or not trace.raised:
            return
        traces = self.start.traces
        traces.append(trace)
        if len(traces) > 16:
            dropped = traces.pop(8)
            self.excerpts.pop(dropped.number, None)

    def _excerpt(self, trace: Traceback, number: int, at: int) -> None:
        """Keep the lines around an exception, for a failure that no entry knows."""
        if trace.number in self.excerpts or at < 0:
            return
        before = [*self._before[-EXCERPT_BEFORE:], *self._block[max(0, at - EXCERPT_BEFORE) : at]][
            -EXCERPT_BEFORE:
        ]
        lines = [*before, *self._block[at : at + EXCERPT_AFTER]]
        first = number - len(before)
        self.excerpts[trace.number] = [(first + step, _shown(raw)) for step, raw in enumerate(lines)]


def _add(seen: Seen, number: int, text: str, names: Mapping[str, Value]) -> None:
    if seen.last != number:
        seen.count += 1
        seen.last = number
        if len(seen.lines) < _LINES_KEPT and all(text != other for _, other in seen.lines):
            seen.lines.append((number, text))
    for name, value in names.items():
        seen.names.setdefault(name, value)


def _arguments(text: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for match in _ARGUMENT.finditer(text):
        value = next(
            (match[kind] for kind in ("text", "quoted", "number", "word") if match[kind] is not None), None
        )
        if value is not None and "key" not in match["name"]:
            found.setdefault(match["name"], read_value(value))
    return found


def _options(text: str) -> dict[str, Value]:
    return {
        match["name"].replace("-", "_"): read_value(match["value"] or "True")
        for match in _OPTION.finditer(text)
        if "key" not in match["name"]
    }


def _shown(raw: bytes) -> str:
    return " ".join(line.text for line in clean_lines(raw[:2000])).rstrip()
