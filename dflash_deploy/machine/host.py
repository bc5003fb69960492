"""The machine around the cards: memory, disk, CPU, system. All is measured; sizes are MiB."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from dflash_deploy import paths
from dflash_deploy.errors import DeployError
from dflash_deploy.machine import system
from dflash_deploy.machine.text import printable


@dataclass(frozen=True)
class Disk:
    """Room where something is kept. ``path`` may not exist yet: its nearest existing parent is measured."""

    use: Literal["home", "cache", "models"]
    path: str
    free_mib: int
    total_mib: int


@dataclass(frozen=True)
class Host:
    """Facts of the host; None where the system does not tell.

    Attributes:
        memory_limit_mib: limit that a container or control group sets, or None without one.
        cpus_usable: logical CPUs that this process may run on.
        wsl: version of the Windows Subsystem for Linux, or None outside it.
        container: kind of container, or None outside one.
        shared_memory_free_mib: room in /dev/shm.
    """

    memory_total_mib: int
    memory_available_mib: int
    swap_total_mib: int
    swap_free_mib: int
    memory_limit_mib: int | None
    disks: tuple[Disk, ...]
    cpu_model: str | None
    cpu_cores: int | None
    cpu_threads: int | None
    cpus_usable: int
    architecture: str
    kernel: str
    distribution: str | None
    glibc: str | None
    wsl: Literal[1, 2] | None
    container: str | None
    shared_memory_total_mib: int | None
    shared_memory_free_mib: int | None


def read_host() -> Host:
    """Read the host's facts."""
    memory = psutil.virtual_memory()
    swap_total_mib, swap_free_mib = _swap_mib()
    library, version = platform.libc_ver()
    shared = _room_mib(Path("/dev/shm"))  # noqa: S108 - measured, never written
    return Host(
        memory_total_mib=memory.total >> 20,
        memory_available_mib=memory.available >> 20,
        swap_total_mib=swap_total_mib,
        swap_free_mib=swap_free_mib,
        memory_limit_mib=system.memory_limit_mib(),
        disks=_disks(),
        cpu_model=system.cpu_model(),
        cpu_cores=psutil.cpu_count(logical=False),
        cpu_threads=psutil.cpu_count(),
        cpus_usable=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        kernel=platform.release(),
        distribution=system.distribution(),
        glibc=version if library == "glibc" else None,
        wsl=system.wsl(),
        container=system.container(),
        shared_memory_total_mib=shared[1] if shared else None,
        shared_memory_free_mib=shared[0] if shared else None,
    )


def models_dir(environ: Mapping[str, str]) -> Path:
    """Where the Hugging Face hub keeps downloaded models."""
    if hub := environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _disks() -> tuple[Disk, ...]:
    places: tuple[tuple[Literal["home", "cache", "models"], Callable[[], Path]], ...] = (
        ("home", Path.home),
        ("cache", paths.cache_dir),
        ("models", lambda: models_dir(os.environ)),
    )
    disks = []
    for use, find in places:
        # A user without a home folder has none of these.
        with suppress(RuntimeError, DeployError):
            path = find()
            if room := _room_mib(path):
                disks.append(Disk(use, printable(str(path), longest=4096), *room))
    return tuple(disks)


def _room_mib(path: Path) -> tuple[int, int] | None:
    """Free to this user and total, of the file system that holds ``path`` or would hold it."""
    for place in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            usage = psutil.disk_usage(str(place))
            return usage.free >> 20, usage.total >> 20
    return None


def _swap_mib() -> tuple[int, int]:
    # Some containers hide /proc/vmstat, which psutil wants too; no swap can be used that cannot be seen.
    with suppress(OSError, RuntimeError):
        swap = psutil.swap_memory()
        return swap.total >> 20, swap.free >> 20
    return 0, 0
