"""Two result files side by side: what two people, or one on two days, have measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_deploy.bench.results import ResultFile, Run
from dflash_deploy.bench.statistics import Comparison, compare
from dflash_deploy.compare.summary import speed_of, speeds_of
from dflash_deploy.compare.tables import finite, shown
from dflash_deploy.errors import DeployError, ExitCode


@dataclass(frozen=True)
class Pair:
    """The same run of two files.

    Attributes:
        name: of the run, ``A against B`` where the two are called differently.
        users: requests at once.
        speed: of A against B; the unit is that of ``speed_of``.
        same_text: texts that are the same to the last byte, of ``compared_text``; None where neither file has
            texts in common.
    """

    name: str
    users: int
    rounds: int
    speed: Comparison
    same_text: int | None
    compared_text: int


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
            "the two files have no run in common: "
            f"{_names(a.runs)} in the first, {_names(b.runs)} in the second",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return Beside(tuple(pairs), tuple(warnings))


def as_text(beside: Beside) -> str:
    """A line a pair."""
    lines = []
    for pair in beside.pairs:
        unit, _ = speed_of(pair.users)
        at_once = "one user" if pair.users == 1 else f"{pair.users} at once" if pair.users else "open loop"
        lines.append(
            f"{shown(pair.name)}, {at_once}, {unit}: {pair.speed.sentence('the first', 'the second')}"
        )
        if pair.same_text is not None:
            lines.append(f"  {pair.same_text} of {pair.compared_text} texts are the same to the last byte")
    return "\n".join(lines)


def as_json(beside: Beside) -> str:
    """For scripts (docs/json.md)."""
    pairs = [
        {
            "name": pair.name,
            "users": pair.users,
            "rounds": pair.rounds,
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
        mine = {key: value for key, value in a.items() if key.users == users}
        yours = {key: value for key, value in b.items() if key.users == users}
        both = [key for key in mine if key in yours]
        # Round n asks the same questions in both files, so each is compared with its like.
        matched = paired and len(both) == len(mine) == len(yours)
        speed = compare(
            [mine[key] for key in both] if matched else list(mine.values()),
            [yours[key] for key in both] if matched else list(yours.values()),
            paired=matched,
        )
        found.append(Pair(name, users, min(len(mine), len(yours)), speed, same, texts))
    return found


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
    cards = [one.machine and (one.machine.card or one.machine.gpu) for one in (a, b)]
    if all(cards) and cards[0] != cards[1]:
        found.append(f"different cards: {cards[0]} and {cards[1]}")
    versions = [{run.engine_version for run in one.runs} - {None} for one in (a, b)]
    if all(versions) and versions[0] != versions[1]:
        words = [", ".join(sorted(str(version) for version in some)) for some in versions]
        found.append(f"different engine versions: {words[0]} and {words[1]}")
    for which, one in (("first", a), ("second", b)):
        if one.interrupted:
            found.append(f"the {which} was cut short")
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


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(run.name for run in runs)) or "none"
