"""GPU memory that stays with processes which have ended."""

from __future__ import annotations

import time
from collections.abc import Collection

from dflash_deploy.machine.gpu import read_gpus

_POLL_S = 0.5


def held_memory(pids: Collection[int], within_s: float) -> tuple[str, ...]:
    """GPU memory that the driver still counts for these processes after ``within_s``, in words.

    The driver takes a moment to give a killed process's memory back; where there is no driver there is
    nothing to hold.
    """
    deadline = time.monotonic() + within_s
    while True:
        held = tuple(
            f"GPU {gpu.index} still holds {_amount(process.vram_mib)} of process {process.pid}"
            for gpu in read_gpus().gpus
            for process in gpu.processes or ()
            if process.pid in pids
        )
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(_POLL_S)


def _amount(vram_mib: int | None) -> str:
    return "memory" if vram_mib is None else f"{vram_mib} MiB (measured)"
