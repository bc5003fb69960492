"""What to try next: Optuna's sampler over a profile's space, with its storage beside the trials.

The trials' own records are what counts; Optuna's database is brought up to date with them whenever a study
is opened, so a crash between the two loses nothing, and a damaged one is made anew.
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
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import FlagSetting, Goal
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.space import Dimension, Space, key_of

STARTUP_TRIALS = 6
"""Trials, known settings among them, before the sampler trusts what it has seen."""

_MODELLED_ASKS = 12
_RANDOM_ASKS = 36
_LARGEST_GRID = 200_000
_LOCKED_S = 5.0
"""How long another program, such as a viewer of the study, may have the database for itself."""
_RECORD = "record"

_STRANGE = (RuntimeError, LookupError, ValueError, TypeError)
"""What Optuna stumbles over in a database that holds other than it wrote, or that a newer one wrote."""


@dataclass(frozen=True)
class Proposal:
    """One configuration that has not been tried, and Optuna's own trial for it."""

    settings: dict[str, FlagSetting]
    trial: optuna.Trial


class Search:
    """The sampler's view of one study."""

    def __init__(
        self, folder: Path, space: Space, goal: Goal, seed: int, records: Sequence[TrialRecord] = ()
    ) -> None:
        """Open the storage, or make it, and bring it up to date.

        Args:
            folder: the study's.
            space: what may be varied.
            goal: decides between least and most.
            seed: the same seed and the same results give the same proposals.
            records: all trials that have ended.

        Raises:
            DeployError: the storage cannot be read or written.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._space = space
        self._seed = seed
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

    def propose(self, tried: set[str]) -> Proposal | None:
        """A configuration that is not among ``tried`` (by ``key_of``), or None where all have been."""
        with self._storage_errors():
            for attempt in range(_MODELLED_ASKS + _RANDOM_ASKS):
                self._study.sampler = self._sampler(len(tried), attempt)
                trial = self._study.ask(self._distributions)
                settings = self._space.settings(self._places(trial))
                if key_of(settings) not in tried:
                    return Proposal(settings, trial)
                self._study.tell(trial, state=TrialState.FAIL)
            if self._space.size > _LARGEST_GRID:
                return None
            for places in self._space.grid():
                if key_of(self._space.settings(places)) not in tried:
                    self._study.enqueue_trial(self._params(places))
                    trial = self._study.ask(self._distributions)
                    return Proposal(self._space.settings(places), trial)
        return None

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """What came of a proposal. A failure is infeasible, and has no value at all."""
        with self._storage_errors():
            if record.outcome == "interrupted":
                self._study.tell(proposal.trial, state=TrialState.FAIL)
                return
            proposal.trial.set_user_attr(_RECORD, record.number)
            proposal.trial.set_user_attr("outcome", record.outcome)
            for name, value in _constraints(record).items():
                proposal.trial.set_constraint(name, value)
            if record.feasible:
                self._study.tell(proposal.trial, record.objective)
            else:
                self._study.tell(proposal.trial, state=TrialState.PRUNED)

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

    def _sampler(self, seen: int, attempt: int) -> BaseSampler:
        # A sampler for each question, so that what it proposes hangs on the seed and on what is known, and
        # not on how often the study was interrupted.
        seed = (self._seed * 1_000_003 + seen * 1_009 + attempt) % (1 << 32)
        if attempt >= _MODELLED_ASKS:
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False)

    def _places(self, trial: optuna.Trial) -> dict[str, int]:
        return {
            dimension.flag: _place(dimension, trial.params[dimension.flag])
            for dimension in self._space.dimensions
        }

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


def _place(dimension: Dimension, param: object) -> int:
    places = range(len(dimension.values))
    if isinstance(param, int | float):
        return min(places, key=lambda place: abs(_number(dimension.values[place]) - param))
    return next(place for place in places if _label(dimension.values[place]) == param)


def _number(value: FlagSetting | None) -> float:
    assert isinstance(value, int | float)  # noqa: S101  (a numeric dimension holds nothing else)
    return value


def _label(value: FlagSetting | None) -> str:
    return json.dumps(value)
