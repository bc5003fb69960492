"""Which trial is the best, and by how much it beats another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dflash_deploy.bench.measurement import RoundFigures, Spread
from dflash_deploy.profile.schema import Goal, Profile
from dflash_deploy.tune.limits import LESS_IS_BETTER, objective_value
from dflash_deploy.tune.records import StudyRecord, TrialRecord
from dflash_deploy.tune.space import key_of

KNOWN = "known:"

NOISE = 0.004
"""Two launches of one configuration differ by as much (a share), and nobody feels it."""

_PLAIN = 0.015
"""More than this is better, though single rounds may say otherwise."""

_LOST = 0.05
"""A first round that is behind the best one's by more is not caught up with."""


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
    """``best_of`` a study."""
    return best_of(study.profile, trials)


def best_of(profile: Profile, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The best feasible trial, or None where there is none.

    A configuration that failed when it was started again is out. Of those that nothing is distinguishably
    better than, one that somebody already knows is taken, else the one with the fewest flags to give, and of
    these the one that leaves the most memory.
    """
    goal, searched = profile.objective.optimize, profile.search.keys()
    feasible = _holding(list(trials))
    if not feasible:
        return None
    top = max(feasible, key=lambda trial: (_score(trial, goal), -trial.number))
    level = [trial for trial in feasible if not _beats(top, trial, goal)]
    return max(level, key=lambda trial: _simplicity(trial, searched, goal), default=top)


def front_of(profile: Profile, trials: Iterable[TrialRecord]) -> list[int]:
    """Numbers of the trials that no other is better than in one objective and as good as in the others.

    Empty where the profile has one objective only.
    """
    goals = [profile.objective.optimize, *profile.objective.also]
    if len(goals) < 2:
        return []
    users = profile.workload.users
    points = []
    for trial in _holding(list(trials)):
        if trial.measured is None or trial.boot is None:
            continue
        values = [objective_value(goal, trial.measured, trial.boot, users) for goal in goals]
        if None not in values:
            signs = [-1 if goal in LESS_IS_BETTER else 1 for goal in goals]
            points.append((trial.number, [s * (v or 0.0) for s, v in zip(signs, values, strict=True)]))
    return [
        number
        for number, point in points
        if not any(
            other != point and all(a >= b for a, b in zip(other, point, strict=True)) for _, other in points
        )
    ]


def proof_of(trial: TrialRecord, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The last time that a trial's configuration was started again to see whether it holds."""
    key = key_of(trial.flags)
    proofs = [one for one in trials if one.proof is not None and key_of(one.flags) == key]
    return proofs[-1] if proofs else None


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


def lost_already(rounds: Sequence[RoundFigures], best: TrialRecord | None, goal: Goal) -> bool:
    """A trial's rounds so far are clearly worse than the same rounds of the best: more would tell nothing."""
    if best is None or best.measured is None or not rounds:
        return False
    ours, theirs = _by_round(rounds, goal), _by_round(best.measured.per_round, goal)
    shares = [_better_by(a, b, goal) for a, b in zip(ours, theirs, strict=False)]
    return bool(shares) and max(shares) < -_LOST


def _holding(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    fell = [one for one in trials if one.proves is not None and _fell(one)]
    failed = {key_of(one.flags) for one in fell}
    # What had no more memory free than one that then had too little of it would go the same way.
    tight = min((_used_mib(one) for one in fell if _starved(one)), default=math.inf)
    return [
        trial
        for trial in trials
        if trial.feasible
        and trial.objective is not None
        and trial.proves is None
        and key_of(trial.flags) not in failed
        and _used_mib(trial) < tight
    ]


def _starved(proof: TrialRecord) -> bool:
    """It had enough memory while it was measured, and too little for all that was promised."""
    told = proof.measured is not None and proof.measured.vram_used_mib is not None
    return told and proof.proof is not None and proof.proof.free_mib is not None


def _used_mib(trial: TrialRecord) -> float:
    used = trial.measured.vram_used_mib if trial.measured else None
    return -math.inf if used is None else used


def _fell(proof: TrialRecord) -> bool:
    return not proof.feasible and proof.outcome != "interrupted"


def _beats(trial: TrialRecord, over: TrialRecord, goal: Goal) -> bool:
    found = gain(trial, over, goal)
    if found is None:
        return True
    whole = _better_by(trial.objective or 0.0, over.objective or 0.0, goal)
    return max(found.median, whole) > _PLAIN or (found.low > 0 and found.median > NOISE)


def _simplicity(
    trial: TrialRecord, searched: Collection[str], goal: Goal
) -> tuple[bool, int, int, float, int]:
    given = sum(flag in searched for flag in trial.flags)
    measured = trial.measured
    used = measured.vram_used_mib if measured else None
    room = -used if used is not None else 0
    return trial.source.startswith(KNOWN), -given, room, _score(trial, goal), -trial.number


def _score(trial: TrialRecord, goal: Goal) -> float:
    value = trial.objective
    assert value is not None  # noqa: S101  (only trials with a figure are compared)
    return -value if goal in LESS_IS_BETTER else value


def _rounds(trial: TrialRecord, goal: Goal) -> list[float]:
    value = trial.objective
    assert value is not None  # noqa: S101
    return (_by_round(trial.measured.per_round, goal) if trial.measured else None) or [value]


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


def _better_by(value: float, than: float, goal: Goal) -> float:
    if goal in LESS_IS_BETTER:
        value, than = than, value
    return value / than - 1 if than else 0.0
