"""What serves here, how it is, and what it holds, as values; everything is asked with a time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal
from urllib.parse import urlsplit

import psutil

from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.sglang import http, metrics
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.clocks import HELD_BACK
from dflash_deploy.machine.gpu import GpuReading, read_gpus
from dflash_deploy.watch.bounded import within
from dflash_deploy.watch.journal import unit_log
from dflash_deploy.watch.memory import Part, split
from dflash_deploy.watch.places import Place
from dflash_deploy.watch.recorded import Recorded, recorded
from dflash_deploy.watch.units import UnitState

Health = Literal["healthy", "starting", "unhealthy", "stopped"]
"""healthy: it answered its health check, for which it generates a token. starting: systemd waits for it.
unhealthy: it should answer and does not. stopped: a unit whose process does not run."""

_CONNECT_S = 1.0
_FULL = 0.97
_LITTLE_VRAM_MIB = 300
_GPU_S = 10.0


@dataclass(frozen=True)
class Limits:
    """The engine's own limits, as it says them itself."""

    max_running_requests: int | None
    kv_tokens: int | None
    context_tokens: int | None


@dataclass(frozen=True)
class Load:
    """What it does now; None where its metrics are off.

    Attributes:
        accept_length: tokens a verify step gives on average, the bonus token among them.
        kv_usage: share of the KV pool in use, 0 to 1.
    """

    running: int | None = None
    queued: int | None = None
    tokens_per_s: float | None = None
    kv_usage: float | None = None
    accept_length: float | None = None


@dataclass(frozen=True)
class Vram:
    """Memory of one card in MiB (``gpu``: its NVML index, None for a simulated card).

    ``ours_mib`` is what the server's own processes hold, None where the driver does not say.
    """

    gpu: int | None
    used_mib: int | None
    total_mib: int | None
    ours_mib: int | None


@dataclass(frozen=True)
class Warned:
    """Something amiss, and the command that helps."""

    text: str
    fix: str


@dataclass(frozen=True)
class ServerStatus:
    """One server. ``simulated`` holds for every figure of it.

    Attributes:
        problem: what is wrong, or None.
        fix: the command that helps, or None.
        vram: by card that it has memory of; empty where that cannot be told.
        memory: what that memory is used for; empty where that cannot be told.
        uptime_s: since its main process began.
        recorded: what is recorded of the installed generation that it runs from, None where it is none.
        warnings: what is amiss though it serves, each with what helps.
    """

    place: Place
    health: Health
    pid: int | None = None
    problem: str | None = None
    fix: str | None = None
    model: str | None = None
    version: str | None = None
    simulated: bool = False
    limits: Limits | None = None
    load: Load | None = None
    vram: tuple[Vram, ...] = ()
    memory: tuple[Part, ...] = ()
    uptime_s: float | None = None
    recorded: Recorded | None = None
    warnings: tuple[Warned, ...] = ()


@dataclass(frozen=True)
class Status:
    """Everything at one moment."""

    servers: tuple[ServerStatus, ...]
    gpus: GpuReading

    @property
    def healthy(self) -> bool:
        """Some server answers."""
        return any(server.health == "healthy" for server in self.servers)


def gather(places: Sequence[Place], *, timeout_s: float) -> Status:
    """Ask every place at once, and the cards.

    Args:
        places: where to look. A place found by its port alone is left out when nothing listens there.
        timeout_s: for a server's health check, and once more for all else that it is asked.
    """
    (gpus,) = within(_GPU_S, [read_gpus])
    if gpus is None:
        gpus = GpuReading(
            problem=f"the NVIDIA driver did not answer within {_GPU_S:.0f} s",
            fix="nvidia-smi (if that hangs too, restart the machine)",
        )
    answers = within(
        2 * timeout_s + _CONNECT_S + 1, [partial(_server, place, gpus, timeout_s) for place in places]
    )
    servers = [
        answer or _silent(place, f"no answer within {timeout_s:g} s")
        for place, answer in zip(places, answers, strict=True)
    ]
    servers = [_from_generation(server) for server in servers]
    return Status(tuple(one for one in servers if one.health != "stopped" or one.place.unit), gpus)


def _server(place: Place, gpus: GpuReading, timeout_s: float) -> ServerStatus:
    if place.base_url is None or not _listens(place.base_url):
        return _not_listening(place)
    pid = place.pid or _listener(place.base_url)
    healthy = http.healthy(place.base_url, timeout_s=timeout_s, api_key=place.api_key)
    if not healthy and not (place.unit and place.unit.active == "activating"):
        return _silent(place, f"it takes connections, but no healthy answer within {timeout_s:g} s", pid)
    deadline = time.monotonic() + timeout_s
    info = http.server_info(place.base_url, timeout_s=timeout_s, api_key=place.api_key)
    model = http.served_model(place.base_url, timeout_s=deadline - time.monotonic(), api_key=place.api_key)
    text = http.get_text(
        place.base_url, "/metrics", timeout_s=deadline - time.monotonic(), api_key=place.api_key
    )
    simulator = info.simulator if info else None
    vram = (_simulated_vram(simulator),) if simulator else _vram(pid, gpus)
    load = _load(info, metrics.parse(text) if text else None)
    boot = _boot_record(place, deadline - time.monotonic())
    others_mib = None if simulator or len(vram) != 1 else _others_mib(vram[0], gpus)
    return ServerStatus(
        place,
        health="healthy" if healthy else "starting",
        pid=pid,
        problem=None if info or not healthy else "it says no more: it may want its API key, or be no SGLang",
        fix=None if info or not healthy else "name it, and give --api-key-file FILE",
        model=model,
        version=info.version if info else None,
        simulated=simulator is not None,
        limits=Limits(info.max_running_requests, info.kv_tokens, info.context_tokens) if info else None,
        load=load,
        vram=vram,
        memory=split(
            info.memory if info else None,
            boot,
            used_mib=vram[0].used_mib if len(vram) == 1 else None,
            others_mib=others_mib,
        ),
        uptime_s=_uptime_s(pid),
        warnings=_warnings(place, load, vram, boot, gpus),
    )


def _uptime_s(pid: int | None) -> float | None:
    if pid is None:
        return None
    with suppress(psutil.Error):
        return max(0.0, time.time() - psutil.Process(pid).create_time())
    return None


def _boot_record(place: Place, timeout_s: float) -> BootRecord | None:
    if place.unit is None or place.unit.main_pid is None or timeout_s <= 0:
        return None
    (record,) = within(timeout_s, [partial(_logged_boot, place.unit.name, place.unit.main_pid)])
    return record


@lru_cache(maxsize=16)
def _logged_boot(unit: str, pid: int) -> BootRecord | None:  # noqa: ARG001 - another process, another start
    """What the start of this process logged; read once, for a start is logged once."""
    try:
        with unit_log(unit) as stream:
            return read_boot_log(line.decode(errors="replace") for line in stream)
    except (DeployError, OSError):
        return None


def _from_generation(server: ServerStatus) -> ServerStatus:
    """Add what is recorded of the generation that the unit was installed from."""
    unit = server.place.unit
    known = recorded(unit) if unit else None
    if known is None or unit is None:
        return server
    again = f"dflash-deploy tune, then dflash-deploy service install{_user(unit)} --name {unit.service}"
    stale = tuple(Warned(f"generation {known.generation} is stale: {why}", again) for why in known.stale)
    if known.router and server.health == "healthy":
        # It tells of the engines behind it, and nothing of itself.
        server = replace(server, problem=None, fix=None)
    return replace(server, recorded=known, warnings=(*server.warnings, *stale))


def _user(unit: UnitState) -> str:
    return " --user" if unit.manager == "user" else ""


def _warnings(
    place: Place, load: Load | None, vram: Sequence[Vram], boot: BootRecord | None, gpus: GpuReading
) -> tuple[Warned, ...]:
    diagnose = f"dflash-deploy diagnose --unit {place.unit.name if place.unit else 'UNIT'}"
    found = [Warned(f"{lost.id}: {lost.text}", diagnose) for lost in (boot.degradations if boot else ())]
    if load is not None and load.kv_usage is not None and load.kv_usage > _FULL:
        found.append(
            Warned(
                f"the KV pool is {load.kv_usage:.0%} full: requests wait or begin anew",
                "fewer users or shorter contexts; dflash-deploy tune for a larger pool",
            )
        )
    if load is not None and load.queued and load.running is not None:
        found.append(
            Warned(
                f"{load.queued} requests wait behind {load.running}",
                "dflash-deploy tune with more users, if that goes on",
            )
        )
    for one in vram:
        if one.used_mib is not None and one.total_mib is not None:
            free_mib = one.total_mib - one.used_mib
            if free_mib < _LITTLE_VRAM_MIB:
                found.append(
                    Warned(
                        f"only {max(0, free_mib):,} MiB of VRAM are free",
                        "dflash-deploy probe (who holds it)",
                    )
                )
    cards = {one.gpu for one in vram}
    for gpu in gpus.readable:
        held = [reason for reason in gpu.clock_reasons or () if reason in HELD_BACK]
        if gpu.index in cards and held:
            found.append(
                Warned(f"GPU {gpu.index} is slowed down: {', '.join(held)}", "nvidia-smi -q -d PERFORMANCE")
            )
    return tuple(found)


def _others_mib(vram: Vram, gpus: GpuReading) -> int | None:
    """What other processes hold of this card."""
    card = next((gpu for gpu in gpus.readable if gpu.index == vram.gpu), None)
    if card is None or vram.ours_mib is None or card.processes is None:
        return None
    held = [process.vram_mib for process in card.processes]
    known = [mib for mib in held if mib is not None]
    return sum(known) - vram.ours_mib if len(known) == len(held) else None


def _not_listening(place: Place) -> ServerStatus:
    unit = place.unit
    if unit is None:
        if place.found_by == "port":
            return ServerStatus(place, "stopped")
        return ServerStatus(
            place,
            "starting" if place.found_by == "record" else "unhealthy",
            pid=place.pid,
            problem="it does not take connections yet"
            if place.found_by == "record"
            else "nothing listens there",
        )
    journal = f"journalctl {'--user ' if unit.manager == 'user' else ''}-u {unit.name} -n 50"
    if unit.active in ("activating", "reloading") and unit.sub != "auto-restart":
        return ServerStatus(place, "starting", pid=place.pid)
    if unit.active == "active":
        return ServerStatus(
            place, "unhealthy", place.pid, "its process runs, but its port is closed", journal
        )
    if unit.active == "failed" or unit.sub == "auto-restart":
        again = "; systemd starts it again" if unit.sub == "auto-restart" else ""
        return ServerStatus(place, "unhealthy", place.pid, f"it failed ({unit.result}){again}", journal)
    start = f"systemctl {'--user ' if unit.manager == 'user' else ''}start {unit.name}"
    return ServerStatus(place, "stopped", problem=f"the unit is {unit.active}", fix=start)


def _silent(place: Place, problem: str, pid: int | None = None) -> ServerStatus:
    return ServerStatus(place, "unhealthy", pid or place.pid, problem)


def _listens(base_url: str) -> bool:
    host, port = _address(base_url)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):
        return False
    return True


def _address(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _listener(base_url: str) -> int | None:
    """Process that listens there, where it is on this machine and we may know."""
    host, port = _address(base_url)
    if host not in ("localhost", "::1") and not host.startswith("127."):
        return None
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            at = connection.laddr
            if connection.status == psutil.CONN_LISTEN and at and at.port == port and connection.pid:
                return int(connection.pid)
    return None


def _load(info: http.ServerInfo | None, figures: metrics.Metrics | None) -> Load | None:
    accept_length = info.accept_length if info else None
    if figures is None:
        return Load(accept_length=accept_length) if accept_length is not None else None
    return Load(
        running=_count(figures.running_requests),
        queued=_count(figures.queued_requests),
        tokens_per_s=figures.gen_throughput_tokens_per_s,
        kv_usage=figures.token_usage,
        accept_length=accept_length if accept_length is not None else figures.spec_accept_length,
    )


def _count(figure: float | None) -> int | None:
    return int(figure) if figure is not None else None


def _simulated_vram(simulator: http.SimulatorInfo) -> Vram:
    return Vram(None, _count(simulator.vram_used_mib), _count(simulator.vram_total_mib), None)


def _vram(pid: int | None, gpus: GpuReading) -> tuple[Vram, ...]:
    if pid is None:
        return ()
    pids = {pid}
    with suppress(psutil.Error):
        pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found = []
    for gpu in gpus.readable:
        ours = [process for process in gpu.processes or () if process.pid in pids]
        if ours:
            known = [process.vram_mib for process in ours if process.vram_mib is not None]
            share = sum(known) if len(known) == len(ours) else None
            found.append(Vram(gpu.index, gpu.memory_used_mib, gpu.memory_total_mib, share))
    return tuple(found)
