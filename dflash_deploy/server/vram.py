"""GPU memory before a server and after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_deploy.machine.gpu import GpuProcess, read_gpus
from dflash_deploy.machine.text import printable

_NOISE_MIB = 512
"""What desktops and contexts of other programs come and go by."""
_POLL_S = 0.5


@dataclass(frozen=True)
class CardUse:
    """What stands on one card at one moment."""

    used_mib: int
    processes: tuple[GpuProcess, ...]


def read_use(environ: Mapping[str, str]) -> Mapping[int, CardUse]:
    """Memory in use (measured) on every card that a server with this environment sees, by NVML index.

    Empty where there is no card, no driver, or none that tells its memory.
    """
    reading = read_gpus(environ)
    return {
        gpu.index: CardUse(gpu.memory_used_mib, gpu.processes or ())
        for gpu in reading.readable
        if gpu.memory_used_mib is not None and (reading.visible is None or gpu.index in reading.visible)
    }


def not_returned(
    before: Mapping[int, CardUse], environ: Mapping[str, str], *, within_s: float
) -> tuple[str, ...]:
    """Cards whose memory is not back at what it was before, in words, with the processes that are new there.

    The driver takes a moment to give a killed process's memory back.
    """
    deadline = time.monotonic() + within_s
    while True:
        after = read_use(environ) if before else {}
        grown = {index: use for index, use in after.items() if _growth_mib(before, index, use) > _NOISE_MIB}
        if not grown or time.monotonic() > deadline:
            return tuple(_describe(before[index], index, use) for index, use in grown.items())
        time.sleep(_POLL_S)


def _growth_mib(before: Mapping[int, CardUse], index: int, use: CardUse) -> int:
    return use.used_mib - before[index].used_mib if index in before else 0


def _describe(before: CardUse, index: int, after: CardUse) -> str:
    known = {process.pid for process in before.processes}
    new = [f"process {p.pid} ({printable(p.name)})" for p in after.processes if p.pid not in known]
    growth = f"GPU {index} holds {after.used_mib - before.used_mib} MiB more than before the start (measured)"
    return f"{growth}: {', '.join(new)}" if new else f"{growth}; no new process is seen on it"
