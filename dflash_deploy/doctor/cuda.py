"""Whether CUDA itself can be started: NVML answers on machines where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dflash_deploy.doctor.finding import Answer, failed, passed, warned
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.machine import nvml, system
from dflash_deploy.machine.text import printable
from dflash_deploy.machine.visible import VARIABLE

_SCRIPT = Path(__file__).parents[1] / "inside" / "start_cuda.py"
_LIBRARY = "libcuda.so.1"
_START_S = 12.0
_LOG = "sudo dmesg | grep -iE 'NVRM|Xid'"

_DEVICES = "sudo modprobe nvidia_uvm; ls -l /dev/nvidia*; " + _LOG
_IN_CONTAINER = "start the container with all device files of the GPU (docker run --gpus all …)"
_IN_WINDOWS = "in PowerShell: wsl --update, then wsl --shutdown; update the NVIDIA driver in Windows"
_OF_THE_SYSTEM = frozenset({100, 101, 304, 999})
"""Answers for which device files and modules are to blame, whoever gives them."""

# CUresult of the driver API, as far as cuInit answers so.
_ANSWERS = {
    34: (
        "the library that was loaded is the toolkit's stub, not the driver's",
        "take .../lib64/stubs out of LD_LIBRARY_PATH",
    ),
    35: ("the driver is too old for the CUDA library that was loaded", "update the NVIDIA driver"),
    100: ("no card is there for CUDA", _DEVICES),
    304: ("device files are missing, or may not be opened", _DEVICES),
    802: ("the cards' fabric is not ready", "sudo systemctl start nvidia-fabricmanager"),
    803: (
        "the CUDA library and the kernel module are of different versions",
        "sudo reboot   (a container: take the driver's libraries out of its image)",
    ),
    804: (
        "a CUDA library newer than the driver is loaded (cuda-compat), which these cards do not allow",
        "take cuda-compat out of LD_LIBRARY_PATH (/usr/local/cuda/compat), or update the machine's driver",
    ),
    999: (
        "for no reason that is told; often its module nvidia_uvm is missing, or a suspend broke it",
        _DEVICES,
    ),
}


def starts(subject: Subject) -> Answer | None:
    """A program can start CUDA on what NVML shows."""
    if not subject.gpus().readable:
        return None
    environ = {**os.environ, **(subject.profile.env if subject.profile else {})}
    # That it hides every card is another check's to tell.
    environ.pop(VARIABLE, None)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", _SCRIPT],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warned(f"CUDA did not start within {_START_S:.0f} s", _LOG, f"cuInit of {_LIBRARY}")
    told = _parsed(done.stdout)
    if missing := told.get("missing"):
        return _not_loaded(printable(str(missing), longest=300))
    code = told.get("code")
    if not isinstance(code, int):
        return failed(f"a program that starts CUDA ends with status {done.returncode}", _LOG, _LIBRARY)
    if code == 0:
        return passed("CUDA can be started", f"cuInit of {_LIBRARY}")
    words, fix = _ANSWERS.get(code, ("its answer is known to CUDA's manual alone", _LOG))
    return failed(f"NVML answers, and CUDA cannot be started: {words}", _here(code, fix), f"cuInit: {code}")


def _parsed(output: bytes) -> dict[str, object]:
    try:
        told = json.loads(output)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _here(code: int, fix: str) -> str:
    """Who mends the system's part: it is another one under Windows, and outside of a container."""
    if code not in _OF_THE_SYSTEM:
        return fix
    if system.container():
        return _IN_CONTAINER
    return _IN_WINDOWS if system.wsl() is not None else fix


def _not_loaded(said: str) -> Answer:
    lies_in = next((folder for folder in nvml.FOLDERS if (folder / _LIBRARY).exists()), None)
    if lies_in is not None:
        return failed(
            f"{_LIBRARY} lies in {lies_in}, where the loader does not look: torch and Triton find no CUDA",
            f"echo {lies_in} | sudo tee /etc/ld.so.conf.d/nvidia.conf && sudo ldconfig",
            said,
        )
    if system.container():
        return failed(
            f"NVML answers, and {_LIBRARY} is not in this container: it was started for nvidia-smi alone",
            "start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility (docker run --gpus all …)",
            said,
        )
    return failed(
        f"NVML answers, and {_LIBRARY} of the same driver is not there",
        "install the driver's compute libraries (Debian: libcuda1; Ubuntu: libnvidia-compute-…)",
        said,
    )
