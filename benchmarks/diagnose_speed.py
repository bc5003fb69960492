"""How fast a log is diagnosed, and in how much memory: ``python benchmarks/diagnose_speed.py [MB]``.

Three logs are made: a server's that served for long, one whose lines are all unlike, and a serving log
with a failure at its end, packed with gzip. Figures are measured on the machine that runs it.
"""

from __future__ import annotations

import gzip
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_deploy.diagnosis import diagnose

MB = 1_000_000
FAILURE = (
    "[2026-08-24 19:31:54] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/sgl/scheduler.py", line 2750, in event_loop_overlap\n    batch = self.run_batch()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of "
    "31.36 GiB of which 604.06 MiB is free.\n\n"
    "[2026-08-24 19:31:55] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
)


def serving(size: int) -> Iterator[str]:
    """What a server logs while it serves."""
    draw, written, number = random.Random(7), 0, 0  # noqa: S311
    yield "[2026-08-24 13:31:54] The server is fired up and ready to roll!\n"
    while written < size:
        number += 1
        stamp = f"[2026-08-24 {number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}]"
        lines = (
            f"{stamp} Prefill batch, #new-seq: 1, #new-token: {draw.randrange(4096)}, #cached-token: 64, "
            f"full token usage: 0.{draw.randrange(100):02d}, #running-req: 0, #queue-req: 0, "
            "cuda graph: False\n"
            f"{stamp} Decode batch, #running-req: 1, #full token: {draw.randrange(90_000)}, "
            "full token usage: "
            f"0.{draw.randrange(100):02d}, mamba num: 3, mamba usage: 0.38, accept len: "
            f"4.{draw.randrange(100):02d}, "
            f"accept rate: 0.52, cuda graph: True, gen throughput (token/s): "
            f"{draw.randrange(300)}.17, #queue-req: 0\n"
            f"{stamp} INFO:     172.17.0.1:{draw.randrange(65_536)} - "
            '"POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        )
        written += len(lines)
        yield lines


def unlike(size: int) -> Iterator[str]:
    """Lines that are all unlike, the worst case."""
    draw, written = random.Random(7), 0  # noqa: S311
    words = "a river that bends where stones lie and light falls on leaves in autumn wind".split()  # noqa: SIM905
    while written < size:
        line = f"[2026-08-24 13:31:54] {' '.join(draw.choices(words, k=30))}\n"
        written += len(line)
        yield line


def measure(name: str, path: Path, size: int) -> None:
    begun, worked = time.perf_counter(), time.process_time()
    found = diagnose(path)
    seconds, worked = time.perf_counter() - begun, time.process_time() - worked
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    root = found.root.id if found.root else "no failure"
    print(
        f"{name:<24} {size / MB:6.0f} MB: {size / MB / seconds:5.0f} MB/s by the clock, "
        f"{size / MB / worked:5.0f} MB/s "
        f"of processor time (measured), peak {peak_mib:.0f} MiB, {root}"
    )


def main() -> None:
    size = int(float(sys.argv[1]) * MB) if len(sys.argv) > 1 else 300 * MB
    diagnose(["warm up"])
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("serving, then a failure", serving), ("all lines unlike", unlike)):
            path = Path(folder) / "log"
            with path.open("w") as file:
                file.writelines(lines(size))
                file.write(FAILURE)
            measure(name, path, path.stat().st_size)
        path = Path(folder) / "log.gz"
        with gzip.open(path, "wt", compresslevel=1) as packed:
            packed.writelines(serving(size // 3))
            packed.write(FAILURE)
        measure("serving, gzip", path, size // 3)


if __name__ == "__main__":
    main()
