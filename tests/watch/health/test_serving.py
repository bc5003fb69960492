"""The layers that the server itself answers for, against the simulator and against servers that lie."""

from __future__ import annotations

import json
import threading
import time

import pytest

from dflash_deploy.engine.sglang import metrics
from dflash_deploy.watch.health import serving
from dflash_deploy.watch.health.examination import Limits, examine
from dflash_deploy.watch.health.verdict import Verdict
from dflash_deploy.watch.places import Place
from tests.simulator.conftest import FOUR_USERS, chat_body
from tests.watch.engine_server import HEALTHY
from tests.watch.engine_server import serving as engine_serving

TOKEN = (200, json.dumps({"text": "4", "meta_info": {"completion_tokens": 1}}).encode())


def check(url: str, timeout_s: float = 20.0, **limits: object) -> dict[str, tuple[Verdict, str]]:
    health = examine(Place("url", "mine", url), timeout_s=timeout_s, limits=Limits(**limits))
    layers = {layer.name: (layer.verdict, layer.text) for layer in health.layers}
    return {"all": (health.verdict, ""), **layers}


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_a_healthy_simulated_server_is_well_and_its_memory_is_told(launch):
    server = launch(f"{FOUR_USERS} --enable-metrics")
    health = examine(Place("url", "mine", url_of(server)), timeout_s=40.0)
    found = {layer.name: layer for layer in health.layers}
    assert health.simulated
    for name in ("port", "health", "generation", "scheduler"):
        assert found[name].verdict is Verdict.OK, found[name]
    figures = {figure.name: figure.value for layer in health.layers for figure in layer.figures}
    info = server.info()["simulator"]
    assert figures["vram_free"] == pytest.approx(info["vram_total_mib"] - info["vram_used_mib"], abs=64)
    assert figures["running_requests"] == 0


def test_a_dead_scheduler_behind_a_living_http_server_is_critical(launch):
    server = launch(f"{FOUR_USERS} --enable-metrics", fault="dead-scheduler")
    assert server.get("/v1/models")[0] == 200
    found = check(url_of(server), timeout_s=6.0)
    assert found["all"][0] is Verdict.CRITICAL
    assert found["port"][0] is Verdict.OK
    assert found["generation"][0] is Verdict.CRITICAL
    assert found["scheduler"][0] is Verdict.CRITICAL
    assert "stand still" in found["scheduler"][1]


def test_health_200_at_once_with_a_scheduler_that_is_dead_is_critical():
    # As with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0.
    with engine_serving(HEALTHY) as engine:
        # What else is slow there is no sign of life.
        engine.delays_s["/metrics"] = 1.0
        found = check(engine.url, timeout_s=6.0)
    assert found["health"][0] is Verdict.OK
    assert found["scheduler"][0] is Verdict.CRITICAL
    assert found["all"][0] is Verdict.CRITICAL


def test_a_busy_server_whose_token_has_to_wait_is_no_failure(launch):
    server = launch(f"{FOUR_USERS} --enable-metrics", scale=1)
    body = json.dumps(chat_body("Tell a very long story.", max_tokens=4000, ignore_eos=True))
    busy = [server.open("POST", "/v1/chat/completions", body) for _ in range(6)]
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if metrics.parse(server.get("/metrics")[1]).running_requests == 4:
                break
            time.sleep(0.1)
        found = check(url_of(server), timeout_s=8.0)
    finally:
        for connection in busy:
            connection.close()
    assert found["generation"][0] is Verdict.OK, found
    assert found["scheduler"][0] is Verdict.OK, found
    assert found["health"][0] is Verdict.OK, found


def test_a_long_prefill_is_no_failure():
    answers = {"/metrics": (200, b"sglang:num_running_reqs 0.0\nsglang:realtime_tokens_total 0\n")}
    stop = threading.Event()

    def prefill() -> None:
        done = 0
        while not stop.wait(0.3):
            done += 2048
            text = f"sglang:num_running_reqs 0.0\nsglang:realtime_tokens_total {done}\n"
            answers["/metrics"] = (200, text.encode())

    with engine_serving(answers) as engine:
        worker = threading.Thread(target=prefill)
        worker.start()
        try:
            found = check(engine.url, timeout_s=6.0)
        finally:
            stop.set()
            worker.join()
    assert {found[name][0] for name in ("port", "health", "generation", "scheduler")} == {Verdict.OK}


def test_waiting_requests_alone_are_no_sign_of_life():
    answers = {"/metrics": (200, b"sglang:num_queue_reqs 0.0\nsglang:realtime_tokens_total 5\n")}
    stop = threading.Event()

    def queue() -> None:
        waiting = 0
        while not stop.wait(0.3):
            waiting += 1
            text = f"sglang:num_queue_reqs {waiting}\nsglang:realtime_tokens_total 5\n"
            answers["/metrics"] = (200, text.encode())

    with engine_serving(answers) as engine:
        worker = threading.Thread(target=queue)
        worker.start()
        try:
            found = check(engine.url, timeout_s=5.0)
        finally:
            stop.set()
            worker.join()
    assert found["scheduler"][0] is Verdict.CRITICAL


def test_a_health_check_that_fails_beside_a_token_that_came_is_no_reason_to_restart():
    with engine_serving({**HEALTHY, "/health": (503, b""), "/generate": TOKEN}) as engine:
        found = check(engine.url)
    assert found["health"][0] is Verdict.WARNING
    assert "503, though a token came" in found["health"][1]
    assert found["all"][0] is Verdict.WARNING


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (TOKEN, Verdict.OK),
        ((200, b"{}"), Verdict.CRITICAL),
        ((200, b"\xff" * 100), Verdict.CRITICAL),
        ((500, b""), Verdict.CRITICAL),
        ((401, b"{}"), Verdict.UNKNOWN),
        ((404, b"{}"), Verdict.UNKNOWN),
        ((429, b"{}"), Verdict.WARNING),
    ],
)
def test_the_answer_to_a_request_of_one_token_is_judged(answer, verdict):
    with engine_serving({**HEALTHY, "/generate": answer}) as engine:
        found = check(engine.url)
    assert found["generation"][0] is verdict
    if verdict in (Verdict.CRITICAL, Verdict.UNKNOWN):
        assert found["all"][0] is verdict


@pytest.mark.parametrize(
    ("seen", "expected", "steps", "verdict"),
    [
        (4.25, 4.5, 1000, Verdict.OK),
        (3.0, 4.5, 1000, Verdict.WARNING),
        (1.1, 4.5, 1000, Verdict.CRITICAL),
        (1.05, None, 1000, Verdict.WARNING),
        (1.05, None, 10, Verdict.OK),
        (None, 4.5, 0, Verdict.UNKNOWN),
    ],
)
def test_an_accept_length_that_collapsed_is_told(seen, expected, steps, verdict):
    figures = metrics.Metrics(spec_accept_length=seen, verify_calls_total=steps)
    assert serving.accept_layer(serving.Answers(True, last=figures), expected).verdict is verdict


def test_a_closed_port_is_critical_and_one_of_a_unit_that_starts_is_unknown():
    nothing = serving.Answers(listens=False)
    assert serving.layers(nothing, starting=False)[0].verdict is Verdict.CRITICAL
    assert {layer.verdict for layer in serving.layers(nothing, starting=True)} == {Verdict.UNKNOWN}


def test_a_server_that_warms_up_is_not_held_to_be_dead():
    warming = serving.Answers(True, health=503, health_s=0.1)
    assert all(layer.verdict is not Verdict.CRITICAL for layer in serving.layers(warming, starting=True))
    assert any(layer.verdict is Verdict.CRITICAL for layer in serving.layers(warming, starting=False))
