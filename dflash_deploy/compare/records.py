"""What a comparison leaves on disk: one folder, one file a run, so that nothing that has ended is lost.

```
<state>/comparisons/<name>/comparison.json      what was asked, on what machine
                          /runs/1-none.json      one launch of one method, written when it has ended
                          /runs/1-none/server.log
```
A run without its file was cut short, and is done again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy import paths
from dflash_deploy.bench.quality.exam import Examination
from dflash_deploy.bench.results import Machine, Run, Workload
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.json_file import first_mistake
from dflash_deploy.lock import exclusive_file
from dflash_deploy.profile.schema import FlagSetting, Profile

SCHEMA_VERSION: Literal[1] = 1
_LARGEST_BYTES = 32 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_R = TypeVar("_R", bound="_Record")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArmRecord(_Record):
    """A method and the flags that it is launched with."""

    method: Method
    flags: dict[str, FlagSetting]


class ComparisonRecord(_Record):
    """What was asked. ``simulated`` holds for every figure.

    Attributes:
        repeats: launches of each method.
        rounds: of each launch that count.
        examine: questions are asked besides the load.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    created: AwareDatetime
    tool_version: str
    simulated: bool
    card: str | None
    seed: int = 0
    time_scale: float = 1.0
    engine_version: str
    profile: Profile
    arms: list[ArmRecord] = Field(min_length=1)
    repeats: int = Field(ge=1)
    users: int = Field(ge=1)
    output_tokens: int = Field(ge=2)
    rounds: int = Field(ge=1)
    examine: bool
    machine: Machine | None
    workload: Workload


class RunRecord(_Record):
    """One launch of one method. The answers are kept whole, for agreement with those of others."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: Run
    examination: Examination | None = None
    wall_s: float


def comparisons_dir() -> Path:
    """Folder of all comparisons."""
    return paths.state_dir() / "comparisons"


def claim(name: str | None, profile_name: str) -> Path:
    """Make the folder of a new comparison.

    Args:
        name: its name, None for ``<profile>-<date>-<n>`` with the first free number.
        profile_name: what one without a name is called after.

    Raises:
        DeployError: the name cannot be one, or is taken.
    """
    if name is not None:
        folder = comparisons_dir() / _sound(name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if _is_nothing_yet(folder):
                return folder
            raise DeployError(
                f"there is a comparison {name} already",
                fix=f"go on with it: dflash-deploy compare --resume --name {name}; or take another --name",
                exit_code=ExitCode.USAGE,
            ) from None
        return folder
    stem, number = f"{profile_name}-{datetime.now().astimezone():%Y%m%d}", 1
    while True:
        folder = comparisons_dir() / f"{stem}-{number}"
        # Made, not looked for: somebody else may be choosing a name at this very moment.
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1


def _is_nothing_yet(folder: Path) -> bool:
    """Whoever claimed it was killed before it was a comparison."""
    return folder.is_dir() and all(one.name.startswith(".comparison.json.") for one in folder.iterdir())


def find(name: str | None) -> Path:
    """The comparison of this name; None takes the one made last.

    Raises:
        DeployError: there is none.
    """
    records = list(comparisons_dir().glob("*/comparison.json"))
    if name is not None:
        records = [record for record in records if record.parent.name == _sound(name)]
    if not records:
        raise DeployError(
            f"there is no comparison{'' if name is None else ' ' + name} in {comparisons_dir()}",
            fix="dflash-deploy compare --profile PROFILE",
            exit_code=ExitCode.MISSING,
        )
    return max(records, key=lambda record: record.stat().st_mtime).parent


def run_name(method: Method, repeat: int) -> str:
    """Name of a run's file and folder."""
    return f"{repeat}-{method}"


def run_path(folder: Path, method: Method, repeat: int) -> Path:
    """File of one run; it is there once the run has ended."""
    return folder / "runs" / f"{run_name(method, repeat)}.json"


def read_comparison(folder: Path) -> ComparisonRecord:
    """Read ``comparison.json``.

    Raises:
        DeployError: it cannot be read.
    """
    fix = "put the file back from a copy, or begin anew: dflash-deploy compare --profile PROFILE"
    return _read(folder / "comparison.json", ComparisonRecord, fix=fix)


def read_run(path: Path) -> RunRecord:
    """Read one run.

    Raises:
        DeployError: it cannot be read.
    """
    return _read(path, RunRecord, fix=f"move {path} away: that run is then done again")


def write_record(path: Path, record: _Record) -> None:
    """Write a record in one step."""
    write_atomic(path, record.model_dump_json(indent=2) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others out of a comparison; the lock goes with the process, however it ends.

    Raises:
        DeployError: somebody else has it.
    """
    busy = DeployError(
        f"another dflash-deploy works on {folder.name}",
        fix="wait for it, or begin one of your own with another --name",
        exit_code=ExitCode.UNAVAILABLE,
    )
    with exclusive_file(folder / "lock", busy=lambda _: busy):
        yield


def _sound(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise DeployError(
            f"{name!r} cannot name a comparison: letters a to z, digits, dots, dashes and underscores can",
            exit_code=ExitCode.USAGE,
        )
    return name


def _read(path: Path, kind: type[_R], *, fix: str) -> _R:
    try:
        return kind.model_validate_json(read_regular(path, most_bytes=_LARGEST_BYTES))
    except OSError as error:
        why = error.strerror or str(error)
    except ValidationError as error:
        why = first_mistake(error)
    raise DeployError(
        f"{path} is no record that this tool reads: {why}",
        fix=fix,
        exit_code=ExitCode.INVALID_INPUT,
    )
