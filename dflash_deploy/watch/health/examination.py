"""One health check of one service, all layers, within one time limit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from dflash_deploy import paths
from dflash_deploy.engine.sglang import http
from dflash_deploy.engine.sglang.http import SimulatorInfo
from dflash_deploy.machine.gpu import Gpu, GpuReading, read_gpus
from dflash_deploy.machine.text import printable
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.watch.bounded import within
from dflash_deploy.watch.health import gpu, kernel_log, serving
from dflash_deploy.watch.health.verdict import Figure, Health, Layer, Verdict
from dflash_deploy.watch.places import Place
from dflash_deploy.watch.recorded import recorded

_GIB = 1 << 30
_LITTLE_ROOM_BYTES = 2 * _GIB
_NO_ROOM_BYTES = _GIB // 4
_XIDS_OF_S = 3600.0
_COMMAND_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the layers are held against.

    Attributes:
        accept_length: tokens a verify step that the service is expected to give; None takes what was
            measured when its generation was chosen, where that is recorded.
    """

    accept_length: float | None = None
    free_vram_warning_mib: int = 300
    free_vram_critical_mib: int = 64


def examine(place: Place, *, timeout_s: float, limits: Limits | None = None) -> Health:
    """Check everything at once; what does not answer within ``timeout_s`` is told as such.

    Args:
        place: the service, as ``places`` found it.
        timeout_s: for all of it together.
        limits: what it is held against.
    """
    if place.base_url is not None:
        http.load()
    began = time.monotonic()
    # For putting together what came, even where other programs keep the processor busy.
    spare_s = max(0.1 * timeout_s, min(1.0, 0.25 * timeout_s))
    held = limits or Limits()
    unit = place.unit
    pid = place.pid or (unit.main_pid if unit else None)
    calls: list[Callable[[], object]] = [
        partial(_ask, place, began + timeout_s - spare_s),
        partial(_read_cards, pid),
        partial(_patches, pid),
        partial(_disk, place),
    ]
    answers, cards, patches, disk = within(timeout_s, calls)
    asked = answers if isinstance(answers, serving.Answers) else None
    simulator = asked.simulator if asked else None
    starting = _starting(place)
    if held.accept_length is None and unit is not None:
        known = recorded(unit)
        # What the simulator gave says nothing of a real server.
        held = replace(held, accept_length=known.accept_length if known and not known.simulated else None)
    layers = [*_process_layers(place, pid), *_serving_layers(asked, held, timeout_s, starting=starting)]
    layers = [_without_key(layer, place) for layer in layers]
    layers += _card_layers(cards if isinstance(cards, _Cards) else _Cards.silent(), simulator, held)
    layers.append(patches if isinstance(patches, Layer) else _no_answer("patches"))
    layers.append(disk if isinstance(disk, Layer) else _no_answer("disk"))
    return Health(
        place.name,
        tuple(layers),
        time.monotonic() - began,
        starting=starting,
        pid=pid,
        simulated=simulator is not None,
    )


def _starting(place: Place) -> bool:
    """Systemd waits for it to be ready; a pause before it is started again is no start."""
    unit = place.unit
    return unit is not None and unit.active in ("activating", "reloading") and unit.sub != "auto-restart"


def _process_layers(place: Place, pid: int | None) -> list[Layer]:
    return [_unit(place), _process(place, pid)]


def _unit(place: Place) -> Layer:
    unit = place.unit
    if unit is None:
        return Layer("unit", Verdict.UNKNOWN, "it runs under no unit of this tool")
    manager = "--user " if unit.manager == "user" else ""
    figures = (Figure("unit_restarts", unit.restarts, "count"),)
    text = f"{unit.name}: {unit.active} ({unit.sub})"
    if unit.active == "active":
        return Layer("unit", Verdict.OK, text, None, figures)
    if _starting(place):
        return Layer("unit", Verdict.WARNING, f"{text}: it starts", None, figures)
    journal = f"journalctl {manager}-u {unit.name} -n 50"
    if unit.result == "start-limit-hit":
        again = f"{journal}; then systemctl {manager}reset-failed {unit.name}"
        text += ": it failed so often that systemd starts it no more"
        return Layer("unit", Verdict.CRITICAL, text, again, figures)
    if unit.active == "failed" or unit.sub == "auto-restart":
        return Layer("unit", Verdict.CRITICAL, f"{text}: {unit.result}", journal, figures)
    return Layer("unit", Verdict.CRITICAL, text, f"systemctl {manager}start {unit.name}", figures)


def _process(place: Place, pid: int | None) -> Layer:
    if pid is None:
        if place.unit is not None and not _starting(place):
            return Layer("process", Verdict.CRITICAL, "it does not run")
        return Layer("process", Verdict.UNKNOWN, "which process it is cannot be told here")
    try:
        process = psutil.Process(pid)
        status, began_s = process.status(), process.create_time()
    except psutil.NoSuchProcess:
        return Layer("process", Verdict.CRITICAL, f"process {pid} is gone")
    except psutil.Error:
        return Layer("process", Verdict.UNKNOWN, f"process {pid} cannot be looked at by this user")
    figures = (Figure("uptime", max(0.0, time.time() - began_s), "s"),)
    if status == psutil.STATUS_ZOMBIE:
        return Layer(
            "process",
            Verdict.CRITICAL,
            f"process {pid} has ended, and its parent has not taken notice (zombie)",
            None,
            figures,
        )
    if status == psutil.STATUS_STOPPED:
        return Layer("process", Verdict.CRITICAL, f"process {pid} is stopped", f"kill -CONT {pid}", figures)
    return Layer("process", Verdict.OK, f"process {pid} runs", None, figures)


def _ask(place: Place, deadline: float) -> serving.Answers:
    if place.base_url is None:
        return serving.Answers(listens=False)
    return serving.ask(place.base_url, api_key=place.api_key, deadline=deadline)


def _serving_layers(
    answers: serving.Answers | None, held: Limits, timeout_s: float, *, starting: bool
) -> tuple[Layer, ...]:
    if answers is None:
        text = f"no answer within {timeout_s:g} s"
        return (Layer("port", Verdict.CRITICAL, text, needed=True),)
    return (
        *serving.layers(answers, starting=starting),
        serving.accept_layer(answers, held.accept_length),
    )


def _without_key(layer: Layer, place: Place) -> Layer:
    """Say why there was no key, where one was wanted."""
    if place.key_problem is None or layer.name != "generation" or layer.verdict is not Verdict.UNKNOWN:
        return layer
    return replace(layer, text=f"{layer.text}: {place.key_problem}")


@dataclass(frozen=True)
class _Cards:
    """What the driver and the kernel tell of the service's cards."""

    reading: GpuReading
    used: tuple[Gpu, ...] = ()
    errors: tuple[gpu.CardErrors, ...] = ()
    xids: tuple[kernel_log.Xid, ...] | None = None

    @classmethod
    def silent(cls) -> _Cards:
        return cls(GpuReading(problem="the NVIDIA driver did not answer in time", fix="nvidia-smi"))


def _read_cards(pid: int | None) -> _Cards:
    reading = read_gpus()
    pids = _family(pid)
    used = tuple(card for card in reading.readable if any(one.pid in pids for one in card.processes or ()))
    xids = kernel_log.read_xids() if reading.gpus else None
    if xids is not None:
        oldest_s = time.clock_gettime(time.CLOCK_BOOTTIME) - _XIDS_OF_S
        xids = tuple(xid for xid in xids if xid.at_s >= oldest_s)
    return _Cards(reading, used or reading.readable, gpu.read_errors() if reading.gpus else (), xids)


def _family(pid: int | None) -> set[int]:
    if pid is None:
        return set()
    pids = {pid}
    with suppress(psutil.Error):
        pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return pids


def _card_layers(cards: _Cards, simulator: SimulatorInfo | None, held: Limits) -> list[Layer]:
    limits = {"warning_mib": held.free_vram_warning_mib, "critical_mib": held.free_vram_critical_mib}
    if simulator and simulator.vram_used_mib is not None and simulator.vram_total_mib is not None:
        free_mib = max(0, round(simulator.vram_total_mib - simulator.vram_used_mib))
        memory = gpu.free_memory_layer([(None, free_mib)], **limits)
    else:
        memory = gpu.memory_layer(cards.used, **limits)
    return [
        memory,
        gpu.errors_layer(cards.reading, cards.errors, cards.xids),
        gpu.throttle_layer(cards.used),
    ]


def _patches(pid: int | None) -> Layer:
    """The environment of the interpreter that runs it, if SGLang is installed there."""
    python = _interpreter(pid)
    if python is None:
        return Layer("patches", Verdict.UNKNOWN, "which environment it runs in cannot be told")
    verdict = verify_intact(python)
    if verdict.version is None:
        return Layer("patches", Verdict.UNKNOWN, f"no SGLang in the environment of {printable(str(python))}")
    if not verdict.intact:
        # The server that runs has its code in memory; the next start is what would fail, or be another.
        text = f"{printable('; '.join(verdict.problems), longest=400)}; the next start would be affected"
        return Layer("patches", Verdict.WARNING, text, verdict.fix)
    applied = ", ".join(verdict.applied) or "none applied"
    return Layer("patches", Verdict.OK, f"SGLang {verdict.version}: {applied}")


def _interpreter(pid: int | None) -> Path | None:
    if pid is None:
        return None
    with suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        first = file.read(_COMMAND_LIMIT_BYTES).split(b"\0")[0]
        python = Path(os.fsdecode(first))
        return python if python.is_absolute() and python.is_file() else None
    return None


def _disk(place: Place) -> Layer:
    """Room where the engine and this tool write."""
    folders = [paths.state_dir(), paths.cache_dir(), Path("/dev/shm"), Path("/tmp"), Path("/")]  # noqa: S108
    if place.unit is not None:
        folders.append(Path("/var/cache") / place.unit.name.removesuffix(".service"))
    seen: dict[int, tuple[Path, int]] = {}
    for folder in folders:
        with suppress(OSError):
            there = next(one for one in (folder, *folder.parents) if one.exists())
            seen.setdefault(there.stat().st_dev, (there, shutil.disk_usage(there).free))
    if not seen:
        return Layer("disk", Verdict.UNKNOWN, "no folder could be looked at")
    at, free = min(seen.values(), key=lambda one: one[1])
    limits = (_LITTLE_ROOM_BYTES >> 20, _NO_ROOM_BYTES >> 20)
    figures = (Figure("disk_free_least", free >> 20, "mib", *limits),)
    text = f"least room: {free >> 20:,} MiB free at {printable(str(at))}"
    fix = (
        f"make room at {printable(str(at))}: dflash-deploy env list, hf cache ls, journalctl --vacuum-size=1G"
    )
    if free < _NO_ROOM_BYTES:
        return Layer("disk", Verdict.CRITICAL, text, fix, figures)
    if free < _LITTLE_ROOM_BYTES:
        return Layer("disk", Verdict.WARNING, text, fix, figures)
    return Layer("disk", Verdict.OK, text, None, figures)


def _no_answer(name: str) -> Layer:
    return Layer(name, Verdict.UNKNOWN, "no answer in time")
