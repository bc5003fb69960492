"""How long `dflash-deploy doctor` takes: this machine alone, and with a profile; no network, no imports.

python benchmarks/doctor_time.py [--runs 5] [--profile NAME] [--python FILE]
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
        # Findings make the status; only a broken run is an error here.
        status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        taken.append(time.perf_counter() - start)
        if status not in (0, 1):
            sys.exit(f"{' '.join(command)} ended with {status}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", default="rtx5090-single-user")
    parser.add_argument("--python", help="serving interpreter to look at")
    given = parser.parse_args()
    command = [sys.executable, "-m", "dflash_deploy", "doctor"]
    command += ["--python", given.python] if given.python else []
    print(f"machine: {platform.machine()}, Python {platform.python_version()}, {given.runs} runs each")
    for name, line in (("doctor", command), (f"doctor {given.profile}", [*command, given.profile])):
        taken = seconds(line, given.runs)
        print(f"{name:34} median {statistics.median(taken):5.2f} s, slowest {max(taken):5.2f} s (measured)")


if __name__ == "__main__":
    main()
