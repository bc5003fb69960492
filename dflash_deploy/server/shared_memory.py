"""Shared-memory files that an engine leaves behind.

Their names tell no owner (a random word each), and the same person may have other servers that start or run.
So a file counts as a server's only where one of its processes was seen to hold it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dflash_deploy.server.processes import open_files

_PROC = Path("/proc")
_FOLDER = Path("/dev/shm")  # noqa: S108
_PREFIXES = ("sglang_loads_", "sgl_shm_", "sem.mp-")
"""SGLang's load snapshots (left by every server, also after a clean end) and shared buffers, and the
semaphores of Python's multiprocessing."""


def held_by(pids: Iterable[int]) -> frozenset[str]:
    """Names of an engine's shared-memory files that these processes have open or mapped."""
    held = {Path(path) for pid in pids for path in _held(pid)}
    return frozenset(path.name for path in held if path.parent == _FOLDER and path.name.startswith(_PREFIXES))


def remove_leftovers(seen: Iterable[str]) -> tuple[str, ...]:
    """Remove what a server that has ended left in shared memory.

    Args:
        seen: names that its processes were seen to hold. A file that any process still holds stays.

    Returns:
        Files that could not be removed, in words.
    """
    left = [_FOLDER / name for name in sorted(seen) if name.startswith(_PREFIXES) and "/" not in name]
    left = [path for path in left if _is_ours(path)]
    if not left:
        return ()
    held = {
        path for process in _PROC.iterdir() if process.name.isdecimal() for path in _held(int(process.name))
    }
    stubborn = []
    for path in left:
        if str(path) not in held:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                stubborn.append(f"shared memory {path} cannot be removed: {error.strerror}")
    return tuple(stubborn)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _held(pid: int) -> Iterator[str]:
    """What a process holds in shared memory, as far as can be seen."""
    folder = f"{_FOLDER}/"
    with suppress(OSError):
        for line in (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
            if folder in line:
                yield line[line.index(folder) :]
    yield from (path for path in open_files(pid) if path.startswith(folder))
