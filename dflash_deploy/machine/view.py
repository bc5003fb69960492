"""What ``probe`` shows: the same facts as JSON, as plain lines, and as a table on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from dflash_deploy.machine.clocks import IDLE

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_deploy.machine.cards import Card
    from dflash_deploy.machine.gpu import Gpu, GpuProcess, GpuReading
    from dflash_deploy.machine.host import Host

SCHEMA_VERSION = 1
_LABEL_WIDTH = 13


@dataclass(frozen=True)
class Section:
    """One block of what is shown: a title, and label and text of each row."""

    title: str
    rows: tuple[tuple[str, str], ...]


def as_json(reading: GpuReading, host: Host, cards: Mapping[int, Card]) -> dict[str, object]:
    """The keys that docs/json.md describes.

    Args:
        reading: the machine's GPUs.
        host: the machine around them.
        cards: the known card, by NVML index, for each GPU that is one.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "measured",
        "problem": reading.problem,
        "fix": reading.fix,
        "driver_version": reading.driver_version,
        "cuda_version": reading.cuda_version,
        "cuda_visible_devices": reading.cuda_visible_devices,
        "visible": reading.visible,
        "gpus": [_gpu_json(gpu, cards.get(gpu.index)) for gpu in reading.gpus],
        "host": asdict(host),
    }


def sections(reading: GpuReading, host: Host, cards: Mapping[int, Card]) -> tuple[Section, ...]:
    """The same for people: one section a GPU, one for the host. Arguments as for ``as_json``."""
    blocks = [_gpu_section(gpu, cards.get(gpu.index), reading) for gpu in reading.gpus]
    return (*blocks, _host_section(reading, host))


def plain_lines(blocks: tuple[Section, ...], *, width: int = 80) -> list[str]:
    """The sections as text, no line wider than ``width``."""
    lines: list[str] = []
    for block in blocks:
        lines += ["", *wrap(block.title, width)]
        for label, text in block.rows:
            parts = wrap(text, width - _LABEL_WIDTH - 2) or [""]
            lines.append(f"  {label:<{_LABEL_WIDTH}}{parts[0]}")
            lines += [f"  {'':<{_LABEL_WIDTH}}{part}" for part in parts[1:]]
    return lines[1:]


def print_tables(blocks: tuple[Section, ...], console: Console) -> None:
    """The sections as tables on a terminal."""
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs it
    from rich.text import Text  # noqa: PLC0415

    for block in blocks:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True, min_width=_LABEL_WIDTH - 2)
        table.add_column(overflow="fold")
        for label, text in block.rows:
            # Text, and not a string: a process may be named like rich's markup.
            table.add_row(Text(label), Text(text))
        console.print(Text(block.title, style="bold"))
        console.print(table)
        console.print()


def _gpu_json(gpu: Gpu, card: Card | None) -> dict[str, object]:
    return {
        **asdict(gpu),
        "unknown": {unknown.field: unknown.why for unknown in gpu.unknown},
        "card": None if card is None else card.id,
    }


def _gpu_section(gpu: Gpu, card: Card | None, reading: GpuReading) -> Section:
    rows = [("card", card.id if card else "none of the known ones")]
    if gpu.failed:
        rows = [("FAILED", gpu.failed), *rows]
    rows += [
        ("memory", _memory(gpu, card)),
        ("compute", _or_unknown(gpu.compute_capability, "capability {}")),
        ("PCIe", f"{gpu.pci_bus_id or 'bus unknown'}: {_link(gpu)}"),
        ("power", _power(gpu)),
        ("clocks", _clocks(gpu)),
        ("held by", _reasons(gpu)),
        ("temperature", _or_unknown(gpu.temperature_c, "{} °C")),
        (
            "modes",
            f"ECC {_switch(gpu.ecc)}, MIG {_switch(gpu.mig)}, persistence {_switch(gpu.persistence_mode)}",
        ),
        *([] if gpu.failed else [("servers", _visibility(gpu, reading))]),
        ("UUID", gpu.uuid or "unknown"),
        *_process_rows(gpu),
    ]
    if gpu.unknown and not gpu.failed:
        rows.append(("unknown", "; ".join(f"{unknown.field}: {unknown.why}" for unknown in gpu.unknown)))
    return Section(f"GPU {gpu.index}  {gpu.name or 'name unknown'}  (measured)", tuple(rows))


def _host_section(reading: GpuReading, host: Host) -> Section:
    cpu = f"{host.cpu_model or 'model unknown'}, {_or_unknown(host.cpu_cores, '{}')} cores, "
    cpu += f"{_or_unknown(host.cpu_threads, '{}')} threads, {host.cpus_usable} usable here"
    memory = f"{host.memory_available_mib:,} of {host.memory_total_mib:,} MiB available"
    if host.memory_limit_mib is not None:
        memory += f", limited to {host.memory_limit_mib:,} MiB"
    system = [host.distribution or "distribution unknown", f"kernel {host.kernel} ({host.architecture})"]
    system.append(f"glibc {host.glibc}" if host.glibc else "no glibc")
    if host.wsl is not None:
        system.append(f"WSL {host.wsl}")
    if host.container is not None:
        system.append(f"container: {host.container}")
    rows = [
        (
            "driver",
            f"{reading.driver_version or 'unknown'}, for CUDA up to {reading.cuda_version or 'unknown'}",
        ),
        ("memory", memory),
        ("swap", f"{host.swap_free_mib:,} of {host.swap_total_mib:,} MiB free"),
        ("shared mem", _room(host.shared_memory_free_mib, host.shared_memory_total_mib)),
        *(
            (f"disk {disk.use}", f"{_room(disk.free_mib, disk.total_mib)}: {disk.path}")
            for disk in host.disks
        ),
        ("CPU", cpu),
        ("system", ", ".join(system)),
    ]
    if not reading.gpus:
        del rows[0]
    return Section("Host  (measured)", tuple(rows))


def _memory(gpu: Gpu, card: Card | None) -> str:
    if gpu.memory_total_mib is None and card is not None and card.unified_memory:
        return "the host's, shared; the driver reports none of the card's own"
    if gpu.memory_total_mib is None:
        return "unknown"
    free = _or_unknown(gpu.memory_free_mib, "{:,} free")
    used = _or_unknown(gpu.memory_used_mib, "{:,}")
    reserved = "" if gpu.memory_reserved_mib is None else f", {gpu.memory_reserved_mib:,} kept by the driver"
    return f"{used} of {gpu.memory_total_mib:,} MiB used, {free}{reserved}"


def _link(gpu: Gpu) -> str:
    now = f"gen {_figure(gpu.pcie_gen)} x{_figure(gpu.pcie_width)} now"
    return f"{now}, at most gen {_figure(gpu.pcie_gen_max)} x{_figure(gpu.pcie_width_max)}"


def _power(gpu: Gpu) -> str:
    text = f"{_or_unknown(gpu.power_draw_w, '{:.0f} W')} of {_or_unknown(gpu.power_limit_w, '{:.0f} W')}"
    if gpu.power_limit_w != gpu.power_limit_default_w and gpu.power_limit_default_w is not None:
        text += f" (default limit {gpu.power_limit_default_w:.0f} W)"
    return text


def _clocks(gpu: Gpu) -> str:
    cores = f"SM {_figure(gpu.clock_sm_mhz)} of {_figure(gpu.clock_sm_max_mhz)} MHz"
    return f"{cores}, memory {_figure(gpu.clock_memory_mhz)} of {_figure(gpu.clock_memory_max_mhz)} MHz"


def _reasons(gpu: Gpu) -> str:
    if gpu.clock_reasons is None:
        return "unknown"
    if gpu.clock_reasons == (IDLE,):
        return "nothing: idle"
    return ", ".join(gpu.clock_reasons) or "nothing"


def _visibility(gpu: Gpu, reading: GpuReading) -> str:
    if reading.cuda_visible_devices is None:
        return "visible to a server started here"
    setting = f"CUDA_VISIBLE_DEVICES={reading.cuda_visible_devices}"
    if reading.visible is None:
        return f"cannot be told: {setting} counts in CUDA's order; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if gpu.index in reading.visible:
        return f"visible to a server as cuda:{reading.visible.index(gpu.index)} ({setting})"
    return f"hidden from a server ({setting})"


def _process_rows(gpu: Gpu) -> list[tuple[str, str]]:
    if gpu.processes is None:
        return [("processes", "unknown")]
    if not gpu.processes:
        return [("processes", "none")]
    return [("processes" if not at else "", _process(process)) for at, process in enumerate(gpu.processes)]


def _process(process: GpuProcess) -> str:
    held = "memory unknown" if process.vram_mib is None else f"{process.vram_mib:,} MiB"
    owner = f", {process.user}" if process.user else ""
    desktop = ", desktop" if process.desktop else ""
    return f"{held}: {process.name} (pid {process.pid}{owner}, {process.kind}{desktop})"


def _room(free_mib: int | None, total_mib: int | None) -> str:
    if free_mib is None or total_mib is None:
        return "unknown"
    return f"{free_mib:,} of {total_mib:,} MiB free"


def _switch(on: bool | None) -> str:
    return "unknown" if on is None else "on" if on else "off"


def _or_unknown(value: float | str | None, shape: str) -> str:
    return "unknown" if value is None else shape.format(value)


def _figure(value: int | None) -> str:
    return "?" if value is None else str(value)
