from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.sglang import http

Answer = tuple[int, bytes | Callable[[BaseHTTPRequestHandler], None]]
TIMEOUT_S = 20.0


class Server:
    """A real HTTP server whose answers a test sets by method and path."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.asked.append((f"{self.command} {self.path}", dict(self.headers), body))
                status, content = server.answers.get(f"{self.command} {self.path}", (404, b"{}"))
                self.send_response(status)
                if callable(content):
                    self.end_headers()
                    content(self)
                    return
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer  # noqa: N815 -- the names http.server looks for

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def says(self, question: str, content: Any, status: int = 200) -> None:
        self.answers[question] = (status, content if callable(content) else json.dumps(content).encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


INFO = {
    "version": "0.5.23",
    "context_length": 262144,
    "max_total_num_tokens": 31000,
    "max_running_requests": 48,
    "internal_states": [
        {
            "avg_spec_accept_length": 4.5,
            "effective_max_running_requests_per_dp": 4,
            "memory_usage": {"graph": {}},
        }
    ],
}


def test_server_info(server: Server) -> None:
    server.says("GET /server_info", INFO)
    assert http.server_info(server.url, timeout_s=TIMEOUT_S, api_key="sk") == http.ServerInfo(
        version="0.5.23",
        accept_length=4.5,
        kv_tokens=31000,
        max_running_requests=4,
        context_tokens=262144,
    )
    assert server.asked[0][1]["Authorization"] == "Bearer sk"


def test_server_info_by_its_old_name(server: Server) -> None:
    server.says("GET /get_server_info", INFO)
    found = http.server_info(server.url, timeout_s=TIMEOUT_S)
    assert found is not None
    assert found.version == "0.5.23"


def test_the_simulator_tells_of_itself(server: Server) -> None:
    simulator = {
        "card": "rtx-5090",
        "seed": 7,
        "time_scale": 60.0,
        "vram_used_mib": 29076,
        "vram_total_mib": 32607,
    }
    server.says("GET /server_info", {**INFO, "simulator": simulator})
    found = http.server_info(server.url, timeout_s=TIMEOUT_S)
    assert found is not None
    assert found.simulator == http.SimulatorInfo("rtx-5090", 7, 60.0, 29076.0, 32607.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *("version", "context_length", "max_total_num_tokens", "max_running_requests", "internal_states"),
        *("simulator", "card", "seed", "time_scale", "avg_spec_accept_length"),
    ]
)
DEEP = st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON) | st.lists(st.dictionaries(KEYS, JSON)))


@given(DEEP)
def test_any_server_info_is_read_or_left_out(content: dict[str, object]) -> None:
    found = http.read_server_info(content)
    for figure in (found.kv_tokens, found.max_running_requests, found.context_tokens):
        assert figure is None or figure >= 0


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b"1e999"])
def test_nonsense_is_no_answer(server: Server, body: bytes) -> None:
    for question in ("GET /server_info", "GET /v1/models", "POST /generate"):
        server.answers[question] = (200, body)
    assert http.server_info(server.url, timeout_s=TIMEOUT_S) is None
    assert http.served_model(server.url, timeout_s=TIMEOUT_S) is None


def test_health(server: Server) -> None:
    server.says("GET /health", {}, status=503)
    assert not http.healthy(server.url, timeout_s=TIMEOUT_S)
    server.says("GET /health", {})
    assert http.healthy(server.url, timeout_s=TIMEOUT_S)


def test_served_model(server: Server) -> None:
    server.says("GET /v1/models", {"data": [{"id": "qwen", "max_model_len": 4096}]})
    assert http.served_model(server.url, timeout_s=TIMEOUT_S) == "qwen"
    server.says("GET /v1/models", {"data": []})
    assert http.served_model(server.url, timeout_s=TIMEOUT_S) is None


def test_flush_cache(server: Server) -> None:
    server.says("POST /flush_cache", "Cache flushed.")
    assert http.flush_cache(server.url, timeout_s=TIMEOUT_S)
    server.says("POST /flush_cache", "Flush cache failed.", status=400)
    assert not http.flush_cache(server.url, timeout_s=TIMEOUT_S)


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert not http.healthy(url, timeout_s=TIMEOUT_S)
        assert http.server_info(url, timeout_s=TIMEOUT_S) is None
    assert not http.healthy("http://[not an address", timeout_s=TIMEOUT_S)


def test_a_server_that_never_ends_its_answer_is_left(server: Server) -> None:
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        while not stop.wait(0.05):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    server.says("GET /server_info", drip)
    began = time.monotonic()
    assert http.server_info(server.url, timeout_s=0.5) is None
    assert time.monotonic() - began < TIMEOUT_S
    stop.set()


def test_a_server_that_never_ends_its_headers_is_left() -> None:
    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not stop.wait(0.05):
                try:
                    connection.sendall(b"X-More: to come\r\n")
                except OSError:
                    return

    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=drip)
        server.start()
        # Without a limit over all of it, this would last until the test's own.
        assert not http.healthy(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        stop.set()
        server.join()


def test_figures_that_cannot_be_are_left_out(server: Server) -> None:
    simulator = {"card": "x", "seed": 0, "time_scale": 1, "vram_used_mib": -1, "vram_total_mib": 1e300}
    server.says("GET /server_info", {"simulator": simulator, "max_total_num_tokens": -5})
    info = http.server_info(server.url, timeout_s=TIMEOUT_S)
    assert info is not None
    assert info.kv_tokens is None
    assert info.simulator == http.SimulatorInfo("x", 0, 1.0, None, None)


def test_a_server_that_sends_without_end_is_left(server: Server) -> None:
    sent = []

    def flood(handler: BaseHTTPRequestHandler) -> None:
        try:
            for _ in range(400):
                handler.wfile.write(b"x" * (1 << 20))
                sent.append(1)
        except OSError:
            return

    server.says("GET /metrics", flood)
    assert http.get_text(server.url, "/metrics", timeout_s=60) is None
    assert len(sent) < 400


def test_proxies_of_the_environment_are_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.says("GET /health", {})
    assert http.healthy(server.url, timeout_s=TIMEOUT_S)
