"""What serves here, how it is, and what it holds, as values; everything is asked with a time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from dflash_deploy import paths
from dflash_deploy.deploy.systemctl import Systemd
from dflash_deploy.deploy.timer import state_folders
from dflash_deploy.engine.boot import BootRecord, Stage
from dflash_deploy.engine.sglang import http, metrics
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.clocks import HELD_BACK
from dflash_deploy.machine.gpu import GpuReading, read_gpus
from dflash_deploy.machine.text import printable
from dflash_deploy.proxy import proxy_for
from dflash_deploy.watch import history
from dflash_deploy.watch.bounded import within
from dflash_deploy.watch.health.serving import listens
from dflash_deploy.watch.history import Sample, Series
from dflash_deploy.watch.journal import unit_log
from dflash_deploy.watch.memory import Part, split
from dflash_deploy.watch.places import Place
from dflash_deploy.watch.recorded import Recorded, installed, recorded
from dflash_deploy.watch.units import UnitState

Health = Literal["healthy", "starting", "unhealthy", "stopped"]
"""healthy: it answered its health check, for which it generates a token. starting: systemd waits for it.
unhealthy: it should answer and does not. stopped: a unit whose process does not run."""

_CONNECT_S = 1.0
_FULL = 0.97
_LITTLE_VRAM_MIB = 300
_GPU_S = 10.0
_LOG_S = 5.0
HISTORY_HOURS = 6
_HISTORY_SPANS = 36
_KEPT_BY_TIMER_S = 180.0


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
        stage: how far its start has come, as its log tells; None once it serves.
        history: the last hours of its figures; empty where none were kept.
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
    stage: Stage | None = None
    history: tuple[Series, ...] = ()
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


def gather(places: Sequence[Place], *, timeout_s: float, keep: bool = False) -> Status:
    """Ask every place at once, and the cards.

    Args:
        places: where to look. A place found by its port alone is left out when nothing listens there.
        timeout_s: for a server's health check, and once more for all else that it is asked.
        keep: keep what is seen for later looks, where no timer does so already.
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
    servers = [_with_history(_from_generation(server), keep=keep) for server in servers]
    return Status(tuple(one for one in servers if one.health != "stopped" or one.place.unit), gpus)


def _server(place: Place, gpus: GpuReading, timeout_s: float) -> ServerStatus:
    if place.base_url is None:
        return _not_listening(place)
    proxied = proxy_for(place.base_url) is not None
    if not proxied and not listens(place.base_url, _CONNECT_S):
        return _not_listening(place)
    http.load()
    pid = place.pid or _listener(place.base_url)
    healthy = http.healthy(place.base_url, timeout_s=timeout_s, api_key=place.api_key)
    if not healthy and not (place.unit and place.unit.active == "activating"):
        reached = "through a proxy there is" if proxied else "it takes connections, but"
        return _silent(place, f"{reached} no healthy answer within {timeout_s:g} s", pid)
    deadline = time.monotonic() + timeout_s
    info = http.server_info(place.base_url, timeout_s=timeout_s, api_key=place.api_key)
    model = http.served_model(place.base_url, timeout_s=deadline - time.monotonic(), api_key=place.api_key)
    text = http.get_text(
        place.base_url, "/metrics", timeout_s=deadline - time.monotonic(), api_key=place.api_key
    )
    simulator = info.simulator if info else None
    vram = (_simulated_vram(simulator),) if simulator else _vram(pid, gpus)
    load = _load(info, metrics.parse(text) if text else None)
    boot = _boot_record(place, deadline - time.monotonic(), done=healthy)
    others_mib = None if simulator or len(vram) != 1 else _others_mib(vram[0], gpus)
    return ServerStatus(
        place,
        health="healthy" if healthy else "starting",
        pid=pid,
        problem=None if info or not healthy else _says_no_more(place),
        fix=None if info or not healthy else "name the service, and add --api-key-file FILE (or sudo)",
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
        stage=None if healthy or boot is None else boot.stage,
        warnings=_warnings(place, load, vram, boot, gpus),
    )


def _says_no_more(place: Place) -> str:
    why = place.key_problem or "it may want its API key, or be no SGLang"
    return printable(f"it answers, and tells no more: {why}", longest=300)


def _uptime_s(pid: int | None) -> float | None:
    if pid is None:
        return None
    with suppress(psutil.Error):
        return max(0.0, time.time() - psutil.Process(pid).create_time())
    return None


def _boot_record(place: Place, timeout_s: float, *, done: bool) -> BootRecord | None:
    """What the log of the unit's last start tells; one that is done is read once."""
    if place.unit is None or timeout_s <= 0:
        return None
    look = (
        partial(_done_boot, place.unit.name, place.unit.main_pid) if done else partial(_boot, place.unit.name)
    )
    (record,) = within(timeout_s, [look])
    return record


@lru_cache(maxsize=16)
def _done_boot(unit: str, pid: int | None) -> BootRecord | None:  # noqa: ARG001 - another process, another start
    return _boot(unit)


def _boot(unit: str) -> BootRecord | None:
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
    if server.version is None and known.simulated:
        # It did not say what it is; figures of its log are then of what it was installed as.
        server = replace(server, simulated=True)
    stale = tuple(Warned(f"generation {known.generation} is stale: {why}", again) for why in known.stale)
    if known.router and server.health == "healthy":
        # It tells of the engines behind it, and nothing of itself.
        server = replace(server, problem=None, fix=None)
    return replace(server, recorded=known, warnings=(*server.warnings, *stale))


def _user(unit: UnitState) -> str:
    return " --user" if unit.manager == "user" else ""


def _with_history(server: ServerStatus, *, keep: bool) -> ServerStatus:
    """Add the last hours, as the timer's checks kept them, or a watch did."""
    unit, now_s = server.place.unit, time.time()
    try:
        own = paths.state_dir() / "history" / f"{_key(server.place)}.sqlite"
        files = [folder / f"{unit.service}.sqlite" for folder in state_folders(unit.manager)] if unit else []
    except DeployError:
        return server
    kept = next((found for file in files if (found := _recent(file, now_s))), ())
    if keep and not (kept and now_s - kept[-1].at_s < _KEPT_BY_TIMER_S):
        history.keep(own, _sample(server, now_s), mode=0o600)
    samples = kept or _recent(own, now_s)
    if len(samples) < 2:
        return server
    return replace(
        server, history=history.series(samples, now_s=now_s, hours=HISTORY_HOURS, spans=_HISTORY_SPANS)
    )


def _key(place: Place) -> str:
    return (
        place.unit.service if place.unit else sha256((place.base_url or place.name).encode()).hexdigest()[:24]
    )


def _recent(file: Path, now_s: float) -> tuple[Sample, ...]:
    return history.read(file, since_s=now_s - HISTORY_HOURS * 3600)


def _sample(server: ServerStatus, now_s: float) -> Sample:
    load = server.load or Load()
    free = [
        one.total_mib - one.used_mib
        for one in server.vram
        if one.total_mib is not None and one.used_mib is not None
    ]
    return Sample(
        now_s,
        tokens_per_s=load.tokens_per_s,
        kv_usage=load.kv_usage,
        accept_length=load.accept_length,
        vram_free_mib=min(free, default=None),
        running=load.running,
        simulated=float(server.simulated),
    )


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
        boot = _boot_record(place, _LOG_S, done=False) if place.pid else None
        return ServerStatus(
            place,
            "starting",
            pid=place.pid,
            uptime_s=_uptime_s(place.pid),
            stage=boot.stage if boot else None,
        )
    if unit.active == "active":
        return ServerStatus(
            place, "unhealthy", place.pid, "its process runs, but its port is closed", journal
        )
    if unit.active == "failed" or unit.sub == "auto-restart":
        return _failed(place, unit)
    start = f"systemctl {'--user ' if unit.manager == 'user' else ''}start {unit.name}"
    if installed(unit) is not None:
        start = f"dflash-deploy service start{_user(unit)} {unit.service}"
    return ServerStatus(place, "stopped", problem=f"its unit is {unit.active}", fix=start)


def _failed(place: Place, unit: UnitState) -> ServerStatus:
    """Why it failed, and what becomes of it now."""
    boot = _boot_record(place, _LOG_S, done=False)
    why = f" ({unit.result})"
    if boot is not None and boot.failure is not None:
        why = f" in stage {boot.failure.stage}: {printable(boot.failure.message, longest=300)}"
    elif said := _last_words(unit):
        why += f": {printable(said, longest=300)}"
    if unit.sub == "auto-restart":
        then = "; systemd starts it again in a moment"
    elif unit.restarts or unit.result == "start-limit-hit":
        # The last of them is the one that systemd refused.
        then = f"; after {max(1, unit.restarts)} starts that failed, systemd starts it no more"
    else:
        then = ""
    fix = f"dflash-deploy diagnose --unit {unit.name}"
    if unit.active == "failed":
        fix += f"; then dflash-deploy service start{_user(unit)} {unit.service}"
    return ServerStatus(place, "unhealthy", place.pid, f"it failed{why}{then}", fix)


def _last_words(unit: UnitState) -> str | None:
    """The last line that is the service's own, and not systemd's about it."""
    (text,) = within(_LOG_S, [partial(Systemd(unit.manager).last_lines, unit.name)])
    lines = [line for line in (text or "").splitlines() if unit.name not in line]
    return lines[-1] if lines else None


def _silent(place: Place, problem: str, pid: int | None = None) -> ServerStatus:
    return ServerStatus(place, "unhealthy", pid or place.pid, problem)


def _listener(base_url: str) -> int | None:
    """Process that listens there, where it is on this machine and we may know."""
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
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
