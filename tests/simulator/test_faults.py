from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from http.client import HTTPConnection, HTTPException

import pytest

from dflash_deploy.simulator.faults import STAGES, read_faults

from .conftest import DEADLINE_S, FOUR_USERS, ONE_USER, Launcher, chat_body, wait

LAST_WORDS = {
    "load": "Load weight begin.",
    "draft-load": "avail mem=11.02 GB, mem usage=20.14 GB.",
    "sizing": "DFLASH draft runner ready.",
    "pools": "Reserving 0.10 GB",
    "prefill-capture": "Capture target prefill CUDA graph begin",
    "decode-capture": "Capture target verify CUDA graph begin",
    "draft-capture": "Capture draft verify CUDA graph begin",
    "warm-up": "Uvicorn running on",
}
NEXT_WORDS = {
    "load": "Load weight end.",
    "draft-load": "type=DFlash2DraftModel",
    "sizing": "Reserving",
    "pools": "Mamba Cache is allocated",
    "prefill-capture": "Capture target prefill CUDA graph end",
    "decode-capture": "Capture target verify CUDA graph end",
    "draft-capture": "Capture draft verify CUDA graph end",
    "warm-up": "ready to roll",
}
WITH_PREFILL_GRAPHS = ONE_USER.replace("--disable-prefill-cuda-graph", "--chunked-prefill-size 1024")


@pytest.mark.parametrize("stage", STAGES)
def test_hangs_in_a_stage(launch: Launcher, stage: str) -> None:
    flags = WITH_PREFILL_GRAPHS if stage == "prefill-capture" else ONE_USER
    server = launch(flags, ready=False, fault=f"hang:{stage}", scale=1000)
    server.wait_for(LAST_WORDS[stage])
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.3)
    assert NEXT_WORDS[stage] not in server.text()
    if stage == "warm-up":
        assert server.get("/health")[0] == 503
        assert server.get("/v1/models")[0] == 200


@pytest.mark.parametrize("stage", STAGES)
def test_dies_in_a_stage(launch: Launcher, stage: str) -> None:
    flags = WITH_PREFILL_GRAPHS if stage == "prefill-capture" else ONE_USER
    server = launch(flags, ready=False, fault=f"die:{stage}", scale=1000)
    assert server.exit_status() == -signal.SIGKILL
    text = server.text()
    assert "Scheduler hit an exception: Traceback" in text
    assert f"injected failure in stage {stage}" in text
    assert LAST_WORDS[stage] in text
    assert "ready to roll" not in text


def test_a_dead_scheduler_answers_but_generates_nothing(launch: Launcher) -> None:
    server = launch(fault="dead-scheduler", scale=400)
    assert server.get("/v1/models")[0] == 200
    assert server.get("/health")[0] == 503
    assert "Health check failed. Server couldn't get a response from detokenizer for last 20" in server.text()
    client = HTTPConnection("127.0.0.1", server.port, timeout=0.5)
    client.request("POST", "/v1/chat/completions", json.dumps(chat_body("x")))
    with pytest.raises(TimeoutError):
        client.getresponse()
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_status() == -signal.SIGKILL


def test_garbage_and_repeats_and_good_text(launch: Launcher) -> None:
    texts = {}
    for fault in ("", "garbage", "repeat"):
        body = launch(fault=fault).chat(max_tokens=200)[1]
        texts[fault] = json.loads(body)["choices"][0]["message"]["content"]
    assert len(set(texts.values())) == 3
    assert "\ufffd" in texts["garbage"]
    assert texts["repeat"].count("the same") == 200


def test_wrong_usage(launch: Launcher) -> None:
    answer = json.loads(launch(fault="wrong-usage").chat(max_tokens=100)[1])
    assert answer["usage"]["completion_tokens"] == 150


def test_a_slow_start_takes_longer(launch: Launcher) -> None:
    server = launch(fault="slow-start:3", scale=300, ready=False)
    server.wait_for("ready to roll")
    assert server.get("/health")[0] == 200


def test_sigterm_is_ignored(launch: Launcher) -> None:
    server = launch(fault="ignore-sigterm", scale=1000)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.5)
    assert server.chat()[0] == 200


def test_a_port_said_to_be_taken(launch: Launcher) -> None:
    server = launch(fault="port-taken", ready=False)
    server.wait_for("[Errno 98] error while attempting to bind on address ('127.0.0.1', ")
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.3)


def test_death_after_some_requests(launch: Launcher) -> None:
    server = launch(fault="die-after:2")
    assert server.chat()[0] == 200
    assert server.chat()[0] == 200
    assert server.exit_status() == -signal.SIGKILL
    text = server.text()
    assert "Scheduler hit an exception" in text
    assert "SIGQUIT received." in text


@pytest.mark.parametrize("scale", [200, 5000])
def test_death_under_load(launch: Launcher, scale: int) -> None:
    server = launch(FOUR_USERS, fault="die-under-load", scale=scale)
    assert server.chat()[0] == 200

    def ask(number: int) -> None:
        # Again and again: where time runs fast, an answer may be over before the next question comes.
        with contextlib.suppress(OSError, HTTPException):
            while True:
                server.chat(f"Question {number}", max_tokens=4000)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert server.exit_status() == -signal.SIGKILL
    for thread in threads:
        thread.join(DEADLINE_S)


def test_a_stream_stalls_midway(launch: Launcher) -> None:
    server = launch(fault="stall:50")
    client = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    client.request("POST", "/v1/chat/completions", json.dumps(chat_body("x", max_tokens=500, stream=True)))
    answer = client.getresponse()
    received = b""
    while received.count(b"data: ") < 50 / 8:
        received += answer.read1()
    client.sock.settimeout(1.0)
    with pytest.raises(TimeoutError):
        while part := answer.read1():
            received += part
    assert b"[DONE]" not in received
    assert received.count(b"data: ") <= 60
    client.close()
    wait(lambda: server.get("/health")[0] == 200)


def test_memory_runs_out_under_load_and_the_process_follows(launch: Launcher) -> None:
    server = launch(ONE_USER.replace("0.85", "0.945"))
    assert server.chat()[0] == 200
    with contextlib.suppress(OSError, HTTPException):
        server.chat("word " * 16_000)
    assert server.exit_status() == -signal.SIGKILL
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in server.text()


@pytest.mark.parametrize("text", ["explode", "hang:nowhere", "die-after:many", "stall:-1", "garbage:1"])
def test_unknown_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_faults(text)
