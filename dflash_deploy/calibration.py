"""What boot logs taught about this machine, kept between runs.

```
<state>/calibration/<key>.json
```
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.machine.cards import Card
from dflash_deploy.paths import state_dir
from dflash_deploy.plan.calibration import Calibrated
from dflash_deploy.plan.terms import Terms

_SIZE_LIMIT_BYTES = 1 << 16
_Mib = Annotated[float, Field(ge=0, le=1 << 22)]


class TermsRecord(BaseModel):
    """``plan.terms.Terms`` on disk: MiB, and factors; none beyond what any card has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    driver: _Mib
    context: _Mib
    target_weights: _Mib | None
    draft_weights: _Mib | None
    after_load: Annotated[float, Field(ge=-(1 << 14), le=1 << 14)]
    workspace: _Mib
    workspace_draft: _Mib
    workspace_request: _Mib
    graphs: _Mib
    prefill_graphs: _Mib
    kernels: _Mib
    fragments: _Mib
    fragments_expandable: _Mib
    unified: bool


class CalibrationRecord(BaseModel):
    """One machine, engine version and model.

    Attributes:
        machine: the card, by ``machine_name``.
        boots: logs that it was corrected by; the last one counts.
        before_mib: error of the free memory predicted for that log, with the terms as they were before.
        after_mib: the same with the terms kept here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    schema_version: int = 1
    machine: str
    version: str
    target: str
    draft: str | None
    boots: int = Field(ge=1)
    before_mib: float | None
    after_mib: float | None
    terms: TermsRecord

    def corrected(self) -> Terms:
        """The terms to plan with."""
        return Terms(**self.terms.model_dump())


@dataclass(frozen=True)
class Subject:
    """What a correction holds for: nothing learnt of one is used for another.

    Attributes:
        machine: the card, by ``machine_name``.
        version: the engine's.
        target: id of the model; ``draft`` of its draft, None without one.
    """

    machine: str
    version: str
    target: str
    draft: str | None


def machine_name(card: Card | None, memory_mib: int) -> str:
    """How a card is called here: by its own name, or by its memory where it is none that is known."""
    return card.name if card is not None else f"a card of {memory_mib} MiB"


def load(subject: Subject) -> CalibrationRecord | None:
    """What is kept, None where no log has been seen (or what was kept of it cannot be read)."""
    return _read(_path(subject))


def keep(subject: Subject, calibrated: Calibrated) -> CalibrationRecord:
    """Keep what a log taught; it takes the place of what was kept before.

    Raises:
        DeployError: the state folder cannot be written.
    """
    path = _path(subject)
    earlier = _read(path)
    record = CalibrationRecord(
        **asdict(subject),
        boots=1 if earlier is None else earlier.boots + 1,
        before_mib=calibrated.before_mib,
        after_mib=calibrated.after_mib,
        terms=TermsRecord(**asdict(calibrated.terms)),
    )
    try:
        write_atomic(path, record.model_dump_json(indent=1))
    except OSError as error:
        raise DeployError(
            f"the calibration cannot be kept: {error}",
            fix=f"make {path.parent} writable",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    return record


def records() -> Iterator[CalibrationRecord]:
    """All that is kept; what cannot be read is left out."""
    with suppress(OSError):
        for path in sorted(_folder().glob("*.json")):
            record = _read(path)
            if record is not None:
                yield record


def reset(*, machine: str | None = None) -> int:
    """Forget what was learnt, of one machine or of all; how many records are gone.

    Raises:
        DeployError: a record cannot be removed.
    """
    gone = 0
    for path in sorted(_folder().glob("*.json")) if _folder().is_dir() else ():
        record = _read(path)
        if machine is not None and (record is None or record.machine != machine):
            continue
        try:
            path.unlink()
        except OSError as error:
            raise DeployError(
                f"the calibration cannot be removed: {error}",
                fix=f"make {path.parent} writable",
                exit_code=ExitCode.UNAVAILABLE,
            ) from error
        gone += 1
    return gone


def _folder() -> Path:
    return state_dir() / "calibration"


def _path(subject: Subject) -> Path:
    key = "\n".join((subject.machine, subject.version, subject.target, subject.draft or ""))
    name = re.sub(r"[^a-z0-9]+", "-", f"{subject.machine} {subject.target}".lower()).strip("-")[:60]
    return _folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _read(path: Path) -> CalibrationRecord | None:
    try:
        return CalibrationRecord.model_validate_json(read_regular(path, most_bytes=_SIZE_LIMIT_BYTES))
    except (OSError, ValidationError):
        return None
