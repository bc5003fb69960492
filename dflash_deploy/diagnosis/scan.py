"""The one pass over a log: which entries show, where the start stood, what figures were told.

A line is looked at closely only if a line of its kind (the same but for digits) holds words of the catalogue.
Most lines of a long log are of few kinds, so most cost one look-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_deploy.diagnosis import stage as stages
from dflash_deploy.diagnosis.entry import Entry, read_value
from dflash_deploy.diagnosis.expression import Value
from dflash_deploy.diagnosis.pattern import Pattern
from dflash_deploy.diagnosis.stage import Stage
from dflash_deploy.diagnosis.text import clean_lines
from dflash_deploy.diagnosis.trace import Traceback, begin
from dflash_deploy.engine.sglang.bootlog import BootLog

SEARCHED_CHARACTERS = 4096
EXCERPT_BEFORE, EXCERPT_AFTER = 12, 8

_DIGITS = b"0123456789"
_KINDS_KEPT = 200_000
_LINES_KEPT = 5
_ENOUGH = 200
_STARTS_KEPT = 64
_ESCAPES = re.compile(rb"\x1b(?:\[[;?]{0,20}[@-~]|[@-Z\\-_])")
_MARKS = (*stages.MARKS, "traceback (most recent", "launch_server", "sglang serve", "scheduled restart job")
_ARGUMENT = re.compile(
    r"""['"]?\b(?P<name>[a-z]\w{2,60})['"]?\s?[=:]\s?"""
    r"""(?:'(?P<text>[^']{0,200})'|"(?P<quoted>[^"]{0,200})"|(?P<number>-?\d{1,12}(?:\.\d{1,9})?)\b|(?P<word>True|False))"""
)
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]{2,60})(?:[= ](?P<value>[^\s'\"-][^\s'\"]{0,200}))?")

_PIECE = re.compile(r"[a-z_]{4,}")

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
        self.by_anchor = self._anchors()

    def _anchors(self) -> Mapping[bytes, list[tuple[int, bytes]]]:
        """Every pattern's words under one short piece of them, with few different pieces.

        A line without any of the pieces needs no further look.
        """
        words = [(number, text) for number, (pattern, _, _) in enumerate(self.held) for text in pattern.words]
        users: dict[str, set[int]] = {}
        for at, (_, text) in enumerate(words):
            for piece in set(_PIECE.findall(text)) or {text}:
                users.setdefault(piece, set()).add(at)
        found: dict[bytes, list[tuple[int, bytes]]] = {}
        left = set(range(len(words)))
        for piece in sorted(users, key=lambda piece: (-len(users[piece]), -len(piece), piece)):
            if taken := users[piece] & left:
                found[piece.encode()] = [(words[at][0], words[at][1].encode()) for at in sorted(taken)]
                left -= taken
        return found


class Scanner:
    """Reads lines in blocks; ``starts`` holds what was seen."""

    def __init__(self, index: Index) -> None:
        self.entries = index.entries
        self.starts: list[Start] = [Start(1)]
        self.lines_read = 0
        self.excerpts: dict[int, list[tuple[int, str]]] = {}
        self.tail: list[tuple[int, str]] = []
        self._held = index.held
        self._by_anchor = index.by_anchor
        self._marks = tuple(words.encode() for words in _MARKS)
        self._kinds: dict[bytes, tuple[int, ...] | None] = {}
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
                held = self._classify(kind)
            if held is None and self._trace is None:
                continue
            self._look(first + at + 1, at, raw, held or ())
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
        kind = text.encode()
        self._look(0, -1, kind, self._classify(kind.translate(None, _DIGITS)) or ())

    @property
    def start(self) -> Start:
        """The start that is being read."""
        return self.starts[-1]

    def _classify(self, kind: bytes) -> tuple[int, ...] | None:
        """Which patterns a kind of line may match; empty for one that is a mark only, None for none."""
        small = (_ESCAPES.sub(b"", kind) if b"\x1b" in kind else kind).lower()
        held: tuple[int, ...] | None = tuple(
            dict.fromkeys(
                number
                for anchor, numbers in self._by_anchor.items()
                if anchor in small
                for number, words in numbers
                if words in small
            )
        )
        if not held and not any(mark in small for mark in self._marks):
            held = None
        if len(self._kinds) < _KINDS_KEPT:
            self._kinds[kind] = held
        return held

    def _look(self, number: int, at: int, raw: bytes, held: Iterable[int]) -> None:
        for line in clean_lines(raw):
            text = line.text
            small = text[:SEARCHED_CHARACTERS]
            if self._trace is not None and not self._trace.takes(number, line):
                self._close_trace()
            if self._trace is None:
                self._trace = begin(number, small)
                if self._trace is not None:
                    self.excerpts[number] = []
            elif self._trace.raised and self._trace.raised[-1].number == number:
                self._keep_excerpt(number, at)
            self._read_mark(number, text)
            if not self._benign(held, number, small):
                for index in held:
                    self._match(index, number, small)

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
            entry, number, text, match.end() - match.start(), standing, self._trace, names, [(number, text)]
        )
        if entry.role == "symptom" and entry.severity == "error":
            start.ended = True
        return True

    def _standing(self, text: str) -> Stage:
        standing = stages.told_by_message(text, self.start.stage)
        if self._trace is not None and standing in (Stage.UNKNOWN, Stage.ARGUMENTS, Stage.ENVIRONMENT):
            standing = stages.told_by_frames(self._trace.frames) or standing
        return standing

    def _read_mark(self, number: int, text: str) -> None:
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
        stage = stages.begins(small)
        if stage is not None:
            start.boot.feed(text[:20_000])
            # A request for the same figure while it serves does not lead back into the start.
            if start.stage is not Stage.SERVING or stage is Stage.SHUTDOWN:
                start.stage = stage
            if stage is Stage.SERVING and start.ready_at is None:
                start.ready_at = number

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

    def _keep_excerpt(self, number: int, at: int) -> None:
        """The lines around an exception, for a failure that no entry knows."""
        if self._trace is None or self.excerpts.get(self._trace.number) or at < 0:
            return
        before = (
            [*self._before[-EXCERPT_BEFORE:], *self._block[:at]] if at < EXCERPT_BEFORE else self._block[:at]
        )
        lines = [*before[-EXCERPT_BEFORE:], *self._block[at : at + EXCERPT_AFTER]]
        first = number - min(len(before), EXCERPT_BEFORE)
        self.excerpts[self._trace.number] = [(first + step, _shown(raw)) for step, raw in enumerate(lines)]


def _add(seen: Seen, number: int, text: str, names: Mapping[str, Value]) -> None:
    if seen.lines[-1][0] != number:
        seen.count += 1
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
