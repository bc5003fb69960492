"""Which trial is the best, and by how much it beats another."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from dflash_deploy.bench.measurement import Measurement, Spread
from dflash_deploy.profile.schema import Goal
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.records import StudyRecord, TrialRecord

KNOWN = "known:"


@dataclass(frozen=True)
class Gain:
    """How much better one trial is than another, as shares (0.05 is 5 % better), compared round by round.

    Every trial asks the same questions in the same rounds, so a round of one is held against the same round
    of the other. ``distinguishable`` where all rounds agree on which is the better.
    """

    median: float
    low: float
    high: float

    @property
    def distinguishable(self) -> bool:
        """The sign of the difference is the same in every round."""
        return self.low > 0 or self.high < 0


def best_trial(study: StudyRecord, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The best feasible trial, or None where there is none.

    A setting that somebody already knows is preferred where the search found nothing that is
    distinguishably better.
    """
    goal = study.profile.objective.optimize
    feasible = [trial for trial in trials if trial.feasible and trial.objective is not None]
    if not feasible:
        return None
    top = max(feasible, key=lambda trial: (_score(trial, goal), -trial.number))
    level = [trial for trial in feasible if trial.source.startswith(KNOWN) and not _beats(top, trial, goal)]
    return max(level, key=lambda trial: (_score(trial, goal), -trial.number), default=top)


def gain(trial: TrialRecord, over: TrialRecord, goal: Goal) -> Gain | None:
    """How much better ``trial`` is than ``over``, or None where one of them has no figure."""
    if trial.objective is None or over.objective is None:
        return None
    ours, theirs = _rounds(trial, goal), _rounds(over, goal)
    shares = [_better_by(a, b, goal) for a, b in zip(ours, theirs, strict=False)]
    return Gain(statistics.median(shares), min(shares), max(shares))


def spread_of(trial: TrialRecord, goal: Goal) -> Spread | None:
    """The objective over the trial's rounds."""
    if trial.objective is None:
        return None
    rounds = _rounds(trial, goal)
    return Spread(trial.objective, min(rounds), max(rounds))


def _beats(trial: TrialRecord, over: TrialRecord, goal: Goal) -> bool:
    found = gain(trial, over, goal)
    return found is None or found.low > 0


def _score(trial: TrialRecord, goal: Goal) -> float:
    value = trial.objective
    assert value is not None  # noqa: S101  (only trials with a figure are compared)
    return -value if goal in LESS_IS_BETTER else value


def _rounds(trial: TrialRecord, goal: Goal) -> list[float]:
    value = trial.objective
    assert value is not None  # noqa: S101
    measured = trial.measured
    return (_by_round(measured, goal) if measured else None) or [value]


def _by_round(measured: Measurement, goal: Goal) -> list[float]:
    match goal:
        case "total_tokens_per_s":
            return [one.total_tokens_per_s for one in measured.per_round]
        case "user_tokens_per_s":
            return [one.user_tokens_per_s for one in measured.per_round]
        case "latency_s":
            return [one.latency_s for one in measured.per_round]
        case "context_tokens":
            return []


def _better_by(value: float, than: float, goal: Goal) -> float:
    if goal in LESS_IS_BETTER:
        value, than = than, value
    return value / than - 1 if than else 0.0
