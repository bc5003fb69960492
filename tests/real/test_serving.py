"""The real server: its start is read right, it is measured, its speculation is real, its end is clean."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from dflash_deploy.bench.measure import measure
from dflash_deploy.bench.measurement import Measurement
from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.sglang import http, metrics

from .conftest import HOST, Running
from .environment import SGLANG_VERSION

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_the_log_tells_what_was_started(speculating):
    boot = speculating.served.boot
    assert boot.ready
    assert boot.failure is None
    assert [weights.architecture for weights in boot.weights] == ["Qwen3ForCausalLM"]
    assert boot.kv_tokens == 8192
    assert [(pool.tokens, pool.dtype) for pool in boot.kv_pools] == [(8192, "float32")]
    assert boot.max_running_requests == 4
    assert boot.context_tokens == 4096
    assert dict(boot.startup_timings_s).keys() >= {"load_weight", "kv_cache_allocation", "tokenizer_e2e"}
    assert 0 < boot.free_at_ready_gib <= boot.free_before_load_gib


def test_progress_goes_forward_to_serving(speculating):
    stages = [progress.stage for progress in speculating.progress]
    assert stages == sorted(stages, key=list(Stage).index)
    assert {Stage.LOAD, Stage.SERVING} <= set(stages)


def test_the_server_tells_the_same_over_http(speculating):
    url, boot = speculating.launch.base_url, speculating.served.boot
    assert http.healthy(url, timeout_s=60)
    assert http.served_model(url, timeout_s=30) == "tiny-random"
    assert http.flush_cache(url, timeout_s=30)
    info = http.server_info(url, timeout_s=30)
    assert info is not None
    assert info.version == SGLANG_VERSION
    assert info.kv_tokens == boot.kv_tokens
    assert info.max_running_requests == boot.max_running_requests
    assert info.context_tokens in (boot.context_tokens, None)
    assert info.simulator is None


def test_status_finds_it_healthy(speculating):
    url = speculating.launch.base_url
    shown = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "status", "--json", "--url", url, "--timeout", "60"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    (server,) = json.loads(shown.stdout)["servers"]
    assert server["health"] == "healthy"
    assert server["kind"] == "measured"
    assert (server["model"], server["version"]) == ("tiny-random", SGLANG_VERSION)
    assert server["limits"]["kv_tokens"] == speculating.served.boot.kv_tokens


def test_metrics_count_what_was_asked(speculating):
    url = speculating.launch.base_url

    def figures() -> metrics.Metrics:
        text = http.get_text(url, "/metrics", timeout_s=30)
        assert text is not None
        return metrics.parse(text)

    before = figures()
    generate(speculating, "Count on me.")
    after = figures()
    assert after.kv_tokens == speculating.served.boot.kv_tokens
    assert after.generation_tokens_total - (before.generation_tokens_total or 0) == 200
    assert after.requests_total - (before.requests_total or 0) == 1
    assert 0 < after.verify_calls_total - (before.verify_calls_total or 0) < 200
    assert 1 < after.spec_accept_length <= 8


@pytest.mark.parametrize("users", [1, 4])
def test_users_at_once_get_every_token_and_sound_text(speculating, users):
    measured = measure(
        speculating.launch.base_url,
        users=users,
        prompts=mixed_prompts({"instruction": 1, "code": 1}, 8),
        output_tokens=96,
        rounds=2,
        warm_up=1,
        timeout_s=600,
        accept_length=lambda: accept_length(speculating),
    )
    assert isinstance(measured, Measurement), measured
    assert measured.users == users
    assert measured.output_tokens == 96 * users * 2
    assert measured.faults == ()
    assert 1 < measured.accept_length <= 8
    for spread in (
        measured.total_tokens_per_s,
        measured.user_tokens_per_s,
        measured.ttft_s,
        measured.latency_s,
    ):
        assert 0 < spread.low <= spread.median <= spread.high
    assert measured.ttft_s.high < measured.latency_s.high
    if users == 1:
        assert measured.total_tokens_per_s.median < measured.user_tokens_per_s.median


def test_a_question_asked_again_is_answered_in_fewer_steps_with_the_same_text(speculating):
    first, first_accept_length = generate(speculating, "What does a lock file hold?")
    again, again_accept_length = generate(speculating, "What does a lock file hold?")
    assert again == first
    assert 1 < first_accept_length < 4 < again_accept_length <= 8


def test_speculation_changes_no_text(speculating, plain):
    for prompt in ("def main():", "The quick brown fox", "Explain what a lock file is."):
        text, tokens_per_step = generate(plain, prompt)
        assert tokens_per_step is None
        assert generate(speculating, prompt)[0] == text


def test_a_stop_is_graceful_and_leaves_nothing(plain):
    """The last test that uses this server."""
    main = psutil.Process(plain.server.pid)
    children = main.children(recursive=True)
    assert children
    temporary = Path(main.environ()["TMPDIR"])
    assert temporary.is_dir()
    shared = {
        Path(memory.path)
        for process in (main, *children)
        for memory in process.memory_maps()
        if "sglang_loads_" in memory.path
    }
    assert shared
    report = plain.server.stop()
    assert report.graceful
    assert report.exit_status == 0
    assert report.leftovers == ()
    assert not psutil.pid_exists(main.pid)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not temporary.exists()
    assert not any(path.exists() for path in shared)
    with socket.socket() as listener:
        listener.bind((HOST, plain.launch.port))


def accept_length(running: Running) -> float | None:
    """Of all that the server has generated until now."""
    info = http.server_info(running.launch.base_url, timeout_s=30)
    return info.accept_length if info else None


def generate(running: Running, prompt: str) -> tuple[str, float | None]:
    """A greedy answer, and tokens per verify step."""
    response = httpx.post(
        f"{running.launch.base_url}/generate",
        json={
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
        },
        timeout=600,
    )
    answer = response.raise_for_status().json()
    assert answer["meta_info"]["completion_tokens"] == 200
    steps = answer["meta_info"].get("spec_verify_ct")
    return answer["text"], 200 / steps if steps else None
