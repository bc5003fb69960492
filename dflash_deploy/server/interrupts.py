"""Being told to stop, from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise ``KeyboardInterrupt`` as Ctrl-C does, so every server is stopped.

    Only for the main thread. A signal that is ignored (``nohup``) stays ignored.
    """

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
