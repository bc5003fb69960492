"""The card while it worked: clocks, power, heat, what held it back, memory. All is measured."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dflash_deploy.bench.measurement import Quantiles
from dflash_deploy.machine.clocks import HELD_BACK
from dflash_deploy.machine.gpu import GpuSample

EVERY_S = 0.25


@dataclass(frozen=True)
class Telemetry:
    """What the samples of one card came to; None where the driver never told.

    Attributes:
        samples: looks at the card that were answered.
        clock_reasons: share of the samples in which each reason set the clocks.
        throttled: share of the samples in which heat or the power supply held the card back.
        vram_peak_mib: highest use of memory that was seen.
    """

    samples: int
    clock_sm_mhz: Quantiles | None
    clock_memory_mhz: Quantiles | None
    power_w: Quantiles | None
    temperature_c: Quantiles | None
    clock_reasons: dict[str, float]
    throttled: float
    vram_peak_mib: int | None

    @classmethod
    def of(cls, seen: Sequence[GpuSample]) -> Self | None:
        """What samples come to; None where there is none."""
        if not seen:
            return None
        vram = [one.vram_used_mib for one in seen if one.vram_used_mib is not None]
        reasons = Counter(reason for one in seen for reason in one.clock_reasons or ())
        return cls(
            samples=len(seen),
            clock_sm_mhz=Quantiles.of(one.clock_sm_mhz for one in seen if one.clock_sm_mhz is not None),
            clock_memory_mhz=Quantiles.of(
                one.clock_memory_mhz for one in seen if one.clock_memory_mhz is not None
            ),
            power_w=Quantiles.of(one.power_w for one in seen if one.power_w is not None),
            temperature_c=Quantiles.of(one.temperature_c for one in seen if one.temperature_c is not None),
            clock_reasons={reason: count / len(seen) for reason, count in reasons.most_common()},
            throttled=sum(bool(HELD_BACK & set(one.clock_reasons or ())) for one in seen) / len(seen),
            vram_peak_mib=max(vram, default=None),
        )


class GpuWatch:
    """Looks at a card from a thread of its own while the block runs.

    The driver may take long to answer, which must not hold up the streams that are being timed.

    Args:
        look: one sample, or None where the card does not answer.
        every_s: between two looks.
    """

    def __init__(self, look: Callable[[], GpuSample | None], every_s: float = EVERY_S) -> None:
        self._look = look
        self._every_s = every_s
        self._samples: list[GpuSample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        # A driver that hangs is left behind.
        self._thread.join(5.0)

    def _watch(self) -> None:
        while True:
            sample = self._look()
            if sample is not None:
                self._samples.append(sample)
            if self._ended.wait(self._every_s):
                return

    def telemetry(self) -> Telemetry | None:
        """What was seen until now; None where the card never answered."""
        return Telemetry.of(list(self._samples))
