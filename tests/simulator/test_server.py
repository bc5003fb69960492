"""The simulator as others meet it: a process with a port, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection

import httpx
import pytest

from .conftest import DEADLINE_S, FOUR_USERS, ONE_USER, Launcher, Simulated, chat_body, launching, wait


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """One server that no test changes for the next."""
    with launching(tmp_path_factory.mktemp("simulator")) as start:
        yield start(f"{FOUR_USERS} --served-model-name small")


def test_readiness_in_sglangs_order(launch: Launcher) -> None:
    server = launch(scale=20, ready=False)
    seen: list[str] = []

    def look() -> bool:
        try:
            models, health = server.get("/v1/models")[0], server.get("/health")[0]
        except OSError:
            state = "closed"
        else:
            state = f"{models} {health}"
        if state not in seen:
            seen.append(state)
        return state == "200 200"

    wait(look)
    assert seen[-1] == "200 200"
    assert seen[:-1] in (["closed"], ["closed", "200 503"])
    assert server.get("/ready")[0] == 200
    assert "The server is fired up and ready to roll!" in server.text()


def test_a_stream_has_one_event_for_each_verify_step(server: Simulated) -> None:
    events = server.events(max_tokens=200)
    usage = events[-1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 200
    assert usage["usage"]["prompt_tokens"] > 5
    words = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    filled = [word for word in words if word]
    assert 200 / 8 <= len(filled) < 200 / 2
    assert all(event["model"] == "small" for event in events)


def test_whole_and_streamed_and_batched_answers_agree(server: Simulated) -> None:
    events = server.events(max_tokens=120)
    streamed = "".join(event["choices"][0]["delta"]["content"] or "" for event in events[:-1])
    whole = json.loads(server.chat(max_tokens=120)[1])
    assert whole["choices"][0]["message"]["content"] == streamed
    assert whole["usage"]["completion_tokens"] == 120
    assert whole["choices"][0]["finish_reason"] == "length"

    async def together() -> list[str]:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
            bodies = [chat_body("Explain what a cache is.", max_tokens=120), chat_body("Name a river.")] * 3
            answers = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
            return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    texts = asyncio.run(together())
    assert texts[0] == texts[2] == texts[4] == streamed
    assert texts[1] != streamed


def test_completions_and_generate(server: Simulated) -> None:
    status, body = server.request("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 20})
    answer = json.loads(body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
    assert answer["choices"][0]["text"]
    params = {"max_new_tokens": 90, "temperature": 0, "ignore_eos": True}
    status, body = server.request("POST", "/generate", {"text": "Once", "sampling_params": params})
    meta = json.loads(body)["meta_info"]
    assert (status, meta["completion_tokens"], meta["finish_reason"]["type"]) == (200, 90, "length")
    assert meta["spec_accept_length"] == pytest.approx(90 / meta["spec_verify_ct"])
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert meta["e2e_latency"] > 0
    status, body = server.request(
        "POST", "/generate", {"input_ids": [1, 2, 3], "sampling_params": params, "stream": True}
    )
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_an_answer_ends_by_itself_unless_told_not_to(server: Simulated) -> None:
    natural = json.loads(server.chat(max_tokens=4000)[1])
    assert natural["choices"][0]["finish_reason"] == "stop"
    assert 1024 < natural["usage"]["completion_tokens"] < 4000
    forced = json.loads(server.chat(max_tokens=4000, ignore_eos=True)[1])
    assert forced["usage"]["completion_tokens"] == 4000
    full = json.loads(server.chat(max_tokens=1024)[1])
    assert full["usage"]["completion_tokens"] == 1024


def test_server_info(launch: Launcher) -> None:
    server = launch(f"{FOUR_USERS} --served-model-name small")
    assert "avg_spec_accept_length" not in server.info()["internal_states"][0]
    server.chat(max_tokens=600)
    info = server.info()
    assert info["simulator"]["card"] == "rtx-5090"
    assert info["simulator"]["time_scale"] == 200
    assert info["simulator"]["vram_total_mib"] == 32607
    assert info["simulator"]["vram_used_mib"] == pytest.approx(31211, rel=0.05)
    state = info["internal_states"][0]
    assert 3 < state["avg_spec_accept_length"] < 6
    assert state["effective_max_running_requests_per_dp"] == 4
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"] == 8192
    assert state["mem_fraction_static"] == 0.95
    assert info["served_model_name"] == "small"
    assert json.loads(server.get("/get_server_info")[1])["version"] == info["version"]
    assert json.loads(server.get("/model_info")[1])["is_generation"] is True


def test_metrics_count(launch: Launcher) -> None:
    server = launch(f"{FOUR_USERS} --enable-metrics")
    server.chat(max_tokens=300)
    text = server.get("/metrics")[1]
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    assert values["sglang:num_requests_total"] == 1
    assert values["sglang:generation_tokens_total"] >= 300
    assert values["sglang:spec_verify_calls_total"] > 300 / 8
    assert values["sglang:time_to_first_token_seconds_count"] == 1
    assert values["sglang:max_total_num_tokens"] == 8192


def test_metrics_only_when_asked_for(server: Simulated) -> None:
    assert server.get("/metrics")[0] == 404


def test_flush_only_when_idle(server: Simulated) -> None:
    def refused_while_one_is_answered() -> bool:
        client = server.open(
            "POST", "/v1/chat/completions", json.dumps(chat_body("x", max_tokens=6000, stream=True))
        )
        answer = client.getresponse()
        answer.read(10)
        status = server.request("POST", "/flush_cache")[0]
        answer.close()
        client.close()
        return status == 400

    wait(lambda: server.get("/flush_cache")[0] == 200)
    # On a busy machine the answer may have ended before the question comes.
    wait(refused_while_one_is_answered)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", "{not json", 400),
        ("/v1/chat/completions", "[]", 400),
        ("/v1/chat/completions", "[" * 100_000, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["x"]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400),
        ("/v1/chat/completions", chat_body("x", max_tokens=-1), 400),
        ("/v1/chat/completions", chat_body("x", max_tokens=300_000), 400),
        ("/v1/chat/completions", chat_body("word " * 9000), 400),
        ("/v1/completions", {"prompt": {}}, 400),
        ("/generate", {}, 400),
        ("/nothing", {}, 404),
        ("/health", {}, 405),
    ],
)
def test_wrong_requests(server: Simulated, path: str, body: object, status: int) -> None:
    got, text = server.request("POST", path, body)
    assert got == status, text
    assert "Traceback" not in text
    assert server.get("/health")[0] == 200


def test_one_connection_serves_many_requests_also_chunked_ones(server: Simulated) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    body = json.dumps(chat_body("Hello", max_tokens=3)).encode()
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions", iter([body[:20], body[20:]]), encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
    connection.close()


def test_the_key_is_wanted_where_sglang_wants_it(launch: Launcher) -> None:
    server = launch(f"{ONE_USER} --api-key secret")
    assert server.get("/health")[0] == 200
    assert server.get("/v1/models") == (401, '{"error":"Unauthorized"}')
    assert server.chat()[0] == 401
    server.headers["Authorization"] = "Bearer secret"
    assert server.get("/v1/models")[0] == 200
    assert server.chat()[0] == 200


def test_a_client_that_leaves_frees_its_slot(server: Simulated) -> None:
    for _ in range(4):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        body = json.dumps(chat_body("x", max_tokens=7000, stream=True)).encode()
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        client.recv(100)
        client.close()
    assert server.chat(max_tokens=5)[0] == 200
    wait(lambda: json.loads(server.get("/v1/loads")[1])["loads"][0]["num_running_reqs"] == 0)


def test_a_hundred_connections_at_once(launch: Launcher) -> None:
    server = launch(FOUR_USERS, scale=400)

    async def one(client: httpx.AsyncClient, number: int) -> int:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        async with client.stream(
            "POST", url, json=chat_body(f"Number {number}.", max_tokens=40, stream=True)
        ) as answer:
            return sum([len(part) async for part in answer.aiter_bytes()])

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    sizes = asyncio.run(all_of_them())
    assert len(sizes) == 100
    assert min(sizes) > 500


def test_a_full_queue_is_refused(launch: Launcher) -> None:
    server = launch(f"{ONE_USER} --max-queued-requests 1", scale=5)
    clients = []
    for _ in range(3):
        client = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        body = chat_body("x", max_tokens=20_000, ignore_eos=True)
        client.request("POST", "/v1/chat/completions", json.dumps(body))
        clients.append(client)
    wait(lambda: '" 503 ' in server.text())
    for client in clients:
        client.close()


def test_the_clock_runs_by_schedule(launch: Launcher) -> None:
    """The server's own figures stay right however busy the machine is: steps end by schedule."""
    server = launch(ONE_USER)
    rates = []
    for _ in range(3):
        params = {"max_new_tokens": 1024, "ignore_eos": True}
        body = {"text": "Explain what a cache is, please.", "sampling_params": params}
        rates.append(
            json.loads(server.request("POST", "/generate", body)[1])["meta_info"]["decode_throughput"]
        )
    assert statistics.median(rates) == pytest.approx(207.52, rel=0.05)


def test_sigterm_idle_and_busy(launch: Launcher) -> None:
    idle = launch()
    idle.process.send_signal(signal.SIGTERM)
    assert idle.exit_status() == 0
    busy = launch(ONE_USER, scale=20)
    client = HTTPConnection("127.0.0.1", busy.port, timeout=DEADLINE_S)
    client.request(
        "POST", "/v1/chat/completions", json.dumps(chat_body("x", max_tokens=8000, ignore_eos=True))
    )
    wait(lambda: "Prefill batch" in busy.text())
    busy.process.send_signal(signal.SIGTERM)
    busy.wait_for("Gracefully exiting... Remaining number of requests 1")
    busy.process.send_signal(signal.SIGTERM)
    assert busy.get("/health")[0] == 503
    answer = client.getresponse()
    assert json.loads(answer.read())["usage"]["completion_tokens"] == 8000
    assert busy.exit_status() == 0


def test_sigint_kills_an_idle_server(launch: Launcher) -> None:
    server = launch()
    server.process.send_signal(signal.SIGINT)
    assert server.exit_status() == -signal.SIGINT


def test_sigterm_while_loading_kills(launch: Launcher) -> None:
    server = launch(scale=5, ready=False)
    server.wait_for("Load weight begin")
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_status() == -signal.SIGTERM


def test_a_taken_port_is_noticed_after_loading_and_hangs(launch: Launcher) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = launch(ready=False, port=other.getsockname()[1])
        text = server.wait_for("[Errno 98] error while attempting to bind on address")
        assert "address already in use" in text
        assert text.index("Load weight end") < text.index("[Errno 98]")
        with pytest.raises(Exception, match="timed out"):
            server.process.wait(0.5)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (f"{ONE_USER} --no-such-flag 1", 2, "error: unrecognized arguments: --no-such-flag 1"),
        (f"{ONE_USER} --cuda-graph-max-bs 4", 2, "ambiguous option: --cuda-graph-max-bs"),
        (f"{ONE_USER} --mem-fraction-static much", 2, "argument --mem-fraction-static: invalid float value"),
        ("--model-path nobody/nothing", 1, "is not a local folder and is not a valid model identifier"),
        (ONE_USER.replace("0.85", "0.8"), -9, "Loaded weights leave no GPU memory for the KV cache"),
        (ONE_USER.replace("0.85", "0.97"), -9, "torch.OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_failed_starts(launch: Launcher, flags: str, status: int, message: str) -> None:
    server = launch(flags, ready=False)
    assert server.exit_status() == status
    text = server.text()
    assert message in text
    if status == -9:
        assert "Scheduler hit an exception: Traceback" in text
        assert "igquit" in text.lower()


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, dflash_deploy.simulator.__main__, dflash_deploy.simulator.server; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    for name in ("pydantic", "httpx", "uvicorn", "optuna", "rich", "typer"):
        assert name not in modules
    own = {name for name in modules if name.startswith("dflash_deploy.")}
    for part in ("plan", "profile", "tune", "bench"):
        assert not any(name.startswith(f"dflash_deploy.{part}") for name in own)


def test_a_wrong_environment_is_told(launch: Launcher) -> None:
    for env in ({"DFLASH_SIM_CARD": "rtx-9999"}, {"DFLASH_SIM_FAULT": "explode"}, {"DFLASH_SIM_SEED": "x"}):
        fault = env.pop("DFLASH_SIM_FAULT", "")
        server = launch(ready=False, fault=fault, **env)
        assert server.exit_status() == 2
        assert server.text().startswith("simulator: ")
        assert "Traceback" not in server.text()
