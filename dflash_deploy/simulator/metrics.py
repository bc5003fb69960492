"""Prometheus text, by SGLang's names."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_deploy.simulator.scheduler import Scheduler

_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)


@dataclass
class Histogram:
    """Counts by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(_BUCKETS, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        """As Prometheus reads it."""
        out = [f"# TYPE {name} histogram"]
        sum_so_far = 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self.counts, strict=True):
            sum_so_far += count
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {sum_so_far}')
        out += [f"{name}_sum{{{labels}}} {self.total}", f"{name}_count{{{labels}}} {sum_so_far}"]
        return out


@dataclass
class Timings:
    """Distributions over requests, in simulated seconds."""

    first_token: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)


def render(scheduler: Scheduler, timings: Timings) -> str:
    """The whole page."""
    settings, pools, sums = scheduler.up.settings, scheduler.up.pools, scheduler.counters
    name = settings.served_model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'model_name="{name}",engine_type="unified",tp_rank="0",pp_rank="0"'
    used = scheduler.used_tokens
    cached = scheduler.cache.tokens
    prompt = sums.prompt_tokens
    gauges: dict[str, float] = {
        "num_running_reqs": len(scheduler.running),
        "num_queue_reqs": len(scheduler.waiting),
        "num_retracted_reqs": 0,
        "num_paused_reqs": 0,
        "num_used_tokens": used,
        "kv_used_tokens": used,
        "kv_available_tokens": pools.tokens - used - cached,
        "kv_evictable_tokens": cached,
        "token_usage": used / pools.tokens,
        "full_token_usage": used / pools.tokens,
        "max_total_num_tokens": pools.tokens,
        "gen_throughput": scheduler.last_throughput,
        "cache_hit_rate": sums.cached_tokens / prompt if prompt else 0.0,
        "context_len": settings.context_length,
        "page_size": settings.page_size,
        "num_pages": pools.tokens // settings.page_size,
        "mamba_used_tokens": len(scheduler.running),
        "mamba_available_tokens": max(0, pools.slots - len(scheduler.running)),
        "mamba_evictable_tokens": 0,
        "mamba_usage": len(scheduler.running) / pools.slots if pools.slots else 0.0,
        "startup_available_gpu_memory_gb": scheduler.up.free_gib,
        "weight_memory_usage_gb": scheduler.up.weights_gib,
        "kv_cache_memory_usage_gb": pools.kv,
        "is_cuda_graph": float(bool(scheduler.up.speed.captured)),
    }
    if settings.speculation is not None:
        gauges["spec_accept_length"] = scheduler.accept_length or 0.0
        gauges["spec_accept_rate"] = scheduler.accept_rate or 0.0
        gauges["spec_num_steps"] = settings.speculation.steps
        gauges["spec_num_draft_tokens"] = settings.speculation.draft_tokens
    counters = {
        "prompt_tokens_total": sums.prompt_tokens,
        "generation_tokens_total": sums.generated_tokens,
        "cached_tokens_total": sums.cached_tokens,
        "num_requests_total": sums.finished,
        "num_aborted_requests_total": sums.aborted,
        "num_retracted_requests_total": sums.retracted,
        "spec_verify_calls_total": sums.verify_steps,
        "cuda_graph_passes_total": sums.graph_steps,
    }
    lines: list[str] = []
    for key, value in gauges.items():
        lines += [f"# TYPE sglang:{key} gauge", f"sglang:{key}{{{labels}}} {value}"]
    for key, count in counters.items():
        lines += [f"# TYPE sglang:{key} counter", f"sglang:{key}{{{labels}}} {count}"]
    lines += timings.first_token.lines("sglang:time_to_first_token_seconds", labels)
    lines += timings.end_to_end.lines("sglang:e2e_request_latency_seconds", labels)
    lines += timings.queue.lines("sglang:queue_time_seconds", labels)
    return "\n".join(lines) + "\n"
