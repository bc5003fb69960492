"""Checks of the disks: room for checkpoints and caches, folders that are there and can be written."""

from __future__ import annotations

import errno
import os
import shlex
from functools import partial
from pathlib import Path

from dflash_deploy import paths
from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.doctor.finding import Answer, Repair, failed, passed, unknown, warned
from dflash_deploy.doctor.subject import Model, Subject
from dflash_deploy.serving_env.refused import refused

_MODELS_MIB = 30 * 1024
_CACHES_MIB = 10 * 1024
_FULL_MIB = 1024
_FEW_INODES = 1000


def models(subject: Subject) -> Answer:
    """The checkpoints are here, or there is room to download them."""
    folder = hub_cache.cache_dir()
    missing = [
        model
        for model in (subject.target(), subject.draft())
        if model is not None and model.checkpoint is None and not model.is_folder
    ]
    if (missing or subject.profile is None) and (error := _obstacle(folder)) is not None:
        made = failed if missing else warned
        return made(
            f"nothing can be downloaded to {folder}: {error.filename}: {error.strerror}",
            "export HF_HUB_CACHE=/a/folder/of/yours",
        )
    free_mib = _free_mib(folder)
    if free_mib is None:
        return unknown(f"{folder}: its disk cannot be measured")
    told = f"{free_mib:,} MiB free for {folder}"
    fix = "free some space (hf cache ls), or: export HF_HUB_CACHE=/a/larger/disk"
    if subject.profile is None:
        if free_mib < _MODELS_MIB:
            return warned(f"{told}: a 27B checkpoint and its draft take about {_MODELS_MIB:,} MiB", fix)
        return passed(told)
    needed_mib = sum(size_mib(model) or 0 for model in missing)
    if any(size_mib(model) is None for model in missing):
        return unknown(f"{told}; how large the download is, is not known", fix)
    if missing and needed_mib + _FULL_MIB > free_mib:
        return failed(f"{told}, and about {needed_mib:,} MiB have to be downloaded", fix)
    return passed(told + (f"; about {needed_mib:,} MiB to download" if missing else "; nothing to download"))


def caches(_: Subject) -> Answer:
    """There is room for kernels, environments, records and temporary files, and they can be written."""
    places = {
        "kernels (~/.cache)": paths.expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache"),
        "environments": paths.data_dir(),
        "records": paths.state_dir(),
        "profiles": paths.config_dir(),
        "temporary files": Path(os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 - looked at, not written
    }
    shut = {use: error for use, place in places.items() if (error := _obstacle(place)) is not None}
    if shut:
        by_place: dict[str, list[str]] = {}
        for use, error in shut.items():
            by_place.setdefault(f"{error.filename}: {error.strerror}", []).append(use)
        told = "; ".join(f"{why} ({', '.join(uses)})" for why, uses in by_place.items())
        fixes = dict.fromkeys(refused(error, places[use]).fix for use, error in shut.items())
        if len(shut) > 1:
            fixes["or for all of it: export HOME=/a/folder/of/yours"] = None
        return failed(f"cannot be written: {told}", "; ".join(filter(None, fixes)))
    free = {use: room for use, place in places.items() if (room := _free_mib(place)) is not None}
    if not free:
        return unknown("the disks of the caches cannot be measured")
    for use, place in places.items():
        inodes = _free_inodes(place)
        if inodes is not None and inodes < _FEW_INODES:
            return failed(
                f"the disk takes only {inodes:,} files more where {use} go ({place}), whatever room it has",
                f"df -i {shlex.quote(str(_standing(place)))}; remove what has many small files",
            )
    use, least_mib = min(free.items(), key=lambda item: item[1])
    told = f"{least_mib:,} MiB free where {use} go ({places[use]})"
    at = shlex.quote(str(_standing(places[use])))
    clean = f"du -xh --max-depth=2 {at} | sort -h | tail; free some space there"
    if least_mib < _FULL_MIB:
        return failed(f"the disk is as good as full: {told}", clean)
    if least_mib < _CACHES_MIB:
        return warned(f"{told}: compiled kernels, logs and an environment take more", clean)
    return passed(told)


def folders(_: Subject) -> Answer:
    """Folders that variables name are there: programs fall back to others without a word."""
    named = {
        name: paths.expanded(value)
        for name in ("TMPDIR", "HF_HOME", "HF_HUB_CACHE", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR")
        if (value := os.environ.get(name))
    }
    missing = {name: path for name, path in named.items() if not os.path.isdir(path)}  # noqa: PTH112
    if not missing:
        return passed("those that variables name are there" if named else "no variable names another one")
    obstacles = {name: error for name, path in missing.items() if (error := _obstacle(path)) is not None}
    if obstacles:
        told = ", ".join(f"{name}={missing[name]}: {error.strerror}" for name, error in obstacles.items())
        return failed(
            f"cannot be used, nor made: {told}",
            "; ".join(f"unset {name}, or name a folder of your own" for name in obstacles),
            *(f"{error.filename}: {error.strerror}" for error in obstacles.values()),
        )
    makeable = tuple(missing.values())
    return warned(
        f"not there: {', '.join(f'{name}={path}' for name, path in missing.items())} (a disk that is not "
        "mounted?)",
        "mkdir -p " + " ".join(shlex.quote(str(path)) for path in makeable),
        repair=Repair(f"make {', '.join(map(str, makeable))}", partial(_make, makeable)),
    )


def size_mib(model: Model | None) -> int | None:
    """What a checkpoint takes on the disk, None where nothing is known of it."""
    if model is None:
        return None
    if model.checkpoint is not None:
        return model.checkpoint.disk_bytes >> 20
    if model.card is None:
        return None
    # What a server says that loading took is about what lies on the disk.
    return model.card.disk_bytes >> 20 if model.card.disk_bytes else int(model.card.loaded_gib * 1024)


def _make(folders_to_make: tuple[Path, ...]) -> str:
    for folder in folders_to_make:
        folder.mkdir(parents=True, exist_ok=True)
    return f"made {', '.join(map(str, folders_to_make))}"


def _standing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there and can be seen."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if os.path.lexists(place)), Path("/"))


def _obstacle(path: Path) -> OSError | None:
    """What keeps this user from writing to a folder, or from making it."""
    standing = _standing(path)
    number = None
    if not os.path.isdir(standing):  # noqa: PTH112 - whatever keeps it from being seen, it is none
        number = errno.ENOENT if os.path.islink(standing) else errno.ENOTDIR  # noqa: PTH114
    elif not os.access(standing, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(standing).f_flag & os.ST_RDONLY else errno.EACCES
    return None if number is None else OSError(number, os.strerror(number), str(standing))


def _free_mib(path: Path) -> int | None:
    try:
        about = os.statvfs(_standing(path))
    except OSError:
        return None
    return about.f_bavail * about.f_frsize >> 20


def _free_inodes(path: Path) -> int | None:
    """How many files can still be made; None where the file system does not count them."""
    try:
        about = os.statvfs(_standing(path))
    except OSError:
        return None
    return about.f_favail if about.f_files else None
