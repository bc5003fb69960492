"""A day of ``status --watch`` on a clock that runs fast: what the program's memory does.

python benchmarks/watch_day.py [HOURS [EVERY_S]]

A frame a minute is what the day's history is kept by; the command's own pace, every 2 s, is 43,200 frames.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_deploy.cli.status import _watch
from dflash_deploy.watch.places import Place
from dflash_deploy.watch.status import Status, gather

_EVERY_S = 60.0
_MARKS = 8

_ENGINE = """
import sys
from tests.watch.engine_server import HEALTHY, serving
with serving(HEALTHY) as engine:
    print(engine.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def _served() -> Iterator[str]:
    """A server that answers, in a process of its own: its memory is not what is measured."""
    command = [sys.executable, "-c", _ENGINE]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None  # noqa: S101 - asked for above
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


class _Counted(io.TextIOBase):
    """Output that goes nowhere."""

    letters = 0

    def write(self, text: str) -> int:
        self.letters += len(text)
        return len(text)


def main() -> None:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    every_s = float(sys.argv[2]) if len(sys.argv) > 2 else _EVERY_S
    frames = int(hours * 3600 / every_s)
    process = psutil.Process()
    memory_mib: list[float] = []
    real, began = time.time, time.monotonic()
    with _served() as url:
        place = Place("url", url, url)

        def look() -> Status:
            # The samples that are kept are as far apart as on a clock that is not in a hurry.
            time.time = lambda: real() + every_s * len(memory_mib)
            try:
                return gather([place], timeout_s=5.0, keep=True)
            finally:
                time.time = real
                memory_mib.append(process.memory_info().rss / 2**20)

        shown = _Counted()
        with redirect_stdout(shown):
            _watch(look, None, 0.0, frames, as_lines_of_json=False)
    print(f"{frames} frames of {hours:g} simulated hours in {time.monotonic() - began:.0f} s")
    print(f"{shown.letters / frames:.0f} letters a frame")
    marks = [round(frames * part / _MARKS) - 1 for part in range(1, _MARKS + 1)]
    line = ", ".join(f"{memory_mib[mark]:.1f}" for mark in marks)
    print(f"memory (RSS, measured) after each {hours / _MARKS:g} h: {line} MiB")
    second = memory_mib[frames // 2 :]
    print(f"second half: {min(second):.1f} to {max(second):.1f} MiB")


if __name__ == "__main__":
    main()
