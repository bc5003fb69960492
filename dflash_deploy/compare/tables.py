"""The write-up's tables, as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from dflash_deploy.bench.results import GpuRow, LoadRows, ResultFile, Run
from dflash_deploy.bench.statistics import (
    Comparison,
    Interval,
    drift,
    outliers,
    warm_up_rounds,
)
from dflash_deploy.compare.summary import ENOUGH_LAUNCHES, PLAIN, Row, minutes_of, speed_of, summarize
from dflash_deploy.machine.text import printable

_LEAST_THROTTLED = 0.05
_LONGEST_LINE = 2000


@dataclass(frozen=True)
class Table:
    """Cells as a person reads them; ``notes`` stand below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(result: ResultFile) -> list[Table]:
    """What a person wants to see of a result file."""
    if all(run.flags is None for run in result.runs):
        # Servers that somebody else had started.
        return [_levels(result, run, rows) for run, rows in _by_run(result)] + _users(result)
    return [_methods(result, summarize(result)), *_users(result)]


def _by_run(result: ResultFile) -> Iterator[tuple[Run, list[Row]]]:
    for run in result.runs:
        yield run, summarize(result.model_copy(update={"runs": [run]}))


def as_text(result: ResultFile) -> str:
    """For a terminal or a log."""
    return "\n\n".join(_text(table) for table in tables(result))


def as_markdown(result: ResultFile) -> str:
    """For an issue or a web page."""
    return "\n\n".join(_markdown(table) for table in tables(result))


def as_csv(result: ResultFile) -> str:
    """A line for each method and load, every figure by itself, its unit in its name."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", *(name for name, _ in _CSV)])
    for row in summarize(result):
        writer.writerow([result.kind, *(_plain(read(row)) for _, read in _CSV)])
    return out.getvalue()


def as_json(result: ResultFile, live: Comparison | None = None) -> str:
    """For scripts: what ``as_csv`` has, and the result file itself.

    Args:
        result: what was measured.
        live: how two live servers compared, where they were measured in turn.
    """
    summary = [{name: finite(read(row)) for name, read in _CSV} for row in summarize(result)]
    return json.dumps(
        {
            "schema_version": 1,
            "kind": result.kind,
            "summary": summary,
            **({} if live is None else {"comparison": {k: finite(v) for k, v in asdict(live).items()}}),
            "result": result.model_dump(mode="json"),
        },
        ensure_ascii=False,
    )


_CSV: Sequence[tuple[str, Callable[[Row], object]]] = (
    ("method", lambda row: row.name),
    ("load", lambda row: row.load),
    ("users", lambda row: row.users),
    ("outcome", lambda row: row.outcome),
    ("launches", lambda row: row.launches),
    ("rounds", lambda row: row.rounds),
    ("tokens_per_s", lambda row: row.tokens_per_s and row.tokens_per_s.median),
    ("user_tokens_per_s", lambda row: row.user_tokens_per_s and row.user_tokens_per_s.median),
    ("ttft_s", lambda row: row.ttft_s),
    ("ttft_p95_s", lambda row: row.ttft_p95_s),
    ("inter_token_s", lambda row: row.inter_token_s),
    ("inter_token_p99_s", lambda row: row.inter_token_p99_s),
    ("latency_s", lambda row: row.latency_s),
    ("latency_p95_s", lambda row: row.latency_p95_s),
    ("wall_s", lambda row: row.wall_s),
    ("prompt_tokens", lambda row: row.prompt_tokens),
    ("prefill_tokens_per_s", lambda row: row.prefill_tokens_per_s),
    ("accept_length", lambda row: row.accept_length),
    ("speed_up", lambda row: row.speed_up and row.speed_up.ratio),
    ("speed_up_low", lambda row: row.speed_up and row.speed_up.low),
    ("speed_up_high", lambda row: row.speed_up and row.speed_up.high),
    ("verdict", lambda row: row.speed_up and row.speed_up.verdict),
    ("same_text", lambda row: row.same_text),
    ("compared_text", lambda row: row.compared_text),
    ("diverge_after_tokens", lambda row: row.diverge_after),
    ("right", lambda row: row.right),
    ("asked", lambda row: row.asked),
    ("vram_used_mib", lambda row: row.vram_used_mib),
    ("vram_total_mib", lambda row: row.vram_total_mib),
)


_Column = tuple[str, Callable[[Row], str]]
"""A heading, and what stands below it."""


def _methods(result: ResultFile, rows: Sequence[Row]) -> Table:
    users = max((load.users for run in result.runs for load in run.loads), default=1)
    unit, _ = speed_of(users)
    workload = result.workload
    length = f"{workload.output_tokens} tokens"
    where = result.machine and (result.machine.card or result.machine.gpu)
    title = (
        f"{users} at once, {length}{f', {where}' if where else ''} (all figures {result.kind})"
        if users > 1
        else f"one user, {length}{f', {where}' if where else ''} (all figures {result.kind})"
    )
    columns = (
        "method",
        unit,
        "tokens/s in all" if users == 1 else "tokens/s a user",
        "TTFT s",
        "wall s",
        "accept length",
        "speed-up",
        "as plain",
        "right",
        "VRAM MiB",
        "outcome",
    )
    several = len({row.load for row in rows} - {None}) > 1
    cells = tuple(_cells(row, users, f"{row.name}, {row.load}" if several else row.name) for row in rows)
    return Table(title, columns, cells, tuple(dict.fromkeys(_notes(rows, unit))))


def _cells(row: Row, users: int, name: str) -> tuple[str, ...]:
    speeds = (row.user_tokens_per_s, row.tokens_per_s)
    first, second = reversed(speeds) if users > 1 else speeds
    return (
        name,
        _interval(first),
        _number(None if second is None else second.median, 1),
        _number(row.ttft_s, 3),
        _number(row.wall_s, 2),
        _number(row.accept_length, 2),
        _speed_up(row.speed_up) if row.name != PLAIN else "1.00",
        "-" if row.same_text is None else f"{row.same_text}/{row.compared_text}",
        "-" if row.right is None else f"{row.right}/{row.asked}",
        "-" if row.vram_used_mib is None else str(row.vram_used_mib),
        row.outcome,
    )


def _notes(rows: Sequence[Row], unit: str) -> list[str]:
    notes: list[str] = []
    for row in rows:
        if row.speed_up is not None:
            notes.append(f"{unit}: {row.speed_up.sentence(row.name, 'plain decoding')}")
        if row.diverge_after is not None:
            about = "" if row.diverge_counted else "about "
            notes.append(
                f"{row.name}: {row.same_text} of {row.compared_text} answers are plain decoding's to the "
                f"last byte; the others part after {about}{row.diverge_after:.0f} tokens (median)"
            )
        notes += [f"{row.name}: {note}" for note in row.notes]
        if row.reason:
            notes.append(f"{row.name}: {row.outcome}: {row.reason}")
    if any(row.speed_up is not None for row in rows):
        notes.append(
            "intervals are of 95 %, over launches"
            if min(row.launches for row in rows) >= ENOUGH_LAUNCHES
            else "intervals are of 95 %, over rounds: what differs between two launches is not in them "
            f"(--repeats {ENOUGH_LAUNCHES})"
        )
    return notes


def _levels(result: ResultFile, run: Run, rows: Sequence[Row]) -> Table:
    """One server, load level by load level."""
    columns: list[_Column] = [
        ("load", lambda row: row.load or "-")
        if any(load.label for load in run.loads)
        else ("users", lambda row: str(row.users)),
        ("tokens/s in all", lambda row: _interval(row.tokens_per_s)),
        ("tokens/s a user", lambda row: _interval(row.user_tokens_per_s)),
        ("TTFT s", lambda row: _number(row.ttft_s, 3)),
        ("p95", lambda row: _number(row.ttft_p95_s, 3)),
        ("token to token ms", lambda row: _number(row.inter_token_s, 2, scale=1000)),
        ("p99", lambda row: _number(row.inter_token_p99_s, 2, scale=1000)),
        ("answer s", lambda row: _number(row.latency_s, 2)),
        ("p95", lambda row: _number(row.latency_p95_s, 2)),
        ("rounds", lambda row: str(row.rounds)),
    ]
    if any(row.prefill_tokens_per_s is not None for row in rows):
        columns.insert(1, ("prefill tokens/s", lambda row: _number(row.prefill_tokens_per_s, 0)))
    cells = tuple(tuple(read(row) for _, read in columns) for row in rows if row.load is not None)
    name = "" if run.name == "bench" else f"{run.name}: "
    asked = f"{result.workload.protocol}, {result.workload.output_tokens} tokens an answer"
    title = f"{name}{run.model or 'a model'} at {run.url}: {asked} (all figures {result.kind})"
    return Table(title, tuple(heading for heading, _ in columns), cells, tuple(_about(run)))


def _about(run: Run) -> Iterator[str]:
    if run.accept_length is not None:
        yield f"accept length: {run.accept_length:.2f} tokens a verify step"
    if run.vram_used_mib is not None:
        yield f"VRAM used at most: {run.vram_used_mib} MiB of the card"
    quality = run.quality
    if quality is not None:
        if quality.asked:
            yield f"known questions: {sum(quality.right.values())} of {sum(quality.asked.values())} right"
        yield f"asked three times: {quality.repeated_same} of {quality.repeated} got the very same answer"
        if quality.cached_tokens is not None:
            yield f"second turns found {quality.cached_tokens} tokens in the prefix cache"
    if run.server is not None:
        if run.server.queue_s is not None:
            yield f"waiting in the server's queue: {run.server.queue_s * 1000:.1f} ms (mean)"
        if run.server.retracted:
            yield f"{run.server.retracted} requests were put back for lack of memory"
    if run.gpu is not None:
        yield from _gpu_words(run.gpu)
    yield from run.notes
    for load in run.loads:
        yield from _doubts(load)
    levels: dict[int, list[float]] = {}
    for load in minutes_of(run):
        levels.setdefault(load.users, []).append(load.rounds[0].tokens_per_s)
    for users, minutes in levels.items():
        if (trend := drift(minutes)).significant:
            yield f"{users} at once: speed drifts by {trend.share * 100:+.1f} % over {len(minutes)} minutes"
    for failure in run.failures:
        yield f"failed: {failure.count} times {failure.kind}, for example {failure.example}"
    if run.outcome == "unfit":
        yield f"unfit: {run.reason}"


def _gpu_words(gpu: GpuRow) -> Iterator[str]:
    figures = [
        (gpu.clock_sm_mhz, "MHz"),
        (gpu.power_w, "W"),
        (gpu.temperature_c, "°C at most"),
    ]
    known = ", ".join(f"{value:.0f} {unit}" for value, unit in figures if value is not None)
    if known:
        yield f"the card: {known}"
    if gpu.throttled > _LEAST_THROTTLED:
        reasons = ", ".join(gpu.clock_reasons) or "for reasons that the driver does not tell"
        yield f"held back in {gpu.throttled * 100:.0f} % of the looks at it: {reasons}"


def _doubts(load: LoadRows) -> Iterator[str]:
    """What makes the rounds of a level less than a steady state."""
    speeds = [one.tokens_per_s for one in load.counted]
    if len(speeds) < 3:
        return
    if warming := warm_up_rounds(speeds):
        yield f"{load.users} at once: still warming up in the first {warming} rounds (--cold {warming + 1})"
    trend = drift(speeds)
    if trend.significant:
        yield f"{load.users} at once: speed drifts by {trend.share * 100:+.1f} % over the rounds"
    far = outliers(speeds)
    if far:
        names = ", ".join(load.counted[place].name for place in far)
        yield f"{load.users} at once: {names} unlike the others"


def _users(result: ResultFile) -> list[Table]:
    """The rounds of each method's first launch, user by user, as the write-up has them for four."""
    found = []
    launches = max((run.repeat for run in result.runs), default=1)
    for run in result.runs:
        for load in run.loads if run.repeat == 1 else []:
            if load.users == 1 or load.label is not None:
                continue
            rows: list[tuple[str, ...]] = []
            for played in load.rounds:
                rows += [
                    (
                        played.name,
                        str(one.user + 1),
                        str(one.output_tokens),
                        _number(one.ttft_s, 3),
                        _number(one.tokens_per_s, 1),
                        _number(one.wall_s, 2),
                    )
                    for one in played.users
                ]
                tokens = sum(one.output_tokens for one in played.users)
                rows.append(
                    (
                        played.name,
                        "all",
                        str(tokens),
                        "",
                        _number(played.tokens_per_s, 1),
                        _number(played.wall_s, 2),
                    )
                )
            title = "" if launches == 1 else f", first of {launches} launches"
            columns = ("round", "user", "tokens", "TTFT s", "tokens/s", "wall s")
            found.append(
                Table(f"{run.name}{title}: {load.users} at once ({result.kind})", columns, tuple(rows))
            )
    return found


def _interval(value: Interval | None) -> str:
    if value is None:
        return "-"
    half = max(value.high - value.median, value.median - value.low)
    return f"{value.median:.1f}" + (f" ± {half:.1f}" if math.isfinite(half) else "")


def _speed_up(value: Comparison | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value.high):
        return f"{value.ratio:.2f}"
    return f"{value.ratio:.2f} ({value.low:.2f} … {value.high:.2f})"


def _number(value: float | None, digits: int, *, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def finite(value: object) -> object:
    """As JSON has it: it knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: object) -> object:
    if finite(value) is None:
        return ""
    if not isinstance(value, str):
        return value
    # A spreadsheet would take such a cell for a formula.
    return f"'{shown(value)}" if value[:1] in "=+-@" else shown(value)


def _text(table: Table) -> str:
    cells = [table.columns, *(tuple(shown(cell) for cell in row) for row in table.rows)]
    widths = [max(_width(row[at]) for row in cells) for at in range(len(table.columns))]
    lines = [shown(table.title)]
    for row in cells:
        padded = [
            cell + " " * (width - _width(cell)) if at == 0 else " " * (width - _width(cell)) + cell
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, *map(shown, table.notes)])


def _markdown(table: Table) -> str:
    lines = [
        f"**{_escaped(table.title)}**",
        "",
        f"| {' | '.join(map(_escaped, table.columns))} |",
        f"|{'|'.join(['---', *['---:'] * (len(table.columns) - 1)])}|",
        *(f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in table.rows),
    ]
    if table.notes:
        lines += ["", *(f"- {_escaped(note)}" for note in table.notes)]
    return "\n".join(lines)


def shown(text: str) -> str:
    """One line without what a terminal obeys: servers and files of strangers have their say in it."""
    return printable(" ".join(text.split()), longest=_LONGEST_LINE)


def _escaped(text: str) -> str:
    line = shown(text)
    for char in "\\|<>*_`[]":
        line = line.replace(char, f"\\{char}")
    return line


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
