"""Ctrl-C and SIGTERM, once: what runs is stopped in order, and impatience cannot cut that short."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEAF_S = 60.0
"""Longer than stopping a server takes, which is bounded by SIGKILL. After that a signal counts again: Python
may have dropped the first one's exception, in a destructor for instance."""


@contextmanager
def stop_once() -> Iterator[None]:
    """Within, one of these signals raises KeyboardInterrupt, and those that follow it closely do nothing.

    A hangup that is ignored already (``nohup``) stays so.
    """
    last = -math.inf

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _DEAF_S:
            last = now
            raise KeyboardInterrupt

    hangup_matters = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = _STOPPING if hangup_matters else _STOPPING[:2]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
