"""What ``status`` shows: the same facts as JSON and as sections for people."""

from __future__ import annotations

from dataclasses import asdict

from dflash_deploy.machine.gpu import Gpu, GpuReading
from dflash_deploy.machine.text import printable
from dflash_deploy.machine.view import Section
from dflash_deploy.watch.history import sparkline
from dflash_deploy.watch.memory import Part
from dflash_deploy.watch.status import HISTORY_HOURS, Limits, Load, ServerStatus, Status, Vram

SCHEMA_VERSION = 1


def as_json(status: Status) -> dict[str, object]:
    """The keys that docs/json.md describes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "healthy": status.healthy,
        "servers": [_server_json(server) for server in status.servers],
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "memory_used_mib": gpu.memory_used_mib,
                "memory_total_mib": gpu.memory_total_mib,
                "temperature_c": gpu.temperature_c,
                "power_draw_w": gpu.power_draw_w,
                "power_limit_w": gpu.power_limit_w,
                "clock_sm_mhz": gpu.clock_sm_mhz,
                "clock_reasons": gpu.clock_reasons,
                "failed": gpu.failed,
            }
            for gpu in status.gpus.gpus
        ],
        "gpu_problem": status.gpus.problem,
        "gpu_fix": status.gpus.fix,
    }


def sections(status: Status) -> tuple[Section, ...]:
    """One section a server, one for the cards."""
    return (*map(_server_section, status.servers), _gpu_section(status.gpus))


def _server_json(server: ServerStatus) -> dict[str, object]:
    place, unit = server.place, server.place.unit
    return {
        "name": place.name,
        "url": place.base_url,
        "found_by": place.found_by,
        "unit": None if unit is None else asdict(unit),
        "pid": server.pid,
        "health": server.health,
        "problem": server.problem,
        "fix": server.fix,
        "model": server.model,
        "engine": "sglang",
        "version": server.version,
        "kind": _kind(server),
        "limits": None if server.limits is None else asdict(server.limits),
        "load": None if server.load is None else asdict(server.load),
        "vram": [asdict(vram) for vram in server.vram],
        "memory": [asdict(part) for part in server.memory],
        "uptime_s": None if server.uptime_s is None else round(server.uptime_s, 1),
        "stage": server.stage,
        "history": [asdict(one) for one in server.history],
        "generation": server.recorded and server.recorded.generation,
        "expected_mib": server.recorded and server.recorded.expected_mib,
        "expected_memory": [asdict(part) for part in server.recorded.memory] if server.recorded else [],
        "stale": list(server.recorded.stale) if server.recorded else [],
        "warnings": [asdict(warned) for warned in server.warnings],
    }


def _kind(server: ServerStatus) -> str:
    return "simulated" if server.simulated else "measured"


def _server_section(server: ServerStatus) -> Section:
    place, unit, kind = server.place, server.place.unit, _kind(server)
    rows = []
    if server.problem:
        rows.append(("problem", server.problem))
    if server.fix:
        rows.append(("fix", server.fix))
    process = f"process {server.pid}" if server.pid else None
    if at := ", ".join(part for part in (place.base_url, process) if part):
        rows.append(("at", printable(at, longest=200)))
    if unit is not None:
        when = ("at boot" if unit.manager == "system" else "at login") if unit.enabled else "only by hand"
        again = f"{unit.restarts or 'no'} automatic restart{'' if unit.restarts == 1 else 's'}"
        what = f"{unit.name} ({unit.manager} manager): {unit.active} ({unit.sub})"
        rows.append(("unit", f"{what}, {again}, starts {when}"))
    if server.recorded is not None:
        router = ", the router in front of the engines" if server.recorded.router else ""
        rows.append(("generation", f"{server.recorded.generation}{router}"))
    if server.health == "starting":
        rows.append(("starting", _starting(server)))
    elif server.uptime_s is not None:
        rows.append(("up for", _duration(server.uptime_s)))
    if server.model or server.version:
        model = printable(server.model or "model unknown", longest=200)
        rows.append(("model", f"{model}, SGLang {printable(server.version or 'of unknown version')}"))
    if server.limits is not None:
        rows.append(("limits", _limits(server.limits)))
    if server.load is not None:
        rows.append(("load", f"{_load(server.load)} ({kind})"))
    elif server.health == "healthy" and not (server.recorded and server.recorded.router):
        rows.append(("load", "unknown: its metrics are off (--enable-metrics)"))
    rows += [("VRAM", f"{_vram(vram)} ({kind})") for vram in server.vram]
    if server.memory:
        planned = server.recorded.memory if server.recorded else ()
        rows.append(("used for", f"{_parts(server.memory, planned)} ({kind}{_planned(server)})"))
    if server.recorded is not None and server.recorded.expected_mib is not None:
        parts = f": {_parts(server.recorded.memory)}" if server.recorded.memory and not server.memory else ""
        when = "simulated" if server.recorded.simulated else "measured"
        rows.append(
            ("planned", f"at most {server.recorded.expected_mib:,} MiB{parts} ({when} when it was tuned)")
        )
    rows += _history(server)
    for warned in server.warnings:
        rows.append(("warning", printable(warned.text, longest=300)))
        rows.append(("fix", warned.fix))
    what = " (simulated)" if server.simulated else ""
    return Section(f"{printable(place.name)}: {server.health}{what}", tuple(rows))


def _starting(server: ServerStatus) -> str:
    parts = [f"stage {server.stage}"] if server.stage else []
    if server.uptime_s is not None:
        parts.append(f"{_duration(server.uptime_s)} since its process began")
    return ", ".join(parts) or "its process has not begun yet"


_HISTORY = {
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "kv_usage": ("KV pool", "{:.0%}"),
    "accept_length": ("accepted", "{:.1f}"),
    "vram_free_mib": ("free MiB", "{:,.0f}"),
}


def _history(server: ServerStatus) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for one in server.history:
        name, shape = _HISTORY[one.name]
        top = shape.format(max(value for value in one.values if value is not None))
        kind = "simulated" if one.simulated else "measured"
        label = "" if rows else f"last {HISTORY_HOURS} h"
        rows.append((label, f"{name} {sparkline(one.values)} to {top} ({kind})"))
    return rows


def _planned(server: ServerStatus) -> str:
    if not server.recorded or not server.recorded.memory:
        return ""
    return (
        ", in brackets: when it was tuned"
        if not server.recorded.simulated
        else ", in brackets: when simulated"
    )


def _limits(limits: Limits) -> str:
    parts = (
        (limits.max_running_requests, "requests at once"),
        (limits.kv_tokens, "KV tokens"),
        (limits.context_tokens, "tokens of context"),
    )
    return ", ".join(f"{value:,} {what}" for value, what in parts if value is not None) or "it tells none"


def _load(load: Load) -> str:
    parts = []
    if load.running is not None:
        parts.append(f"{load.running} running")
    if load.queued is not None:
        parts.append(f"{load.queued} waiting")
    if load.tokens_per_s is not None:
        parts.append(f"{load.tokens_per_s:.1f} tokens/s")
    if load.kv_usage is not None:
        parts.append(f"KV pool {load.kv_usage:.0%} full")
    if load.accept_length is not None:
        parts.append(f"accept length {load.accept_length:.2f} tokens")
    return ", ".join(parts) or "its metrics say nothing of it"


def _vram(vram: Vram) -> str:
    used = f"{_figure(vram.used_mib)} of {_figure(vram.total_mib)} MiB in use"
    if vram.gpu is None:
        return used
    share = "its share unknown" if vram.ours_mib is None else f"{vram.ours_mib:,} MiB by this server"
    return f"GPU {vram.gpu}: {used}, {share}"


def _gpu_section(reading: GpuReading) -> Section:
    rows = [(f"GPU {gpu.index}", _gpu(gpu)) for gpu in reading.gpus]
    problems = (reading.problem or "").splitlines()
    fixes = (reading.fix or "").splitlines()
    for problem, fix in zip(problems, fixes, strict=True):
        rows += [("problem", problem), ("fix", fix)]
    return Section("GPUs of this machine (measured)" if reading.gpus else "No GPU", tuple(rows))


def _gpu(gpu: Gpu) -> str:
    name = gpu.name or "name unknown"
    if gpu.failed:
        return f"{name}: {gpu.failed}"
    if gpu.memory_total_mib is None:
        return ", ".join(part for part in (f"{name}: tells no memory of its own", _physics(gpu)) if part)
    memory = f"{_figure(gpu.memory_used_mib)} of {_figure(gpu.memory_total_mib)} MiB in use"
    return ", ".join(part for part in (f"{name}: {memory}", _physics(gpu)) if part)


def _parts(parts: tuple[Part, ...], planned: tuple[Part, ...] = ()) -> str:
    then = {part.name: f" [{part.mib:,}]" for part in planned}
    return ", ".join(f"{part.name} {part.mib:,}{then.get(part.name, '')}" for part in parts) + " MiB"


def _physics(gpu: Gpu) -> str:
    """Power, heat, clock and what holds it back, as far as the driver tells."""
    parts = []
    if gpu.power_draw_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        parts.append(f"{gpu.power_draw_w:.0f}{limit} W")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    if gpu.clock_sm_mhz is not None:
        parts.append(f"SM {gpu.clock_sm_mhz} MHz")
    if gpu.clock_reasons:
        parts.append(f"clocks held by {', '.join(gpu.clock_reasons)}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"


def _figure(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
