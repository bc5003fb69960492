"""Builds the stand-in driver library, and describes the cards that it shows.

    env = {**os.environ, **stub_env(stub_folder(), StubCard(), StubCard(name="…"))}

A process started in ``env`` finds these cards through the real pynvml.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"
MIB = 1 << 20

NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_POWER = 8
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
NO_VALUE = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class StubProcess:
    pid: int
    mib: int | None
    kind: str = "compute"


@dataclass(frozen=True)
class StubCard:
    """One card, an idle RTX 5090 unless told otherwise.

    ``used_mib`` may list the use at the first, second … question; the last then stays. ``errors`` gives the
    NVML error code that a function answers with. From question number ``lost_after`` on the card is lost.
    """

    name: str | bytes = "NVIDIA GeForce RTX 5090"
    uuid: str | None = None
    bus: str | None = None
    total_mib: int = 32607
    reserved_mib: int = 483
    used_mib: int | Sequence[int] = 2
    numbers: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    processes: Sequence[StubProcess] = ()
    lost_after: int | None = None
    list_grows: int = 0

    def lines(self, index: int) -> list[bytes]:
        idle = {"gen": 1, "gen_max": 5, "width": 16, "width_max": 16, "major": 12, "minor": 0}
        idle |= {"draw": 14_500, "limit": 575_000, "limit_default": 575_000, "temperature": 34, "reasons": 1}
        idle |= {"sm": 180, "sm_max": 3090, "mem": 405, "mem_max": 14_001, "persistence": 1}
        sizes = {"total": self.total_mib * MIB, "reserved": self.reserved_mib * MIB}
        numbers = {**idle, **sizes, **self.numbers}
        name = self.name if isinstance(self.name, bytes) else self.name.encode()
        used = [self.used_mib] if isinstance(self.used_mib, int) else self.used_mib
        lines = [
            b"card",
            b"text name " + name,
            f"text uuid {self.uuid or f'GPU-00000000-0000-0000-0000-00000000000{index}'}".encode(),
            f"text bus {self.bus or f'00000000:0{index + 1}:00.0'}".encode(),
            b"used " + b" ".join(str(mib * MIB).encode() for mib in used),
        ]
        lines += [f"number {key} {value}".encode() for key, value in numbers.items()]
        lines += [f"error {function} {code}".encode() for function, code in self.errors.items()]
        lines += [
            f"process {process.kind} {process.pid} "
            f"{NO_VALUE if process.mib is None else process.mib * MIB}".encode()
            for process in self.processes
        ]
        if self.lost_after is not None:
            lines.append(f"lost_after {self.lost_after}".encode())
        lines.append(f"growing {self.list_grows}".encode())
        return lines


@cache
def stub_folder() -> Path:
    """The library's folder, one for all tests of a process; skips a test where there is no C compiler."""
    folder = Path(tempfile.mkdtemp(prefix="nvml-stub-"))
    atexit.register(shutil.rmtree, folder)
    return build_stub(folder)


def build_stub(folder: Path) -> Path:
    """Compile the library into ``folder`` and return that; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc) to build the stand-in driver library with")
    folder.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, "-o", str(folder / LIBRARY), str(SOURCE)], check=True)
    return folder


def stub_env(
    library_folder: Path,
    *cards: StubCard,
    driver: str = "610.43.02",
    cuda: int = 13030,
    init_code: int = 0,
    fails: Mapping[str, int] | None = None,
    log: Path | None = None,
) -> dict[str, str]:
    """Variables for a process that is to find ``cards``, and no others.

    Args:
        library_folder: from ``build_stub``.
        init_code: NVML error code that opening ends with.
        fails: error codes of functions that belong to no card.
        log: file that notes each open and close of NVML.
    """
    lines = [f"init {init_code}".encode(), f"driver {driver}".encode(), f"cuda {cuda}".encode()]
    lines += [f"fail {function} {code}".encode() for function, code in (fails or {}).items()]
    for index, card in enumerate(cards):
        lines += card.lines(index)
    with tempfile.NamedTemporaryFile(dir=library_folder, suffix=".scenario", delete=False) as file:
        file.write(b"\n".join(lines) + b"\n")
    variables = {"LD_LIBRARY_PATH": str(library_folder), "NVML_STUB_SCENARIO": file.name}
    return variables if log is None else {**variables, "NVML_STUB_LOG": str(log)}
