"""What a health check says: layers, each with a verdict, and the verdict of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Verdict(IntEnum):
    """How well a layer is; the numbers are the exit statuses of monitoring plugins."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_WORST_FIRST = (Verdict.CRITICAL, Verdict.WARNING, Verdict.UNKNOWN, Verdict.OK)


@dataclass(frozen=True)
class Figure:
    """One number, measured unless the server is simulated.

    Attributes:
        name: lower case and underscores, without its unit.
        unit: ``s``, ``mib``, ``celsius``, ``watts``, ``tokens``, ``tokens_per_s``, ``ratio``, ``count``.
        warning: limit that it is held against, where there is one; so ``critical``.
        gpu: NVML index of the card that it belongs to.
    """

    name: str
    value: float
    unit: str
    warning: float | None = None
    critical: float | None = None
    gpu: int | None = None


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        text: what was found, one line.
        fix: the command that helps, or None.
        needed: when it cannot be told, neither can the whole.
    """

    name: str
    verdict: Verdict
    text: str
    fix: str | None = None
    figures: tuple[Figure, ...] = ()
    needed: bool = False


@dataclass(frozen=True)
class Health:
    """All layers of one service at one moment.

    Attributes:
        starting: systemd waits for it; nothing that does not answer yet is held against it.
        pid: its main process, where that is known.
        simulated: the server is the simulator, and so are the figures that come from it.
    """

    service: str
    layers: tuple[Layer, ...]
    took_s: float
    starting: bool = False
    pid: int | None = None
    simulated: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst that counts: critical, then warning, then a needed layer that cannot be told."""
        counted = [
            layer.verdict for layer in self.layers if layer.verdict is not Verdict.UNKNOWN or layer.needed
        ]
        return next((verdict for verdict in _WORST_FIRST if verdict in counted), Verdict.UNKNOWN)

    @property
    def worst(self) -> tuple[Layer, ...]:
        """The layers that make the verdict what it is; none where all is well."""
        if self.verdict is Verdict.OK:
            return ()
        return tuple(
            layer
            for layer in self.layers
            if layer.verdict is self.verdict and (layer.needed or layer.verdict is not Verdict.UNKNOWN)
        )
