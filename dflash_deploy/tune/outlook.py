"""What lies ahead of a running study: for a person who waits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_deploy.tune.records import TrialRecord

Ending = Literal["gain", "target", "trials", "minutes", "exhausted", "interrupted"]
"""Why a study went no further: nothing left would gain more than the noise, what was wanted was reached, as
many launches as were wanted, the time was up, every configuration that could serve has been tried, or it was
stopped."""


@dataclass(frozen=True)
class Outlook:
    """Told as each trial begins.

    Attributes:
        why: the reason for trying this one, in words.
        after: what comes next, and why, as far as it is known before this one has ended.
        launched: servers launched in the study before this one.
        trials: how many it launches at most.
        left_s: until no further trial is begun, None where only their number counts.
    """

    why: str
    after: str
    launched: int
    trials: int
    left_s: float | None = None


def time_left_s(outlook: Outlook, trials: Sequence[TrialRecord]) -> float | None:
    """How long the study still takes from the beginning of its present trial (predicted).

    By the median of the trials so far; None before the first has ended.
    """
    lasted = [trial.wall_s for trial in trials if trial.launched and trial.wall_s > 0]
    if not lasted:
        return None
    one_s = statistics.median(lasted)
    by_number_s = one_s * max(1, outlook.trials - outlook.launched)
    # The trial that has begun when the time is up is brought to its end.
    return by_number_s if outlook.left_s is None else min(by_number_s, outlook.left_s + one_s)


def duration(seconds: float) -> str:
    """``40 s``, ``7 min``, ``1 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
