"""What serves here, how it is, and what it holds, as values; everything is asked with a time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

import psutil

from dflash_deploy.engine.sglang import http, metrics
from dflash_deploy.machine.gpu import GpuReading, read_gpus
from dflash_deploy.watch.bounded import within
from dflash_deploy.watch.places import Place

Health = Literal["healthy", "starting", "unhealthy", "stopped"]
"""healthy: it answered its health check, for which it generates a token. starting: systemd waits for it.
unhealthy: it should answer and does not. stopped: a unit whose process does not run."""

_CONNECT_S = 1.0
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
class ServerStatus:
    """One server. ``simulated`` holds for every figure of it.

    Attributes:
        problem: what is wrong, or None.
        fix: the command that helps, or None.
        vram: by card that it has memory of; empty where that cannot be told.
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
        load=_load(info, metrics.parse(text) if text else None),
        vram=(_simulated_vram(simulator),) if simulator else _vram(pid, gpus),
    )


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
