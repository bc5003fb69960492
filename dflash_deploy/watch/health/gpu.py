"""The cards: free memory, errors, and what holds their clocks back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pynvml

from dflash_deploy.machine import nvml
from dflash_deploy.machine.clocks import HELD_BACK
from dflash_deploy.machine.gpu import Gpu, GpuReading
from dflash_deploy.watch.health.kernel_log import Xid
from dflash_deploy.watch.health.verdict import Figure, Layer, Verdict

_HOT_C = 90
_KERNEL_LOG = "sudo dmesg | grep -iE 'NVRM|Xid'"
# Numbers of NVIDIA's Xid catalogue after which the card needs a person (or a reset), not only the process.
_GRAVE = {
    48: "double-bit memory error",
    62: "internal micro-controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "GPU system processor timed out",
    120: "GPU system processor failed",
    140: "memory error that was not corrected",
    143: "GPU failed to start",
    154: "the driver wants a recovery action",
}
_PASSING = {
    13: "exception in a kernel",
    31: "memory page fault",
    43: "a process's work stopped",
    45: "work taken off the GPU",
    63: "memory row remapped",
    92: "many corrected memory errors",
    94: "contained memory error",
}


@dataclass(frozen=True)
class CardErrors:
    """Errors that a card counts itself; None where it does not count (consumer cards have no ECC).

    Attributes:
        uncorrected: memory errors since the driver was loaded that ECC could not mend.
        remap_pending: a broken memory row is replaced at the next reset; ``remap_failed``: it cannot be.
    """

    gpu: int
    uncorrected: int | None = None
    corrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False


def read_errors() -> tuple[CardErrors, ...]:
    """What every card counts; empty where there is none to ask."""
    found = []
    with suppress(pynvml.NVMLError), nvml.session():
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):
                found.append(_errors_of(index))
    return tuple(found)


def _errors_of(index: int) -> CardErrors:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    counts: dict[int, int | None] = {}
    for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED):
        counts[kind] = None
        with suppress(pynvml.NVMLError):
            counts[kind] = int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))
    pending = failed = False
    with suppress(pynvml.NVMLError):
        _, _, waits, lost = pynvml.nvmlDeviceGetRemappedRows(handle)
        pending, failed = bool(waits), bool(lost)
    return CardErrors(
        index,
        counts[pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED],
        counts[pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED],
        pending,
        failed,
    )


def memory_layer(gpus: Sequence[Gpu], *, warning_mib: int, critical_mib: int) -> Layer:
    """Free memory of the service's cards: too little of it ends in an out-of-memory under load."""
    told = [(gpu.index, gpu.memory_free_mib) for gpu in gpus if gpu.memory_free_mib is not None]
    if not told:
        return Layer("VRAM", Verdict.UNKNOWN, "no card tells its free memory")
    return free_memory_layer(told, warning_mib=warning_mib, critical_mib=critical_mib)


def free_memory_layer(
    free_mib: Sequence[tuple[int | None, int]], *, warning_mib: int, critical_mib: int
) -> Layer:
    """The same for given free memory by card (None: a simulated one)."""
    figures = tuple(
        Figure("vram_free", free, "mib", warning_mib, critical_mib, gpu) for gpu, free in free_mib
    )
    least = min(free for _, free in free_mib)
    text = ", ".join(f"{_card(gpu)}{free:,} MiB free" for gpu, free in free_mib)
    fix = "dflash-deploy probe (who holds it); lower mem_fraction_static, or run dflash-deploy tune again"
    if least < critical_mib:
        return Layer("VRAM", Verdict.CRITICAL, text, fix, figures)
    if least < warning_mib:
        return Layer("VRAM", Verdict.WARNING, text, fix, figures)
    return Layer("VRAM", Verdict.OK, text, None, figures)


def errors_layer(reading: GpuReading, errors: Sequence[CardErrors], xids: Sequence[Xid] | None) -> Layer:
    """Cards that do not answer, ECC, and the kernel's Xid messages (None where its log may not be read)."""
    grave = [f"GPU {gpu.index}: {gpu.failed}" for gpu in reading.gpus if gpu.failed]
    passing: list[str] = []
    figures: list[Figure] = []
    for card in errors:
        if card.uncorrected is not None:
            figures.append(Figure("ecc_uncorrected", card.uncorrected, "count", None, 0, card.gpu))
        if card.uncorrected:
            grave.append(f"GPU {card.gpu}: {card.uncorrected} memory errors that ECC could not mend")
        if card.remap_failed:
            grave.append(f"GPU {card.gpu}: a broken memory row cannot be replaced")
        elif card.remap_pending:
            passing.append(f"GPU {card.gpu}: a broken memory row is replaced at the next reset")
    for number, count in sorted(_counted(xids or ()).items()):
        times = f" ({count} times)" if count > 1 else ""
        if number in _GRAVE:
            grave.append(f"Xid {number}, {_GRAVE[number]}{times}")
        else:
            passing.append(f"Xid {number}, {_PASSING.get(number, 'see the Xid catalogue')}{times}")
    if xids is not None:
        figures.append(Figure("xid_events", len(xids), "count"))
    found = "; ".join([*grave, *passing])
    if grave:
        return Layer(
            "GPU errors", Verdict.CRITICAL, found, f"{_KERNEL_LOG}; then sudo reboot", tuple(figures)
        )
    if passing:
        return Layer("GPU errors", Verdict.WARNING, found, _KERNEL_LOG, tuple(figures))
    if not reading.gpus:
        return Layer("GPU errors", Verdict.UNKNOWN, _no_card(reading), reading.fix)
    unread = "" if xids is not None else "; the kernel's log may not be read here (run it as root)"
    return Layer("GPU errors", Verdict.OK, f"none{unread}", None, tuple(figures))


def throttle_layer(gpus: Sequence[Gpu]) -> Layer:
    """Heat and power. A software power cap is what a busy card lives with, and no fault."""
    if not gpus:
        return Layer("throttling", Verdict.UNKNOWN, "no card can be asked")
    bad: list[str] = []
    figures: list[Figure] = []
    for gpu in gpus:
        held = [reason for reason in gpu.clock_reasons or () if reason in HELD_BACK]
        if held:
            bad.append(f"GPU {gpu.index}: {', '.join(held)}")
        if gpu.temperature_c is not None:
            figures.append(Figure("temperature", gpu.temperature_c, "celsius", _HOT_C, None, gpu.index))
            if gpu.temperature_c >= _HOT_C:
                bad.append(f"GPU {gpu.index}: {gpu.temperature_c} °C")
        if gpu.power_draw_w is not None:
            figures.append(Figure("power", gpu.power_draw_w, "watts", None, None, gpu.index))
    if bad:
        fix = "clean the fans and filters, give the case air; nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        return Layer("throttling", Verdict.WARNING, "; ".join(bad), fix, tuple(figures))
    if all(gpu.clock_reasons is None and gpu.temperature_c is None for gpu in gpus):
        return Layer("throttling", Verdict.UNKNOWN, "the driver tells neither heat nor clocks")
    hottest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    text = "nothing slows it" + ("" if hottest is None else f", {hottest} °C")
    return Layer("throttling", Verdict.OK, text, None, tuple(figures))


def _no_card(reading: GpuReading) -> str:
    return (reading.problem or "no card").splitlines()[0]


def _card(gpu: int | None) -> str:
    return "" if gpu is None else f"GPU {gpu}: "


def _counted(xids: Sequence[Xid]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for xid in xids:
        counts[xid.number] = counts.get(xid.number, 0) + 1
    return counts
