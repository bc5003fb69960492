"""Asking what may never answer: a driver that hangs, a name server, a bus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def within(timeout_s: float, calls: Sequence[Callable[[], _T]]) -> list[_T | None]:
    """Make all calls at once; None for each that has not come back in time.

    A call that hangs is left behind in a thread that does not keep the program from ending.
    """
    answers: list[_T | None] = [None] * len(calls)

    def ask(place: int) -> None:
        answers[place] = calls[place]()

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(len(calls))]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(answers)
