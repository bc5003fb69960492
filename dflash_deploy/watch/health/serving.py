"""Whether it serves: port, ``/health``, a token of our own, and a scheduler that moves.

The server is asked all of it at once, and watched meanwhile, so that a long prefill is told from a scheduler
that is dead behind an HTTP server that still answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from dflash_deploy.engine.sglang import http, metrics
from dflash_deploy.proxy import proxy_for
from dflash_deploy.watch.health.verdict import Figure, Layer, Verdict

_CONNECT_S = 3.0
_SAMPLE_EVERY_S = 1.0
_METRICS_S = 5.0
_INFO_S = 2.0
# /health looks once a second whether anything was generated, so a 200 that comes sooner says nothing of it.
_TELLING_S = 0.9


@dataclass(frozen=True)
class Answers:
    """What one server answered within the time there was.

    Attributes:
        proxied: asked through a proxy, which alone could tell whether something listens behind it.
        health_s: how long ``/health`` took by itself, or the wait without an answer.
        first: figures at the beginning, None where its metrics are off; ``last``: at the end.
        moved: tokens were computed meanwhile, by its counters and gauges.
        accept_length: mean since its start, for a server whose metrics are off.
    """

    listens: bool
    proxied: bool = False
    health: int | None = None
    health_s: float = 0.0
    generation: http.Generation = field(default_factory=lambda: http.Generation(None))
    generation_s: float = 0.0
    first: metrics.Metrics | None = None
    last: metrics.Metrics | None = None
    moved: bool = False
    accept_length: float | None = None
    simulator: http.SimulatorInfo | None = None

    @property
    def busy(self) -> int | None:
        """Requests that ran or waited at the beginning or at the end; None where that is not told."""
        counts = [
            (figures.running_requests or 0) + (figures.queued_requests or 0)
            for figures in (self.first, self.last)
            if figures is not None and figures.running_requests is not None
        ]
        return int(max(counts)) if counts else None


def ask(base_url: str, *, api_key: str | None, deadline: float) -> Answers:
    """Ask one server everything; back by ``deadline`` (on the monotonic clock), whatever it does."""
    proxied = proxy_for(base_url) is not None
    if not proxied and not listens(base_url, min(_CONNECT_S, deadline - time.monotonic())):
        return Answers(listens=False)
    found: dict[str, tuple[object, float]] = {}
    began = time.monotonic()

    def keep(name: str, call: Callable[[], object]) -> None:
        asked = time.monotonic()
        answer = call()
        found[name] = (answer, time.monotonic() - asked)

    left_s = deadline - began - 0.2
    calls: dict[str, Callable[[], object]] = {
        "health": lambda: http.health_status(base_url, timeout_s=left_s, api_key=api_key),
        "generation": lambda: http.generate_once(base_url, timeout_s=left_s, api_key=api_key),
        "info": lambda: http.server_info(base_url, timeout_s=left_s, api_key=api_key),
    }
    first = last = _sample(base_url, api_key, deadline)
    threads = [threading.Thread(target=keep, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    *telling, informing = threads
    moved = False
    while any(thread.is_alive() for thread in telling) and time.monotonic() < deadline:
        pause_until = min(deadline, time.monotonic() + _SAMPLE_EVERY_S)
        for thread in telling:
            thread.join(max(0.0, pause_until - time.monotonic()))
        if first is not None:
            sample = _sample(base_url, api_key, deadline)
            moved = moved or (sample is not None and _pulse(sample) != _pulse(last))
            last = sample or last
    informing.join(max(0.0, min(_INFO_S, deadline - time.monotonic())))
    waited_s = time.monotonic() - began
    health, health_s = found.get("health", (None, waited_s))
    generation, generation_s = found.get("generation", (None, waited_s))
    info = found.get("info", (None, waited_s))[0]
    answers = Answers(
        listens=True,
        proxied=proxied,
        health=health if isinstance(health, int) else None,
        health_s=health_s,
        generation=generation if isinstance(generation, http.Generation) else http.Generation(None),
        generation_s=generation_s,
        first=first,
        last=last,
        moved=moved,
    )
    if isinstance(info, http.ServerInfo):
        answers = replace(answers, accept_length=info.accept_length, simulator=info.simulator)
    return answers


def layers(answers: Answers, *, starting: bool) -> tuple[Layer, ...]:
    """Judge what came back. While it is starting, what does not answer yet is unknown, not critical."""
    if not answers.listens:
        text = "nothing takes connections on it" + (" yet" if starting else "")
        port = Layer("port", Verdict.UNKNOWN if starting else Verdict.CRITICAL, text, needed=True)
        rest = (Layer(name, Verdict.UNKNOWN, "not asked: its port is closed") for name in _ASKED)
        return (port, *rest)
    text = "it is asked through a proxy" if answers.proxied else "it takes connections"
    port = Layer("port", Verdict.OK, text, needed=True)
    judged: tuple[Layer, ...] = (_health(answers), _generation(answers), _scheduler(answers))
    if starting:
        judged = tuple(
            replace(layer, verdict=Verdict.UNKNOWN) if layer.verdict is not Verdict.OK else layer
            for layer in judged
        )
    return (port, *judged)


_ASKED = ("health", "generation", "scheduler")


def _alive_though_late(answers: Answers) -> bool:
    """Tokens come, so what has no answer waits its turn."""
    return answers.moved or (answers.health == 200 and answers.health_s >= _TELLING_S)


def _health(answers: Answers) -> Layer:
    figures = (Figure("health_answer", answers.health_s, "s"),)
    if answers.health == 200:
        text = f"/health answered 200 after {answers.health_s:.1f} s"
        return Layer("health", Verdict.OK, text, None, figures, needed=True)
    if answers.health is None:
        text = f"/health gave no answer within {answers.health_s:.0f} s"
    else:
        text = f"/health answered {answers.health}"
    if _alive_though_late(answers):
        text += ", but it works: its counters move"
        return Layer("health", Verdict.OK, text, None, figures, needed=True)
    if answers.generation.status == 200 and answers.generation.tokens:
        # No reason to restart it; what goes by /health alone (a load balancer) leaves it out all the same.
        text += ", though a token came when it was asked for one"
        return Layer("health", Verdict.WARNING, text, None, figures, needed=True)
    return Layer("health", Verdict.CRITICAL, text, None, figures, needed=True)


def _generation(answers: Answers) -> Layer:
    status, took_s = answers.generation.status, answers.generation_s
    figures = (Figure("generation_answer", took_s, "s"),)

    def layer(verdict: Verdict, text: str, fix: str | None = None) -> Layer:
        return Layer("generation", verdict, text, fix, figures, needed=True)

    if status == 200 and answers.generation.tokens:
        return layer(Verdict.OK, f"one token came after {took_s:.2f} s")
    if status == 200:
        return layer(Verdict.CRITICAL, "it answered a request without a token")
    if status in (401, 403):
        return layer(
            Verdict.UNKNOWN,
            "it wants its API key for a token",
            "name the service, and add --api-key-file FILE",
        )
    if status in (404, 405):
        return layer(Verdict.UNKNOWN, f"it has no /generate ({status}): it may be no SGLang")
    if status is not None:
        verdict = Verdict.WARNING if 400 <= status < 500 else Verdict.CRITICAL
        return layer(verdict, f"it refused a request of one token with {status}")
    text = f"no token within {took_s:.0f} s"
    if _alive_though_late(answers):
        return layer(Verdict.OK, f"{text}: it waits behind other requests, which go on")
    return layer(Verdict.CRITICAL, text)


def _scheduler(answers: Answers) -> Layer:
    figures = _load_figures(answers.last)

    def layer(verdict: Verdict, text: str) -> Layer:
        return Layer("scheduler", verdict, text, None, figures)

    load = "" if answers.busy is None else f", {answers.busy} requests running or waiting"
    if answers.generation.tokens:
        return layer(Verdict.OK, f"it generates{load}")
    if answers.moved:
        return layer(Verdict.OK, f"its counters move{load}")
    if answers.generation.status is not None and answers.generation.status < 500:
        return layer(Verdict.UNKNOWN, "not told: our request was not taken")
    if _alive_though_late(answers):
        return layer(Verdict.OK, f"its health check says that tokens come{load}")
    http_alive = ", while its HTTP server still answers" if answers.health is not None else ""
    if answers.last is None:
        return layer(Verdict.CRITICAL, f"no sign of life from it{http_alive} (its metrics are off)")
    return layer(Verdict.CRITICAL, f"its counters stand still{load}{http_alive}")


def accept_layer(answers: Answers, expected: float | None) -> Layer:
    """Hold the accept length against what was expected of it, or against no speculation at all.

    A collapsed one makes answers slower, not wrong; a restart seldom mends it.
    """
    figures = answers.last
    now = figures.spec_accept_length if figures is not None else None
    seen = now or answers.accept_length
    if not seen:
        return Layer(
            "acceptance", Verdict.UNKNOWN, "no figure: no speculation, no request yet, or no metrics"
        )
    low, lost = (None, None) if expected is None else (0.7 * expected, max(1.0, 0.5 * expected))
    figure = (Figure("accept_length", seen, "tokens", low, lost),)
    diagnose = (
        "compare the prompts with those of the tuning; dflash-deploy diagnose UNIT names lost draft graphs"
    )
    if low is not None and lost is not None and expected is not None:
        text = f"{seen:.2f} tokens a step, {expected:.2f} expected"
        if seen < lost:
            return Layer("acceptance", Verdict.CRITICAL, f"collapsed: {text}", diagnose, figure)
        if seen < low:
            return Layer("acceptance", Verdict.WARNING, f"low: {text}", diagnose, figure)
        return Layer("acceptance", Verdict.OK, text, None, figure)
    steps = figures.verify_calls_total if figures is not None else None
    if seen < 1.2 and steps is not None and steps >= 200:
        text = f"{seen:.2f} tokens a step: the draft's words are hardly ever taken"
        return Layer("acceptance", Verdict.WARNING, text, diagnose, figure)
    return Layer(
        "acceptance", Verdict.OK, f"{seen:.2f} tokens a step, nothing to hold it against", None, figure
    )


def _load_figures(figures: metrics.Metrics | None) -> tuple[Figure, ...]:
    if figures is None:
        return ()
    known = (
        ("running_requests", figures.running_requests, "count"),
        ("queued_requests", figures.queued_requests, "count"),
        ("generation_throughput", figures.gen_throughput_tokens_per_s, "tokens_per_s"),
        ("kv_usage", figures.token_usage, "ratio"),
    )
    return tuple(Figure(name, value, unit) for name, value, unit in known if value is not None)


def _pulse(figures: metrics.Metrics | None) -> tuple[float | None, ...]:
    """What changes only when the scheduler works; a request that merely waits in front of it changes none."""
    if figures is None:
        return ()
    return (
        figures.realtime_tokens_total,
        figures.prompt_tokens_total,
        figures.generation_tokens_total,
        figures.verify_calls_total,
        figures.used_tokens,
        figures.token_usage,
        figures.gen_throughput_tokens_per_s,
    )


def _sample(base_url: str, api_key: str | None, deadline: float) -> metrics.Metrics | None:
    left_s = min(_METRICS_S, deadline - time.monotonic())
    text = http.get_text(base_url, "/metrics", timeout_s=left_s, api_key=api_key)
    found = metrics.parse(text) if text else None
    return found if found != metrics.Metrics() else None


def listens(base_url: str, timeout_s: float) -> bool:
    """Something takes connections there."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=max(0.05, timeout_s)).close()
    except (OSError, UnicodeError):
        return False
    return True
