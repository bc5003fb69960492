"""The one pass over a log: which entries show, where the start stood, what figures were told.

A line is looked at closely only if a line of its kind (the same but for digits and case) holds words of the
catalogue. Most lines of a long log are of few kinds, so most cost one look-up; a line of a new kind costs one
for each of its words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

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
_SMALL = bytes(range(256)).lower()
_KINDS_BYTES = 16 << 20
_WORDS_KEPT = 200_000
_LONGEST_WORD = 80
_LINES_KEPT = 5
_ENOUGH = 200
_STARTS_KEPT = 64
_ECHO_OF_ARGUMENTS = "server_args="
# What people wrote to the model, and it to them: no failure of the server, whatever it says.
_SPOKEN = (b"receive: obj=", b"finish: obj=", b"received request ")
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
_SHORTEST, _PART = 3, 6
_LENGTHS = range(_SHORTEST, _PART + 1)
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


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """What lines of one kind may hold: patterns, and words (with digits) of which one stands in the line."""

    patterns: tuple[int, ...]
    words: tuple[bytes, ...]

    def may_show(self, text: bytes) -> bool:
        """Whether a text in small letters, of one line or many, may hold such a line that tells something."""
        return not self.words or any(word in text for word in self.words)


_NEW = _Kind((), ())
"""A kind of which no line has been seen."""


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
        self._heads = frozenset(key[:_SHORTEST] for key in self.by_key if key.endswith(b"-"))
        self._tails = frozenset(key[-_SHORTEST:] for key in self.by_key if key.startswith(b"-"))
        self._dull: set[bytes] = set()
        self._telling: dict[bytes, tuple[tuple[int, bytes], ...]] = {}

    def _keys(self) -> Mapping[bytes, list[tuple[int, bytes]]]:
        """Every pattern's words by a word, or an end of one, that a line with them must hold."""
        words = [(number, text) for number, (pattern, _, _) in enumerate(self.held) for text in pattern.words]
        words += [(_MARK, text) for text in _MARKS]
        found: dict[bytes, list[tuple[int, bytes]]] = {}
        for number, text in words:
            found.setdefault(_key(text.encode()), []).append((number, text.encode()))
        return found

    def dull(self, kind: bytes) -> bool:
        """Whether all words of a line are known to stand in no pattern."""
        return self._dull.issuperset(kind.split()) and b"\x1b" not in kind

    def candidates(self, kind: bytes, line: bytes) -> tuple[tuple[int, ...], bool]:
        """Patterns that may match a line, and whether it may tell a stage.

        Args:
            kind: the line in small letters and without digits.
            line: in small letters, as far as it is searched.
        """
        held: set[int] = set()
        for word in set(kind.split()) - self._dull:
            for number, piece in self._telling.get(word) or self._tells(word):
                if piece in line:
                    held.add(number)
        return tuple(sorted(held - {_MARK})), _MARK in held

    def _tells(self, word: bytes) -> tuple[tuple[int, bytes], ...]:
        """The pieces of patterns that a line may hold because of this word of it."""
        keys = self._keys_of(word)
        if len(self._dull) + len(self._telling) >= _WORDS_KEPT:
            self._dull.clear()
            self._telling.clear()
        found = tuple(one for key in keys for one in self.by_key[key]) if keys else ()
        if len(word) > _LONGEST_WORD:
            return found
        if keys:
            self._telling[word] = found
        else:
            self._dull.add(word)
        return found

    def _keys_of(self, word: bytes) -> list[bytes]:
        """Keys that a word of a line has; in most words that nobody knows, none."""
        found = []
        for run in _WORD.findall(word):
            if run in self.by_key:
                found.append(run)
            if run[:_SHORTEST] in self._heads:
                found += [key for length in _LENGTHS if (key := run[:length] + b"-") in self.by_key]
            if run[-_SHORTEST:] in self._tails:
                found += [key for length in _LENGTHS if (key := b"-" + run[-length:]) in self.by_key]
        return found


def _key(words: bytes) -> bytes:
    """The longest of: a word within, the end of the first word, the beginning of the last."""
    found = list(_WORD.finditer(words))
    inner = [match[0] for match in found if match.start() > 0 and match.end() < len(words)]
    first, last = found[0], found[-1]
    ends = [b"-" + first[0][-_PART:]] if first.end() < len(words) else []
    # One word alone is taken to begin a word of the line.
    begins = [last[0][:_PART] + b"-"] if last.start() > 0 or len(found) == 1 else []
    return max([*inner, *ends, *begins], key=len)


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
        self._room = _KINDS_BYTES
        self._trace: Traceback | None = None
        self._block: Sequence[bytes] = ()
        self._before: Sequence[bytes] = ()

    def feed(self, lines: Sequence[bytes]) -> None:
        """Take the next lines."""
        first = self.lines_read
        self._before, self._block = self._block, lines
        # One call for all lines: what is done for each in turn decides how fast a log is read.
        small = b"\n".join(lines).lower()
        kinds = small.translate(None, _DIGITS).split(b"\n")
        known = list(map(self._kinds.get, kinds, repeat(_NEW)))
        tells = {kind: kind is not None and kind.may_show(small) for kind in set(known)}
        following = 0
        for at in (*compress(range(len(lines)), map(tells.get, known)), len(lines)):
            while self._trace is not None and following < at:
                self._look(first + following + 1, following, lines[following], ())
                following += 1
            if at == len(lines):
                break
            raw, kind = lines[at], known[at]
            if kind is _NEW:
                kind = self._classify(kinds[at], raw)
            if kind is not None and kind.may_show(raw.lower()):
                self._look(first + at + 1, at, raw, kind.patterns)
            elif self._trace is not None:
                self._look(first + at + 1, at, raw, ())
            following = at + 1
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
        held = self._classify(raw.translate(_SMALL, _DIGITS), raw)
        if held is not None:
            self._look(0, -1, raw, held.patterns)

    @property
    def start(self) -> Start:
        """The start that is being read."""
        return self.starts[-1]

    def _classify(self, kind: bytes, raw: bytes) -> _Kind | None:
        """What a line of this kind may hold; None for nothing that matters."""
        if kind in self._kinds:
            return self._kinds[kind]
        found = None if self._index.dull(kind) else self._read_kind(kind, raw)
        if self._room > 0:
            self._room -= len(kind)
            self._kinds[kind] = found
        return found

    def _read_kind(self, kind: bytes, raw: bytes) -> _Kind | None:
        limit, escaped = SEARCHED_CHARACTERS, b"\x1b" in raw
        if escaped:
            raw = _ESCAPES.sub(b"", raw)
            kind = raw.translate(_SMALL, _DIGITS)
        if _ECHO_OF_ARGUMENTS.encode() in raw:
            limit = len(raw)
        patterns, mark = self._index.candidates(kind[:limit], raw[:limit].lower())
        if mark:
            found = _Kind(patterns, ())
        elif patterns:
            exact = {words.encode() for number in patterns for words in self._held[number][0].exact}
            fewest = tuple(words for words in exact if not any(w in words for w in exact if w != words))
            found = _Kind(patterns, () if escaped else fewest)
        else:
            return None
        return None if any(words in kind for words in _SPOKEN) else found

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
