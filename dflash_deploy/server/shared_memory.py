"""Shared-memory files that an engine leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")  # noqa: S108
_PREFIXES = ("sglang_loads_", "sgl_shm_", "sem.mp-")
"""SGLang's load snapshots (left by every server, also after a clean end) and shared buffers, and the
semaphores of Python's multiprocessing."""


def remove_leftovers(since_s: float) -> tuple[str, ...]:
    """Remove the files that a server which has ended left in shared memory.

    A file is the server's if it has an engine's name, is ours, was last changed after ``since_s``, and no
    process holds it any more: a running server holds its own open, and what an older one left is older.

    Args:
        since_s: when the server started, in seconds since the epoch.

    Returns:
        Files that could not be removed, in words.
    """
    candidates = [path for path in _listed() if _is_ours(path, since_s)]
    if not candidates:
        return ()
    held = set(_held_files())
    stubborn = []
    for path in candidates:
        if str(path) not in held:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                stubborn.append(f"shared memory {path} cannot be removed: {error.strerror}")
    return tuple(stubborn)


def _listed() -> list[Path]:
    try:
        return sorted(path for path in _FOLDER.iterdir() if path.name.startswith(_PREFIXES))
    except OSError:
        return []


def _is_ours(path: Path, since_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_ctime >= since_s


def _held_files() -> Iterator[str]:
    """Shared-memory files that some process has open or mapped, as far as can be seen."""
    folder = str(_FOLDER)
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if folder in line:
                    yield line[line.index(folder) :]
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if target.startswith(folder):
                    yield target
        except OSError:
            continue
