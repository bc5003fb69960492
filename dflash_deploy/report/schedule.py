"""Where the time went: launching, measuring, and what lay between the trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash_deploy.tune.records import TrialRecord

_PAUSE_S = 60.0
"""What is longer lay between two runs of the tuner, and is nobody's work."""


@dataclass(frozen=True)
class Stretch:
    """One launched trial on the clock, in seconds since the first began; pauses between runs are left out.

    ``launch_s`` lasts until the server was ready (all of it where it never was), ``measure_s`` from there,
    the stop included.
    """

    number: int
    outcome: str
    feasible: bool
    start_s: float
    launch_s: float
    measure_s: float


@dataclass(frozen=True)
class Schedule:
    """All of them, and how long the tuner was at work between them."""

    stretches: tuple[Stretch, ...]
    between_s: float

    @property
    def launch_s(self) -> float:
        """All launches together."""
        return sum(stretch.launch_s for stretch in self.stretches)

    @property
    def measure_s(self) -> float:
        """All measuring together."""
        return sum(stretch.measure_s for stretch in self.stretches)

    @property
    def total_s(self) -> float:
        """All three."""
        return self.launch_s + self.measure_s + self.between_s


def schedule_of(trials: Sequence[TrialRecord], time_scale: float) -> Schedule:
    """Lay the trials on one clock.

    Args:
        trials: by number.
        time_scale: of the study; ``boot_s`` is in the server's own time.
    """
    launched = sorted((trial for trial in trials if trial.launched), key=lambda trial: trial.started)
    gaps = [0.0]
    for former, trial in pairwise(launched):
        gap_s = (trial.started - former.started).total_seconds() - former.wall_s
        gaps.append(gap_s if 0 < gap_s <= _PAUSE_S else 0.0)
    clock_s = 0.0
    stretches = []
    for trial, gap_s in zip(launched, gaps, strict=bool(launched)):
        clock_s += gap_s
        served = trial.outcome not in ("failed", "degraded") and trial.boot_s is not None
        launch_s = min(trial.wall_s, (trial.boot_s or 0.0) / time_scale) if served else trial.wall_s
        stretches.append(
            Stretch(trial.number, trial.outcome, trial.feasible, clock_s, launch_s, trial.wall_s - launch_s)
        )
        clock_s += trial.wall_s
    return Schedule(tuple(stretches), sum(gaps) if launched else 0.0)
