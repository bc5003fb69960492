"""What a study leaves on disk: one folder a study, one folder a trial, JSON in each.

```
<state>/studies/<name>/study.json          what was asked, on what machine
                      /optuna.db           the sampler's own storage
                      /trials/0007/candidate.json, trial.json, server.log
```
A trial's ``candidate.json`` is written before anything is launched, its ``trial.json`` once, when the trial
has ended; a folder without the second is a trial that was cut short, and is done again.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from dflash_deploy.bench.measurement import Measurement
from dflash_deploy.bench.telemetry import Telemetry
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.json_file import first_mistake, refuse_newer
from dflash_deploy.profile.schema import FlagSetting, Profile

SCHEMA_VERSION: Literal[1] = 1
_LARGEST_BYTES = 32 << 20

_R = TypeVar("_R", bound="_Record")

Outcome = Literal["served", "degraded", "infeasible", "failed", "bad-output", "unstable", "interrupted"]
"""served: all well. degraded: served without something that was asked for. infeasible: the plan or the engine
refused it, or it broke a limit of the profile. failed: the start ended in an error. bad-output: it served
wrong answers. unstable: it died or stalled under load. interrupted: we stopped it."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Predicted(_Record):
    """The plan's figures for a trial (all predicted), corrected by ``calibrated_by`` logs of this card."""

    peak_mib: float
    kv_tokens: int
    max_running_requests: int
    fits: bool
    calibrated_by: int = 0


class Candidate(_Record):
    """A configuration about to be tried: ``flags`` and ``why`` as ``TrialRecord`` has them.

    ``proves`` is the number of the trial whose configuration is started again, to see whether it holds.
    """

    number: int
    source: str
    flags: dict[str, FlagSetting]
    started: datetime
    why: str | None = None
    proves: int | None = None


class Cause(_Record):
    """What a failed trial's log says of it: ``id`` is an entry of the failure catalogue."""

    id: str
    cause: str
    fix: str | None


class Exam(_Record):
    """What questions to a server came to: see ``bench.quality.exam``.

    Attributes:
        asked: questions with known answers; none where its words mean nothing. ``right``: answered right.
        missed: why an answer is wrong, by the question's id; some of them.
        faults: what makes the server unfit, with an example each; empty where all is well.
        repeated: prompts asked three times. ``repeated_same``: those with one answer to the last byte.
        refused: questions that the server does not take, such as tool calls.
    """

    asked: int
    right: int
    missed: dict[str, str]
    faults: tuple[str, ...]
    repeated: int
    repeated_same: int
    refused: int

    @property
    def words(self) -> str:
        """For people."""
        known = f"{self.right} of {self.asked} known questions were answered right, " if self.asked else ""
        texts = f"{len(self.faults)} faults in its texts" if self.faults else "its texts were sound"
        return f"{known}{texts}, and {self.repeated_same} of {self.repeated} prompts got one answer thrice"


class Proof(_Record):
    """What a configuration lived through when it was started again: see ``tune.proof``.

    Attributes:
        seconds: that it took, in the server's own time.
        answer_tokens: of the long answer that everybody got at once.
        context_tokens: the longest context that everybody had at once, of ``promised_tokens``.
        free_mib: least memory that was free meanwhile, None where nobody can tell.
        kv_tokens: the pool, as large as when the configuration was measured.
        exam: whether its answers were right after all that; None where it did not come so far.
        problem: why it does not hold; None where it does.
    """

    seconds: float
    answer_tokens: int
    context_tokens: int
    promised_tokens: int
    free_mib: int | None
    kv_tokens: int | None
    exam: Exam | None = None
    problem: str | None


class TrialRecord(_Record):
    """One configuration and what came of it.

    Attributes:
        source: ``known:<name>`` for a setting given in the profile, ``search`` for the sampler's own.
        flags: the engine flags, the model's and those fixed by the profile among them; host and port are
            not.
        argv: the whole command that was run, empty where nothing was launched.
        objective: value of the profile's objective, or None where nothing was measured.
        violations: by limit, how far it was broken as a share of the limit; empty where all are kept.
        feasible: served, right, and within every limit: only such a trial can be the best.
        why: the reason for trying it.
        cause: of a failure, as its log tells it.
        levels: what it came to with other numbers of users at once, on the same server.
        proves: number of the trial whose configuration was started again; ``proof`` is what came of it.
        telemetry: the card while it was measured.
        boot_s: from launch to ready, in the server's own time.
        wall_s: the whole trial, on the clock; 0 where the tuner was killed meanwhile.
    """

    number: int
    source: str
    flags: dict[str, FlagSetting]
    argv: list[str]
    env: dict[str, str]
    outcome: Outcome
    reason: str | None = None
    boot: BootRecord | None = None
    measured: Measurement | None = None
    predicted: Predicted | None = None
    objective: float | None = None
    violations: dict[str, float] = {}
    feasible: bool
    started: datetime
    why: str | None = None
    cause: Cause | None = None
    levels: tuple[Measurement, ...] = ()
    proves: int | None = None
    proof: Proof | None = None
    telemetry: Telemetry | None = None
    boot_s: float | None = None
    wall_s: float

    @property
    def launched(self) -> bool:
        """A server was started for it."""
        return bool(self.argv)

    @property
    def ran_out(self) -> bool:
        """It failed for want of memory."""
        if self.outcome not in ("failed", "unstable"):
            return False
        named = self.cause is not None and self.cause.id.startswith("oom-")
        return named or "out of memory" in (self.reason or "").casefold()


class StudyRecord(_Record):
    """What was asked and where. ``simulated`` holds for every figure of the study."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    created: AwareDatetime
    tool_version: str
    simulated: bool
    time_scale: float = 1.0
    seed: int
    card: str | None
    engine_version: str
    driver: str | None = None
    profile: Profile


def write_record(path: Path, record: _Record) -> None:
    """Write a record as JSON, atomically."""
    write_atomic(path, record.model_dump_json(indent=2) + "\n")


def read_study(folder: Path) -> StudyRecord:
    """Read ``study.json``.

    Raises:
        DeployError: there is no study, it cannot be read, or a newer version of the tool wrote it.
    """
    path = folder / "study.json"
    if not path.is_file():
        raise DeployError(f"no study in {folder}", fix="dflash-deploy tune", exit_code=ExitCode.MISSING)
    return _read(path, StudyRecord, fix="put the file back from a copy, or move the study's folder away")


def read_trials(folder: Path) -> list[TrialRecord]:
    """Every ended trial of a study, by number.

    Raises:
        DeployError: a record cannot be read.
    """
    return [_read_trial(path, TrialRecord) for path in sorted((folder / "trials").glob("*/trial.json"))]


def cut_short(folder: Path) -> list[Candidate]:
    """Every trial of a study that was begun and never ended, by number."""
    begun = sorted((folder / "trials").glob("*/candidate.json"))
    return [_read_trial(path, Candidate) for path in begun if not path.with_name("trial.json").exists()]


def trial_folder(folder: Path, number: int) -> Path:
    """Where a trial of the study in ``folder`` keeps its files."""
    return folder / "trials" / f"{number:04d}"


def _read_trial(path: Path, kind: type[_R]) -> _R:
    return _read(path, kind, fix=f"move {path.parent} away: its configuration is then tried again")


def _read(path: Path, kind: type[_R], *, fix: str) -> _R:
    try:
        written = read_regular(path, most_bytes=_LARGEST_BYTES)
        return kind.model_validate_json(written)
    except OSError as error:
        why = error.strerror or str(error)
    except ValidationError as error:
        newer_fix = "install that version, or tune anew: dflash-deploy tune"
        refuse_newer(path, written, reads=SCHEMA_VERSION, what="records", fix=newer_fix)
        why = first_mistake(error)
    raise DeployError(
        f"{path} is no record that this tool reads: {why}",
        fix=fix,
        exit_code=ExitCode.INVALID_INPUT,
    )
