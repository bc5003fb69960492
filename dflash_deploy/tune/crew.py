"""Several workers, one study: they meet in one Optuna storage, each with a card of its own.

A trial of the storage is a claim first: it is made with its configuration's key in one step, and of two
claims to one configuration the one with the lower number stands. Its result is the whole record, which every
other worker takes over into its own folder; so each has all of them, and any can report and emit. While a
worker tries something it counts up a figure on its claim. The others watch that figure by their own clocks;
where it stands still for too long the worker is lost, and its configuration is free again.

Nothing but Optuna's own interface to storages is used, so a database serves as well as a proxy before it.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from pydantic import ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.meeting import Meeting
from dflash_deploy.tune.records import Candidate, StudyRecord, TrialRecord
from dflash_deploy.tune.space import Dimension, Settings, Space, key_of
from dflash_deploy.tune.trial import not_launched

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

_T = TypeVar("_T")

_BEATS_UNTIL_LOST = 6
_RETRY_S = 2.0
_PATIENCE_S = 60.0
"""How long a storage that cannot be reached is asked again: a measured trial is worth that."""
_TERMS_S = 30.0


class Peers(Protocol):
    """The other workers of a study, if there are any."""

    def claim(self, candidate: Candidate) -> Candidate | None:
        """The candidate with its number, once nobody else may try it; None where another one does or did."""

    def publish(self, record: TrialRecord) -> None:
        """A claimed candidate has ended."""

    def news(self) -> Sequence[TrialRecord]:
        """What others have ended since this was last asked."""

    def pending(self) -> Sequence[Candidate]:
        """What others are trying now."""

    def wait(self) -> None:
        """Until there may be news."""


class Nobody:
    """No other worker: a study of one card on one machine."""

    def claim(self, candidate: Candidate) -> Candidate | None:
        """Always granted, under the number that it has."""
        return candidate

    def publish(self, record: TrialRecord) -> None:
        """To nobody."""

    def news(self) -> Sequence[TrialRecord]:
        """Never any."""
        return ()

    def pending(self) -> Sequence[Candidate]:
        """Never any."""
        return ()

    def wait(self) -> None:
        """For nothing."""


class Crew:
    """The workers of one study."""

    def __init__(
        self,
        meeting: Meeting,
        study: StudyRecord,
        space: Space,
        shared: Settings,
        records: Sequence[TrialRecord],
    ) -> None:
        """Join, or be the first.

        Args:
            meeting: where, and as who.
            study: this worker's own record of it.
            space: what may be varied.
            shared: flags of the model, which do not tell two candidates apart.
            records: trials that this worker knows already.

        Raises:
            DeployError: the storage cannot be used, or the study there is another one.
        """
        import optuna  # noqa: PLC0415  (takes most of a second)

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._meeting = meeting
        self._space = space
        self._shared = shared
        self._beat_s = meeting.beat_s
        self._known = {record.number for record in records}
        self._claimed: int | None = None
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._storage: BaseStorage = meeting.open()
        self._study_id = self._join(study)
        self._tidy(records)

    def __enter__(self) -> Self:
        """Show signs of life from now on."""
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave; a claim that was not published is given up."""
        self._over.set()
        self._beats.join()
        if self._claimed is not None:
            with suppress(Exception):
                self._give_up(self._claimed)

    def claim(self, candidate: Candidate) -> Candidate | None:
        """As ``Peers`` has it."""
        import optuna  # noqa: PLC0415

        places = self._space.places(candidate.flags)
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params={one.flag: _label(one.values[places[one.flag]]) for one in self._varied(places)},
            distributions={
                one.flag: optuna.distributions.CategoricalDistribution(
                    [_label(value) for value in one.values]
                )
                for one in self._varied(places)
            },
            user_attrs={
                "key": self._key(candidate),
                "worker": self._meeting.worker,
                "candidate": candidate.model_dump_json(),
                "beat": 0,
            },
        )
        trial_id = self._ask(lambda: self._storage.create_new_trial(self._study_id, template))
        number = self._ask(lambda: self._storage.get_trial_number_from_id(trial_id))
        key = self._key(candidate)
        for other in self._trials():
            if other.number < number and other.user_attrs.get("key") == key and _stands(other):
                self._ask(lambda: self._give_up(trial_id))
                return None
        self._claimed = trial_id
        self._known.add(number + 1)
        return candidate.model_copy(update={"number": number + 1})

    def publish(self, record: TrialRecord) -> None:
        """As ``Peers`` has it. A claim that was taken back meanwhile is made anew, unless another has it."""
        import optuna  # noqa: PLC0415

        trial_id = self._claimed or self._ask(
            lambda: self._storage.get_trial_id_from_study_id_trial_number(self._study_id, record.number - 1)
        )
        try:
            self._ask(lambda: self._end(trial_id, record))
        except optuna.exceptions.UpdateFinishedTrialError:
            self._claimed = None
            if record.outcome != "interrupted":
                self._publish_late(record)
        self._claimed = None

    def news(self) -> Sequence[TrialRecord]:
        """As ``Peers`` has it; a worker that was lost has interrupted its trial."""
        found = []
        for trial in self._trials():
            number = trial.number + 1
            if number in self._known or not trial.state.is_finished():
                continue
            record = _record_of(trial)
            if record is None and "lost" in trial.user_attrs and (candidate := _candidate_of(trial)):
                reason = f"worker {trial.user_attrs.get('worker')} was lost"
                record = not_launched(candidate, "interrupted", reason)
            self._known.add(number)
            if record is not None:
                found.append(record)
        return found

    def pending(self) -> Sequence[Candidate]:
        """As ``Peers`` has it."""
        running = (trial for trial in self._trials() if self._is_others(trial))
        return [candidate for trial in running if (candidate := _candidate_of(trial)) is not None]

    def wait(self) -> None:
        """As ``Peers`` has it."""
        time.sleep(min(1.0, self._beat_s))

    def _join(self, study: StudyRecord) -> int:
        import optuna  # noqa: PLC0415

        storage, name = self._storage, self._meeting.study
        ours = _terms(study)
        less = study.profile.objective.optimize in LESS_IS_BETTER
        direction = optuna.study.StudyDirection.MINIMIZE if less else optuna.study.StudyDirection.MAXIMIZE
        try:
            study_id = self._ask(lambda: storage.create_new_study([direction], name))
        except optuna.exceptions.DuplicatedStudyError:
            study_id = self._ask(lambda: storage.get_study_id_from_name(name))
        else:
            self._ask(lambda: storage.set_study_user_attr(study_id, "terms", json.dumps(ours)))
        theirs = self._terms_of(study_id)
        differing = sorted(name for name in ours if ours[name] != theirs.get(name))
        if differing:
            raise DeployError(
                f"study {name} in that storage is of another {' and '.join(differing)}: "
                "results would not compare",
                fix="give the same profile, settings and seed on every worker, or another --name",
                exit_code=ExitCode.INVALID_INPUT,
            )
        return study_id

    def _terms_of(self, study_id: int) -> Mapping[str, object]:
        """What the first worker wrote, who may be writing it at this moment."""
        deadline = time.monotonic() + _TERMS_S
        while True:
            written = self._ask(lambda: self._storage.get_study_user_attrs(study_id)).get("terms")
            if isinstance(written, str):
                with suppress(ValueError):
                    found = json.loads(written)
                    if isinstance(found, dict):
                        return found
            if time.monotonic() > deadline:
                raise DeployError(
                    f"study {self._meeting.study} in that storage was not made by this tool",
                    fix="take another --name",
                    exit_code=ExitCode.INVALID_INPUT,
                )
            time.sleep(0.2)

    def _tidy(self, records: Sequence[TrialRecord]) -> None:
        """Bring to an end what a former run of this worker has left: published late, or given up."""
        by_number = {record.number: record for record in records}
        for trial in self._trials():
            attributes = trial.user_attrs
            taken_back = "lost" in attributes and "record" not in attributes
            if attributes.get("worker") != self._meeting.worker:
                continue
            if trial.state.is_finished() and not taken_back:
                continue
            record = by_number.get(trial.number + 1)
            if record is not None:
                self.publish(record)
            elif not taken_back:
                self._ask(lambda trial_id=trial._trial_id: self._give_up(trial_id))  # type: ignore[misc]

    def _publish_late(self, record: TrialRecord) -> None:
        claimed = self.claim(
            Candidate(number=0, source=record.source, flags=record.flags, started=record.started)
        )
        if claimed is not None and self._claimed is not None:
            trial_id = self._claimed
            late = record.model_copy(update={"number": claimed.number})
            self._ask(lambda: self._end(trial_id, late))

    def _end(self, trial_id: int, record: TrialRecord) -> None:
        from optuna.trial import TrialState  # noqa: PLC0415

        # Variables may hold what is no other machine's business.
        text = record.model_copy(update={"env": {}}).model_dump_json()
        self._storage.set_trial_user_attr(trial_id, "record", text)
        self._storage.set_trial_user_attr(trial_id, "outcome", record.outcome)
        if record.feasible and record.objective is not None:
            self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [record.objective])
        elif record.outcome == "interrupted":
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        else:
            self._storage.set_trial_state_values(trial_id, TrialState.PRUNED)

    def _give_up(self, trial_id: int) -> None:
        from optuna.trial import TrialState  # noqa: PLC0415

        self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _beat(self) -> None:
        """In a thread of its own: show signs of life, and watch those of the others."""
        beat = 0
        seen: dict[int, tuple[object, float]] = {}
        while not self._over.wait(self._beat_s):
            # A storage that is out of reach for a while is no reason to end anything here.
            with suppress(Exception):
                beat += 1
                if self._claimed is not None:
                    self._storage.set_trial_user_attr(self._claimed, "beat", beat)
                self._take_back(seen)

    def _take_back(self, seen: dict[int, tuple[object, float]]) -> None:
        now = time.monotonic()
        for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
            if not self._is_others(trial):
                continue
            beat = trial.user_attrs.get("beat")
            last, since = seen.get(trial.number, (None, now))
            if last != beat or trial.number not in seen:
                seen[trial.number] = (beat, now)
            elif now - since > _BEATS_UNTIL_LOST * self._beat_s:
                trial_id = trial._trial_id
                self._storage.set_trial_user_attr(trial_id, "lost", self._meeting.worker)
                self._give_up(trial_id)

    def _is_others(self, trial: FrozenTrial) -> bool:
        return not trial.state.is_finished() and trial.user_attrs.get("worker") != self._meeting.worker

    def _trials(self) -> list[FrozenTrial]:
        return self._ask(lambda: self._storage.get_all_trials(self._study_id, deepcopy=False))

    def _varied(self, places: Mapping[str, int]) -> list[Dimension]:
        return [one for one in self._space.dimensions if one.flag in places]

    def _key(self, candidate: Candidate) -> str:
        key = key_of({name: value for name, value in candidate.flags.items() if name not in self._shared})
        # A configuration is proven once more than it is tried.
        return key if candidate.proves is None else f"proof of {key}"

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Put a question to the storage, again while it cannot be reached."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return question()
            except self._meeting.troubles() as error:
                if time.monotonic() + _RETRY_S > deadline:
                    raise self._meeting.unreachable(error) from error
            time.sleep(_RETRY_S)


def _stands(trial: FrozenTrial) -> bool:
    """It is being tried, or has been; one that was interrupted leaves its configuration to others."""
    from optuna.trial import TrialState  # noqa: PLC0415

    return trial.state is not TrialState.FAIL


def _record_of(trial: FrozenTrial) -> TrialRecord | None:
    try:
        record = TrialRecord.model_validate_json(str(trial.user_attrs.get("record")))
    except ValidationError:  # of another version of the tool, or none
        return None
    return record.model_copy(update={"number": trial.number + 1})


def _candidate_of(trial: FrozenTrial) -> Candidate | None:
    try:
        candidate = Candidate.model_validate_json(str(trial.user_attrs.get("candidate")))
    except ValidationError:
        return None
    return candidate.model_copy(update={"number": trial.number + 1})


def _terms(study: StudyRecord) -> dict[str, object]:
    """What must be the same for results to compare, and nothing that is one machine's own."""
    profile = study.profile.model_dump(mode="json", exclude={"env", "service", "summary"})
    profile["engine"].pop("python", None)
    return {
        "profile": profile,
        "card": study.card,
        "engine version": study.engine_version,
        "simulation": study.simulated,
        "seed": study.seed,
    }


def _label(value: object) -> str:
    return json.dumps(value)
