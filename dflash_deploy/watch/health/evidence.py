"""When a service is restarted: only after one check after another found it dead, and not again too soon.

```
<state>/health/<service>.json
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.deploy.timer import state_folders
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.lock import exclusive
from dflash_deploy.server.processes import boot_id
from dflash_deploy.watch.health.verdict import Health, Verdict

# A restart can mend these; a hot card, a full disk or a patch it cannot.
_RESTARTABLE = frozenset({"process", "port", "health", "generation", "scheduler"})
_DAY_S = 86_400.0
_KEPT_RESTARTS = 50
_LARGEST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,100}")


@dataclass(frozen=True)
class Policy:
    """How much evidence a restart takes.

    Attributes:
        checks: so many checks in a row must find it dead.
        gap_s: two checks further apart than this are not in a row.
        cool_down_s: no second restart sooner than this after one.
        most_a_day: after so many restarts in 24 hours a person must look.
    """

    checks: int = 3
    gap_s: float = 900.0
    cool_down_s: float = 900.0
    most_a_day: int = 5


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Record):
    """One check that found the service dead (``pid`` is what it was then)."""

    at_s: float
    pid: int | None
    why: Annotated[str, Field(max_length=2000)]


class Restart(_Record):
    """One restart and why it was made."""

    at_s: float
    why: Annotated[str, Field(max_length=8000)]


class Sent(_Record):
    """A message that was sent."""

    event: Annotated[str, Field(max_length=40)]
    at_s: float


class Told(_Record):
    """What people have been told.

    Attributes:
        down: that it is down, and not yet that it serves again.
        restarts: how often systemd had started it again by itself at the last check.
        sent: messages of the last hour.
        untold: restarts that came too often to be told.
    """

    down: bool = False
    restarts: int = 0
    sent: Annotated[tuple[Sent, ...], Field(max_length=100)] = ()
    untold: int = 0


class State(_Record):
    """What is remembered of a service between checks; times are seconds since the epoch.

    Attributes:
        boot_id: boot of the machine that ``findings`` belong to.
        findings: the checks in a row that found it dead, oldest first.
        restarts: newest last.
    """

    schema_version: Literal[1] = 1
    service: str
    boot_id: str = ""
    findings: tuple[Finding, ...] = ()
    restarts: tuple[Restart, ...] = ()
    told: Told = Told()


@dataclass(frozen=True)
class Decision:
    """What to do now, and the state to write down before it is done.

    Attributes:
        restart: do it.
        why: in a sentence, what was decided and from what.
        enough: enough checks in a row found it dead, whether it is restarted or not.
    """

    restart: bool
    why: str
    state: State
    enough: bool = False


def decide(state: State, health: Health, *, active: bool, now_s: float, policy: Policy) -> Decision:
    """Weigh one more check.

    Args:
        state: what the checks before it left.
        health: what this one found.
        active: systemd says that the unit runs. One that starts, failed or was stopped is systemd's or a
            person's affair.
        now_s: seconds since the epoch.
        policy: how much evidence a restart takes.
    """
    boot = boot_id()
    dead = [
        layer for layer in health.layers if layer.name in _RESTARTABLE and layer.verdict is Verdict.CRITICAL
    ]
    # A clock that was set back leaves times in the future, which say nothing.
    restarts = tuple(one for one in state.restarts if one.at_s <= now_s)[-_KEPT_RESTARTS:]
    if not active or health.starting or not dead:
        text = "it starts" if health.starting else "systemd does not run it" if not active else "it serves"
        return Decision(
            False,
            f"nothing to do: {text}",
            State(service=state.service, boot_id=boot, restarts=restarts, told=state.told),
        )
    why = "; ".join(f"{layer.name}: {layer.text}" for layer in dead)[:2000]
    before = state.findings if state.boot_id == boot else ()
    if before and not (0 <= now_s - before[-1].at_s <= policy.gap_s and before[-1].pid == health.pid):
        # Checks long apart, or of another process, are not in a row.
        before = ()
    findings = (*before, Finding(at_s=now_s, pid=health.pid, why=why))[-policy.checks :]
    kept = State(service=state.service, boot_id=boot, findings=findings, restarts=restarts, told=state.told)
    if len(findings) < policy.checks:
        return Decision(False, f"dead in {len(findings)} of {policy.checks} checks in a row: {why}", kept)
    since_s = now_s - restarts[-1].at_s if restarts else None
    if since_s is not None and since_s < policy.cool_down_s:
        wait_s = policy.cool_down_s - since_s
        told = f"dead, but restarted {since_s:.0f} s ago: not again for {wait_s:.0f} s: {why}"
        return Decision(False, told, kept, enough=True)
    today = sum(now_s - one.at_s < _DAY_S for one in restarts)
    if today >= policy.most_a_day:
        told = f"dead, but restarted {today} times in 24 hours: a person must look: {why}"
        return Decision(False, told, kept, enough=True)
    told = f"{policy.checks} checks in a row found it dead: {why}"
    done = State(
        service=state.service,
        boot_id=boot,
        restarts=(*restarts, Restart(at_s=now_s, why=told))[-_KEPT_RESTARTS:],
        told=state.told,
    )
    return Decision(True, told, done, enough=True)


def state_folder() -> Path:
    """Where the states lie: systemd names the folder of a unit that has one, else the tool's own."""
    return list(state_folders("user"))[-1]


@contextmanager
def held(service: str) -> Iterator[Path]:
    """The state's file, for this process alone.

    Raises:
        DeployError: another check acts on the same service right now, or the folder cannot be written.
    """
    if not _NAME.fullmatch(service):
        raise DeployError(f"{service!r} is no name of a service", exit_code=ExitCode.INVALID_INPUT)
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{service}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeployError(
            f"{folder} cannot be written: {error.strerror}",
            fix="run the command as the user who may write it",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    busy = DeployError(
        f"another health check acts on {service} right now",
        fix="try again when it has ended",
        exit_code=ExitCode.UNAVAILABLE,
    )
    with exclusive(descriptor, busy=busy):
        yield folder / f"{service}.json"


def read(path: Path, service: str) -> State:
    """What was remembered; nothing where the file is not there or damaged: a restart then takes longer."""
    try:
        found = State.model_validate_json(read_regular(path, most_bytes=_LARGEST_BYTES))
    except (OSError, ValidationError):
        return State(service=service)
    return found if found.service == service else State(service=service)


def write(path: Path, state: State) -> None:
    """Remember, durably.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(path, state.model_dump_json(indent=1) + "\n")
