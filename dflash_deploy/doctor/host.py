"""Checks of the machine around the cards: memory, disks, limits, guards, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from functools import partial
from pathlib import Path

import psutil

from dflash_deploy import paths
from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.doctor.finding import Answer, Repair, failed, passed, unknown, warned
from dflash_deploy.doctor.gpu import used
from dflash_deploy.doctor.subject import Model, Subject
from dflash_deploy.machine.text import printable

_ENGINE_RAM_MIB = 6 * 1024
"""Three processes of the engine and their CUDA contexts, before any of the model."""
_LITTLE_RAM_MIB = 16 * 1024
_FEW_FILES = 4096
_FEW_PROCESSES = 4096
_ADDRESS_SPACE = 1 << 40
"""CUDA reserves address space for all memory of all cards; less than a terabyte is a limit set by hand."""
_MODELS_MIB = 30 * 1024
_CACHES_MIB = 10 * 1024
_FULL_MIB = 1024
_SHM = "/dev/shm"  # noqa: S108 - named, never written
_SHM_LEAST_MIB = 16
_SHM_MIB = 1024
_GUARDS = frozenset({"earlyoom", "systemd-oomd", "nohang", "nohang-desktop", "oomd"})
_KEPT_FREE_MIB = 8 * 1024
_SLOW_FILE_SYSTEMS = frozenset({"9p", "drvfs", "v9fs", "cifs", "smb3", "fuse.sshfs", "nfs", "nfs4"})
_UNSYNCHRONISED = 0x0040
_FUTURE_S = 300.0
_DAY_S = 86_400.0


def memory(subject: Subject) -> Answer:
    """The host has memory to load the checkpoint through."""
    host = subject.host()
    total_mib = min(host.memory_total_mib, host.memory_limit_mib or host.memory_total_mib)
    available_mib = min(host.memory_available_mib, total_mib)
    limited = "" if total_mib == host.memory_total_mib else " (limit of this container)"
    told = f"{available_mib:,} of {total_mib:,} MiB available{limited}, {host.swap_free_mib:,} MiB swap free"
    more = "close what holds it (ps aux --sort=-rss | head), or add swap: sudo fallocate -l 32G /swapfile && "
    more += "sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"
    if available_mib + host.swap_free_mib < _ENGINE_RAM_MIB:
        return failed(f"{told}: the engine's processes alone take about {_ENGINE_RAM_MIB:,} MiB", more)
    checkpoint_mib = _size_mib(_model(subject))
    if checkpoint_mib is not None and checkpoint_mib > total_mib:
        return warned(
            f"{told}: less than the checkpoint's {checkpoint_mib:,} MiB, it is read from the disk piece by "
            "piece, slowly, and other programs may be ended for it (exit status 137)",
            more,
        )
    if checkpoint_mib is None and total_mib < _LITTLE_RAM_MIB:
        return warned(
            f"{told}: kernels compiled at the first start may not fit", f"export MAX_JOBS=2; {more}"
        )
    beside = "" if checkpoint_mib is None else f"; the checkpoint has {checkpoint_mib:,} MiB"
    return passed(told + beside)


def disk_models(subject: Subject) -> Answer:
    """The checkpoints are here, or there is room to download them."""
    folder = hub_cache.cache_dir()
    free_mib = _free_mib(folder)
    if free_mib is None:
        return unknown(f"{folder}: its disk cannot be measured")
    told = f"{free_mib:,} MiB free for {folder}"
    fix = "free some space (hf cache ls), or: export HF_HUB_CACHE=/a/larger/disk"
    if subject.profile is None:
        if free_mib < _MODELS_MIB:
            return warned(f"{told}: a 27B checkpoint and its draft take about {_MODELS_MIB:,} MiB", fix)
        return passed(told)
    missing = [
        model
        for model in (subject.target(), subject.draft())
        if model is not None and model.checkpoint is None and not model.is_folder
    ]
    needed_mib = sum(_size_mib(model) or 0 for model in missing)
    if any(_size_mib(model) is None for model in missing):
        return unknown(f"{told}; how large the download is, is not known", fix)
    if missing and needed_mib + _FULL_MIB > free_mib:
        return failed(f"{told}, and about {needed_mib:,} MiB have to be downloaded", fix)
    return passed(told + (f"; about {needed_mib:,} MiB to download" if missing else "; nothing to download"))


def disk_caches(_: Subject) -> Answer:
    """There is room for kernels, environments, records and temporary files, and they can be written."""
    places = {
        "kernels (~/.cache)": Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser(),
        "environments": paths.data_dir(),
        "records": paths.state_dir(),
        "profiles": paths.config_dir(),
        "temporary files": Path(os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 - looked at, not written
    }
    shut = {use: place for use, place in places.items() if not _writable(place)}
    if shut:
        told = ", ".join(f"{place} ({use})" for use, place in shut.items())
        named = " ".join(str(_standing(place)) for place in shut.values())
        return failed(f"cannot be written by this user: {told}", f"sudo chown -R $(id -un): {named}")
    free = {use: room for use, place in places.items() if (room := _free_mib(place)) is not None}
    if not free:
        return unknown("the disks of the caches cannot be measured")
    use, least_mib = min(free.items(), key=lambda item: item[1])
    told = f"{least_mib:,} MiB free where {use} go ({places[use]})"
    clean = f"du -xh --max-depth=2 {places[use]} | sort -h | tail; free some space there"
    if least_mib < _FULL_MIB:
        return failed(f"the disk is as good as full: {told}", clean)
    if least_mib < _CACHES_MIB:
        return warned(f"{told}: compiled kernels, logs and an environment take more", clean)
    return passed(told)


def folders(_: Subject) -> Answer:
    """Folders that variables name are there: programs fall back to others without a word."""
    named = {
        name: Path(value).expanduser()
        for name in ("TMPDIR", "HF_HOME", "HF_HUB_CACHE", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR")
        if (value := os.environ.get(name))
    }
    missing = {name: path for name, path in named.items() if not path.is_dir()}
    if not missing:
        return passed("those that variables name are there" if named else "no variable names another one")
    told = ", ".join(f"{name}={path}" for name, path in missing.items())
    makeable = tuple(path for path in missing.values() if not path.exists() and _writable(path))
    return warned(
        f"not there: {told} (a disk that is not mounted?)",
        "mkdir -p " + " ".join(map(str, missing.values())),
        repair=Repair(f"make {', '.join(map(str, makeable))}", partial(_make, makeable))
        if makeable
        else None,
    )


def shared_memory(subject: Subject) -> Answer:
    """Shared memory has room: processes of one server talk through it."""
    host = subject.host()
    if host.shared_memory_free_mib is None or host.shared_memory_total_mib is None:
        return failed("there is no shared memory", f"sudo mount -t tmpfs tmpfs {_SHM}")
    told = f"{host.shared_memory_free_mib:,} of {host.shared_memory_total_mib:,} MiB of {_SHM} free"
    larger = (
        "start the container with --shm-size=8g (or --ipc=host)"
        if host.container
        else f"sudo mount -o remount,size=8G {_SHM}"
    )
    if host.shared_memory_free_mib < _SHM_LEAST_MIB:
        return failed(told, f"ls -l {_SHM}; {larger}")
    if host.shared_memory_free_mib < _SHM_MIB:
        return warned(f"{told}: enough for one card; several cards and images need more", larger)
    return passed(told)


def limits(_: Subject) -> Answer:
    """Limits of this shell do not keep the engine from starting."""
    files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    space, _hard = resource.getrlimit(resource.RLIMIT_AS)
    told = f"open files {_limit(files)}, processes {_limit(processes)}, address space {_limit(space)}"
    if space != resource.RLIM_INFINITY and space < _ADDRESS_SPACE:
        return failed(
            f"the address space is limited to {space >> 20:,} MiB: CUDA cannot reserve what it needs",
            "ulimit -v unlimited",
            told,
        )
    low = []
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        if hard_files != resource.RLIM_INFINITY and hard_files < _FEW_FILES:
            low.append(
                (
                    f"{files:,} open files (at most {hard_files:,})",
                    "raise nofile in /etc/security/limits.conf",
                )
            )
        else:
            low.append((f"{files:,} open files", "ulimit -n 65536"))
    if processes != resource.RLIM_INFINITY and processes < _FEW_PROCESSES:
        low.append((f"{processes:,} processes and threads", "ulimit -u unlimited"))
    if low:
        return warned(
            f"low limits of this shell: {', '.join(what for what, _ in low)}",
            "; ".join(command for _, command in low),
            told,
        )
    return passed(told)


def guard(subject: Subject) -> Answer:
    """No guard of the host's memory ends the engine in the middle of its work."""
    running = sorted(
        {name for process in psutil.process_iter(["name"]) if (name := process.info["name"]) in _GUARDS}
    )
    if not running:
        return passed("neither earlyoom nor another guard runs")
    host = subject.host()
    unified = any(gpu.memory_total_mib is None for gpu in used(subject.gpus()))
    checkpoint_mib = _size_mib(_model(subject)) or 0
    names = ", ".join(printable(name) for name in running)
    if unified or host.memory_available_mib < checkpoint_mib + _KEPT_FREE_MIB:
        return warned(
            f"{names} runs: it ends the scheduler (exit status -15, no traceback) when little memory is free"
            + (", and this card's memory is the host's" if unified else ""),
            "keep 8 GiB free (lower --mem-fraction-static), and look: journalctl -u earlyoom -u systemd-oomd",
        )
    return passed(f"{names} runs, and {host.memory_available_mib:,} MiB are available")


def wsl(subject: Subject) -> Answer | None:
    """What is different under Windows' subsystem."""
    host = subject.host()
    if host.wsl is None:
        return None
    if host.wsl == 1:
        return failed("WSL 1 has no GPU", "in PowerShell: wsl --set-version DISTRIBUTION 2")
    models = hub_cache.cache_dir()
    kind = file_system(models)
    if kind in _SLOW_FILE_SYSTEMS:
        return warned(
            f"checkpoints lie on a Windows drive ({models}, {kind}), which reads them many times slower",
            "export HF_HUB_CACHE=~/.cache/huggingface/hub   (and move them there)",
        )
    checkpoint_mib = _size_mib(_model(subject))
    if host.memory_total_mib < (checkpoint_mib or _LITTLE_RAM_MIB):
        return warned(
            f"WSL has {host.memory_total_mib:,} MiB of the machine's memory (half, unless told otherwise)",
            "in %UserProfile%\\.wslconfig: [wsl2] memory=48GB; then in PowerShell: wsl --shutdown",
        )
    return passed("WSL 2; Windows holds some of the card's memory, which no process list shows")


def clock(_: Subject) -> Answer:
    """The clock is right: downloads check certificates, and records are ordered by it."""
    ahead_s = _newest_s() - time.time()
    fix = "sudo timedatectl set-ntp true; timedatectl"
    if ahead_s > _FUTURE_S:
        ago = f"{ahead_s / _DAY_S:,.1f} days" if ahead_s > _DAY_S else f"{ahead_s / 60:,.0f} minutes"
        return failed(f"the clock is behind: files of this tool were written {ago} in the future", fix)
    synchronised = _synchronised()
    if synchronised is None:
        return unknown("whether the clock is synchronised, this system does not tell", fix)
    if not synchronised:
        return warned("the clock is not synchronised", fix, "adjtimex: STA_UNSYNC")
    return passed("synchronised")


def file_system(path: Path) -> str | None:
    """Kind of the file system that a path is on."""
    place = _standing(path).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else None


def _make(folders_to_make: tuple[Path, ...]) -> str:
    for folder in folders_to_make:
        folder.mkdir(parents=True, exist_ok=True)
    return f"made {', '.join(map(str, folders_to_make))}"


def _model(subject: Subject) -> Model | None:
    return subject.target()


def _size_mib(model: Model | None) -> int | None:
    if model is None:
        return None
    if model.checkpoint is not None:
        return model.checkpoint.disk_bytes >> 20
    if model.card is None:
        return None
    # What a server says that loading took is about what lies on the disk.
    return model.card.disk_bytes >> 20 if model.card.disk_bytes else int(model.card.loaded_gib * 1024)


def _standing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _writable(path: Path) -> bool:
    return os.access(_standing(path), os.W_OK | os.X_OK)


def _free_mib(path: Path) -> int | None:
    try:
        return psutil.disk_usage(str(_standing(path))).free >> 20
    except OSError:
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _newest_s() -> float:
    """When the newest of the tool's own files was written, as far as a look at its folders tells."""
    newest = 0.0
    for folder in (Path(__file__).parent, paths.state_dir(), paths.cache_dir()):
        try:
            newest = max([newest, *(entry.stat().st_mtime for entry in os.scandir(folder))])
        except OSError:
            continue
    return newest


class _Timex(ctypes.Structure):
    # struct timex of <sys/timex.h>: only its beginning is looked at, and its whole size is kept free.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _synchronised() -> bool | None:
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not timex.status & _UNSYNCHRONISED
