"""Writing files so that a crash or a full disk leaves the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` in one step, durably.

    Args:
        path: file to write; its folder is made when missing.
        content: text is written as UTF-8.
        mode: permission bits of the new file, set before any byte is written.

    Raises:
        OSError: the disk is full, the folder is not writable, and so on; ``path`` is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
