"""The VRAM budget of one configuration, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflash_deploy.engine.boot import Stage


@dataclass(frozen=True)
class Pool:
    """One use of the card's memory; ``exact`` where it follows from the engine's own arithmetic."""

    name: str
    mib: float
    kind: Literal["exact", "empirical"]


@dataclass(frozen=True)
class Budget:
    """What a configuration will take, before anything is launched. Every figure is predicted.

    Attributes:
        kv_tokens: tokens that the KV pool holds.
        state_slots: slots of the recurrent-state cache, zero for a model without one.
        max_running_requests: requests at once after the engine's own clamping.
        context_per_user: tokens for each of the profile's users.
        fails_at: the stage where the start would end, or None.
        failure: the engine's message there, or None.
    """

    pools: tuple[Pool, ...]
    kv_tokens: int
    state_slots: int
    slots_per_request: int
    max_running_requests: int
    context_per_user: int
    predicted_peak_mib: float
    total_mib: int
    fails_at: Stage | None = None
    failure: str | None = None

    @property
    def headroom_mib(self) -> float:
        """Memory left at the peak; negative where it does not fit."""
        return self.total_mib - self.predicted_peak_mib

    @property
    def fits(self) -> bool:
        """The server would start and serve."""
        return self.fails_at is None and self.headroom_mib >= 0
