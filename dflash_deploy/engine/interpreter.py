"""Programs of an environment asked something: bounded in time and in what is kept of their output."""

from __future__ import annotations

import logging
import os
import pwd
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_KEPT_BYTES = 8 << 20
_LOOK_S = 0.2


@dataclass(frozen=True)
class Answer:
    """What a program said, the last 8 MiB of it.

    Attributes:
        status: that it ended with; None where it was ended after its time.
        errors: its standard error, empty where that was not kept.
    """

    status: int | None
    output: bytes
    errors: bytes


def ask(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    errors: Literal["kept", "shown", "dropped"] = "dropped",
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Answer:
    """Run a program to its end, or to the end of its time; nothing of its process group is left.

    No bytecode is written by an interpreter that is asked. Where root runs another user's program, that is
    told on standard error: whoever owns it could do as root what root does with it.

    Args:
        command: program and arguments.
        timeout_s: after which it is ended.
        errors: what becomes of its standard error.
        folder: that it runs in.
        env: environment variables beside those of this process.

    Raises:
        OSError: it cannot be started.
    """
    _warn_of_owner(str(command[0]))
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr={"kept": subprocess.PIPE, "shown": None, "dropped": subprocess.DEVNULL}[errors],
        cwd=folder,
        start_new_session=True,
        env={**os.environ, **(env or {}), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    kept: dict[int, bytearray] = {}
    with process, selectors.DefaultSelector() as selector:
        try:
            for stream in filter(None, (process.stdout, process.stderr)):
                selector.register(stream, selectors.EVENT_READ)
                kept[stream.fileno()] = bytearray()
            ended = _read(process, selector, kept, time.monotonic() + timeout_s)
        finally:
            # Not yet reaped, so the group is still the one that this process leads.
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        output, *rest = (bytes(tail[-_KEPT_BYTES:]) for tail in kept.values())
    return Answer(status if ended else None, output, rest[0] if rest else b"")


def owner_besides_root(program: Path) -> str | None:
    """The first user but root who owns a program that root would run, or the folder it lies in.

    None for any other user than root, and for a program that cannot be looked at.
    """
    if os.geteuid() != 0:
        return None
    for place in (program, program.parent, program.resolve(), program.resolve().parent):
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        if owner != 0:
            try:
                return pwd.getpwuid(owner).pw_name
            except KeyError:
                return f"user {owner}"
    return None


@cache
def _warn_of_owner(program: str) -> None:
    owner = owner_besides_root(Path(program))
    if owner is not None:
        logging.getLogger(__name__).warning(
            "note: %s belongs to %s and is run as root, so that %s could act as root: run this as %s "
            "(sudo -u %s …), or use an environment of root's own",
            *(program, owner, owner, owner, owner),
        )


def _read(
    process: subprocess.Popen[bytes],
    selector: selectors.BaseSelector,
    kept: dict[int, bytearray],
    deadline: float,
) -> bool:
    """Read until the program has ended and nothing more comes; False where its time is over before."""
    while (left_s := deadline - time.monotonic()) > 0:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if ended:
            # Whatever it left running would go on talking.
            os.killpg(process.pid, signal.SIGKILL)
        found = selector.select(0 if ended else min(left_s, _LOOK_S))
        if ended and not found:
            return True
        for key, _ in found:
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                selector.unregister(key.fileobj)
            tail = kept[key.fd]
            tail += chunk
            if len(tail) > 2 * _KEPT_BYTES:
                del tail[:-_KEPT_BYTES]
        if not ended and not selector.get_map():
            time.sleep(min(left_s, 0.01))
    return False
