"""What the runs of a result file come to: a row for each method and load, told apart from plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from dflash_deploy.bench.results import LoadRows, ResultFile, RoundRow, Run, Tailed
from dflash_deploy.bench.statistics import Comparison, Interval, compare, median_interval

PLAIN = "none"
_RUNGS_PER_OCTAVE = 32
ENOUGH_LAUNCHES = 3
"""Launches of each method whose spread can be told from that of rounds."""


@dataclass(frozen=True)
class Row:
    """One method under one load, over all its launches. Medians are over the rounds that count.

    What is told of a whole run (outcome, notes, accept length, answers, memory) stands in each load's row.

    Attributes:
        load: such as ``8 users`` or ``minute 3``; None where nothing was measured.
        users: requests at once, none of an open loop.
        tokens_per_s: of all users over a round's wall time, with its 95 % interval.
        user_tokens_per_s: decode speed of one user.
        speed_up: against plain decoding; None without it, or without rounds.
        same_text: answers that are those of plain decoding to the last byte, of ``compared_text``.
        diverge_after: tokens until the others part; ``diverge_counted`` where the server names tokens.
        right: known questions answered right, of ``asked``.
    """

    name: str
    load: str | None
    users: int | None
    outcome: str
    reason: str | None
    notes: tuple[str, ...]
    launches: int
    rounds: int
    tokens_per_s: Interval | None
    user_tokens_per_s: Interval | None
    ttft_s: float | None
    ttft_p95_s: float | None
    inter_token_s: float | None
    inter_token_p99_s: float | None
    latency_s: float | None
    latency_p95_s: float | None
    wall_s: float | None
    prompt_tokens: int | None
    prefill_tokens_per_s: float | None
    accept_length: float | None
    speed_up: Comparison | None
    same_text: int | None
    compared_text: int | None
    diverge_after: float | None
    diverge_counted: bool
    right: int | None
    asked: int | None
    vram_used_mib: int | None
    vram_total_mib: int | None


def summarize(result: ResultFile) -> list[Row]:
    """A row for each name in the file and each load under it, in its order."""
    by_name: dict[str, list[Run]] = {}
    for run in result.runs:
        by_name.setdefault(run.name, []).append(run)
    plain = by_name.get(PLAIN, [])
    rows = []
    for name, runs in by_name.items():
        loads = dict.fromkeys(_key(load) for run in runs for load in run.loads)
        for key in loads or [None]:
            ours, theirs = ([_under(key, run) for run in some] for some in (runs, plain))
            label = None if key is None else key.label or key.at_once
            rows.append(_row(name, label, ours, theirs if name != PLAIN else []))
    return rows


class _Key(NamedTuple):
    """Tells the loads of a run apart."""

    users: int
    label: str | None

    @property
    def at_once(self) -> str:
        return "1 user" if self.users == 1 else f"{self.users} users"


def _key(load: LoadRows) -> _Key:
    return _Key(load.users, load.label)


def _under(key: _Key | None, run: Run) -> Run:
    """The run as if it had had this load alone."""
    return run.model_copy(update={"loads": [load for load in run.loads if _key(load) == key]})


def speed_of(users: int) -> tuple[str, Callable[[RoundRow], float | None]]:
    """The figure that tells servers apart: what one user sees, or what several get together.

    In an open loop all together get what was asked for, of any server that keeps up; one user gets it sooner.
    """
    if users <= 1:
        return "tokens/s a user", lambda one: one.user_tokens_per_s
    return "tokens/s in all", lambda one: one.tokens_per_s


def compare_runs(ours: Sequence[Run], theirs: Sequence[Run]) -> Comparison | None:
    """Two sides by the rounds that they have in common; None where there are none."""
    a, b = in_common(speeds_of(ours), speeds_of(theirs))
    return compare_speeds(a, b, paired=True) if a else None


def in_common(a: Speeds, b: Speeds) -> tuple[Speeds, Speeds]:
    """The rounds that both sides have, in one order.

    Round *n* of launch *m* asks both the same questions, so each is compared with its like.
    """
    both = [key for key in a if key in b]
    return {key: a[key] for key in both}, {key: b[key] for key in both}


def launches_of(a: Speeds, b: Speeds) -> int:
    """Of the side that has fewer."""
    return min(len({key.repeat for key in side}) for side in (a, b))


def compare_speeds(a: Speeds, b: Speeds, *, paired: bool) -> Comparison:
    """Two sides; there is a round of each, and ``paired`` ones are those of ``in_common``.

    From ``ENOUGH_LAUNCHES`` on, launches are compared and not rounds: rounds of one launch share what is
    peculiar to it, and would make a difference between starts look like one between methods.
    """
    if launches_of(a, b) < ENOUGH_LAUNCHES:
        return compare(list(a.values()), list(b.values()), paired=paired)
    return compare(_by_launch(a), _by_launch(b), paired=paired)


def _by_launch(speeds: Speeds) -> list[float]:
    launches: dict[int, list[float]] = {}
    for key, speed in speeds.items():
        launches.setdefault(key.repeat, []).append(speed)
    return [median(launches[repeat]) for repeat in sorted(launches)]


def _row(name: str, load_name: str | None, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    loads = [load for run in runs for load in run.loads]
    rounds = [one for load in loads for one in load.counted]

    def tail(of: Tailed, which: Literal["median", "p95", "p99"]) -> float | None:
        known: list[float] = [getattr(load.tails[of], which) for load in loads if of in load.tails]
        return median(known) if known else None

    prefills = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s is not None]
    ttft_s = tail("ttft_s", "median")
    if ttft_s is None and rounds:
        ttft_s = median(one.ttft_s for one in rounds)
    worst = next((run for run in runs if run.outcome != "served"), runs[0])
    lengths = [run.accept_length for run in runs if run.accept_length is not None]
    compared = [row for run in runs if run.quality for row in (run.quality.agreement or {}).values()]
    partings = [row.diverge_after for row in compared if row.diverge_after is not None]
    asked = sum(sum(run.quality.asked.values()) for run in runs if run.quality)
    speeds = [one.user_tokens_per_s for one in rounds if one.user_tokens_per_s]
    used = [run.vram_used_mib for run in runs if run.vram_used_mib is not None]
    return Row(
        name=name,
        load=load_name,
        users=loads[0].users if loads else None,
        outcome=worst.outcome,
        reason=worst.reason,
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        launches=len(runs),
        rounds=len(rounds),
        tokens_per_s=median_interval([one.tokens_per_s for one in rounds]) if rounds else None,
        user_tokens_per_s=median_interval(speeds) if speeds else None,
        ttft_s=ttft_s,
        ttft_p95_s=tail("ttft_s", "p95"),
        inter_token_s=tail("inter_token_s", "median"),
        inter_token_p99_s=tail("inter_token_s", "p99"),
        latency_s=tail("latency_s", "median"),
        latency_p95_s=tail("latency_s", "p95"),
        wall_s=median(one.wall_s for one in rounds) if rounds else None,
        prompt_tokens=next((load.prompt_tokens for load in loads if load.prompt_tokens is not None), None),
        prefill_tokens_per_s=median(prefills) if prefills else None,
        accept_length=median(lengths) if lengths else None,
        speed_up=compare_runs(runs, plain) if plain else None,
        same_text=sum(row.identical for row in compared) if compared else None,
        compared_text=sum(row.prompts for row in compared) if compared else None,
        diverge_after=median(partings) if partings else None,
        diverge_counted=all(row.counted for row in compared),
        right=sum(sum(run.quality.right.values()) for run in runs if run.quality) if asked else None,
        asked=asked or None,
        vram_used_mib=max(used, default=None),
        vram_total_mib=next((run.vram_total_mib for run in runs if run.vram_total_mib is not None), None),
    )


def minutes_of(run: Run) -> list[LoadRows]:
    """The windows of a long load, without the load as a whole."""
    return [load for load in run.loads if load.window]


class RoundKey(NamedTuple):
    """Rounds, or requests, of one key asked the same questions.

    ``rung`` is the length of the prompts where the protocol sets it: servers count it to a few tokens alike.
    """

    repeat: int
    users: int
    name: str
    rung: int | None


Speeds = Mapping[RoundKey, float]


def speeds_of(runs: Sequence[Run]) -> Speeds:
    """The figure of ``speed_of`` for each round that counts; of one long load, for each of its requests.

    A load of several users has one figure for all of them together, and so one for each round alone.
    """
    found: dict[RoundKey, float] = {}
    for run in runs:
        for load in minutes_of(run) or run.loads:
            _, speed = speed_of(load.users)
            rung = round(_RUNGS_PER_OCTAVE * math.log2(load.prompt_tokens)) if load.prompt_tokens else None
            for place, one in enumerate(load.counted):
                name = one.name if rung is None else str(place)
                values = {name: speed(one)}
                if load.label is not None and load.users <= 1 and one.users:
                    # One user's requests stand in their order; those of an open loop have numbers.
                    values = {
                        f"{name} {number if load.users else request.user}": request.tokens_per_s
                        for number, request in enumerate(one.users)
                    }
                for which, value in values.items():
                    if value:
                        found[RoundKey(run.repeat, load.users, which, rung)] = value
    return found
