"""A trial's figures against what the profile wants: the objective's value, and limits that were broken."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_deploy.bench.measurement import Measurement
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.profile.schema import Goal, Limit, Limited, Profile

LESS_IS_BETTER: frozenset[Goal] = frozenset({"latency_s"})


def limits_of(profile: Profile) -> Mapping[Limited, Limit]:
    """The profile's limits, and the one that goes without saying: each user's context fits."""
    promised = Limit(min=float(profile.workload.context_tokens))
    return {"context_tokens": promised, **profile.objective.constraints}


def figures(measured: Measurement, boot: BootRecord, users: int) -> dict[Limited, float | None]:
    """What is held against the limits: the worst round or user, for a limit holds for all of them.

    None is what could not be told here, such as free VRAM without a card.
    """
    used, total = measured.vram_used_mib, measured.vram_total_mib
    return {
        "total_tokens_per_s": measured.total_tokens_per_s.low,
        "user_tokens_per_s": measured.user_tokens_per_s.low,
        "ttft_p95_s": measured.ttft_p95_s,
        "latency_s": measured.latency_s.high,
        "context_tokens": _context_per_user(boot, users),
        "free_vram_mib": None if used is None or total is None else total - used,
    }


def violations(found: Mapping[Limited, float | None], limits: Mapping[Limited, Limit]) -> dict[str, float]:
    """By limit, how far it is broken, as a share of the limit."""
    broken: dict[str, float] = {}
    for name, limit in limits.items():
        value = found.get(name)
        if value is None:
            continue
        if limit.min is not None and value < limit.min:
            broken[name] = (limit.min - value) / (abs(limit.min) or 1.0)
        if limit.max is not None and value > limit.max:
            broken[name] = (value - limit.max) / (abs(limit.max) or 1.0)
    return broken


def unchecked(found: Mapping[Limited, float | None], limits: Mapping[Limited, Limit]) -> tuple[str, ...]:
    """Limits whose figure could not be told."""
    return tuple(name for name in limits if found.get(name) is None)


def describe(
    broken: Mapping[str, float], found: Mapping[Limited, float | None], limits: Mapping[Limited, Limit]
) -> str:
    """Broken limits in words: the figure, and what it should have been."""
    parts = []
    for name, limit in limits.items():
        value = found.get(name)
        if name in broken and value is not None:
            low = limit.min is not None and value < limit.min
            bound = limit.min if low else limit.max
            parts.append(f"{name} {value:.4g}, wanted at {'least' if low else 'most'} {bound:g}")
    return "; ".join(parts)


def objective_value(goal: Goal, measured: Measurement, boot: BootRecord, users: int) -> float | None:
    """The figure to make best, as the median over rounds."""
    match goal:
        case "total_tokens_per_s":
            return measured.total_tokens_per_s.median
        case "user_tokens_per_s":
            return measured.user_tokens_per_s.median
        case "latency_s":
            return measured.latency_s.median
        case "context_tokens":
            return _context_per_user(boot, users)


def _context_per_user(boot: BootRecord, users: int) -> float | None:
    """Tokens for each user when all are there: the pool shared out, within the model's own limit."""
    if boot.kv_tokens is None:
        return None
    share = boot.kv_tokens // users
    return float(share if boot.context_tokens is None else min(share, boot.context_tokens))
