"""Checks of the cards and their driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import psutil

from dflash_deploy.doctor.finding import Answer, Repair, failed, passed, unknown, warned
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import Gpu, GpuProcess, GpuReading
from dflash_deploy.watch.places import record_places, unit_places

_FOREIGN_MIB = 256
"""Held by others without a word: driver contexts and small tools come to less."""
_DESKTOP_MIB = 512
_UNSEEN_MIB = 1024
_LOST_W = 1.0
_SLOWED = ("hardware slowdown", "thermal slowdown", "hardware power brake", "reliability limit")
_COMMAND_S = 30.0


def driver(subject: Subject) -> Answer:
    """The driver answers, and there is a card that can be read."""
    reading = subject.gpus()
    about = f"driver {reading.driver_version}, for CUDA up to {reading.cuda_version}"
    if not reading.readable and subject.on_cpu:
        return passed("none, and the profile needs none (device: cpu)")
    if not reading.readable:
        return failed(_lines(reading.problem) or "no card can be read", _lines(reading.fix))
    if reading.problem:
        return warned(_lines(reading.problem), _lines(reading.fix), about)
    names = ", ".join(gpu.name or f"GPU {gpu.index}" for gpu in reading.readable)
    return passed(f"{names}; {about}", "NVML")


def visible(subject: Subject) -> Answer | None:
    """A server that is started here would see a card."""
    reading = subject.gpus()
    if not reading.readable or reading.cuda_visible_devices is None:
        return None
    setting = f"CUDA_VISIBLE_DEVICES={reading.cuda_visible_devices}"
    if reading.visible is None:
        return warned(
            f"{setting} counts in CUDA's own order, and the cards here are unlike each other: which one a "
            "server would take cannot be told",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    if not reading.visible:
        return failed(f"{setting} hides every card from a server", "unset CUDA_VISIBLE_DEVICES")
    return passed(f"{setting}: GPU {', '.join(map(str, reading.visible))}")


def used(reading: GpuReading) -> tuple[Gpu, ...]:
    """The cards that a server started here would see, its first one first."""
    if not reading.visible:
        return reading.readable
    by_index = {gpu.index: gpu for gpu in reading.readable}
    return tuple(by_index[index] for index in reading.visible if index in by_index)


def vram(subject: Subject) -> Answer | None:
    """The memory is free, or it is told who holds it."""
    cards = used(subject.gpus())
    if not cards:
        return None
    sized = [gpu for gpu in cards if gpu.memory_total_mib is not None]
    if not sized:
        host = subject.host()
        return passed(
            f"the card has no memory of its own; {host.memory_available_mib:,} of {host.memory_total_mib:,} "
            "MiB of the host are available"
        )
    ours = _our_processes(subject)
    figures = [
        f"GPU {gpu.index}: {gpu.memory_free_mib:,} of {gpu.memory_total_mib:,} MiB free" for gpu in sized
    ]
    others = [process for gpu in sized for process in gpu.processes or () if process.pid not in ours]
    foreign = [one for one in others if not one.desktop and (one.vram_mib or 0) >= _FOREIGN_MIB]
    desktop = [one for one in others if one.desktop]
    desktop_mib = sum(one.vram_mib or 0 for one in desktop)
    if foreign:
        pids = " ".join(dict.fromkeys(str(one.pid) for one in foreign))
        where, other = _where(sized, foreign)
        return warned(
            f"memory{where} is held by {_told(foreign)}",
            f"end them if they are not needed: kill {pids}{other}",
            *figures,
        )
    if desktop_mib >= _DESKTOP_MIB:
        where, other = _where(sized, desktop)
        return warned(
            f"the desktop holds {desktop_mib:,} MiB{where} ({_told(desktop)})",
            "show the desktop from another card, or end it: sudo systemctl isolate multi-user.target" + other,
            *figures,
        )
    unseen = [gpu for gpu in sized if _unseen_mib(gpu) >= _UNSEEN_MIB]
    if unseen:
        told = ", ".join(f"{_unseen_mib(gpu):,} MiB of GPU {gpu.index}" for gpu in unseen)
        return warned(
            f"{told} are held, and the driver does not say by whom (another user's or a container's process, "
            "or Windows)",
            "sudo nvidia-smi, and sudo fuser -v /dev/nvidia*",
            *figures,
        )
    held = [process for gpu in sized for process in gpu.processes or () if process.pid in ours]
    note = f"; {_told(held)}: a server of this tool" if held else ""
    return passed("; ".join(figures) + note)


def _where(cards: Sequence[Gpu], processes: Sequence[GpuProcess]) -> tuple[str, str]:
    """On which of several cards they are, and how to serve from the others."""
    if len(cards) == 1:
        return "", ""
    taken = [gpu.index for gpu in cards if any(one in processes for one in gpu.processes or ())]
    left = ",".join(str(gpu.index) for gpu in cards if gpu.index not in taken)
    named = ",".join(map(str, taken))
    other = f"; or serve without it: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={left}" if left else ""
    return f" of GPU {named}", other


def held_by_others_mib(subject: Subject, gpu: Gpu) -> int:
    """Memory of a card that a new server could not have; a server of ours would make way for it."""
    ours = _our_processes(subject)
    own_mib = sum(one.vram_mib or 0 for one in gpu.processes or () if one.pid in ours)
    return max((gpu.memory_used_mib or 0) - own_mib, 0)


def clocks(subject: Subject) -> Answer | None:
    """Nothing but its limits holds a card back."""
    cards = used(subject.gpus())
    known = [gpu for gpu in cards if gpu.clock_reasons is not None]
    if not known:
        return unknown("the driver does not say what holds the clocks back") if cards else None
    slowed = [
        f"GPU {gpu.index}: {', '.join(reasons)}"
        + (f" at {gpu.temperature_c} °C" if gpu.temperature_c else "")
        for gpu in known
        if (reasons := [one for one in gpu.clock_reasons or () if one.endswith(_SLOWED)])
    ]
    if slowed:
        return warned(
            f"clocks are held back: {'; '.join(slowed)}",
            "check cooling, power cables and supply; watch it: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        )
    return passed("no thermal or power brake is on")


def power(subject: Subject) -> Answer | None:
    """The power limit is the card's own."""
    cards = used(subject.gpus())
    known = [gpu for gpu in cards if gpu.power_limit_w is not None and gpu.power_limit_default_w is not None]
    if not known:
        return unknown("the driver does not tell the power limit") if cards else None
    lowered = [gpu for gpu in known if (gpu.power_limit_w or 0) < (gpu.power_limit_default_w or 0) - _LOST_W]
    if lowered:
        told = ", ".join(
            f"GPU {gpu.index} is limited to {gpu.power_limit_w:.0f} W of {gpu.power_limit_default_w:.0f} W"
            for gpu in lowered
        )
        commands = "; ".join(
            f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_limit_default_w:.0f}" for gpu in lowered
        )
        return warned(f"{told}: slower, where that is not meant so", commands)
    return passed(", ".join(f"GPU {gpu.index}: {gpu.power_limit_w:.0f} W" for gpu in known))


def pcie(subject: Subject) -> Answer | None:
    """The link is as wide as card and slot allow. Its generation is not looked at: idle cards lower it."""
    cards = used(subject.gpus())
    known = [gpu for gpu in cards if gpu.pcie_width and gpu.pcie_width_max]
    if not known:
        return unknown("the driver does not tell the link's width") if cards else None
    narrow = [gpu for gpu in known if (gpu.pcie_width or 0) < (gpu.pcie_width_max or 0)]
    if narrow:
        told = ", ".join(f"GPU {gpu.index} runs x{gpu.pcie_width} of x{gpu.pcie_width_max}" for gpu in narrow)
        first = narrow[0].pci_bus_id or "BUS"
        return warned(
            f"the PCIe link is narrow: {told}; weights load slower, and several cards work together slower",
            "seat the card anew, look for a shared or split slot in the firmware; see it: "
            f"sudo lspci -s {first.removeprefix('0000')} -vv | grep LnkSta",
        )
    return passed(", ".join(f"GPU {gpu.index}: x{gpu.pcie_width}" for gpu in known))


def persistence(subject: Subject) -> Answer | None:
    """The driver keeps a card ready while nobody uses it. Windows keeps it itself (WSL)."""
    cards = used(subject.gpus())
    if not cards or subject.host().wsl is not None:
        return None
    if all(gpu.persistence_mode is None for gpu in cards):
        return unknown("the driver does not tell the persistence mode")
    off = [gpu.index for gpu in cards if gpu.persistence_mode is False]
    if off:
        named = ",".join(map(str, off))
        able = os.geteuid() == 0 and shutil.which("nvidia-smi") is not None
        return warned(
            f"persistence mode is off on GPU {named}: the first start waits, and the power limit "
            "is forgotten whenever nobody uses it",
            f"sudo nvidia-smi -i {named} -pm 1",
            repair=Repair(f"nvidia-smi -i {named} -pm 1", partial(_set_persistence, named)) if able else None,
        )
    return passed("on")


def _set_persistence(indices: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", indices, "-pm", "1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeployError(f"nvidia-smi did not answer within {_COMMAND_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise DeployError(f"nvidia-smi refused: {said[-1] if said else done.returncode}")
    return f"persistence mode is on for GPU {indices} (until the next restart of the machine)"


def _our_processes(subject: Subject) -> frozenset[int]:
    """Processes of services and of servers that the tool runs now."""
    places = unit_places(subject.units())
    # Records that cannot be read are told by the check of what was left behind.
    with suppress(DeployError, OSError):
        places += record_places()
    found: set[int] = set()
    for pid in (place.pid for place in places if place.pid is not None):
        found.add(pid)
        try:
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            continue
    return frozenset(found)


def _told(processes: Sequence[GpuProcess]) -> str:
    return ", ".join(
        f"{one.name} (pid {one.pid}{', ' + one.user if one.user else ''}"
        f"{'' if one.vram_mib is None else f', {one.vram_mib:,} MiB'})"
        for one in processes[:5]
    ) + (f" and {len(processes) - 5} more" if len(processes) > 5 else "")


def _unseen_mib(gpu: Gpu) -> int:
    seen = sum(process.vram_mib or 0 for process in gpu.processes or ())
    return (gpu.memory_used_mib or 0) - seen


def _lines(text: str | None) -> str:
    return "; ".join((text or "").splitlines())
