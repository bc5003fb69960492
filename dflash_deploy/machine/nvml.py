"""Opening and closing NVML, the driver's own library, and saying in words what went wrong there."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pynvml

from dflash_deploy.machine import system
from dflash_deploy.machine.text import printable

LIBRARY = "libnvidia-ml.so.1"

FOLDERS = (
    Path("/usr/lib/wsl/lib"),
    Path("/usr/local/nvidia/lib64"),
    Path("/run/opengl-driver/lib"),
    Path("/usr/lib64"),
    Path("/usr/lib/nvidia"),
)
"""Where the library lies (WSL, container hosts, NixOS, others) when the loader's own search misses it."""

_WORDS = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "the driver refuses the question",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not supported by this card or driver",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission",
    pynvml.NVML_ERROR_NOT_FOUND: "not found",
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: "the answer kept growing while it was read",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "the card's power cable is missing or loose",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
    pynvml.NVML_ERROR_TIMEOUT: "the driver did not answer in time",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the card's interrupts do not arrive",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: f"{LIBRARY} was not found",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old to know the question",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "the card's information memory is corrupted",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the card has fallen off the bus",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the card must be reset",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the operating system blocks the question",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel module are of different versions",
    pynvml.NVML_ERROR_IN_USE: "the card is in use",
    pynvml.NVML_ERROR_MEMORY: "not enough memory",
    pynvml.NVML_ERROR_NO_DATA: "no data",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "not enough resources",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "the driver knows another version of the question",
    pynvml.NVML_ERROR_NOT_READY: "the card is not ready",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "the card was not found",
}

_BLOCKED_BY_WINDOWS = frozenset(
    {
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_OPERATING_SYSTEM,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
    }
)

_KERNEL_LOG = "sudo dmesg | grep -iE 'NVRM|Xid'"

_INSTALL_DRIVER = {
    "ubuntu": "sudo ubuntu-drivers install && sudo reboot",
    "debian": "sudo apt install nvidia-open && sudo reboot",
    "fedora": "sudo dnf install akmod-nvidia && sudo reboot   (from RPM Fusion)",
    "arch": "sudo pacman -S nvidia-open && sudo reboot",
}


@dataclass(frozen=True)
class Problem:
    """Something for a person to mend: what and why, and the command that helps."""

    message: str
    fix: str


@contextmanager
def session(folders: tuple[Path, ...] = FOLDERS) -> Iterator[None]:
    """NVML opened for the block and closed after it, whatever happens in it.

    Raises:
        pynvml.NVMLError: it cannot be opened (``start_problem`` says it in words).
    """
    _start(folders)
    try:
        yield
    finally:
        _stop()


@functools.cache
def hold() -> None:
    """Open NVML once and keep it until this process ends: opening takes far longer than a question.

    Raises:
        pynvml.NVMLError: it cannot be opened; the next call tries again.
    """
    _start(FOLDERS)
    atexit.register(_stop)


def _start(folders: tuple[Path, ...]) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or not _preload(folders):
            raise
        pynvml.nvmlInit()


def _stop() -> None:
    # Nothing can be done about a driver that fails to close, and all answers are in hand.
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _preload(folders: tuple[Path, ...]) -> bool:
    """Load the library by its path; the loader then finds it by the name that pynvml asks for."""
    for folder in folders:
        with suppress(OSError):
            ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def words(error: pynvml.NVMLError) -> str:
    """An NVML error in words, without a full stop."""
    code = int(error.value)
    if code in _WORDS:
        return _WORDS[code]
    with suppress(UnicodeDecodeError):
        return f"{printable(str(error))} (NVML error {code})"
    return f"NVML error {code}"


def start_problem(error: pynvml.NVMLError) -> Problem:
    """Why NVML cannot be opened on this machine, and what helps."""
    container = system.container()
    code = int(error.value)
    if container is None and system.wsl() is not None and code in _BLOCKED_BY_WINDOWS:
        return Problem(
            f"The NVIDIA driver of Windows cannot be reached from WSL: {words(error)}.",
            "update the NVIDIA driver in Windows; then in PowerShell: wsl --update, and wsl --shutdown",
        )
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _no_library(container)
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        if container:
            return Problem(
                f"The NVIDIA driver cannot be reached from inside this container ({container}).",
                "start the container with the GPU, for example: docker run --gpus all …",
            )
        return Problem(
            "The NVIDIA driver is installed, but its kernel module is not loaded.",
            "sudo modprobe nvidia   (if that fails: dkms status; mokutil --sb-state)",
        )
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        module = system.nvidia_module_version()
        loaded = f" (kernel module: {module})" if module else ""
        if container:
            return Problem(
                f"The NVIDIA libraries in this container are not of the host driver's version{loaded}.",
                "remove the driver packages (libnvidia-*, nvidia-utils-*) from the container's image",
            )
        return Problem(
            "The NVIDIA driver was updated, but the kernel still runs the version before; library and "
            f"kernel module do not match{loaded}.",
            "sudo reboot",
        )
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return Problem(
            "This user may not talk to the NVIDIA driver (/dev/nvidiactl).",
            "sudo usermod -aG video,render $USER   (then log in again; see ls -l /dev/nvidia*)",
        )
    if code == pynvml.NVML_ERROR_INSUFFICIENT_POWER:
        return Problem(
            "A card gets too little power: its power cable is missing or loose.",
            "switch the machine off, seat the card's power cable, and start again",
        )
    if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return Problem(
            f"The {LIBRARY} found here is no NVML, or much too old.",
            f"ldconfig -p | grep {LIBRARY}   (then install the driver again)",
        )
    return Problem(f"The NVIDIA driver cannot be asked: {words(error)}.", f"nvidia-smi; {_KERNEL_LOG}")


def card_problem(index: int, name: str | None, error: pynvml.NVMLError) -> Problem:
    """Why one card cannot be read, and what helps."""
    card = f"GPU {index} ({name})" if name else f"GPU {index}"
    code = int(error.value)
    if code == pynvml.NVML_ERROR_GPU_IS_LOST:
        return Problem(
            f"{card} has fallen off the bus: it no longer answers.",
            f"{_KERNEL_LOG}; then sudo reboot   (if it comes back: check power cable, slot, temperature)",
        )
    if code == pynvml.NVML_ERROR_RESET_REQUIRED:
        return Problem(
            f"{card} must be reset before it can be used.", f"sudo nvidia-smi --gpu-reset -i {index}"
        )
    if code == pynvml.NVML_ERROR_NO_PERMISSION:
        return Problem(
            f"{card} cannot be read: no permission for its device file.",
            f"ls -l /dev/nvidia*; sudo usermod -aG video,render $USER   (card {index}; then log in again)",
        )
    if code == pynvml.NVML_ERROR_INSUFFICIENT_POWER:
        return Problem(
            f"{card} gets too little power: its power cable is missing or loose.",
            "switch the machine off, seat the card's power cable, and start again",
        )
    return Problem(f"{card} cannot be read: {words(error)}.", f"nvidia-smi -i {index}; {_KERNEL_LOG}")


def no_cards() -> Problem:
    """The driver runs and counts no card."""
    return Problem(
        "The NVIDIA driver runs, but it sees no card.",
        f"lspci -d 10de:; {_KERNEL_LOG}",
    )


def _no_library(container: str | None) -> Problem:
    missing = f"{LIBRARY}, which comes with it, was not found"
    if container:
        return Problem(
            f"No NVIDIA driver in this container ({container}): {missing}.",
            "start the container with the GPU (docker run --gpus all …, with the NVIDIA Container Toolkit)",
        )
    if system.wsl() is not None:
        return Problem(
            f"No NVIDIA driver in WSL: {missing} (it should lie in {FOLDERS[0]}).",
            "install the NVIDIA driver for Windows (none inside WSL), then: wsl --shutdown",
        )
    if not system.nvidia_on_pci():
        return Problem(
            f"No NVIDIA card: none is on the PCI bus, and no driver is installed ({missing}).",
            "lspci -d 10de:   (to try the tool without one: dflash-deploy tune --simulate rtx-5090)",
        )
    return Problem(
        f"An NVIDIA card is on the PCI bus, but no driver is installed: {missing}.",
        _INSTALL_DRIVER.get(system.distribution_id(), "install the NVIDIA driver, then: sudo reboot"),
    )
