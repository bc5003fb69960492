"""A running service that gives up its card for a while, and gets it back whatever happens.

What was stopped is written down before it is stopped; a tool that was killed meanwhile leaves the record, and
the next run starts the service again.

```
<state>/lent.json
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.paths import state_dir
from dflash_deploy.server.processes import Identity, alive, boot_id, identity_of, pid_namespace

_LARGEST_BYTES = 1 << 16
_UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,200}\.service")

Kind = Literal["system", "user"]


class Manager(Protocol):
    """What is asked of systemd (``systemctl.Systemd``)."""

    def start(self, unit: str) -> bool: ...  # noqa: D102
    def stop(self, unit: str) -> None: ...  # noqa: D102


Managers = Callable[[Kind], Manager]


class Unit(BaseModel):
    """A service, and the manager that runs it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    manager: Kind
    name: str


class Lent(BaseModel):
    """Services that were stopped, and for whom."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    units: tuple[Unit, ...]
    borrower: Identity
    boot_id: str
    pid_namespace: str


def unit_of(pid: int, *, proc: Path = Path("/proc")) -> Unit | None:
    """The service that a process belongs to; None for one that no service manager started."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.rpartition(":")[2]
        parts = [part for part in path.split("/") if _UNIT.fullmatch(part)]
        own = [part for part in parts if not part.startswith("user@")]
        if own:
            return Unit(manager="user" if len(own) < len(parts) else "system", name=own[-1])
    return None


def units_of(pids: Sequence[int]) -> tuple[Unit, ...]:
    """The services of some processes, each once; our own is none of them."""
    own = unit_of(os.getpid())
    found = dict.fromkeys(unit for pid in pids if (unit := unit_of(pid)) is not None)
    return tuple(unit for unit in found if unit != own)


def require_consent(units: Sequence[Unit], *, given: bool) -> None:
    """See that services may be stopped.

    Raises:
        DeployError: nobody said so.
    """
    if units and not given:
        names = ", ".join(unit.name for unit in units)
        raise DeployError(
            f"{names} is running on this card, and trials would run beside it",
            fix="add --stop-service: it is stopped for the study, and started again after it in any case",
            exit_code=ExitCode.UNAVAILABLE,
        )


@contextmanager
def lent(units: Sequence[Unit], managers: Managers, tell: Callable[[str], None]) -> Iterator[None]:
    """Stop services, and start them again at the end.

    Raises:
        DeployError: one cannot be stopped or started, or what is to be stopped cannot be written down.
    """
    if not units:
        yield
        return
    identity = identity_of(os.getpid()) or Identity(os.getpid(), 0)
    record = Lent(units=tuple(units), borrower=identity, boot_id=boot_id(), pid_namespace=pid_namespace())
    write_atomic(_path(), record.model_dump_json() + "\n")
    try:
        for unit in units:
            tell(f"stopping {unit.name}; it is started again when the study is over")
            managers(unit.manager).stop(unit.name)
        yield
    finally:
        for sentence in _give_back(record, managers):
            tell(sentence)


def give_back_lost(managers: Managers) -> tuple[str, ...]:
    """Start again what a run that is no more had stopped.

    Returns:
        One sentence for each service.

    Raises:
        DeployError: one does not start.
    """
    try:
        record = Lent.model_validate_json(read_regular(_path(), most_bytes=_LARGEST_BYTES))
    except (OSError, ValidationError):
        return ()
    if record.boot_id == boot_id() and (record.pid_namespace != pid_namespace() or alive(record.borrower)):
        return ()
    return tuple(_give_back(record, managers))


def _give_back(record: Lent, managers: Managers) -> Iterator[str]:
    failed = []
    for unit in record.units:
        if managers(unit.manager).start(unit.name):
            yield f"{unit.name} is started again"
        else:
            failed.append(unit.name)
    if failed:
        # The record stays: the next run tries again.
        raise DeployError(
            f"{', '.join(failed)} was stopped for a study and does not start again",
            fix=f"systemctl status {failed[0]}, then run any dflash-deploy tune: it tries again",
            exit_code=ExitCode.FAILED,
        )
    with suppress(FileNotFoundError):
        _path().unlink()


def _path() -> Path:
    return state_dir() / "lent.json"
