"""The NVIDIA cards of this machine, read through NVML. Memory is MiB (2**20 bytes); all is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import psutil
import pynvml

from dflash_deploy.machine import nvml
from dflash_deploy.machine.clocks import clock_reasons
from dflash_deploy.machine.text import printable
from dflash_deploy.machine.visible import VARIABLE, visible_indices

_T = TypeVar("_T")

_DESKTOP = frozenset(
    {
        "budgie-wm",
        "cinnamon",
        "compiz",
        "cosmic-comp",
        "gamescope",
        "gdm-wayland-session",
        "gdm-x-session",
        "gnome-remote-desktop-daemon",
        "gnome-session-binary",
        "gnome-shell",
        "Hyprland",
        "ksmserver",
        "kwin",
        "kwin_wayland",
        "kwin_x11",
        "labwc",
        "lightdm-gtk-greeter",
        "marco",
        "mutter",
        "niri",
        "picom",
        "plasmashell",
        "river",
        "sddm-greeter",
        "sddm-greeter-qt6",
        "sway",
        "wayfire",
        "weston",
        "X",
        "xdg-desktop-portal-gnome",
        "xfwm4",
        "Xorg",
        "Xwayland",
    }
)
# The kernel keeps 15 characters of a process's name.
_DESKTOP_CUT = frozenset(name[:15] for name in _DESKTOP)

_TRY_ANOTHER = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_DEPRECATED,
}
_NO_VALUE = {0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF}
_GROWING_LIST_TRIES = 8


@dataclass(frozen=True)
class Unknown:
    """A field of a card that the driver did not answer, and why."""

    field: str
    why: str


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a card.

    Attributes:
        name: safe to print; ``pid N`` where it cannot be read.
        user: who runs it, or None where that cannot be read.
        vram_mib: None where the driver does not say (WSL, other users' processes).
        kind: what it uses the card for.
        desktop: it belongs to a graphical desktop.
    """

    pid: int
    name: str
    user: str | None
    vram_mib: int | None
    kind: Literal["compute", "graphics", "both"]
    desktop: bool


@dataclass(frozen=True)
class Gpu:
    """One card. A field that the driver cannot answer is None, and ``unknown`` says why.

    Attributes:
        index: NVML's number of the card (PCI order, as nvidia-smi counts).
        memory_used_mib: without ``memory_reserved_mib`` where the driver tells them apart, else with it.
        pcie_gen: link now; cards slow it down while idle.
        power_limit_w: the limit in force.
        clock_reasons: why the clocks are where they are; empty when nothing holds them back.
        processes: on the card, largest first; None where the driver does not list them.
        failed: why the card cannot be read, or not to the end (then what was read before stands).
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    compute_capability: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    memory_free_mib: int | None = None
    memory_reserved_mib: int | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    clock_memory_max_mhz: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    temperature_c: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    persistence_mode: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None
    unknown: tuple[Unknown, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class GpuReading:
    """All cards at one moment.

    Attributes:
        problem: what could not be read and why, a line for each thing; None when all is well.
        fix: the command that helps, a line for each line of ``problem``.
        cuda_visible_devices: the variable's value in this environment, or None where it is not set.
        visible: NVML indices of the cards that a server started here sees, in its order; None where that
            cannot be told (see ``visible_indices``).
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    fix: str | None = None
    cuda_visible_devices: str | None = None
    visible: tuple[int, ...] | None = ()

    @property
    def readable(self) -> tuple[Gpu, ...]:
        """The cards that answer."""
        return tuple(gpu for gpu in self.gpus if gpu.failed is None)


def read_gpus(environ: Mapping[str, str] | None = None) -> GpuReading:
    """Read every card. Whatever goes wrong is told in the reading; nothing is raised.

    Args:
        environ: environment of the server to be started, where it is not this process's own.
    """
    environment = os.environ if environ is None else environ
    setting = environment.get(VARIABLE)
    shown_setting = None if setting is None else printable(setting, longest=400)
    try:
        with nvml.session():
            driver = _Answers()
            driver_version = driver.ask("driver_version", pynvml.nvmlSystemGetDriverVersion)
            cuda_number = driver.ask(
                "cuda_version",
                pynvml.nvmlSystemGetCudaDriverVersion_v2,
                pynvml.nvmlSystemGetCudaDriverVersion,
            )
            gpus, problems = _read_all()
    except pynvml.NVMLError as error:
        problem = nvml.start_problem(error)
        return GpuReading(problem=problem.message, fix=problem.fix, cuda_visible_devices=shown_setting)
    return GpuReading(
        gpus=gpus,
        driver_version=None if driver_version is None else printable(driver_version),
        cuda_version=None if cuda_number is None else f"{cuda_number // 1000}.{cuda_number % 1000 // 10}",
        problem="\n".join(problem.message for problem in problems) or None,
        fix="\n".join(problem.fix for problem in problems) or None,
        cuda_visible_devices=shown_setting,
        visible=visible_indices([gpu.uuid for gpu in gpus], [gpu.name for gpu in gpus], environment),
    )


@dataclass(frozen=True)
class GpuSample:
    """A card at one moment, in what changes while it works; None where the driver does not tell."""

    clock_sm_mhz: int | None
    clock_memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    clock_reasons: tuple[str, ...] | None
    vram_used_mib: int | None


def gpu_sample(gpu: int | str) -> GpuSample | None:
    """Look at one card; quick enough to repeat while measuring.

    NVML stays open in this process after the first call.

    Args:
        gpu: NVML index or UUID.

    Returns:
        None where the card is not there.
    """
    with suppress(pynvml.NVMLError, UnicodeError):
        nvml.hold()
        handle = _handle(gpu)
        answers = _Answers()
        memory = answers.ask("memory", *_memory_queries(handle))
        power_mw = answers.ask("power", lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        reasons = answers.ask("clock_reasons", *_reason_queries(handle))
        return GpuSample(
            clock_sm_mhz=answers.ask(
                "clock_sm", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            ),
            clock_memory_mhz=answers.ask(
                "clock_memory", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
            ),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=answers.ask("temperature", *_temperature_queries(handle)),
            clock_reasons=None if reasons is None else clock_reasons(reasons),
            vram_used_mib=None if memory is None else int(memory.used) >> 20,
        )
    return None


def vram_used_mib(gpu: int | str) -> int | None:
    """Memory in use on one card; quick enough to sample while measuring.

    NVML stays open in this process after the first call.

    Args:
        gpu: NVML index or UUID.

    Returns:
        None where the card is not there or does not tell.
    """
    with suppress(pynvml.NVMLError, UnicodeError):
        nvml.hold()
        memory = _Answers().ask("memory", *_memory_queries(_handle(gpu)))
        return None if memory is None else int(memory.used) >> 20
    return None


def gpu_processes(gpu: int | str) -> tuple[GpuProcess, ...] | None:
    """Processes on one card, largest first.

    Args:
        gpu: NVML index or UUID.

    Returns:
        None where the card is not there or the driver does not list them.
    """
    with suppress(pynvml.NVMLError, UnicodeError):
        nvml.hold()
        return _processes(_Answers(), _handle(gpu))
    return None


class _Answers:
    """Asks the driver, and keeps what it could not answer; a lost card is asked no more."""

    def __init__(self) -> None:
        self.unknown: list[Unknown] = []
        self.lost: pynvml.NVMLError | None = None

    def ask(self, field: str, *queries: Callable[[], _T]) -> _T | None:
        """The first of ``queries`` (newest first) that this driver answers, or None."""
        why = ""
        for query in queries:
            if self.lost is not None:
                why = nvml.words(self.lost)
                break
            try:
                value = query()
            except pynvml.NVMLError as error:
                why = nvml.words(error)
                if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                    self.lost = error
                elif error.value not in _TRY_ANOTHER:
                    break
            except UnicodeDecodeError:
                why = "the driver's answer is not text"
                break
            else:
                if not (isinstance(value, int) and value in _NO_VALUE):
                    return value
                why = "the driver gives no value"
        self.unknown.append(Unknown(field, why))
        return None


def _handle(gpu: int | str) -> object:
    if isinstance(gpu, str):
        return pynvml.nvmlDeviceGetHandleByUUID(gpu)
    if gpu < 0:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return pynvml.nvmlDeviceGetHandleByIndex(gpu)


def _read_all() -> tuple[tuple[Gpu, ...], list[nvml.Problem]]:
    gpus: list[Gpu] = []
    problems: list[nvml.Problem] = []
    count = pynvml.nvmlDeviceGetCount()
    if not count:
        problems.append(nvml.no_cards())
    for index in range(count):
        answers = _Answers()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            problems.append(nvml.card_problem(index, None, error))
            gpus.append(Gpu(index=index, failed=nvml.words(error)))
            continue
        gpu = _read_one(index, handle, answers)
        if answers.lost is not None:
            problems.append(nvml.card_problem(index, gpu.name, answers.lost))
        gpus.append(gpu)
    return tuple(gpus), problems


def _read_one(index: int, handle: object, answers: _Answers) -> Gpu:
    def ask(field: str, query: Callable[..., _T], *arguments: object) -> _T | None:
        return answers.ask(field, lambda: query(handle, *arguments))

    name = ask("name", pynvml.nvmlDeviceGetName)
    uuid = ask("uuid", pynvml.nvmlDeviceGetUUID)
    bus_id = answers.ask("pci_bus_id", lambda: str(pynvml.nvmlDeviceGetPciInfo_v3(handle).busId))
    capability = ask("compute_capability", pynvml.nvmlDeviceGetCudaComputeCapability)
    memory = answers.ask("memory", *_memory_queries(handle))
    draw_mw = ask("power_draw_w", pynvml.nvmlDeviceGetPowerUsage)
    limit_mw = answers.ask(
        "power_limit_w",
        lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle),
    )
    default_limit_mw = ask("power_limit_default_w", pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
    reasons = answers.ask("clock_reasons", *_reason_queries(handle))
    temperature = answers.ask("temperature_c", *_temperature_queries(handle))
    ecc = ask("ecc", pynvml.nvmlDeviceGetEccMode)
    mig = ask("mig", pynvml.nvmlDeviceGetMigMode)
    persistence = ask("persistence_mode", pynvml.nvmlDeviceGetPersistenceMode)
    total_mib = None if memory is None else int(memory.total) >> 20
    if memory is not None and not total_mib:
        answers.unknown.append(Unknown("memory", "the driver reports none of the card's own"))
        memory = total_mib = None
    return Gpu(
        index=index,
        name=None if name is None else printable(name),
        uuid=None if uuid is None else printable(uuid),
        pci_bus_id=None if bus_id is None else printable(bus_id),
        pcie_gen=ask("pcie_gen", pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_gen_max=ask("pcie_gen_max", pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask("pcie_width", pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask("pcie_width_max", pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_total_mib=total_mib,
        memory_used_mib=None if memory is None else int(memory.used) >> 20,
        memory_free_mib=None if memory is None else int(memory.free) >> 20,
        memory_reserved_mib=_reserved_mib(memory, answers),
        power_draw_w=None if draw_mw is None else draw_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        power_limit_default_w=None if default_limit_mw is None else default_limit_mw / 1000,
        clock_sm_mhz=ask("clock_sm_mhz", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        clock_sm_max_mhz=ask("clock_sm_max_mhz", pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        clock_memory_mhz=ask("clock_memory_mhz", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        clock_memory_max_mhz=ask(
            "clock_memory_max_mhz", pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_MEM
        ),
        clock_reasons=None if reasons is None else clock_reasons(reasons),
        temperature_c=temperature,
        ecc=None if ecc is None else bool(ecc[0]),
        mig=None if mig is None else bool(mig[0]),
        persistence_mode=None if persistence is None else bool(persistence),
        processes=_processes(answers, handle),
        failed=None if answers.lost is None else nvml.words(answers.lost),
        unknown=tuple(answers.unknown),
    )


def _memory_queries(handle: object) -> tuple[Callable[[], pynvml.c_nvmlMemory_t], ...]:
    return (
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle),
    )


def _reason_queries(handle: object) -> tuple[Callable[[], int], ...]:
    return (
        lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


def _temperature_queries(handle: object) -> tuple[Callable[[], int], ...]:
    return (
        lambda: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),
        lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _reserved_mib(memory: pynvml.c_nvmlMemory_t | None, answers: _Answers) -> int | None:
    if memory is None:
        return None
    if isinstance(memory, pynvml.c_nvmlMemory_v2_t):
        return int(memory.reserved) >> 20
    answers.unknown.append(Unknown("memory_reserved_mib", "this driver counts it as used"))
    return None


def _processes(answers: _Answers, handle: object) -> tuple[GpuProcess, ...] | None:
    compute = answers.ask(
        "compute_processes",
        lambda: _listed(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle),
        lambda: _listed(pynvml.nvmlDeviceGetComputeRunningProcesses_v2, handle),
    )
    graphics = answers.ask(
        "graphics_processes",
        lambda: _listed(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle),
        lambda: _listed(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2, handle),
    )
    if compute is None and graphics is None:
        return None
    found = [
        _process(pid, compute or {}, graphics or {})
        for pid in dict.fromkeys([*(compute or ()), *(graphics or ())])
    ]
    return tuple(sorted(found, key=lambda process: (-(process.vram_mib or 0), process.pid)))


def _listed(
    query: Callable[[object], list[pynvml.nvmlFriendlyObject]], handle: object
) -> dict[int, int | None]:
    """Bytes by process; asked again while the list outgrows the room that the driver was given for it."""
    for attempt in range(1, _GROWING_LIST_TRIES + 1):
        try:
            entries = query(handle)
            break
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or attempt == _GROWING_LIST_TRIES:
                raise
    held: dict[int, int | None] = {}
    for entry in entries:
        # On a card split by MIG a process stands here once for each instance it uses.
        before = held.get(entry.pid)
        held[entry.pid] = before if entry.usedGpuMemory is None else (before or 0) + entry.usedGpuMemory
    return held


def _process(pid: int, compute: Mapping[int, int | None], graphics: Mapping[int, int | None]) -> GpuProcess:
    held = [used for used in (compute.get(pid), graphics.get(pid)) if used is not None]
    name = user = None
    with suppress(psutil.Error, OSError):
        name = psutil.Process(pid).name()
    with suppress(psutil.Error, OSError, KeyError):
        user = psutil.Process(pid).username()
    return GpuProcess(
        pid=pid,
        name=printable(name) if name else f"pid {pid}",
        user=printable(user) if user else None,
        # A process in both lists has all its memory in each.
        vram_mib=max(held) >> 20 if held else None,
        kind="both" if pid in compute and pid in graphics else "compute" if pid in compute else "graphics",
        desktop=name is not None and (name in _DESKTOP or name in _DESKTOP_CUT),
    )
