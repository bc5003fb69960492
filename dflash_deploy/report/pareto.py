"""Trials as points: the study's objectives against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_deploy.profile.schema import Goal, Profile
from dflash_deploy.tune.limits import LESS_IS_BETTER, objective_value
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.select import holding

Figure = Goal | Literal["ttft_s"]

_BESIDE: dict[Goal, tuple[Figure, ...]] = {
    "total_tokens_per_s": ("user_tokens_per_s", "ttft_s"),
    "user_tokens_per_s": ("ttft_s",),
    "latency_s": ("user_tokens_per_s", "ttft_s"),
    "context_tokens": ("user_tokens_per_s", "ttft_s"),
}
"""What an objective that stands alone is shown against."""


@dataclass(frozen=True)
class Spot:
    """One measured trial; proofs are not among them, for they are another trial's configuration.

    Attributes:
        feasible: it kept every limit, and held where it was started again.
        front: no other feasible trial is at least as good in all the study's figures and better in one.
    """

    number: int
    total_tokens_per_s: float
    user_tokens_per_s: float
    ttft_s: float
    latency_s: float
    context_tokens: float | None
    feasible: bool
    front: bool = False

    def goodness(self, figure: Figure) -> float:
        """More is better; what is not known is worst."""
        value: float | None = getattr(self, figure)
        if value is None:
            return float("-inf")
        return -value if figure == "ttft_s" or figure in LESS_IS_BETTER else value


def figures_shown(profile: Profile) -> tuple[Figure, ...]:
    """The objectives, the main one first; where it is the only one, what it is shown against."""
    goal = profile.objective.optimize
    also: tuple[Figure, ...] = tuple(other for other in profile.objective.also if other != goal)
    beside = also or _BESIDE[goal]
    if not also and profile.workload.users == 1:
        # With one user, the two speeds are one figure but for the first token.
        beside = tuple(one for one in beside if (goal, one) != ("total_tokens_per_s", "user_tokens_per_s"))
    return (goal, *beside)


def spots(profile: Profile, trials: Sequence[TrialRecord]) -> tuple[Spot, ...]:
    """Every trial that was measured to the end and answered rightly."""
    held = {trial.number for trial in holding(profile, trials)}
    found = [
        Spot(
            trial.number,
            trial.measured.total_tokens_per_s.median,
            trial.measured.user_tokens_per_s.median,
            trial.measured.ttft_s.median,
            trial.measured.latency_s.median,
            objective_value("context_tokens", trial.measured, trial.boot, profile.workload.users)
            if trial.boot
            else None,
            trial.number in held,
        )
        for trial in trials
        if trial.measured is not None and trial.outcome in ("served", "infeasible") and trial.proves is None
    ]
    best = front(found, figures_shown(profile))
    return tuple(replace(one, front=one.number in best) for one in found)


def front(found: Sequence[Spot], figures: Sequence[Figure]) -> frozenset[int]:
    """Numbers of the feasible ones that none beats in one of the figures and equals in the others."""
    points = {one.number: [one.goodness(figure) for figure in figures] for one in found if one.feasible}
    return frozenset(
        number
        for number, ours in points.items()
        if not any(
            theirs != ours and all(a >= b for a, b in zip(theirs, ours, strict=True))
            for theirs in points.values()
        )
    )
