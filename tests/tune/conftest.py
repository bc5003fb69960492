from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.tool import run_tool

PROFILE = """
summary: small, for tests
card: rtx-5090
model: {target: qwen3.8-27b-nvfp4}
speculation: {method: dflash, draft: qwen3.8-27b-dflash2}
engine: {version: 0.5.23}
workload: {users: 2, context_tokens: 1024, output_tokens: 256}
objective: {optimize: total_tokens_per_s}
flags:
  mamba-ssm-dtype: bfloat16
  disable-radix-cache: true
  disable-prefill-cuda-graph: true
  kv-cache-dtype: fp8_e4m3
  max-total-tokens: 8192
  cuda-graph-bs-decode: [1, 2]
search:
  mem-fraction-static: {low: 0.90, high: 0.94, step: 0.01}
  max-running-requests: {low: 2, high: 3, step: 1}
  speculative-num-draft-tokens: {low: 6, high: 9, step: 1}
known:
  - name: hand-tuned
    source: made up for this test
    flags: {mem-fraction-static: 0.92, max-running-requests: 2, speculative-num-draft-tokens: 8}
measure: {rounds: 2, warm_up: 1}
service: {name: test}
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def result(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


@dataclass
class Tool:
    """The command line in a home of its own."""

    home: Path
    profile: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def studies(self) -> Path:
        return self.home / "state" / "dflash-deploy" / "studies"

    def start(
        self,
        *arguments: str | Path,
        wrapper: tuple[str, ...] = (),
        stdout: int = subprocess.PIPE,
        **env: str,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*wrapper, sys.executable, "-m", "dflash_deploy", *map(str, arguments)],
            env=self.variables(env),
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        xdg = {f"XDG_{kind.upper()}_HOME": str(self.home / kind) for kind in ("state", "config", "cache")}
        return {**os.environ, **xdg, **self.env, **more}

    def run(self, *arguments: str | Path, **env: str) -> Ended:
        done = run_tool(*arguments, env=self.variables(env))
        return Ended(done.returncode, done.stdout, done.stderr)

    def wrapped(self, shell: str, *arguments: str | Path) -> Ended:
        """By a shell that starts it as ``"$@"``."""
        with self.start(*arguments, wrapper=("bash", "-c", shell, "-")) as process:
            out, err = process.communicate(timeout=110)
        return Ended(process.returncode, out, err)

    def on_terminal(self, *arguments: str | Path) -> Ended:
        """As a person sees it: on a wide terminal."""
        master, slave = pty.openpty()
        wide = {"TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
        with self.start(*arguments, stdout=slave, **wide) as process:
            os.close(slave)
            shown = b""
            with suppress(OSError):  # the other end is gone
                while piece := os.read(master, 65536):
                    shown += piece
            process.wait(timeout=60)
            err = process.stderr.read()
        os.close(master)
        return Ended(process.returncode, shown.decode(), err)

    def simulate(self, *arguments: str | Path, scale: float = 100, **env: str) -> Ended:
        return self.run(*self.command(*arguments, scale=scale), **env)

    def command(self, *arguments: str | Path, scale: float = 100) -> tuple[str | Path, ...]:
        card = ("--simulate", "rtx-5090", "--time-scale", str(scale))
        return ("tune", self.profile, *card, "--json", *arguments)

    def trials(self, study: str) -> dict[int, dict]:
        records = [
            json.loads(path.read_text()) for path in (self.studies / study / "trials").glob("*/trial.json")
        ]
        return {record["number"]: record for record in records}

    def servers(self) -> list[psutil.Process]:
        """Simulators of this home that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if "dflash_deploy.simulator" in process.cmdline() and (
                    process.environ().get("XDG_STATE_HOME") == str(self.home / "state")
                ):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


@pytest.fixture
def tool(tmp_path) -> Iterator[Tool]:
    profile = tmp_path / "small.yaml"
    profile.write_text(PROFILE)
    tool = Tool(tmp_path, profile)
    yield tool
    left = tool.servers()
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not left


def wait_for(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)
