"""Programs of an environment asked something: bounded in time and in what is kept of their output."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
) -> Answer:
    """Run a program to its end, or to the end of its time; nothing of its process group is left.

    No bytecode is written by an interpreter that is asked.

    Args:
        command: program and arguments.
        timeout_s: after which it is ended.
        errors: what becomes of its standard error.
        folder: that it runs in.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr={"kept": subprocess.PIPE, "shown": None, "dropped": subprocess.DEVNULL}[errors],
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
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
