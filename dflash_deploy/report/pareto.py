"""Trials as points: what all users get together against what each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_deploy.tune.records import TrialRecord


@dataclass(frozen=True)
class Spot:
    """One measured trial.

    Attributes:
        feasible: it kept every limit.
        front: no other feasible trial is at least as good in all three and better in one.
    """

    number: int
    total_tokens_per_s: float
    user_tokens_per_s: float
    ttft_s: float
    feasible: bool
    front: bool


def spots(trials: Sequence[TrialRecord]) -> tuple[Spot, ...]:
    """Every trial that was measured to the end and answered rightly."""
    measured = [
        Spot(
            trial.number,
            trial.measured.total_tokens_per_s.median,
            trial.measured.user_tokens_per_s.median,
            trial.measured.ttft_s.median,
            trial.feasible,
            front=False,
        )
        for trial in trials
        if trial.measured is not None and trial.outcome in ("served", "infeasible")
    ]
    return tuple(
        Spot(
            one.number,
            one.total_tokens_per_s,
            one.user_tokens_per_s,
            one.ttft_s,
            one.feasible,
            front=one.feasible and not any(other.feasible and _dominates(other, one) for other in measured),
        )
        for one in measured
    )


def _dominates(other: Spot, one: Spot) -> bool:
    theirs, ours = _goodness(other), _goodness(one)
    return theirs != ours and all(a >= b for a, b in zip(theirs, ours, strict=True))


def _goodness(spot: Spot) -> tuple[float, float, float]:
    return spot.total_tokens_per_s, spot.user_tokens_per_s, -spot.ttft_s
