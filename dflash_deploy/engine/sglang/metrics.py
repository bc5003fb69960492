"""What a serving SGLang counts of itself (``/metrics``, with ``--enable-metrics``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields

_LINE_LIMIT = 4096
_LINES_LIMIT = 50_000
_FIGURE_LIMIT = 1e15
_SHARES = {"spec_accept_rate", "token_usage", "mamba_usage"}
_SHARE_LIMIT = 1.01
_SAMPLE = re.compile(r'sglang:(\w{1,80})(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})? +(\S{1,40})')


@dataclass(frozen=True)
class Metrics:
    """The figures that this tool looks at; None where the server does not give one.

    ``prompt_tokens_total`` and ``generation_tokens_total`` grow when a request ends,
    ``realtime_tokens_total`` while it runs. Usages are shares from 0 to 1. The speculative figures are those
    of the last window the server logged (``--decode-log-interval`` decode steps), so a short request may not
    show in them. ``queue_s_total`` is what all requests have waited, ``queued_total`` how many did.
    """

    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None
    gen_throughput_tokens_per_s: float | None = None
    running_requests: float | None = None
    queued_requests: float | None = None
    token_usage: float | None = None
    state_usage: float | None = None
    kv_tokens: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cached_tokens_total: float | None = None
    realtime_tokens_total: float | None = None
    used_tokens: float | None = None
    verify_calls_total: float | None = None
    requests_total: float | None = None
    aborted_requests_total: float | None = None
    retracted_requests_total: float | None = None
    free_at_start_gib: float | None = None
    queue_s_total: float | None = None
    queued_total: float | None = None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# By field: the name after ``sglang:``, and how the ranks' values become one.
_SOURCES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "spec_accept_length": ("spec_accept_length", _mean),
    "spec_accept_rate": ("spec_accept_rate", _mean),
    "gen_throughput_tokens_per_s": ("gen_throughput", sum),
    "running_requests": ("num_running_reqs", sum),
    "queued_requests": ("num_queue_reqs", sum),
    "token_usage": ("token_usage", max),
    "state_usage": ("mamba_usage", max),
    "kv_tokens": ("max_total_num_tokens", sum),
    "prompt_tokens_total": ("prompt_tokens_total", sum),
    "generation_tokens_total": ("generation_tokens_total", sum),
    "cached_tokens_total": ("cached_tokens_total", sum),
    "realtime_tokens_total": ("realtime_tokens_total", sum),
    "used_tokens": ("num_used_tokens", sum),
    "verify_calls_total": ("spec_verify_calls_total", sum),
    "requests_total": ("num_requests_total", sum),
    "aborted_requests_total": ("num_aborted_requests_total", sum),
    "retracted_requests_total": ("num_retracted_requests_total", sum),
    "queue_s_total": ("queue_time_seconds_sum", sum),
    "queued_total": ("queue_time_seconds_count", sum),
    "free_at_start_gib": ("startup_available_gpu_memory_gb", min),
}


def parse(text: str) -> Metrics:
    """Read Prometheus text; lines that are not understood are passed over."""
    wanted = {name for name, _ in _SOURCES.values()}
    samples: dict[str, list[float]] = {}
    for line in text.splitlines()[:_LINES_LIMIT]:
        match = _SAMPLE.match(line[:_LINE_LIMIT])
        if match is None or match[1] not in wanted:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        # Nothing that is counted here is below zero, NaN or out of this world.
        if 0 <= value < (_SHARE_LIMIT if match[1] in _SHARES else _FIGURE_LIMIT):
            samples.setdefault(match[1], []).append(value)
    found = {
        field.name: combine(samples[name])
        for field in fields(Metrics)
        for name, combine in [_SOURCES[field.name]]
        if name in samples
    }
    return Metrics(**found)
