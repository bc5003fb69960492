"""What is written down of environments and backups: read with limits, since anybody can edit a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular
from dflash_deploy.serving_env.pins import EnginePin
from dflash_deploy.serving_env.refused import refused

_MAX_BYTES = 4 << 20
_Word = Annotated[str, Field(max_length=1000)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1] = 1


class EnvironmentRecord(_Record):
    """What an environment was made from, when, and with what; its file is the stamp of being complete.

    Attributes:
        pin: the source, whole.
        made_at: UTC, ISO 8601.
        made_by: version of this tool.
        installer: ``uv 0.13.9``, ``pip 24.0``, or ``adopted``.
        python_version: of the interpreter.
        packages: name and version of all that is installed.
        constraints: file of constraints that it was made with.
        adopted: the folder of an environment that is not ours, else None.
        replaces: id of the backup that holds what stood here before.
    """

    name: _Word
    pin: EnginePin
    made_at: _Word
    made_by: _Word
    installer: _Word
    python_version: _Word
    packages: dict[_Word, _Word] = Field(max_length=5000)
    constraints: _Word | None = None
    adopted: _Word | None = None
    replaces: _Word | None = None


class Making(_Record):
    """That a folder is being made; while this file stands and no stamp does, it is half-made."""

    name: _Word
    pin: EnginePin
    began_at: _Word


class BackupRecord(_Record):
    """One backup of an environment.

    Attributes:
        id: UTC time of its making.
        reason: why it was made, in words.
        folder: where the environment stood; its scripts hold this path, so it works nowhere else.
        entries: files, folders and links in it.
        size_bytes: of all files.
        manifest_sha256: of the file that lists every entry with its digest.
    """

    id: _Word
    name: _Word
    made_at: _Word
    made_by: _Word
    reason: _Word
    folder: _Word
    environment: EnvironmentRecord
    entries: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    manifest_sha256: _Word


class DefaultRecord(_Record):
    """The environment that commands take when no interpreter is named."""

    name: _Word


_Any = TypeVar("_Any", bound=_Record)


def read(path: Path, schema: type[_Any]) -> _Any | None:
    """A record, None where there is none.

    Raises:
        DeployError: it is there and wrong.
    """
    try:
        data = read_regular(path, most_bytes=_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refused(error, path) from error
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DeployError(
            f"{path}: not a record of this tool: {where + ': ' if where else ''}{first['msg']}",
            fix=f"move {path} away",
            exit_code=ExitCode.INVALID_INPUT,
        ) from error


def write_text(record: _Record) -> str:
    """A record as its file holds it."""
    return record.model_dump_json(indent=1) + "\n"
