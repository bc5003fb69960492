"""Optuna's storage of a study, beside the trials: for its dashboard, and for workers that share a study.

What to try is decided elsewhere (``search``), and the trials' own records are what counts; Optuna's database
is brought up to date with them whenever a study is opened, so a crash between the two loses nothing, and a
damaged one is made anew.
"""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import FlagSetting, Goal
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.space import Dimension, Settings, Space

_LOCKED_S = 5.0
"""How long another program, such as a viewer of the study, may have the database for itself."""
_RECORD = "record"

_STRANGE = (RuntimeError, LookupError, ValueError, TypeError)
"""What Optuna stumbles over in a database that holds other than it wrote, or that a newer one wrote."""


@dataclass(frozen=True)
class Entry:
    """Optuna's own trial for a configuration that is being tried."""

    trial: optuna.Trial


class Ledger:
    """One study in Optuna's storage."""

    def __init__(self, folder: Path, space: Space, goal: Goal, records: Sequence[TrialRecord] = ()) -> None:
        """Open the storage, or make it, and bring it up to date.

        Args:
            folder: the study's.
            space: what may be varied.
            goal: decides between least and most.
            records: all trials that have ended.

        Raises:
            DeployError: the storage cannot be read or written.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._space = space
        self._path = folder / "optuna.db"
        self._distributions = {dimension.flag: _distribution(dimension) for dimension in space.dimensions}
        with self._storage_errors():
            if _is_damaged(self._path):
                self._put_away()
            try:
                self._study = self._open(folder.name, goal)
                self._catch_up(records)
            except _STRANGE:
                self._put_away()
                self._study = self._open(folder.name, goal)
                self._catch_up(records)

    def _open(self, name: str, goal: Goal) -> optuna.Study:
        return optuna.create_study(
            storage=RDBStorage(f"sqlite:///{self._path}", engine_kwargs={"creator": self._connect}),
            study_name=name,
            # Nothing is left to sample: every value is given. Flags that are not are of no weight.
            sampler=RandomSampler(seed=0),
            direction="minimize" if goal in LESS_IS_BETTER else "maximize",
            load_if_exists=True,
        )

    def _put_away(self) -> None:
        self._path.replace(self._path.with_suffix(".damaged"))

    def _catch_up(self, records: Sequence[TrialRecord]) -> None:
        """Add the records that the storage lacks, and give up trials that were cut short."""
        told = set()
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state is TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state is not TrialState.FAIL:
                # A crash may leave the record's number on a trial that was never told what came of it.
                told.add(trial.user_attrs.get(_RECORD))
        for record in records:
            if record.number not in told and record.outcome != "interrupted":
                self.add(record)

    def begin(self, settings: Settings) -> Entry:
        """Write down that a configuration is being tried."""
        places = self._space.places(settings)
        with self._storage_errors():
            self._study.enqueue_trial(self._params(places))
            trial = self._study.ask({flag: self._distributions[flag] for flag in places})
        return Entry(trial)

    def tell(self, entry: Entry, record: TrialRecord) -> None:
        """What came of a configuration. A failure is infeasible, and has no value at all."""
        with self._storage_errors():
            if record.outcome == "interrupted":
                self._study.tell(entry.trial, state=TrialState.FAIL)
                return
            entry.trial.set_user_attr(_RECORD, record.number)
            entry.trial.set_user_attr("outcome", record.outcome)
            for name, value in _constraints(record).items():
                entry.trial.set_constraint(name, value)
            if record.feasible:
                self._study.tell(entry.trial, record.objective)
            else:
                self._study.tell(entry.trial, state=TrialState.PRUNED)

    def add(self, record: TrialRecord) -> None:
        """A trial that was not proposed from here: a known setting, or one from before a crash."""
        places = self._space.places(record.flags)
        with self._storage_errors():
            self._study.add_trial(
                optuna.trial.create_trial(
                    params=self._params(places),
                    distributions={flag: self._distributions[flag] for flag in places},
                    state=TrialState.COMPLETE if record.feasible else TrialState.PRUNED,
                    value=record.objective if record.feasible else None,
                    user_attrs={_RECORD: record.number, "outcome": record.outcome, "source": record.source},
                    constraints=_constraints(record),
                )
            )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_LOCKED_S, check_same_thread=False)
        # Optuna commits some twenty times a trial. A kill loses nothing by this, and what a power failure
        # could damage is made anew from the records.
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def _params(self, places: dict[str, int]) -> dict[str, float | str]:
        return {
            dimension.flag: _param(dimension, places[dimension.flag])
            for dimension in self._space.dimensions
            if dimension.flag in places
        }

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except (StorageInternalError, SQLAlchemyError, sqlite3.Error, OSError) as error:
            cause = error.__cause__ or error
            words = str(getattr(cause, "orig", None) or cause).splitlines()[0]
            raise DeployError(
                f"the study's storage {self._path} cannot be used: {words}",
                fix="free some space, mend the permissions or end what else has it open, then "
                "dflash-deploy tune --resume",
                exit_code=ExitCode.UNAVAILABLE,
            ) from error


def _is_damaged(path: Path) -> bool:
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as connection:
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
        except sqlite3.OperationalError:
            return False
        except sqlite3.DatabaseError:
            return True


def _constraints(record: TrialRecord) -> dict[str, float]:
    """By constraint, how far it is broken; zero and below is kept."""
    if record.feasible:
        return {"served": 0.0}
    return {"served": 0.0 if record.violations else 1.0, **record.violations}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if not dimension.numeric:
        return CategoricalDistribution([_label(value) for value in dimension.values])
    low, high = _number(dimension.values[0]), _number(dimension.values[-1])
    if len(dimension.values) == 1:
        return FloatDistribution(low, high)
    step = _number(dimension.values[1]) - low
    if all(isinstance(value, int) for value in dimension.values):
        return IntDistribution(int(low), int(high), step=int(step))
    return FloatDistribution(low, high, step=round(step, 10))


def _param(dimension: Dimension, place: int) -> float | str:
    value = dimension.values[place]
    return _number(value) if dimension.numeric else _label(value)


def _number(value: FlagSetting | None) -> float:
    assert isinstance(value, int | float)  # noqa: S101  (a numeric dimension holds nothing else)
    return value


def _label(value: FlagSetting | None) -> str:
    return json.dumps(value)
