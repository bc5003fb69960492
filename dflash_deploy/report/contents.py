"""Everything that a report says of a study, put together once for all its forms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from dflash_deploy import __version__
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.cards import Card, load_card
from dflash_deploy.report.failures import Failure, failures_of
from dflash_deploy.report.importance import Importance, importance_of
from dflash_deploy.report.limits import LimitKept, limits_kept
from dflash_deploy.report.memory import Comparison, compare
from dflash_deploy.report.pareto import Spot, spots
from dflash_deploy.report.schedule import Schedule, schedule_of
from dflash_deploy.tune.gain import Gain
from dflash_deploy.tune.journal import tuner_of
from dflash_deploy.tune.reasons import reasons_of
from dflash_deploy.tune.records import (
    Candidate,
    Proof,
    StudyRecord,
    TrialRecord,
    cut_short,
    read_study,
    read_trials,
)
from dflash_deploy.tune.select import best_trial, proof_of
from dflash_deploy.tune.summary import Baseline, Best, baselines_of, best_of, repeated

State = Literal["running", "cut short", "at rest"]
"""running: a tuner works on it now. cut short: a trial was begun and never ended. at rest: neither."""

Kind = Literal["measured", "simulated"]

_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """One study, as far as it has come.

    Attributes:
        made: when this was put together.
        running: the trial that is being tried, or that was cut short.
        kind: of every figure that came from a server.
        best: the configuration to take, None where none served within the limits.
        best_record: its whole record.
        baselines: settings that somebody knew, held against the best.
        reasons: why each searched flag of the best is there.
        proof: what the best went through when it was started again; None where it was not.
        repeated: how it did then, against the first time.
        card: None where it is not a known one.
    """

    folder: Path
    study: StudyRecord
    trials: tuple[TrialRecord, ...]
    running: tuple[Candidate, ...]
    state: State
    made: datetime
    kind: Kind
    best: Best | None
    best_record: TrialRecord | None
    baselines: tuple[Baseline, ...]
    reasons: Mapping[str, str]
    proof: Proof | None
    repeated: Gain | None
    limits: tuple[LimitKept, ...]
    spots: tuple[Spot, ...]
    schedule: Schedule
    memory: Comparison
    importance: Importance
    failures: tuple[Failure, ...]
    card: Card | None
    made_by: str = __version__

    @property
    def launched(self) -> tuple[TrialRecord, ...]:
        """Trials that a server was started for."""
        return tuple(trial for trial in self.trials if trial.launched)


def read_report(folder: Path) -> Report:
    """Read a study and work out what there is to say.

    Raises:
        DeployError: there is no study, or one of its records cannot be read.
    """
    study = _shareable(read_study(folder))
    running = cut_short(folder)
    trials = read_trials(folder)
    ended = {trial.number for trial in trials}
    running = [candidate for candidate in running if candidate.number not in ended]
    alive = tuner_of(folder) is not None
    best = best_trial(study, trials)
    card = _card(study)
    return Report(
        folder=folder,
        study=study,
        trials=tuple(trials),
        running=tuple(running),
        state="running" if alive else "cut short" if running else "at rest",
        made=datetime.now(UTC),
        kind="simulated" if study.simulated else "measured",
        best=best_of(study, best) if best else None,
        best_record=best,
        baselines=tuple(baselines_of(study, trials, best)),
        reasons=reasons_of(study, best, trials) if best else {},
        proof=proven.proof if best and (proven := proof_of(best, trials)) else None,
        repeated=repeated(study, trials, best) if best else None,
        limits=limits_kept(study, best) if best else (),
        spots=spots(study.profile, trials),
        schedule=schedule_of(trials, study.time_scale),
        memory=compare(study, card, trials, best),
        importance=importance_of(study.profile, trials),
        failures=failures_of(folder, _failed(trials)),
        card=card,
    )


def _shareable(study: StudyRecord) -> StudyRecord:
    """The study without values that are nobody else's business: a report is made to be passed on."""
    env = {name: "***" if _SECRET.search(name) else value for name, value in study.profile.env.items()}
    return study.model_copy(update={"profile": study.profile.model_copy(update={"env": env})})


def _failed(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if not trial.feasible and trial.outcome != "interrupted"]


def _card(study: StudyRecord) -> Card | None:
    if study.card is None:
        return None
    try:
        return load_card(study.card)
    except DeployError:  # of another version, which knew other cards
        return None
