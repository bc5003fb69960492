"""The limits of the profile, and how far the best configuration keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.profile.schema import Limited
from dflash_deploy.tune.limits import figures, limits_of
from dflash_deploy.tune.records import StudyRecord, TrialRecord


@dataclass(frozen=True)
class LimitKept:
    """One limit; ``value`` is None where it could not be told here."""

    name: Limited
    value: float | None
    least: float | None
    most: float | None


def limits_kept(study: StudyRecord, best: TrialRecord) -> tuple[LimitKept, ...]:
    """Every limit with the figure that was held against it: the worst round or user."""
    if best.measured is None or best.boot is None:
        return ()
    found = figures(best.measured, best.boot, study.profile.workload.users)
    return tuple(
        LimitKept(name, found.get(name), limit.min, limit.max)
        for name, limit in limits_of(study.profile).items()
    )
