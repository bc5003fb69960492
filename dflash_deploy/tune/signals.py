"""Ctrl-C and SIGTERM: what runs is stopped in order, and impatience cannot cut that short."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEAF_S = 60.0
"""Longer than stopping a server takes, which is bounded by SIGKILL. After that a signal counts again: Python
may have dropped the first one's exception, in a destructor for instance."""
_AGAIN_S = 0.01
_LOOPS = ("_lazy_init", "close")

_Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass
class Asked:
    """Whether somebody has asked to stop.

    Attributes:
        politely: by one Ctrl-C, in a part that was to be finished first.
        finishing: such a part runs; ``on_asked`` is told when Ctrl-C comes meanwhile.
    """

    politely: bool = False
    finishing: bool = False
    on_asked: Callable[[], None] = lambda: None

    @contextmanager
    def finished_first(self, on_asked: Callable[[], None]) -> Iterator[None]:
        """Within, the first Ctrl-C only asks: the second one stops at once, as any other signal does."""
        self.finishing, self.on_asked = True, on_asked
        try:
            yield
        finally:
            self.finishing = False


@contextmanager
def stop_once() -> Iterator[Asked]:
    """Within, one of these signals raises KeyboardInterrupt, and those that follow it closely do nothing.

    Nor do they afterwards, for the program then ends as it was asked to. A hangup that is ignored already
    (``nohup``) stays so.
    """
    asked = Asked()
    last = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if _is_swallowed(frame):
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        if number == signal.SIGINT and asked.finishing and not asked.politely:
            asked.politely = True
            asked.on_asked()
            return
        now = time.monotonic()
        if now - last > _DEAF_S:
            last = now
            # What is cut short is awaited by nobody, which is no news.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            raise KeyboardInterrupt

    hangup_matters = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = _STOPPING if hangup_matters else _STOPPING[:2]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield asked
    finally:
        if last == -math.inf:
            _handle(before)
        else:
            # Python takes its own handlers away before it has ended.
            atexit.register(_handle, dict.fromkeys(numbers, signal.SIG_IGN))


def _handle(handlers: Mapping[signal.Signals, _Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _is_swallowed(frame: FrameType | None) -> bool:
    """Whatever is raised here comes out as something else.

    In what pydantic calls while it writes JSON, as a fault of the value; while asyncio makes a loop or takes
    it apart, as a half-made loop that complains of itself.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("pydantic.") or (module == "asyncio.runners" and frame.f_code.co_name in _LOOPS):
            return True
        frame = frame.f_back
    return False
