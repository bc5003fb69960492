"""A running service that gives up its card for a while, and gets it back whatever happens.

What was stopped is written down before it is stopped; a tool that was killed meanwhile leaves the record, and
the next run starts the service again.

```
<state>/lent/<process>-<its start>.json      of one borrower: others may have other cards
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.machine.gpu import GpuProcess
from dflash_deploy.paths import state_dir
from dflash_deploy.server.processes import Identity, alive, boot_id, identity_of, pid_namespace

_LARGEST_BYTES = 1 << 16
_UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,200}\.service")

Kind = Literal["system", "user"]


class Manager(Protocol):
    """What is asked of systemd (``systemctl.Systemd``)."""

    def known(self, unit: str) -> bool: ...  # noqa: D102
    def active(self, unit: str) -> str: ...  # noqa: D102
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


def units_of(processes: Iterable[GpuProcess]) -> tuple[Unit, ...]:
    """The services that compute on a card, each once; our own is none of them, nor is the desktop."""
    own = unit_of(os.getpid())
    computing = [one.pid for one in processes if one.kind != "graphics" and not one.desktop]
    found = dict.fromkeys(unit for pid in computing if (unit := unit_of(pid)) is not None)
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
def lent(units: Sequence[Unit], managers: Managers, tell: Callable[[str], None]) -> Iterator[list[Unit]]:
    """Stop services, and start them again at the end.

    Gives a list that holds, in the end, those that did not start again.

    Raises:
        DeployError: one cannot be stopped, or what is to be stopped cannot be written down.
    """
    failed: list[Unit] = []
    if not units:
        yield failed
        return
    identity = identity_of(os.getpid()) or Identity(os.getpid(), 0)
    record = Lent(units=tuple(units), borrower=identity, boot_id=boot_id(), pid_namespace=pid_namespace())
    path = _folder() / f"{identity.pid}-{identity.start_ticks}.json"
    try:
        write_atomic(path, record.model_dump_json() + "\n")
    except OSError as error:
        raise DeployError(
            f"{path} cannot be written, and without it a service would stay stopped if this run were killed: "
            f"{error.strerror}",
            fix="make room and check permissions there, or set XDG_STATE_HOME to another folder",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    try:
        for unit in units:
            tell(f"stopping {unit.name}; it is started again when the study is over")
            managers(unit.manager).stop(unit.name)
        yield failed
    finally:
        for unit in units:
            said, well = _start_again(unit, managers(unit.manager))
            tell(said)
            if not well:
                failed.append(unit)
        path.unlink(missing_ok=True)


def give_back_lost(managers: Managers) -> Iterator[str]:
    """Start again what lost runs had stopped; a sentence for each service, also where it fails."""
    for path in sorted(_folder().glob("*.json")):
        try:
            record = Lent.model_validate_json(read_regular(path, most_bytes=_LARGEST_BYTES))
        except (OSError, ValidationError):
            continue
        if record.boot_id == boot_id() and (
            record.pid_namespace != pid_namespace() or alive(record.borrower)
        ):
            continue
        for unit in record.units:
            try:
                yield _start_again(unit, managers(unit.manager))[0]
            except DeployError as error:
                yield f"{unit.name} was stopped for a study: {error.message}"
        # Whatever came of it has been told: a service that does not start must not keep anybody from tuning.
        path.unlink(missing_ok=True)


def not_back(units: Sequence[Unit]) -> DeployError:
    """The error for services that did not start again."""
    first = units[0]
    scope = "--user " if first.manager == "user" else ""
    return DeployError(
        f"{', '.join(unit.name for unit in units)} was stopped for the study and does not start again",
        fix=f"journalctl {scope}-u {first.name} -n 50; then systemctl {scope}start {first.name}",
    )


def _start_again(unit: Unit, manager: Manager) -> tuple[str, bool]:
    """What came of it, and whether it is as it should be."""
    if not manager.known(unit.name):
        return f"{unit.name} was stopped for a study, and is not there any more", True
    if manager.active(unit.name) == "active":
        return f"{unit.name} runs", True
    if manager.start(unit.name):
        return f"{unit.name} is started again", True
    return f"{unit.name} was stopped for a study, and does not start: {not_back([unit]).fix}", False


def _folder() -> Path:
    return state_dir() / "lent"
