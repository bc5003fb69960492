"""Two result files side by side: what two people, or one on two days, have measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from dflash_deploy.bench.results import ResultFile, Run, UserRow
from dflash_deploy.bench.statistics import Comparison, linger
from dflash_deploy.compare.summary import (
    ENOUGH_LAUNCHES,
    Speeds,
    compare_speeds,
    in_common,
    launches_of,
    speed_of,
    speeds_of,
    summarize,
)
from dflash_deploy.compare.tables import finite, shown
from dflash_deploy.errors import DeployError, ExitCode

_LIKE_LENGTHS = 1.05
"""Answers of more tokens than that times the others' took the card another time for each."""


@dataclass(frozen=True)
class Pair:
    """The same run of two files.

    Attributes:
        name: of the run, ``A against B`` where the two are called differently.
        users: requests at once.
        rounds: that were compared, or requests of one user's long load, of the side that has fewer.
        launches: in which they were, of the side that has fewer.
        first: median speed of A in them, and ``second`` of B; the unit is that of ``speed_of``.
        speed: of A against B.
        lingering: rounds that follow each other are alike, so that the interval is too narrow.
        same_text: texts that are the same to the last byte, of ``compared_text``; None where neither file has
            texts in common.
    """

    name: str
    users: int
    rounds: int
    launches: int
    first: float
    second: float
    speed: Comparison
    lingering: bool
    same_text: int | None
    compared_text: int

    @property
    def at_once(self) -> str:
        """The load in words."""
        return "one user" if self.users == 1 else f"{self.users} at once" if self.users else "open loop"


@dataclass(frozen=True)
class Beside:
    """What two files say about each other; ``warnings`` are why not to take it at its word."""

    pairs: tuple[Pair, ...]
    warnings: tuple[str, ...]


def put_beside(a: ResultFile, b: ResultFile, *, anyway: bool = False) -> Beside:
    """Compare two files run by run.

    Args:
        a: that is said to be faster or slower.
        b: than this.
        anyway: compare what was asked differently too, with a warning.

    Raises:
        DeployError: the two asked different questions, or have no run in common.
    """
    warnings = [*_differences(a, b)]
    if a.workload.sha256 != b.workload.sha256:
        what = _workload_difference(a, b)
        if not anyway:
            raise DeployError(
                f"the two files were asked different things ({what}), so their figures do not compare",
                fix="measure both with the same workload, or say --anyway",
                exit_code=ExitCode.INVALID_INPUT,
            )
        warnings.insert(0, f"the two were asked different things ({what})")
    pairs = [
        pair
        for name, ours, theirs in _matching(a.runs, b.runs)
        for pair in _pairs(name, ours, theirs, paired=a.workload.sha256 == b.workload.sha256)
    ]
    if not pairs:
        raise DeployError(
            f"the two files have no load in common: {_loads(a)} in the first, {_loads(b)} in the second",
            exit_code=ExitCode.INVALID_INPUT,
        )
    warnings += [
        f"{pair.name}, {pair.at_once}: what makes a round quick or slow lasts for several: the interval is "
        "too narrow"
        for pair in pairs
        if pair.lingering and pair.launches < ENOUGH_LAUNCHES
    ]
    return Beside(tuple(pairs), tuple(warnings))


def as_text(beside: Beside) -> str:
    """A line a pair."""
    lines = []
    for pair in beside.pairs:
        unit, _ = speed_of(pair.users)
        lines.append(
            f"{shown(pair.name)}, {pair.at_once}, {unit}: {pair.first:.1f} and {pair.second:.1f}: "
            f"{pair.speed.sentence('the first', 'the second')}"
        )
        if pair.same_text is not None:
            lines.append(f"  {pair.same_text} of {pair.compared_text} texts are the same to the last byte")
    if min(pair.launches for pair in beside.pairs) < ENOUGH_LAUNCHES:
        lines.append(
            f"of fewer than {ENOUGH_LAUNCHES} launches: what differs between two starts of one server is not "
            "in the interval"
        )
    return "\n".join(lines)


def as_json(beside: Beside) -> str:
    """For scripts (docs/json.md)."""
    pairs = [
        {
            "name": pair.name,
            "users": pair.users,
            "rounds": pair.rounds,
            "launches": pair.launches,
            "first": pair.first,
            "second": pair.second,
            "ratio": finite(pair.speed.ratio),
            "low": finite(pair.speed.low),
            "high": finite(pair.speed.high),
            "verdict": pair.speed.verdict,
            "confidence": pair.speed.confidence,
            "same_text": pair.same_text,
            "compared_text": pair.compared_text,
        }
        for pair in beside.pairs
    ]
    return json.dumps({"schema_version": 1, "warnings": list(beside.warnings), "pairs": pairs})


def _matching(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[str, list[Run], list[Run]]]:
    ours, theirs = _by_name(a), _by_name(b)
    if len(ours) == len(theirs) == 1:
        (name, mine), (other, yours) = *ours.items(), *theirs.items()
        return [(name if name == other else f"{name} against {other}", mine, yours)]
    return [(name, runs, theirs[name]) for name, runs in ours.items() if name in theirs]


def _by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.name, []).append(run)
    return found


def _pairs(name: str, ours: Sequence[Run], theirs: Sequence[Run], *, paired: bool) -> list[Pair]:
    a, b = speeds_of(ours), speeds_of(theirs)
    found = []
    same, texts = _texts(ours, theirs)
    for users in sorted({key.users for key in a} & {key.users for key in b}):
        mine, yours = _of_users(users, a, b), _of_users(users, b, a)
        if paired:
            mine, yours = in_common(mine, yours)
        # The ratio may change with the length of prompts, and no moment was slow for that.
        one_length = len({key.rung for key in mine}) == 1
        if mine and yours:
            found.append(
                Pair(
                    name,
                    users,
                    min(len(mine), len(yours)),
                    launches_of(mine, yours),
                    median(mine.values()),
                    median(yours.values()),
                    compare_speeds(mine, yours, paired=paired),
                    paired and one_length and linger(list(mine.values()), list(yours.values())),
                    same,
                    texts,
                )
            )
    return found


def _of_users(users: int, side: Speeds, other: Speeds) -> Speeds:
    """Of so many at once, at the lengths of prompts of both: speed falls with them, whatever the server."""
    rungs = {key.rung for key in other if key.users == users}
    return {key: speed for key, speed in side.items() if key.users == users and key.rung in rungs}


def _texts(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[int | None, int]:
    a, b = _digests(ours), _digests(theirs)
    both = a.keys() & b.keys()
    return (sum(a[key] == b[key] for key in both) if both else None), len(both)


def _digests(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    return {
        (mode, prompt): digest
        for run in reversed(runs)
        if run.quality is not None
        for mode, digests in run.quality.digests.items()
        for prompt, digest in digests.items()
    }


def _differences(a: ResultFile, b: ResultFile) -> list[str]:
    found = []
    if a.kind != b.kind:
        found.append(f"the first is {a.kind}, the second {b.kind}: this says nothing about two machines")
    for what, mine, yours in (
        ("releases of this tool", *({one.tool_version} for one in (a, b))),
        ("cards", *(_known([_card(one)]) for one in (a, b))),
        ("drivers", *(_known([one.machine.driver if one.machine else None]) for one in (a, b))),
        ("models", *(_known(_model(run) for run in one.runs) for one in (a, b))),
        ("engine versions", *(_known(run.engine_version for run in one.runs) for one in (a, b))),
    ):
        if mine and yours and mine != yours:
            found.append(f"different {what}: {', '.join(sorted(mine))} and {', '.join(sorted(yours))}")
    for name, ours, theirs in _matching(a.runs, b.runs):
        if names := _other_flags(ours[0], theirs[0]):
            found.append(f"{name}: other flags: {', '.join(names)}")
        lengths = [_answer_tokens(runs) for runs in (ours, theirs)]
        if all(lengths) and max(lengths) > _LIKE_LENGTHS * min(lengths):
            found.append(
                f"{name}: answers of {lengths[0]:.0f} tokens in the first, of {lengths[1]:.0f} in the second"
            )
    for which, one in (("first", a), ("second", b)):
        if one.interrupted:
            found.append(f"the {which} was cut short")
        if any(user.estimated for run in one.runs for user in _requests([run])):
            found.append(
                f"tokens of the {which} are chunks of the stream: the true figures are these or higher"
            )
        wrong = [run for run in one.runs if run.outcome != "served"]
        found += [f"{run.name} of the {which} is {run.outcome}" for run in wrong]
    return found


def _workload_difference(a: ResultFile, b: ResultFile) -> str:
    one, other = a.workload, b.workload
    for what, mine, yours in (
        ("protocol", one.protocol, other.protocol),
        ("output tokens", one.output_tokens, other.output_tokens),
        ("arrivals", one.arrivals, other.arrivals),
        ("tasks", one.tasks, other.tasks),
    ):
        if mine != yours:
            return f"{what}: {mine} and {yours}"
    return "other prompts"


def _known(values: Iterable[str | None]) -> set[str]:
    return {value for value in values if value}


def _card(file: ResultFile) -> str | None:
    machine = file.machine
    return (machine.card or machine.gpu) if machine else None


def _model(run: Run) -> str | None:
    """Without whose it is or where: a redacted file has no more."""
    return run.model and re.split(r"[/\\]", run.model.rstrip("/\\"))[-1]


def _other_flags(one: Run, other: Run) -> list[str]:
    if one.flags is None or other.flags is None:
        return []
    names = one.flags.keys() | other.flags.keys()
    hidden = re.compile("<[a-z]+>").search
    return sorted(
        name
        for name in names
        if (mine := one.flags.get(name)) != (yours := other.flags.get(name))
        and not (hidden(str(mine)) or hidden(str(yours)))
    )


def _requests(runs: Iterable[Run]) -> Iterator[UserRow]:
    return (user for run in runs for load in run.loads for one in load.counted for user in one.users)


def _answer_tokens(runs: Sequence[Run]) -> float:
    tokens = [user.output_tokens for user in _requests(runs)]
    return median(tokens) if tokens else 0


def _loads(file: ResultFile) -> str:
    """What was measured, by run and load."""
    rows = [row for row in summarize(file) if row.tokens_per_s and row.tokens_per_s.median]
    return ", ".join(f"{row.name} ({row.load})" for row in rows) or "none"
