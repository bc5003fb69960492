"""Checks of the machine around the cards: memory, limits, guards, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from pathlib import Path

import psutil

from dflash_deploy import paths
from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.doctor.disks import size_mib
from dflash_deploy.doctor.finding import Answer, failed, passed, unknown, warned
from dflash_deploy.doctor.gpu import used
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.machine.host import Host
from dflash_deploy.machine.system import SYSTEMD_IN_WSL, systemd_runs
from dflash_deploy.machine.text import printable

_ENGINE_RAM_MIB = 6 * 1024
"""Three processes of the engine and their CUDA contexts, before any of the model."""
_LITTLE_RAM_MIB = 16 * 1024
_FEW_FILES = 4096
_FEW_PROCESSES = 4096
_ADDRESS_SPACE = 1 << 40
"""CUDA reserves address space for all memory of all cards; less than a terabyte is a limit set by hand."""
_SHM = "/dev/shm"  # noqa: S108 - named, never written
_SHM_LEAST_MIB = 16
_SHM_MIB = 1024
_WSL_MEMORY = "in %UserProfile%\\.wslconfig: [wsl2] memory=48GB; then in PowerShell: wsl --shutdown"
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
    more = _more_memory(host, limited=bool(limited))
    if available_mib + host.swap_free_mib < _ENGINE_RAM_MIB:
        return failed(f"{told}: the engine's processes alone take about {_ENGINE_RAM_MIB:,} MiB", more)
    checkpoint_mib = size_mib(subject.target())
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


def _more_memory(host: Host, *, limited: bool) -> str:
    held = "close what holds it (ps aux --sort=-rss | head), or "
    if limited:
        return held + "raise the limit (docker run --memory=48g …; a unit: MemoryMax=)"
    if host.wsl is not None:
        return f"{held}{_WSL_MEMORY}"
    if host.container is not None:
        return held + "add memory or swap to the machine that runs this container"
    swap = "sudo fallocate -l 32G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && "
    return f"{held}add swap: {swap}sudo swapon /swapfile"


def shared_memory(subject: Subject) -> Answer:
    """Shared memory is there and has room: processes of one server talk through it."""
    host = subject.host()
    if host.shared_memory_free_mib is None or host.shared_memory_total_mib is None or not Path(_SHM).is_dir():
        return failed(
            f"there is no shared memory ({_SHM})", f"sudo mkdir -p {_SHM} && sudo mount -t tmpfs tmpfs {_SHM}"
        )
    if not os.access(_SHM, os.W_OK | os.X_OK):
        return failed(
            f"{_SHM} cannot be written by this user",
            f"sudo mount -o remount,rw,mode=1777 {_SHM}   (see ls -ld {_SHM})",
        )
    told = f"{host.shared_memory_free_mib:,} of {host.shared_memory_total_mib:,} MiB of {_SHM} free"
    larger = f"sudo mount -o remount,size=8G {_SHM}"
    if host.container == "kubernetes":
        larger = f"mount an emptyDir of medium Memory at {_SHM}"
    elif host.container:
        larger = "start the container with --shm-size=8g (or --ipc=host)"
    if host.shared_memory_free_mib < _SHM_LEAST_MIB:
        return failed(told, f"ls -l {_SHM}; {larger}")
    if host.shared_memory_free_mib < _SHM_MIB and _spread(subject) > 1:
        return failed(f"{told}: the processes of {_spread(subject)} cards need more to talk", larger)
    if host.shared_memory_free_mib < _SHM_MIB:
        return warned(f"{told}: enough for one card; several cards and images need more", larger)
    return passed(told)


def _spread(subject: Subject) -> int:
    """Cards that one model is spread over."""
    given = subject.profile.flags.get("tensor-parallel-size", 1) if subject.profile else 1
    return given if isinstance(given, int) else 1


def limits(subject: Subject) -> Answer:
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
            raised = "raise nofile in /etc/security/limits.conf"
            if os.geteuid() == 0:
                raised = "ulimit -n 65536"
            elif subject.host().container:
                raised = "start the container with --ulimit nofile=65536:65536"
            low.append((f"{files:,} open files (at most {hard_files:,})", raised))
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
    host = subject.host()
    running = sorted(
        {name for process in psutil.process_iter(["name"]) if (name := process.info["name"]) in _GUARDS}
    )
    if not running:
        return passed("neither earlyoom nor another guard runs")
    unified = any(gpu.memory_total_mib is None for gpu in used(subject.gpus()))
    checkpoint_mib = size_mib(subject.target()) or 0
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
    checkpoint_mib = size_mib(subject.target())
    if host.memory_total_mib < (checkpoint_mib or _LITTLE_RAM_MIB):
        return warned(
            f"WSL has {host.memory_total_mib:,} MiB of the machine's memory (half, unless told otherwise)",
            _WSL_MEMORY,
        )
    if not systemd_runs():
        return warned(
            "systemd does not run in this WSL, and `service` needs it (without: emit --format shell)",
            SYSTEMD_IN_WSL,
        )
    return passed("WSL 2; Windows holds some of the card's memory, which no process list shows")


def clock(subject: Subject) -> Answer:
    """The clock is right: downloads check certificates, and records are ordered by it."""
    ahead_s = _newest_s() - time.time()
    fix = _set_clock(subject.host())
    if ahead_s > _FUTURE_S:
        ago = f"{ahead_s / _DAY_S:,.1f} days" if ahead_s > _DAY_S else f"{ahead_s / 60:,.0f} minutes"
        return failed(f"the clock is behind: files of this tool were written {ago} in the future", fix)
    synchronised = _synchronised()
    if synchronised is None:
        return unknown("whether the clock is synchronised, this system does not tell", fix)
    if not synchronised:
        return warned("the clock is not synchronised", fix, "adjtimex: STA_UNSYNC")
    return passed("synchronised")


def _set_clock(host: Host) -> str:
    if host.wsl is not None:
        return "sudo hwclock -s; or in PowerShell: wsl --shutdown"
    there = shutil.which("timedatectl") is not None
    fix = "sudo timedatectl set-ntp true; timedatectl" if there else "run a time service, such as chrony"
    # A container has its machine's clock, and cannot set it.
    return f"on the machine that runs this container: {fix}" if host.container else fix


def file_system(path: Path) -> str | None:
    """Kind of the file system that a path is on."""
    place = _standing(path).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else None


def _standing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("/"))  # noqa: PTH110


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
