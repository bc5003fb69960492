"""Whether the machine stayed the same: a study takes an hour, and heat, clocks and other programs change.

Two things tell without a launch of their own. The best configuration is started again at the end, to be
proven, and asked the very same questions: what differs then is the machine. And the card's clocks are read
while every trial is measured.
"""

from __future__ import annotations

import math

from dflash_deploy.profile.schema import Goal
from dflash_deploy.tune.gain import Gain, gain
from dflash_deploy.tune.records import TrialRecord

STEADY = 0.01
"""What changes by less (a share) is the same."""


def moved(first: TrialRecord, again: TrialRecord, goal: Goal) -> float:
    """How much better a configuration was when it was started again, as a logarithm; 0 where it was alike."""
    found = gain(again, first, goal)
    return math.log1p(found.median) if found is not None and changed(found) else 0.0


def changed(found: Gain) -> bool:
    """The machine was not the same for two launches of one configuration that differ by so much."""
    return found.distinguishable and abs(found.median) > STEADY


def excuse(trial: TrialRecord, best: TrialRecord, again: TrialRecord, goal: Goal) -> float:
    """How far behind the best the machine may have put a trial, as a logarithm; 0 where nothing says so.

    Args:
        trial: another one.
        best: as it was measured first.
        again: the same, started again.
        goal: what is compared.
    """
    by_time = 0.0
    change = moved(best, again, goal)
    if change and (change < 0) == (trial.number > best.number):
        # Worse since the best was measured, and so were all that came after; or better ever since.
        by_time = abs(change)
    return max(by_time, -_clocks(trial, best))


def unlike(trial: TrialRecord, best: TrialRecord, again: TrialRecord, goal: Goal) -> bool:
    """The machine was not the same for a trial as for the best."""
    return moved(best, again, goal) != 0 or _clocks(trial, best) != 0


def _clocks(trial: TrialRecord, than: TrialRecord) -> float:
    """How much faster the card ran, as a logarithm, by the clock that differs most; 0 where it did not."""
    ours, theirs = trial.telemetry, than.telemetry
    if ours is None or theirs is None:
        return 0.0
    pairs = ((ours.clock_sm_mhz, theirs.clock_sm_mhz), (ours.clock_memory_mhz, theirs.clock_memory_mhz))
    told = [(one.median, other.median) for one, other in pairs if one is not None and other is not None]
    ratios = [math.log(one / other) for one, other in told if one > 0 and other > 0]
    most = max(ratios, key=abs, default=0.0)
    return most if abs(most) > STEADY else 0.0
