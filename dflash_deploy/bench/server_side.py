"""What a server says of the load that it has just been through."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.engine.sglang import http, metrics

_ASK_S = 10.0
_MOST = 1e15


@dataclass(frozen=True)
class Standing:
    """What it has counted and averaged until one moment."""

    metrics: metrics.Metrics | None
    accept_length: float | None


@dataclass(frozen=True)
class ServerFigures:
    """The server's own view of a load, from what it counted before and after; None where it does not say.

    Attributes:
        accept_length: tokens per verify step. From the counters of this load where the server has them
            (``--enable-metrics``), else its average since it started.
        accept_length_since_start: the latter was taken.
        accept_rate: of the last window that it logged.
        queue_s: mean time that a request waited in its queue.
        generated_tokens: that it counted.
        cached_tokens: prompt tokens found in its prefix cache.
        retracted: requests that were put back into the queue for lack of memory.
        aborted: requests that it gave up.
    """

    accept_length: float | None = None
    accept_length_since_start: bool = False
    accept_rate: float | None = None
    queue_s: float | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    retracted: int | None = None
    aborted: int | None = None


def standing(endpoint: Endpoint) -> Standing:
    """Ask ``/metrics`` and ``/server_info``; not to be called from a coroutine."""
    if endpoint.engine != "sglang":
        return Standing(None, None)
    text = http.get_text(endpoint.base_url, "/metrics", timeout_s=_ASK_S, api_key=endpoint.api_key)
    info = http.server_info(endpoint.base_url, timeout_s=_ASK_S, api_key=endpoint.api_key)
    return Standing(metrics.parse(text) if text else None, info.accept_length if info else None)


def between(before: Standing, after: Standing) -> ServerFigures | None:
    """The load that lies between two moments; None of a server that says nothing."""
    old, new = before.metrics, after.metrics
    if new is None:
        if after.accept_length is None:
            return None
        return ServerFigures(accept_length=after.accept_length, accept_length_since_start=True)
    old = old or metrics.Metrics()
    steps = _grown(old.verify_calls_total, new.verify_calls_total)
    tokens = _grown(old.generation_tokens_total, new.generation_tokens_total)
    waits = _grown(old.queued_total, new.queued_total)
    waited_s = _grown(old.queue_s_total, new.queue_s_total)
    counted = tokens / steps if tokens and steps else None
    return ServerFigures(
        accept_length=counted if counted is not None else after.accept_length,
        accept_length_since_start=counted is None and after.accept_length is not None,
        accept_rate=new.spec_accept_rate if steps else None,
        queue_s=waited_s / waits if waited_s is not None and waits else None,
        generated_tokens=_whole(tokens),
        cached_tokens=_whole(_grown(old.cached_tokens_total, new.cached_tokens_total)),
        retracted=_whole(_grown(old.retracted_requests_total, new.retracted_requests_total)),
        aborted=_whole(_grown(old.aborted_requests_total, new.aborted_requests_total)),
    )


def _grown(old: float | None, new: float | None) -> float | None:
    """By how much a counter grew; None where it is not there, began anew, or cannot be one."""
    if new is None or not (old or 0.0) <= new < _MOST:
        return None
    return new - (old or 0.0)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
