"""The VRAM budget of one configuration, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dflash_deploy.engine.boot import Stage
    from dflash_deploy.engine.launch import FlagValue


class Pool(NamedTuple):
    """One use of the card's memory; ``exact`` where it follows from the engine's own arithmetic."""

    name: str
    mib: float
    kind: Literal["exact", "empirical"]


@dataclass(frozen=True)
class Advice:
    """One change that would make a configuration fit, or serve more.

    Attributes:
        text: what it brings, with predicted figures.
        flags: the flags to set; None takes one away.
        cost: what is given up for it.
        makes_fit: the configuration does not fit as it is, and does with this.
        last_resort: much is given up for it.
    """

    id: str
    text: str
    flags: Mapping[str, FlagValue | None]
    cost: str
    makes_fit: bool = False
    last_resort: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """What a configuration will take, before anything is launched. Every figure is predicted, for one card.

    Attributes:
        sizes: MiB of all uses of memory at the peak, by name, but for what the driver keeps; ``pools`` has
            the kind of each besides.
        exact: names of those that follow from the engine's own arithmetic.
        reserved: MiB that the sizing leaves free (slack, images), by name; graphs and workspaces stand in it.
        kv_tokens: tokens that the KV pool holds.
        window_tokens: tokens of the pool of window layers, 0 without such layers.
        state_slots: slots of the recurrent-state cache, zero for a model without one.
        max_running_requests: requests at once after the engine's own clamping.
        context_per_user: tokens for each of the profile's users.
        predicted_peak_mib: used memory at the peak, as the driver's tools show it.
        ready_free_mib: free memory when the server says that it is ready.
        driver_mib: kept by the driver, neither used nor free.
        fails_at: the stage where the start, or the first requests, would end; None where it serves.
        failure: the engine's message there, or None.
        certain: the failure follows from the engine's own arithmetic alone, given the memory at the start.
        binding_pool: the pool that limits what is served, or that there is no room for; None where a flag
            does.
        unknown: what is not known of the model, and how it was planned all the same.
        margin_mib: what the unknown may add to the peak.
        warnings: what the engine would do silently or with a warning only.
    """

    sizes: Mapping[str, float]
    exact: frozenset[str]
    reserved: Mapping[str, float]
    kv_tokens: int
    state_slots: int
    slots_per_request: int
    max_running_requests: int
    context_per_user: int
    predicted_peak_mib: float
    total_mib: int
    fails_at: Stage | None = None
    failure: str | None = None
    certain: bool = False
    binding_pool: str | None = None
    window_tokens: int = 0
    ready_free_mib: float = 0.0
    driver_mib: float = 0.0
    unknown: tuple[str, ...] = ()
    margin_mib: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def headroom_mib(self) -> float:
        """Memory left at the peak; negative where it does not fit."""
        return self.total_mib - self.driver_mib - self.predicted_peak_mib

    @property
    def fits(self) -> bool:
        """The server would start and serve."""
        return self.fails_at is None and self.headroom_mib >= 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All uses of memory at the peak, in the order in which a start takes them."""
        return tuple(
            Pool(name, mib, "exact" if name in self.exact else "empirical")
            for name, mib in self.sizes.items()
        )

    def pool_mib(self, name: str) -> float:
        """Size of a pool, 0 where there is none of that name."""
        return self.sizes.get(name, 0.0)

    def as_json(self, advice: tuple[Advice, ...] = ()) -> dict[str, object]:
        """The documented keys, ready for ``json.dumps``."""
        return {
            "kind": "predicted",
            "pools": {pool.name: {"mib": round(pool.mib, 3), "kind": pool.kind} for pool in self.pools},
            "reserves": {
                name: {"mib": round(mib, 3), "kind": "exact"} for name, mib in self.reserved.items()
            },
            "kv_tokens": self.kv_tokens,
            "window_tokens": self.window_tokens,
            "state_slots": self.state_slots,
            "slots_per_request": self.slots_per_request,
            "max_running_requests": self.max_running_requests,
            "context_per_user": self.context_per_user,
            "predicted_peak_mib": round(self.predicted_peak_mib, 1),
            "ready_free_mib": round(self.ready_free_mib, 1),
            "headroom_mib": round(self.headroom_mib, 1),
            "margin_mib": round(self.margin_mib, 1),
            "driver_mib": round(self.driver_mib, 1),
            "total_mib": self.total_mib,
            "fits": self.fits,
            "fails_at": None if self.fails_at is None else str(self.fails_at),
            "failure": self.failure,
            "certain": self.certain,
            "binding_pool": self.binding_pool,
            "unknown": list(self.unknown),
            "warnings": list(self.warnings),
            "advice": [
                {"id": one.id, "text": one.text, "flags": _plain(one.flags), "cost": one.cost}
                for one in advice
            ],
        }


def _plain(flags: Mapping[str, FlagValue | None]) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
