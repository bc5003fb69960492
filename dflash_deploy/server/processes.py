"""Processes by identity: found, and ended, never by name and never by a number alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.machine.text import printable

TOKEN_VARIABLE = "DFLASH_DEPLOY_SERVER"  # noqa: S105
"""Environment variable that marks every process of one server with the server's token."""

_PROC = Path("/proc")
_ENVIRON_LIMIT_BYTES = 1 << 20
_POLL_S = 0.05


@dataclass(frozen=True)
class Identity:
    """A process for good: the kernel gives a number again, but not with the same start.

    ``start_ticks`` is the start in clock ticks since boot (field 22 of ``/proc/<pid>/stat``), which no
    change of the wall clock touches.
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class _Process:
    identity: Identity
    parent: int
    session: int
    zombie: bool


def boot_id() -> str:
    """Identifies this boot of the machine; numbers and starts of processes mean nothing in another one.

    Empty where a sandbox hides it.
    """
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Identifies the set of processes that is seen from here; a container sees another one than its host.

    Empty where a sandbox hides it.
    """
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def identity_of(pid: int) -> Identity | None:
    """Who has this number now; None if nobody. A process that has ended but was not reaped still has it."""
    process = _read(pid)
    return process.identity if process else None


def alive(identity: Identity) -> bool:
    """This very process still runs."""
    process = _read(identity.pid)
    return process is not None and process.identity == identity and not process.zombie


def send(identity: Identity, signum: signal.Signals) -> None:
    """Signal this very process; nothing happens if it is gone or another has its number."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, or a container whose rules are older than the call
        with suppress(ProcessLookupError, PermissionError):
            if identity_of(identity.pid) == identity:
                os.kill(identity.pid, signum)
        return
    try:
        # The descriptor holds on to one process, so the one that is checked is the one that is signalled.
        if identity_of(identity.pid) == identity:
            signal.pidfd_send_signal(descriptor, signum)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(descriptor)


def members(main: Identity, token: str, known: Iterable[Identity] = ()) -> tuple[Identity, ...]:
    """Every running process of a server.

    Those are: the main process, its session and its descendants as long as the main process holds its number
    (running, or ended and not reaped); every process that carries the token; those known from before; and
    the descendants of all of them. A process that only has a number in common with one of them is not.
    """
    table = {process.identity.pid: process for process in _all()}
    main_stands = main.pid in table and table[main.pid].identity == main
    ours = {identity.pid for identity in known if identity in {p.identity for p in table.values()}}
    for pid, process in table.items():
        if (main_stands and main.pid in (pid, process.session)) or _carries(pid, token):
            ours.add(pid)
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    unvisited = list(ours)
    while unvisited:
        new = [child for child in children.get(unvisited.pop(), []) if child not in ours]
        ours.update(new)
        unvisited.extend(new)
    ours.discard(os.getpid())
    return tuple(table[pid].identity for pid in sorted(ours) if not table[pid].zombie)


def writers(pipe: int) -> tuple[Identity, ...]:
    """Every process but this one that has a pipe open, given its inode, as far as can be seen."""
    others = (process.identity for process in _all() if process.identity.pid != os.getpid())
    return tuple(other for other in others if f"pipe:[{pipe}]" in open_files(other.pid))


def open_files(pid: int) -> frozenset[str]:
    """What a process has open, as far as can be seen."""
    found = set()
    with suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # closed just now; the others are open all the same
                found.add(str(descriptor.readlink()))
    return frozenset(found)


def end(
    main: Identity, token: str, known: Iterable[Identity] = (), *, within_s: float = 30.0
) -> tuple[str, ...]:
    """Kill every process of a server and wait until all are gone.

    Returns:
        Those that still stand after ``within_s``, in words.
    """
    known = tuple(known)
    deadline = time.monotonic() + within_s
    while left := members(main, token, known):
        # Those that are found now may lose what they were found by (a parent, a session) with the others.
        known = tuple({*known, *left})
        for identity in left:
            send(identity, signal.SIGKILL)
        if time.monotonic() > deadline:
            return tuple(
                f"process {identity.pid} ({name_of(identity.pid)}) does not end" for identity in left
            )
        time.sleep(_POLL_S)
    return ()


def name_of(pid: int) -> str:
    """The process's short name, for a message."""
    try:
        return printable((_PROC / str(pid) / "comm").read_text(errors="replace").strip())
    except OSError:
        return "name unknown"


def _all() -> Iterator[_Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (process := _read(int(entry.name))):
            yield process


def _read(pid: int) -> _Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold blanks and brackets itself; the rest starts with field 3, the state.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return _Process(
        identity=Identity(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        zombie=fields[0] in (b"Z", b"X"),
    )


def _carries(pid: int, token: str) -> bool:
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            environ = file.read(_ENVIRON_LIMIT_BYTES)
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in environ.split(b"\0")
