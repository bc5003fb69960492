"""A small HTTP server that answers as it is told, the way an engine would or would not."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HEALTHY = {
    "/health": (200, b""),
    "/server_info": (
        200,
        b'{"version": "0.5.23", "max_total_num_tokens": 8192, "context_length": 4096,'
        b' "internal_states": [{'
        b'"effective_max_running_requests_per_dp": 4, "avg_spec_accept_length": 4.25}]}',
    ),
    "/v1/models": (200, b'{"data": [{"id": "a-model"}]}'),
    "/metrics": (
        200,
        b"sglang:num_running_reqs 3.0\nsglang:num_queue_reqs 1.0\nsglang:gen_throughput 512.5\n"
        b"sglang:token_usage 0.5\n",
    ),
}


class EngineServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answers: dict[str, tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.delays_s: dict[str, float] = {}
        self.silent = threading.Event()
        self.keys: set[str | None] = set()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: EngineServer

    def do_GET(self):
        self.server.keys.add(self.headers.get("Authorization"))
        if self.path not in self.server.answers:
            # Asked for something that it never answers.
            self.server.silent.wait()
            return
        time.sleep(self.server.delays_s.get(self.path, 0))
        status, body = self.server.answers[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def serving(answers: dict[str, tuple[int, bytes]]) -> Iterator[EngineServer]:
    with EngineServer(answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.silent.set()
            server.shutdown()
