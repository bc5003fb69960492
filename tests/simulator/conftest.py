"""A simulated server as a real process, ended whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import pytest

from dflash_deploy.server.ports import free_port

NVFP4 = "--model-path RadixArk/Qwen3.8-27B-NVFP4"
DFLASH2 = "--speculative-algorithm DFLASH --speculative-draft-model-path incoai/Qwen3.8-27B-DFlash2"
ONE_USER = (
    f"{NVFP4} {DFLASH2} --mem-fraction-static 0.85 --max-running-requests 1 --max-mamba-cache-size 4 "
    "--mamba-ssm-dtype bfloat16 --mamba-radix-cache-strategy extra_buffer_lazy --kv-cache-dtype fp8_e4m3 "
    "--disable-prefill-cuda-graph"
)
FOUR_USERS = (
    f"{NVFP4} {DFLASH2} --mem-fraction-static 0.95 --max-total-tokens 8192 --max-running-requests 4 "
    "--max-mamba-cache-size 4 --disable-radix-cache --mamba-ssm-dtype bfloat16 --kv-cache-dtype fp8_e4m3 "
    "--disable-prefill-cuda-graph --cuda-graph-bs-decode 1 2 3 4"
)
DEADLINE_S = 60.0


@dataclass
class Simulated:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            data = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
            connection.request(method, path, data, self.headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def open(self, method: str, path: str, body: str) -> HTTPConnection:
        """Send a request and do not wait for its answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        connection.request(method, path, body, self.headers)
        return connection

    def get(self, path: str) -> tuple[int, str]:
        return self.request("GET", path)

    def info(self) -> dict:
        return json.loads(self.get("/server_info")[1])

    def chat(self, text: str = "Explain what a cache is.", **options: object) -> tuple[int, str]:
        return self.request("POST", "/v1/chat/completions", chat_body(text, **options))

    def events(self, text: str = "Explain what a cache is.", **options: object) -> list[dict]:
        """The whole event stream of one answer, parsed; the end mark is checked and left out."""
        status, body = self.chat(text, stream=True, stream_options={"include_usage": True}, **options)
        assert status == 200, body
        lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_for(self, wanted: str) -> str:
        wait(lambda: wanted in self.text() or self.process.poll() is not None)
        text = self.text()
        assert wanted in text, text[-3000:]
        return text

    def exit_status(self) -> int:
        return self.process.wait(DEADLINE_S)


def chat_body(text: str, **options: object) -> dict[str, object]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 64} | options


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


Launcher = Callable[..., Simulated]


@contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """Start simulators, and end them; ``ready=False`` comes back at once."""
    started: list[Simulated] = []

    def start(
        flags: str = ONE_USER,
        *,
        ready: bool = True,
        scale: float = 200,
        fault: str = "",
        port: int | None = None,
        **env: str,
    ) -> Simulated:
        number = free_port("127.0.0.1") if port is None else port
        log = folder / f"simulator-{len(started)}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH_SIM_")}
        environment |= {"DFLASH_SIM_TIME_SCALE": str(scale), "DFLASH_SIM_FAULT": fault} | env
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "dflash_deploy.simulator", *flags.split(), "--port", str(number)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        server = Simulated(process, number, log)
        started.append(server)
        if ready:
            server.wait_for("The server is fired up and ready to roll!")
        return server

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait(DEADLINE_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as start:
        yield start
