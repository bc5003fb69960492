"""Files that a crash, a full disk or somebody else's content cannot turn against the tool.

What is written is the old content or the new, never a part; what is read is a regular file of bounded size.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

_ROOM_BYTES = 1 << 20
"""More than any record takes that is written at the end of something long."""


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """The content of a file that anybody may have put there: no pipe is waited for, no device read.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than ``most_bytes``.
    """
    # Opening a FIFO that nobody writes would wait for ever without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 10} KiB", str(path))
    return data


def check_place(path: Path) -> None:
    """See that a file may stand there: its folder is made, and nothing but a file is replaced.

    Raises:
        OSError: root could otherwise replace /dev/null.
    """
    if path.exists() and not path.is_file():
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(number, os.strerror(number) if path.is_dir() else "it is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)


def hold_room(folder: Path) -> IO[bytes]:
    """Keep room for a record on the disk of ``folder`` until what is returned is closed.

    So that what took long to measure can be written although the disk has filled up meanwhile. It has no
    name: however this process ends, nothing of it is left.

    Raises:
        OSError: there is no room now, or the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the caller closes it
        try:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        error.filename = str(folder)
        raise
    return file


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
    check_place(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            # A full disk names no file.
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
