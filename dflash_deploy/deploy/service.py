"""Changing a service from one generation to another, and back by itself when the new one does not serve.

The order of every change: say what is about to be done (``change.json``), stop, switch the link, write the
unit, start, ask, have a timer check it; then say what came of it. Whatever is cut short in between, the next
command finds the record and goes back to the generation before (or ends the taking away).
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import psutil

from dflash_deploy.deploy import canary, key_file, timer
from dflash_deploy.deploy.generations import (
    Generation,
    Operation,
    PendingChange,
    Store,
    event,
    locked,
    no_service,
)
from dflash_deploy.deploy.notify import Event
from dflash_deploy.engine.launch import Launch
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import hold_room, read_regular, write_atomic
from dflash_deploy.machine.gpu import read_gpus
from dflash_deploy.server.ports import holder_of
from dflash_deploy.server.processes import Identity, identity_of

_UNIT_LIMIT_BYTES = 4 << 20
_GONE_S = 30.0

Tell = Callable[[str], None]


class Manager(Protocol):
    """What is asked of systemd (``systemctl.Systemd``)."""

    @property
    def manager(self) -> Literal["system", "user"]: ...  # noqa: D102
    def reload(self) -> None: ...  # noqa: D102
    def start(self, unit: str) -> bool: ...  # noqa: D102
    def stop(self, unit: str) -> None: ...  # noqa: D102
    def enable(self, unit: str) -> None: ...  # noqa: D102
    def disable(self, unit: str) -> None: ...  # noqa: D102
    def active(self, unit: str) -> str: ...  # noqa: D102
    def property(self, unit: str, name: str) -> str: ...  # noqa: D102
    def last_lines(self, unit: str) -> str: ...  # noqa: D102


Check = Callable[[Generation], canary.Canary]


@dataclass(frozen=True)
class Service:
    """One service: where it is kept, whose it is, where its unit stands.

    Attributes:
        check: asks a generation that runs whether it serves.
        tell: told what is done, a line at a time.
        notify: told when the service was rolled back because another generation did not serve.
    """

    store: Store
    systemd: Manager
    unit_dir: Path
    check: Check
    tell: Tell
    notify: Callable[[Event, str], None] = lambda _event, _why: None

    @property
    def unit(self) -> str:
        """Name of its unit."""
        return self.store.unit_name

    @property
    def unit_path(self) -> Path:
        """Where its unit stands."""
        return self.unit_dir / self.unit

    @property
    def running(self) -> bool:
        """It runs, or is on its way."""
        return self.systemd.active(self.unit) in ("active", "activating", "reloading")


@dataclass(frozen=True)
class Changed:
    """What came of a change.

    Attributes:
        generation: the one that is current now, None for none.
        problem: why the wanted one is not, or None.
        fix: what helps, where that is known.
        outage_s: how long nothing was served; None where nothing was stopped or started.
    """

    generation: int | None
    problem: str | None = None
    outage_s: float | None = None
    fix: str | None = None


def install(
    service: Service,
    make: Callable[[int], tuple[Generation, str, str | None]],
    *,
    start: bool,
    watch: Mapping[str, str] | None = None,
) -> Changed:
    """Write a generation and change to it.

    Args:
        service: the service.
        make: gives the generation of a number, its unit and its evidence.
        start: start it, ask it, and go back when it does not serve; else what runs is left alone.
        watch: the units of the timer that checks it from then on, by file name; None for no such timer.

    Raises:
        DeployError: the generation could not be made or written; nothing was changed.
    """
    store = service.store
    with locked(store, make=True):
        try:
            mend(service)
            _require_own_unit(service)
            number = store.next_number()
            store.sweep()
            with _room_held(service):
                made = make(number)
            store.add(*made)
        except BaseException:
            if not store.numbers():
                with suppress(OSError):
                    store.remove()
                _remove_empty(store.folder.parent)
            raise
        service.tell(f"generation {number} is written: {store.folder / 'generations' / f'{number:04d}'}")
        return _change(service, "install", number, start=start, then=lambda: _watch(service, watch))


def rollback(service: Service, number: int | None) -> Changed:
    """Change to another generation: the one named, or the last before the current that served.

    Raises:
        DeployError: there is none.
    """
    store = service.store
    with locked(store, make=False):
        mend(service)
        target = rollback_target(store, number)
        store.generation(target)
        store.unit_text(target)
        _require_own_unit(service)
        _require_key(service, target)
        return _change(service, "rollback", target, start=True)


def rollback_target(store: Store, number: int | None) -> int:
    """The generation to go back to.

    Raises:
        DeployError: there is none, or it is the current one.
    """
    current = store.current()
    if number is not None:
        if number not in store.numbers():
            store.generation(number)
        if number == current:
            raise DeployError(
                f"generation {number} is the current one",
                fix=store.command("restart"),
            )
        return number
    failed = {one.generation for one in store.history() if one.operation == "install" and not one.ok}
    older = [one for one in store.numbers() if (current is None or one < current) and one not in failed]
    if not older:
        raise DeployError(
            f"service {store.service} has no generation before {current if current is not None else 'this'} "
            "that served",
            fix=store.command("show"),
            exit_code=ExitCode.MISSING,
        )
    return older[-1]


def start(service: Service) -> Changed:
    """Start the current generation and wait until it answers."""
    with locked(service.store, make=False):
        mend(service)
        current = _need_current(service)
        _require_key(service, current)
        began = time.monotonic()
        if not service.running:
            _require_port(service)
        if not service.systemd.start(service.unit):
            return Changed(current, _why_not_started(service))
        return Changed(current, outage_s=time.monotonic() - began)


def stop(service: Service) -> tuple[str, ...]:
    """Stop it; what is not as it should be afterwards: a process, its port, its memory."""
    with locked(service.store, make=False):
        mend(service)
        return _stop(service)


def restart(service: Service) -> Changed:
    """Stop, see that all is free, start, wait."""
    with locked(service.store, make=False):
        mend(service)
        current = _need_current(service)
        _require_key(service, current)
        began = time.monotonic()
        if left := _stop(service):
            return Changed(current, "; ".join(left))
        _require_port(service)
        if not service.systemd.start(service.unit):
            return Changed(current, _why_not_started(service))
        return Changed(current, outage_s=time.monotonic() - began)


def uninstall(service: Service) -> None:
    """Stop it and take away its unit and all its generations.

    Raises:
        DeployError: something could not be taken away; the next command goes on with it.
    """
    store = service.store
    with locked(store, make=False):
        pending = _pending_now(service)
        if pending is None or pending.operation != "uninstall":
            mend(service)
            current = store.current()
            if store.numbers():
                _require_own_unit(service)
            store.begin(_pending("uninstall", current, None, running=False))
        _take_away(service)


def kept_changes(service: Service) -> tuple[Path, ...]:
    """A person's own files beside the unit, which nothing here takes away."""
    return tuple(sorted(service.unit_dir.glob(f"{service.unit}.*")))


def mend(service: Service) -> None:
    """Bring a change that was cut short to an end; to be called with the lock held.

    Raises:
        DeployError: what was cut short was the taking away, which is ended first; there is no service then.
    """
    store = service.store
    pending = _pending_now(service)
    if pending is None:
        store.sweep()
        return
    if pending.operation == "uninstall":
        service.tell("uninstalling was cut short: ending it")
        _take_away(service)
        raise no_service(store.service)
    service.tell(f"{pending.words} was cut short: going back to {_named(pending.before)}")
    _go_back(service, pending, "it was cut short")
    store.sweep()


def _pending_now(service: Service) -> PendingChange | None:
    """A change that was cut short. What cannot be read must not keep every command from its work."""
    try:
        return service.store.pending()
    except DeployError as error:
        current = service.store.current()
        now = "no generation is" if current is None else f"generation {current} is taken to be"
        aside = service.store.set_pending_aside()
        service.tell(f"{error.message}\nit is kept as {aside.name}, and {now} the current one")
        return None


def _change(
    service: Service,
    operation: Operation,
    after: int,
    *,
    start: bool,
    then: Callable[[], None] = lambda: None,
) -> Changed:
    store = service.store
    before, running = store.current(), service.running
    pending = _pending(operation, before, after, running=running)
    began, fix = time.monotonic(), None
    with _room_held(service) as room:
        store.begin(pending)
        try:
            problem = _bring_up(service, after) if start else _put(service, after)
            if problem is None:
                then()
        except KeyboardInterrupt:
            service.tell(f"interrupted: going back to {_named(before)}")
            room.close()
            _go_back(service, pending, "it was interrupted")
            raise
        except (DeployError, OSError) as error:
            told = error if isinstance(error, DeployError) else None
            problem, fix = (told.message, told.fix) if told else (str(error), None)
    if problem is None:
        store.end(event(operation, after, before, ok=True))
        return Changed(after, outage_s=time.monotonic() - began if start and running else None)
    service.tell(f"generation {after} does not serve; going back to {_named(before)}")
    worse = _go_back(service, pending, problem)
    if worse is not None:
        problem = f"{problem}\nand generation {before} does not serve either: {worse}"
    if before is not None:
        service.notify("rolled back", f"generation {after} does not serve, back to {before}: {problem}")
    return Changed(before, problem, time.monotonic() - began if running else None, fix)


@contextmanager
def _room_held(service: Service) -> Iterator[ExitStack]:
    """Hold room for the way back and for the record of what came of it, while a disk may fill up.

    Raises:
        DeployError: there is none now.
    """
    with ExitStack() as room:
        for folder in (service.store.folder, service.unit_dir):
            try:
                room.enter_context(hold_room(folder))
            except OSError as error:
                raise DeployError(
                    f"{folder} cannot be written: {error.strerror or error}; what runs was left alone",
                    fix="make room there or mend its permissions, then give the same command again",
                    exit_code=ExitCode.UNAVAILABLE,
                ) from error
        yield room


def _named(number: int | None) -> str:
    return f"generation {number}" if number is not None else "no generation: nothing is installed then"


def _bring_up(service: Service, number: int) -> str | None:
    if left := _stop(service):
        return "; ".join(left)
    _put(service, number)
    _require_port(service)
    service.tell(f"starting {service.unit}; this takes until the model answers")
    if not service.systemd.start(service.unit):
        return _why_not_started(service)
    found = service.check(service.store.generation(number))
    for line in found.seen:
        service.tell(f"  {line}")
    return found.problem


def _put(service: Service, number: int) -> str | None:
    """Make a generation the current one, on disk and for systemd."""
    service.store.switch(number)
    text = service.store.unit_text(number)
    # What stands there already needs no room on a full disk.
    if service.unit_path.is_symlink() or _unit_there(service) != text:
        write_atomic(service.unit_path, text)
    service.systemd.reload()
    service.systemd.enable(service.unit)
    return None


def _unit_there(service: Service) -> str | None:
    try:
        return read_regular(service.unit_path, most_bytes=_UNIT_LIMIT_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None


def _go_back(service: Service, pending: PendingChange, why: str) -> str | None:
    """To what was before a change; a problem with that, or None."""
    store, problem = service.store, None
    service.systemd.stop(service.unit)
    if pending.before is None:
        _unwatch(service)
        _remove_unit(service)
        store.switch(None)
    else:
        _put(service, pending.before)
        if pending.running and not service.systemd.start(service.unit):
            problem = _why_not_started(service)
    store.end(event(pending.operation, pending.after, pending.before, ok=False, why=why))
    return problem


def _take_away(service: Service) -> None:
    # The check that may start it again goes first.
    _unwatch(service)
    service.systemd.stop(service.unit)
    _remove_unit(service)
    for path in timer.remembered(service.systemd.manager, service.store.service):
        path.unlink(missing_ok=True)
    service.store.remove()
    _remove_empty(service.store.folder.parent)


def _watch(service: Service, units: Mapping[str, str] | None) -> None:
    """Have a timer check it from now on, or none."""
    if units is None:
        _unwatch(service)
        return
    for path in timer.place(units, service.unit_dir):
        service.tell(f"{path} was another one: it is kept as {path.name}.previous")
    service.systemd.reload()
    name = timer.timer_of(service.store.service)
    service.systemd.enable(name)
    if not service.systemd.start(name):
        raise DeployError(f"{name} could not be started", fix="install it with --no-timer")
    service.tell(f"{name} checks it from now on")


def _unwatch(service: Service) -> None:
    name = timer.timer_of(service.store.service)
    service.systemd.stop(name)
    service.systemd.disable(name)
    for path in timer.unneeded(service.unit_dir):
        path.unlink()


def _remove_unit(service: Service) -> None:
    service.systemd.disable(service.unit)
    service.unit_path.unlink(missing_ok=True)
    service.systemd.reload()


def _remove_empty(folder: Path) -> None:
    """The folders that hold services, when they hold none any more."""
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _require_own_unit(service: Service) -> None:
    """What stands where the unit is to stand must be ours to replace."""
    path = service.unit_path
    if not path.exists() and not path.is_symlink():
        return
    text = _unit_there(service)
    if text is not None and service.store.wrote(text):
        return
    move = shlex.join(["mv", str(path), f"{path}.mine"])
    ours = bool(service.store.numbers())
    raise DeployError(
        f"{path} is there, and no generation of this service has written it"
        + (" so (changed by hand?)" if ours else ""),
        fix=f"move it away first: {move}"
        + (f"; for changes there is systemctl edit {service.unit}" if ours else ""),
        exit_code=ExitCode.UNAVAILABLE,
    )


def _require_key(service: Service, number: int) -> None:
    """See that a generation's key is there before anything is stopped; systemd says "protocol error"."""
    file = None
    with suppress(DeployError):
        file = service.store.generation(number).api_key_file
    if file is not None:
        key_file.require(Path(file))


def _require_port(service: Service) -> None:
    """See that nobody else has the port of the current generation; the service does not run."""
    current, generation = service.store.current(), None
    with suppress(DeployError):
        generation = None if current is None else service.store.generation(current)
    if generation is not None and (holder := holder_of(generation.host, generation.port)):
        raise DeployError(
            f"port {generation.port} on {generation.host} is taken by {holder}",
            fix="end what has it, or give the service another port in its profile (service.port)",
            exit_code=ExitCode.UNAVAILABLE,
        )


def _stop(service: Service) -> tuple[str, ...]:
    running = processes(service.systemd, service.unit)
    service.systemd.stop(service.unit)
    deadline = time.monotonic() + _GONE_S
    while left := _left(service, running):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.5)
    return ()


def _left(service: Service, pids: frozenset[int]) -> tuple[str, ...]:
    """What of a stopped service is still there."""
    if not pids:
        return ()
    alive = sorted(pid for pid in pids if psutil.pid_exists(pid) and not _ended(pid))
    told = [f"process {pid} of {service.unit} still runs" for pid in alive]
    told += [
        f"process {process.pid} still holds memory of GPU {gpu.index}"
        for gpu in read_gpus().gpus
        for process in gpu.processes or ()
        if process.pid in pids
    ]
    current = service.store.current()
    # A generation that cannot be read tells no port; that must keep nobody from leaving it.
    with suppress(DeployError, OSError):
        if current is not None:
            generation = service.store.generation(current)
            socket.create_connection((generation.health_host, generation.port), timeout=2).close()
            told.append(f"port {generation.port} on {generation.health_host} still takes connections")
    return tuple(told)


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def processes(systemd: Manager, unit: str) -> frozenset[int]:
    """The processes of a unit that runs."""
    text = systemd.property(unit, "MainPID")
    pid = int(text) if text.isdigit() else 0
    if not pid:
        return frozenset()
    with suppress(psutil.Error):
        return frozenset({pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))})
    return frozenset({pid})


def _need_current(service: Service) -> int:
    current = service.store.current()
    if current is None:
        raise DeployError(
            f"service {service.store.service} has no generation that served",
            fix=f"{service.store.command('rollback', 'N')}, or install it again",
            exit_code=ExitCode.MISSING,
        )
    return current


def _why_not_started(service: Service) -> str:
    loaded = service.systemd.property(service.unit, "LoadState")
    if loaded == "masked":
        scope = "--user " if service.systemd.manager == "user" else ""
        return (
            f"{service.unit} is masked, so that nobody can start it: systemctl {scope}unmask {service.unit}"
        )
    if loaded in ("not-found", "bad-setting", "error"):
        what = loaded.replace("-", " ")
        return f"{service.unit} cannot be started: for systemd it is {what} ({service.unit_path})"
    said = service.systemd.last_lines(service.unit)
    result = service.systemd.property(service.unit, "Result")
    why = f" ({result})" if result not in ("", "success") else ""
    told = f"{service.unit} did not start{why}"
    return f"{told}; its last lines:\n{said}" if said else told


def _pending(operation: Operation, before: int | None, after: int | None, *, running: bool) -> PendingChange:
    process = identity_of(os.getpid()) or Identity(os.getpid(), 0)
    return PendingChange(operation=operation, before=before, after=after, running=running, process=process)


def base_url(generation: Generation) -> str:
    """Where a generation is asked from this machine."""
    return Launch((), generation.health_host, generation.port).base_url
