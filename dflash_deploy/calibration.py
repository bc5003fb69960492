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
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.paths import state_dir
from dflash_deploy.plan.calibration import Calibrated
from dflash_deploy.plan.terms import Terms

_SIZE_LIMIT_BYTES = 1 << 16


class TermsRecord(BaseModel):
    """``plan.terms.Terms`` on disk, in MiB."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    driver: float = Field(ge=0)
    context: float = Field(ge=0)
    target_weights: float | None = Field(ge=0)
    draft_weights: float | None = Field(ge=0)
    after_load: float
    workspace: float = Field(ge=0)
    workspace_draft: float = Field(ge=0)
    workspace_request: float = Field(ge=0)
    graphs: float = Field(ge=0)
    prefill_graphs: float = Field(ge=0)
    kernels: float = Field(ge=0)
    fragments: float = Field(ge=0)
    fragments_expandable: float = Field(ge=0)
    unified: bool


class CalibrationRecord(BaseModel):
    """One machine, engine version and model.

    Attributes:
        machine: the card as its driver names it, with its memory.
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


def load(*, machine: str, version: str, target: str, draft: str | None) -> Terms | None:
    """The corrected terms, None where no log has been seen (or what was kept of it cannot be read)."""
    record = _read(_path(machine, version, target, draft))
    return None if record is None else Terms(**record.terms.model_dump())


def keep(
    calibrated: Calibrated, *, machine: str, version: str, target: str, draft: str | None
) -> CalibrationRecord:
    """Keep what a log taught; it takes the place of what was kept before.

    Raises:
        DeployError: the state folder cannot be written.
    """
    path = _path(machine, version, target, draft)
    earlier = _read(path)
    record = CalibrationRecord(
        machine=machine,
        version=version,
        target=target,
        draft=draft,
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


def _path(machine: str, version: str, target: str, draft: str | None) -> Path:
    key = "\n".join((machine, version, target, draft or ""))
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine} {target}".lower()).strip("-")[:60]
    return _folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _read(path: Path) -> CalibrationRecord | None:
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_LIMIT_BYTES + 1)
        return CalibrationRecord.model_validate_json(data) if len(data) <= _SIZE_LIMIT_BYTES else None
    except (OSError, ValidationError):
        return None
