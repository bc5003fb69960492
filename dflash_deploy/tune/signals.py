"""Ctrl-C and SIGTERM, once: what runs is stopped in order, and further ones cannot cut that short."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_once() -> Iterator[None]:
    """Within, the first of these signals raises KeyboardInterrupt, and all later ones are ignored.

    Stopping a server takes seconds at most, since it is bounded by SIGKILL. A hangup that is ignored already
    (``nohup``) stays so.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    hangup_matters = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = _STOPPING if hangup_matters else _STOPPING[:2]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
