"""One process at a time; the lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_deploy.errors import DeployError

_LONGEST_HOLDER = 64


@contextmanager
def exclusive(descriptor: int, *, busy: DeployError | Callable[[], DeployError]) -> Iterator[None]:
    """Hold an open file or folder for this process alone; it is closed in the end.

    Raises:
        DeployError: ``busy``, where another process holds it.
    """
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise (busy if isinstance(busy, DeployError) else busy()) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_file(path: Path, *, busy: Callable[[int | None], DeployError]) -> Iterator[None]:
    """Hold a lock file, which is made where it is missing and says which process holds it.

    Args:
        path: the file.
        busy: makes the error from the process that holds it, None where the file does not say.

    Raises:
        DeployError: ``busy``, where another process holds it.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def taken() -> DeployError:
        holder = os.pread(descriptor, _LONGEST_HOLDER, 0).strip()
        return busy(int(holder) if holder.isdigit() else None)

    with exclusive(descriptor, busy=taken):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
