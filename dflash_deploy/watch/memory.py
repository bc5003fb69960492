"""What a server's VRAM is used for, as far as engine, log and driver tell. MiB are 2**20 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.sglang.http import MemoryUsage


@dataclass(frozen=True)
class Part:
    """One use of the card's memory.

    Attributes:
        name: ``weights``, ``draft``, ``state``, ``KV``, ``draft KV``, ``graphs``, ``other processes``, or
            ``rest`` for what nobody names (CUDA itself, work space).
    """

    name: str
    mib: int


def split(
    usage: MemoryUsage | None, boot: BootRecord | None, *, used_mib: int | None, others_mib: int | None
) -> tuple[Part, ...]:
    """The parts that are known, in that order; empty where none is.

    Args:
        usage: what the engine says now.
        boot: what its log said when it started; the only place that tells of the draft and of states.
        used_mib: what the card holds in all.
        others_mib: what other processes hold of it.
    """
    told = usage or MemoryUsage()
    boot_weights = boot.weights if boot else ()
    pools = boot.kv_pools if boot else ()
    known = (
        (
            "weights",
            _first(told.weights_gib, boot_weights[0].memory_gib if boot_weights else None),
        ),
        ("draft", sum(one.memory_gib for one in boot_weights[1:]) if len(boot_weights) > 1 else None),
        ("state", boot.state_cache.total_gib if boot and boot.state_cache else None),
        ("KV", _first(told.kv_gib, pools[0].memory_gib if pools else None)),
        ("draft KV", sum(one.memory_gib for one in pools[1:]) if len(pools) > 1 else None),
        (
            "graphs",
            _first(
                told.graphs_gib,
                sum(one.memory_gib for one in boot.graphs) if boot and boot.graphs else None,
            ),
        ),
    )
    parts = [Part(name, round(gib * 1024)) for name, gib in known if gib is not None and gib >= 0]
    if not parts:
        return ()
    if others_mib is not None:
        parts.append(Part("other processes", others_mib))
    if used_mib is not None and (rest := used_mib - sum(part.mib for part in parts)) >= 0:
        parts.append(Part("rest", rest))
    return tuple(parts)


def _first(*figures: float | None) -> float | None:
    return next((figure for figure in figures if figure is not None), None)
