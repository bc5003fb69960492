"""One process at a time; the lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_deploy.errors import DeployError


@contextmanager
def exclusive(descriptor: int, *, busy: DeployError) -> Iterator[None]:
    """Hold an open file or folder for this process alone; it is closed in the end.

    Raises:
        DeployError: ``busy``, where another process holds it.
    """
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield
    finally:
        os.close(descriptor)
