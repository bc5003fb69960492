"""How long the command line takes to start: `dflash-deploy --help`, and a bare interpreter beside it.

python benchmarks/startup.py [--runs 20]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time


def seconds(command: list[str], runs: int) -> list[float]:
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    help_s = seconds([sys.executable, "-m", "dflash_deploy", "--help"], runs)
    bare_s = seconds([sys.executable, "-c", "pass"], runs)
    print(f"machine: {platform.machine()}, Python {platform.python_version()}, {runs} runs each")
    for name, taken in (("dflash-deploy --help", help_s), ("bare interpreter", bare_s)):
        print(
            f"{name:22} median {statistics.median(taken) * 1e3:6.1f} ms, "
            f"slowest {max(taken) * 1e3:6.1f} ms (measured)"
        )
    print(f"ratio of the medians: {statistics.median(help_s) / statistics.median(bare_s):.1f}")


if __name__ == "__main__":
    main()
