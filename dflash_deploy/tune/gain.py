"""How much better one trial is than another, by the rounds of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_deploy.bench.measurement import RoundFigures, Spread
from dflash_deploy.bench.statistics import Interval, compare, median_interval
from dflash_deploy.profile.schema import Goal
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.records import TrialRecord

NOISE = 0.004
"""Two launches of one configuration differ by as much (a share), and nobody feels it."""

CONFIDENCE = 0.95

_LEAST_TOLD = 5e-4
"""What is less reads as 0.0 %."""


@dataclass(frozen=True)
class Gain:
    """How much better one trial is than another, as shares (0.05 is 5 % better or faster).

    Every trial asks the same questions in the same rounds, so a round of one is held against the same round
    of the other; the interval is ``bench.statistics``' of 95 %.

    Attributes:
        low: lower end of the interval, None with ``high`` where one round tells none.
    """

    median: float
    low: float | None
    high: float | None

    @property
    def distinguishable(self) -> bool:
        """The interval leaves no doubt about which of the two is the better."""
        if self.low is None or self.high is None or abs(self.median) < _LEAST_TOLD:
            return False
        return self.low > 0 or self.high < 0


def gain(trial: TrialRecord, over: TrialRecord, goal: Goal) -> Gain | None:
    """How much better ``trial`` is than ``over``, or None where one of them has no figure."""
    if not trial.objective or not over.objective:
        return None
    ours, theirs = rounds_of(trial, goal), rounds_of(over, goal)
    if not ours or not theirs:  # counted, not timed
        share = better_by(trial.objective, over.objective, goal)
        return Gain(share, share, share)
    count = min(len(ours), len(theirs))
    try:
        found = compare(
            ours[:count],
            theirs[:count],
            paired=True,
            confidence=CONFIDENCE,
            higher_is_better=goal not in LESS_IS_BETTER,
        )
    except ValueError:  # a round without a figure
        return None
    known = math.isfinite(found.high)
    return Gain(found.ratio - 1, found.low - 1 if known else None, found.high - 1 if known else None)


def spread_of(trial: TrialRecord, goal: Goal) -> Spread | None:
    """The objective over the trial's rounds."""
    if trial.objective is None:
        return None
    rounds = rounds_of(trial, goal) or [trial.objective]
    return Spread(trial.objective, min(rounds), max(rounds))


def interval_of(trial: TrialRecord, goal: Goal) -> Interval | None:
    """The objective's 95 % interval over rounds, which ask different questions; None where one tells none."""
    rounds = rounds_of(trial, goal)
    if trial.objective is None or len(rounds) < 2:
        return None
    try:
        found = median_interval(rounds, confidence=CONFIDENCE)
    except ValueError:
        return None
    return Interval(trial.objective, max(found.low, 0.0), found.high)


def rounds_of(trial: TrialRecord, goal: Goal) -> list[float]:
    """The objective in every round; empty for what is read once and not timed."""
    return _by_round(trial.measured.per_round, goal) if trial.measured else []


def better_by(value: float, than: float, goal: Goal) -> float:
    """How much better a figure is than another, as a share."""
    if goal in LESS_IS_BETTER:
        value, than = than, value
    return value / than - 1 if than else 0.0


def _by_round(rounds: Sequence[RoundFigures], goal: Goal) -> list[float]:
    match goal:
        case "total_tokens_per_s":
            return [one.total_tokens_per_s for one in rounds]
        case "user_tokens_per_s":
            return [one.user_tokens_per_s for one in rounds]
        case "latency_s":
            return [one.latency_s for one in rounds]
        case "context_tokens":
            return []
