"""Trials that came to nothing, those of one cause together, with what its log says would help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.diagnosis import diagnose
from dflash_deploy.errors import DeployError
from dflash_deploy.tune.launching import values
from dflash_deploy.tune.records import Outcome, TrialRecord, trial_folder

_MOST_DIAGNOSED = 12
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Failure:
    """One cause.

    Attributes:
        launched: a server was started; else the plan refused it before.
        diagnosis: the root cause that the first trial's log shows, None where none is known.
        fix: what helps.
    """

    outcome: Outcome
    reason: str
    trials: tuple[int, ...]
    launched: bool
    diagnosis: str | None = None
    fix: str | None = None


def failures_of(folder: Path, failed: Sequence[TrialRecord]) -> tuple[Failure, ...]:
    """Put trials of one outcome and reason together, launched ones and frequent causes first.

    Reasons that differ in their figures alone are one; the first is told.
    """
    causes: dict[tuple[bool, Outcome, str], list[TrialRecord]] = {}
    for trial in failed:
        kind = _NUMBER.sub("0", trial.reason or "")
        causes.setdefault((trial.launched, trial.outcome, kind), []).append(trial)
    ordered = sorted(causes.items(), key=lambda cause: (not cause[0][0], -len(cause[1])))
    return tuple(
        Failure(
            outcome,
            trials[0].reason or "no reason told",
            tuple(trial.number for trial in trials),
            launched,
            *(_diagnosis(folder, trials[0]) if place < _MOST_DIAGNOSED else (None, None)),
        )
        for place, ((launched, outcome, _), trials) in enumerate(ordered)
    )


def _diagnosis(folder: Path, trial: TrialRecord) -> tuple[str | None, str | None]:
    if trial.cause is not None:
        return trial.cause.cause, trial.cause.fix
    log = trial_folder(folder, trial.number) / "server.log"
    if trial.outcome not in ("failed", "unstable") or not log.is_file():
        return None, None
    try:
        found = diagnose(log, flags=values(trial.flags))
    except DeployError:  # it cannot be read: its reason stands all the same
        return None, None
    root = found.root
    if root is None or found.unknown is not None:
        return None, None
    return root.cause, root.fix.text if root.fix else None
