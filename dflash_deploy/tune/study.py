"""A study from its first trial to its last: what is tried next, until when, what a crash leaves behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_deploy import __version__, calibration, paths
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import hold_room
from dflash_deploy.lock import exclusive_file
from dflash_deploy.machine.cards import Card, load_card
from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.crew import Crew, Nobody, Peers
from dflash_deploy.tune.feasible import Forecast, Forecaster
from dflash_deploy.tune.journal import Journal
from dflash_deploy.tune.launching import Launcher, method_of, searched_methods, shared_flags
from dflash_deploy.tune.limits import LESS_IS_BETTER
from dflash_deploy.tune.meeting import Meeting
from dflash_deploy.tune.outlook import Ending, Outlook
from dflash_deploy.tune.proof import Promise
from dflash_deploy.tune.records import (
    Candidate,
    StudyRecord,
    TrialRecord,
    cut_short,
    read_study,
    read_trials,
    trial_folder,
    write_record,
)
from dflash_deploy.tune.screen import Screen
from dflash_deploy.tune.search import WORTH, Proposal, Search, Stop
from dflash_deploy.tune.select import KNOWN, best_trial
from dflash_deploy.tune.signals import Asked
from dflash_deploy.tune.space import Settings, Space, key_of, space_of
from dflash_deploy.tune.studies import studies_dir
from dflash_deploy.tune.trial import Gauge, not_launched, run_trial

if TYPE_CHECKING:
    from dflash_deploy.tune.ledger import Entry

EARLIER = "earlier:"
"""How the source of a setting begins that won another study of this machine."""
_MOST_EARLIER = 2

_LEAST_FOR_PROOF = 5
"""Launches that a study must have for its last one to be the proof of the best."""


@dataclass(frozen=True)
class Effort:
    """When to stop.

    Attributes:
        trials: servers launched in the whole study, at most.
        minutes: of this run.
        worth: expected gain, as a share, below which nothing more is launched.
        target: value of the objective that is enough.
    """

    trials: int
    minutes: float | None = None
    worth: float = WORTH
    target: float | None = None


@dataclass(frozen=True)
class Rig:
    """What trials run on.

    Attributes:
        launcher: how a server is launched.
        memory_mib: the card's memory, None where there is no card or it does not tell.
        gauge: how its use is read meanwhile; None for a simulated card, which tells by itself.
        card: what tells the card from all others of the machine, None for a simulated one or none.
        index: of the card, as its driver counts.
    """

    launcher: Launcher
    memory_mib: int | None
    gauge: Gauge | None
    card: str | None = None
    index: int | None = None


def create_study(
    name: str | None,
    profile: Profile,
    *,
    profile_name: str,
    simulated: bool,
    card: str | None,
    engine_version: str,
    time_scale: float,
    seed: int,
    driver: str | None = None,
) -> tuple[Path, StudyRecord]:
    """Make a study's folder and record.

    Args:
        name: the study's; None for ``<profile_name>-<date>-<n>``, with the first free number.
        profile: what is tuned.
        profile_name: what a study without a name is called after.
        simulated: on the simulator.
        card: id of the card.
        engine_version: of SGLang.
        time_scale: of the simulator.
        seed: of the search.
        driver: version of the card's driver, None where there is none or it does not tell.

    Raises:
        DeployError: there is one of this name, or the folder cannot be written.
    """
    folder = _claim(name) if name is not None else _claim_fresh(profile_name)
    study = StudyRecord(
        name=folder.name,
        created=datetime.now(UTC),
        tool_version=__version__,
        simulated=simulated,
        time_scale=time_scale,
        seed=seed,
        card=card,
        engine_version=engine_version,
        driver=driver,
        profile=profile,
    )
    with writing(folder):
        write_record(folder / "study.json", study)
    return folder, study


def _claim(name: str) -> Path:
    folder = studies_dir() / name
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if all(one.name.startswith(".study.json.") for one in folder.iterdir()):
                return folder  # whoever claimed it was killed before it was a study
            raise DeployError(
                f"there is a study named {name} already",
                fix=f"dflash-deploy tune --resume --name {name}, or choose another name",
                exit_code=ExitCode.UNAVAILABLE,
            ) from None
    return folder


def _claim_fresh(profile_name: str) -> Path:
    stem = f"{profile_name}-{datetime.now().astimezone():%Y%m%d}"
    number = 1
    while True:
        folder = studies_dir() / f"{stem}-{number}"
        # Made, not looked for: another tuner may be choosing its name at this very moment.
        with writing(folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1


def earlier_bests(study: StudyRecord) -> list[tuple[StudyRecord, TrialRecord]]:
    """Studies of the same service on the same card that were begun before, with their best; newest first.

    What a simulated card came to is no news for another one, nor is a best that drafts as none is to here.
    """
    found = []
    drafting = searched_methods(study.profile) or (study.profile.speculation.method,)
    if study.simulated:
        return []
    for path in studies_dir().glob("*/study.json"):
        with suppress(DeployError):
            other = read_study(path.parent)
            if other.created < study.created and _same_service(other, study):
                best = best_trial(other, read_trials(path.parent))
                if best is not None and method_of(other.profile, best.flags) in drafting:
                    found.append((other, best))
    return sorted(found, key=lambda one: one[0].created, reverse=True)


def _same_service(other: StudyRecord, study: StudyRecord) -> bool:
    """The same models for the same people on the same card; what else differs is measured anew."""
    return (
        not other.simulated
        and other.card == study.card
        and other.profile.model.target == study.profile.model.target
        and other.profile.speculation == study.profile.speculation
        and other.profile.workload == study.profile.workload
        and other.profile.objective.optimize == study.profile.objective.optimize
    )


def discard_untried(folder: Path) -> None:
    """Take back a study that came to no trial, unless a tuner works on it."""
    with suppress(DeployError, OSError), locked(folder):
        if not any((folder / "trials").glob("*")):
            shutil.rmtree(folder)


def run_study(
    folder: Path,
    study: StudyRecord,
    rig: Rig,
    effort: Effort,
    screen: Screen,
    *,
    meeting: Meeting | None = None,
    asked: Asked | None = None,
) -> tuple[list[TrialRecord], Ending]:
    """Try configurations until the effort is spent; what a former run left unfinished comes first.

    Every trial is on disk before the next begins. The first Ctrl-C lets the running one end (``asked``), the
    second stops it: its record then says "interrupted", and it is tried again when the study is resumed.
    Where there is a ``meeting``, other workers try configurations of the same study, and the effort is that
    of all of them.

    Raises:
        DeployError: the study or the card is locked, its folder cannot be written, no server can be started
            at all, or the other workers cannot be reached.
    """
    with locked(folder), alone_on(rig.card), writing(folder), Journal(folder, screen) as journal:
        for candidate in cut_short(folder):
            record = not_launched(candidate, "interrupted", "the tuner was ended while it ran")
            write_record(trial_folder(folder, candidate.number) / "trial.json", record)
        with _peers(folder, study, meeting) as peers:
            run = _Run(folder, study, rig, effort, screen=journal, peers=peers, asked=asked or Asked())
            ending = run.until_spent()
        journal.over(ending)
        return run.records, ending


def _peers(folder: Path, study: StudyRecord, meeting: Meeting | None) -> AbstractContextManager[Peers]:
    if meeting is None:
        return nullcontext(Nobody())
    model = shared_flags(study.profile, simulated=study.simulated)
    space = space_of(study.profile, simulated=study.simulated)
    return Crew(meeting, study, space, model, read_trials(folder))


class _Run:
    """The trials of one run of the tuner."""

    def __init__(
        self,
        folder: Path,
        study: StudyRecord,
        rig: Rig,
        effort: Effort,
        *,
        screen: Journal,
        peers: Peers,
        asked: Asked,
    ) -> None:
        # Optuna takes most of a second to load, which an error before this need not wait for.
        from dflash_deploy.tune.ledger import Ledger  # noqa: PLC0415

        self.records = read_trials(folder)
        self._folder = folder
        self._study = study
        self._profile = study.profile
        self._rig = rig
        self._screen = screen
        self._peers = peers
        self._asked = asked
        self._refused: dict[str, Settings] = {}
        self._model = shared_flags(study.profile, simulated=study.simulated)
        space = self._space = space_of(study.profile, simulated=study.simulated)
        self._search = self._begun_search(study, space, effort.worth)
        self._ledger = Ledger(folder, space, study.profile.objective.optimize, self.records)
        self._launched = sum(record.launched for record in self.records if record.outcome != "interrupted")
        self._effort = effort
        self._deadline = None if effort.minutes is None else time.monotonic() + 60 * effort.minutes

    def until_spent(self) -> Ending:
        target = self._effort.target
        try:
            while self._is_room():
                if self._asked.politely:
                    return "interrupted"
                if self._is_late():
                    return "minutes"
                if target is not None and self._reached(target):
                    proof = self._search.proof()
                    if proof is None or self._effort.trials < _LEAST_FOR_PROOF:
                        return "target"
                    self._try(proof)
                    continue
                pending = self._peers.pending()
                step = self._search.ask([*(one.flags for one in pending), *self._refused.values()])
                step = self._last_of_all(step)
                proving = not isinstance(step, Stop) and step.proves is not None
                if pending and (isinstance(step, Stop) or proving):  # what others find may change that
                    self._peers.wait()
                elif not isinstance(step, Stop):
                    self._try(step)
                else:
                    self._screen.note(f"nothing more to launch: {step.why}")
                    return step.reason
        except KeyboardInterrupt:
            return "interrupted"
        return "trials"

    def _last_of_all(self, step: Proposal | Stop) -> Proposal | Stop:
        """The last launch there is goes to the proof of the best, where the study is not a very short one."""
        if self._effort.trials < _LEAST_FOR_PROOF or self._launched + 1 < self._effort.trials:
            return step
        return self._search.proof() or step

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _is_room(self) -> bool:
        """A launch is left for us. What others try counts, and is waited for: it may come to nothing."""
        told = False
        while True:
            self._hear()
            trying = len(self._peers.pending())
            if self._launched + trying < self._effort.trials or (trying and self._is_late()):
                return True
            if not trying:
                return False
            if not told:
                self._screen.note(f"all launches are taken; waiting for {trying} of other workers")
                told = True
            self._peers.wait()

    def _hear(self) -> None:
        """Take over what other workers have ended."""
        for record in self._peers.news():
            write_record(trial_folder(self._folder, record.number) / "trial.json", record)
            self.records.append(record)
            self._search.tell(record)
            if record.outcome == "interrupted":
                self._refused.pop(self._key(record.flags), None)
            else:
                self._ledger.add(record)
                self._launched += record.launched
                self._learn(record, ours=False)
            self._screen.ended(record)

    def _key(self, flags: Settings) -> str:
        return key_of({name: value for name, value in flags.items() if name not in self._model})

    def _reached(self, target: float) -> bool:
        best = best_trial(self._study, self.records)
        if best is None or best.objective is None:
            return False
        less = self._profile.objective.optimize in LESS_IS_BETTER
        return best.objective <= target if less else best.objective >= target

    def _begun_search(self, study: StudyRecord, space: Space, worth: float) -> Search:
        card = load_card(study.card) if study.card else None
        forecaster = self._first_forecaster(study, card)
        search = Search(
            space,
            forecaster,
            goal=study.profile.objective.optimize,
            rate=lambda flags: forecaster.rate(flags, card) if card else None,
            shared=self._model,
            seed=study.seed,
            known=list(self._waiting()),
            worth=worth,
        )
        for record in self.records:
            search.tell(record)
        return search

    def _waiting(self) -> Iterator[Proposal]:
        """Settings that somebody knows, then those that a former run did not finish."""
        for known in self._profile.known:
            settings = self._space.whole(known.flags)
            yield Proposal(settings, f"{KNOWN}{known.name}", f"known: {known.source}")
        yield from self._earlier()
        for record in self.records:
            if record.outcome == "interrupted":
                own = {name: value for name, value in record.flags.items() if name not in self._model}
                yield Proposal(own, record.source, f"trial {record.number} was cut short")

    def _earlier(self) -> Iterator[Proposal]:
        """The best of this machine's other studies of the same service, the newest first."""
        for study, best in earlier_bests(self._study)[:_MOST_EARLIER]:
            settings = {flag: best.flags[flag] for flag in self._profile.search if flag in best.flags}
            stale = [
                f"{what} {before}, now {now}"
                for what, before, now in (
                    ("SGLang", study.engine_version, self._study.engine_version),
                    ("driver", study.driver, self._study.driver),
                )
                if before != now
            ]
            aside = f" (stale: measured with {', '.join(stale)})" if stale else ""
            yield Proposal(
                self._space.whole(settings),
                f"{EARLIER}{study.name}",
                f"the best of study {study.name}{aside}",
            )

    def _outlook(self, candidate: Candidate) -> Outlook:
        if self._launched + 1 >= self._effort.trials:
            after = "nothing: this is the last launch"
        else:
            coming = self._search.waiting(candidate.flags)
            after = (
                f"{coming.source} ({coming.why})" if coming else "what the search proposes once this is in"
            )
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return Outlook(candidate.why or "", after, self._launched, self._effort.trials, left_s)

    def _first_forecaster(self, study: StudyRecord, card: Card | None) -> Forecaster:
        """As logs have corrected it: those kept of this card, or this study's own where it is simulated."""
        rig = self._rig
        held = rig.gauge.used_mib() if rig.gauge else None
        forecaster = Forecaster(study.profile, study.engine_version, rig.memory_mib, float(held or 0))
        self._card = card
        if study.simulated:
            for record in self.records:
                forecaster = forecaster.after(record)
            return forecaster
        own = study.profile.speculation.method
        # The profile's own method last: what is common to all is taken from it.
        for method in (*(one for one in searched_methods(study.profile) if one != own), own):
            subject = forecaster.subject(card, method)
            kept = calibration.load(subject) if subject else None
            if kept is not None:
                forecaster = forecaster.corrected(kept.corrected(), method, boots=kept.boots)
        return forecaster

    def _learn(self, record: TrialRecord, *, ours: bool = True) -> None:
        """Let the log of a server that came to serve correct the forecasts that follow.

        Only what ``ours`` taught is kept for other studies: another worker's card is not this machine's.
        """
        forecaster, method = self._search.forecaster, method_of(self._profile, record.flags)
        lesson = forecaster.lesson(record)
        if lesson is None:
            return
        self._search.forecaster = forecaster.corrected(lesson.terms, method)
        # What a simulated card teaches is never kept: it would correct the plans of a real one.
        subject = None if self._study.simulated else forecaster.subject(self._card, method)
        if ours and subject is not None:
            calibration.keep(subject, lesson)

    def _try(self, proposal: Proposal) -> None:
        wanted = Candidate(
            number=1 + max((record.number for record in self.records), default=0),
            source=proposal.source,
            flags={**self._model, **proposal.settings},
            started=datetime.now(UTC),
            why=proposal.why,
            proves=proposal.proves,
        )
        candidate = self._peers.claim(wanted)
        if candidate is None:  # another worker was quicker
            self._refused[self._key(wanted.flags)] = wanted.flags
            return
        write_record(trial_folder(self._folder, candidate.number) / "candidate.json", candidate)
        self._screen.begun(candidate, self._outlook(candidate))
        forecast = self._search.forecaster.forecast(candidate.flags)
        predicted = forecast.predicted
        entry = self._ledger.begin(proposal.settings)
        if (why := self._not_worth_it(candidate, forecast)) is not None:
            self._keep(entry, not_launched(candidate, "infeasible", why, predicted))
            return
        begun = time.monotonic()
        try:
            with (
                self._asked.finished_first(self._say_asked),
                hold_room(trial_folder(self._folder, candidate.number)),
            ):
                record = run_trial(
                    candidate,
                    folder=self._folder,
                    profile=self._profile,
                    launcher=self._rig.launcher,
                    gauge=self._rig.gauge,
                    predicted=predicted,
                    on_stage=self._screen.stage,
                    promise=self._promise(candidate),
                )
        except KeyboardInterrupt:
            wall_s = time.monotonic() - begun
            cut = not_launched(candidate, "interrupted", "stopped by hand", predicted, wall_s=wall_s)
            self._keep(entry, cut)
            raise
        except DeployError as error:
            raise error.then(f"dflash-deploy tune --resume --name {self._folder.name}") from error
        self._keep(entry, record)
        self._learn(record)
        self._launched += 1

    def _not_worth_it(self, candidate: Candidate, forecast: Forecast) -> str | None:
        """Why a known setting is not launched; None where it is.

        The engine is certain to refuse it; or the plan does what nobody has tuned: where somebody has, the
        plan may be wrong.
        """
        known = {f"{KNOWN}{one.name}": one for one in self._profile.known}.get(candidate.source)
        if known is None or forecast.refusal is None or (known.flags and not forecast.certain):
            return None
        return f"{forecast.refusal} (predicted)"

    def _say_asked(self) -> None:
        # Where nothing can be shown any more, the next thing that is shown says so.
        with suppress(Exception):
            self._screen.note("stopping when this trial has ended; Ctrl-C once more stops it now")

    def _promise(self, candidate: Candidate) -> Promise | None:
        proven = next((one for one in self.records if one.number == candidate.proves), None)
        if proven is None:
            return None
        promised = self._profile.workload.context_tokens
        if self._profile.objective.optimize == "context_tokens" and proven.objective is not None:
            promised = int(proven.objective)
        free = self._profile.objective.constraints.get("free_vram_mib")
        kv_tokens = proven.boot.kv_tokens if proven.boot else None
        return Promise(promised, kv_tokens, free.min if free else None)

    def _keep(self, entry: Entry, record: TrialRecord) -> None:
        write_record(trial_folder(self._folder, record.number) / "trial.json", record)
        self.records.append(record)
        self._search.tell(record)
        self._ledger.tell(entry, record)
        self._peers.publish(record)
        self._screen.ended(record)


@contextmanager
def alone_on(card: str | None, *, fix: str = "wait for it, or choose another card: --gpu") -> Iterator[None]:
    """Keep others off a card: two servers on it would measure each other.

    Raises:
        DeployError: another one has it; with this ``fix``.
    """
    if card is None:
        yield
        return
    folder = paths.state_dir() / "cards"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in card)
    with _held(folder / f"{name}.lock", f"this card ({card})", fix):
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other tuners out of a study.

    Raises:
        DeployError: another tuner has it.
    """
    fix = "wait for it, or start a study of its own with another --name"
    with _held(folder / "lock", folder.name, fix):
        yield


@contextmanager
def _held(path: Path, what: str, fix: str) -> Iterator[None]:
    def busy(holder: int | None) -> DeployError:
        who = "" if holder is None else f" (process {holder})"
        return DeployError(
            f"another dflash-deploy works on {what}{who}", fix=fix, exit_code=ExitCode.UNAVAILABLE
        )

    with writing(path), exclusive_file(path, busy=busy):
        yield


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into words.

    Raises:
        DeployError: ``folder`` could not be written.
    """
    try:
        yield
    except BrokenPipeError:  # who read what we print has left: no file's fault
        raise
    except OSError as error:
        begun = any(os.path.isfile(place / "study.json") for place in (folder, folder.parent))  # noqa: PTH113
        raise DeployError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}"
            + ("; what had ended until then is kept" if begun else ""),
            fix="free some space or mend the permissions, then "
            + ("dflash-deploy tune --resume" if begun else "run the same command again"),
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
