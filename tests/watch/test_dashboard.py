"""The Grafana dashboard asks only for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dflash_deploy.engine.sglang import metrics
from dflash_deploy.watch.health import render
from dflash_deploy.watch.health.verdict import Figure, Health, Layer, Verdict
from tests.simulator.conftest import FOUR_USERS, launch  # noqa: F401 - a fixture

_ROOT = Path(__file__).parents[2]
_DASHBOARD = json.loads((_ROOT / "templates/grafana-dashboard.json").read_text())

# What SGLang from 0.5.16 to 0.5.23 counts for a server with speculation.
_GAUGES = {
    "cache_hit_rate", "context_len", "full_token_usage", "gen_throughput", "is_cuda_graph",
    "kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens", "mamba_available_tokens",
    "mamba_evictable_tokens", "mamba_usage", "mamba_used_tokens", "max_total_num_tokens",
    "num_pages", "num_paused_reqs", "num_queue_reqs", "num_retracted_reqs", "num_running_reqs",
    "num_used_tokens", "page_size", "spec_accept_length", "spec_accept_rate",
    "spec_num_draft_tokens", "spec_num_steps", "startup_available_gpu_memory_gb", "token_usage",
}  # fmt: skip
_COUNTERS = {
    "cached_tokens_total", "cuda_graph_passes_total", "generation_tokens_total",
    "num_aborted_requests_total", "num_requests_total", "num_retracted_requests_total",
    "prompt_tokens_total", "realtime_tokens_total", "spec_verify_calls_total",
}  # fmt: skip
_HISTOGRAMS = {
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "queue_time_seconds",
    "time_to_first_token_seconds",
}  # fmt: skip
_OURS = {
    "dflash_health_layer_verdict", "dflash_health_vram_free_bytes", "dflash_health_temperature_celsius"
}  # fmt: skip


def _expressions() -> list[str]:
    asked = [target["expr"] for panel in _DASHBOARD["panels"] for target in panel["targets"]]
    return [*asked, *(one["definition"] for one in _DASHBOARD["templating"]["list"] if "definition" in one)]


def _asked_of_sglang() -> set[str]:
    return {name for text in _expressions() for name in re.findall(r"sglang:(\w+)", text)}


def test_every_metric_is_one_of_sglangs_and_counters_are_rated():
    asked = _asked_of_sglang()
    assert asked
    assert asked <= _GAUGES | _COUNTERS | {f"{name}_bucket" for name in _HISTOGRAMS}
    for text in _expressions():
        for name in re.findall(r"sglang:(\w+_(?:total|bucket))", text):
            assert re.search(rf"rate\(sglang:{name}\{{[^}}]*\}}\[5m\]\)", text), text


def test_every_panel_asks_something_and_they_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in _DASHBOARD["panels"]:
        assert panel["targets"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    identifiers = [panel["id"] for panel in _DASHBOARD["panels"]]
    assert len(identifiers) == len(set(identifiers))


def test_our_own_metrics_are_those_that_health_writes():
    figures = (Figure("vram_free", 1, "mib", gpu=0), Figure("temperature", 1, "celsius", gpu=0))
    written = render.prometheus(Health("x", (Layer("VRAM", Verdict.OK, "", None, figures),), 0), now_s=0)
    asked = {name for text in _expressions() for name in re.findall(r"dflash_\w+", text)}
    assert asked == _OURS
    assert all(f"# TYPE {name} gauge" in written for name in asked)


def test_a_server_has_what_the_dashboard_asks_for(launch):  # noqa: F811
    server = launch(f"{FOUR_USERS} --enable-metrics")
    server.chat()
    text = server.get("/metrics")[1]
    # The simulator keeps no histogram of the time between tokens.
    missing = {name for name in _asked_of_sglang() if f"sglang:{name}" not in text}
    assert missing <= {"inter_token_latency_seconds_bucket"}
    assert metrics.parse(text).running_requests is not None
