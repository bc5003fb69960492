"""What is written down of a running server, so that another run of the tool can tell whether it is ours.

```
<state>/servers/<token>.json
```
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.paths import state_dir
from dflash_deploy.server.processes import Identity

_SIZE_LIMIT_BYTES = 1 << 20


class ServerRecord(BaseModel):
    """One server of one run of the tool.

    Attributes:
        token: marks the server's processes (see ``processes.TOKEN_VARIABLE``) and names the record.
        boot_id: boot of the machine that the identities belong to.
        pid_namespace: set of processes that the identities belong to.
        tool: the process of the tool that owns the server.
        server: the main process, None in the moment before it is started.
        children: the server's other processes as they stood when it was ready.
        segments: names of files in shared memory that its processes were seen to hold.
        started_s: seconds since the epoch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    token: str
    boot_id: str
    pid_namespace: str
    tool: Identity
    server: Identity | None = None
    children: tuple[Identity, ...] = ()
    segments: tuple[str, ...] = ()
    command: tuple[str, ...]
    host: str
    port: int
    run_dir: Path
    temp_dir: Path
    started_s: float


def write_record(record: ServerRecord) -> None:
    """Write or replace a server's record.

    Raises:
        DeployError: the state folder cannot be written.
    """
    path = _path(record.token)
    try:
        write_atomic(path, record.model_dump_json(indent=2) + "\n", mode=0o600)
    except OSError as error:
        raise DeployError(
            f"the record of the server cannot be written to {path}: {error.strerror}",
            fix="make room and check permissions there, or set XDG_STATE_HOME to another folder",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


def read_records() -> Iterator[ServerRecord]:
    """Every record on disk; what cannot be read as one is passed over."""
    for path in sorted(_folder().glob("*.json")):
        try:
            if path.stat().st_size <= _SIZE_LIMIT_BYTES:
                record = ServerRecord.model_validate_json(path.read_bytes())
                if path == _path(record.token):
                    yield record
        except (OSError, ValidationError):
            continue


def remove_record(token: str) -> None:
    """Forget a server that has ended. A record that cannot be removed is removed by a later run."""
    with suppress(OSError):
        _path(token).unlink()


def _folder() -> Path:
    return state_dir() / "servers"


def _path(token: str) -> Path:
    return _folder() / f"{token}.json"
