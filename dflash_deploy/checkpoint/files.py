"""Where a checkpoint's files are read from: a folder (also of the Hugging Face cache), or a hub."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_deploy.checkpoint.json_text import invalid, shown
from dflash_deploy.errors import DeployError, ExitCode

_MAX_ENTRIES = 20_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,200}")


class Files(Protocol):
    """The files of one checkpoint, none of which is ever read whole by accident."""

    @property
    def where(self) -> str:
        """What to call the place in messages."""

    @property
    def parallel_reads(self) -> int:
        """How many reads at once are of use."""

    def names(self) -> tuple[str, ...]:
        """Names of the files at its top, without those in folders."""

    def size(self, name: str) -> int:
        """Bytes of a file; DeployError (MISSING) where there is none."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most ``length`` bytes of a file, fewer at its end."""


def is_plain(name: str) -> bool:
    """Whether a file's name is one that leads nowhere else."""
    return _PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def read_whole(files: Files, name: str, *, most: int) -> bytes:
    """A small file.

    Raises:
        DeployError: it is not there, cannot be read, or is larger than ``most``.
    """
    if files.size(name) > most:
        raise invalid(f"{files.where}/{name}", f"is larger than {most >> 20} MiB")
    return files.read(name, 0, most)


@dataclass(frozen=True)
class Folder:
    """Files on this machine. What is not a regular file (pipe, device, folder) is not opened for reading."""

    path: Path
    repair: str | None = None
    """The command that brings missing or short files, where one is known."""

    parallel_reads = 1

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.path)

    def names(self) -> tuple[str, ...]:
        """Names in the folder, whatever they are of."""
        found = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    found.append(entry.name)
                    if len(found) > _MAX_ENTRIES:
                        raise invalid(
                            self.where, f"holds more than {_MAX_ENTRIES:,} files; is it a checkpoint?"
                        )
        except OSError as error:
            raise DeployError(
                f"{self.where}: cannot be listed: {error.strerror}", exit_code=_exit_code(error)
            ) from error
        return tuple(sorted(found))

    def size(self, name: str) -> int:
        """Bytes of a regular file."""
        with self._opened(name) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, name: str, start: int, length: int) -> bytes:
        """Part of a regular file."""
        with self._opened(name) as descriptor:
            parts = []
            while length > 0:
                part = os.pread(descriptor, min(length, 1 << 24), start)
                if not part:
                    break
                parts.append(part)
                start += len(part)
                length -= len(part)
            return b"".join(parts)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        if not is_plain(name):
            raise invalid(self.where, f"{shown(name)!r} is no name of a file in a checkpoint")
        path = self.path / name
        try:
            # Opening a pipe that nobody writes would wait for ever without O_NONBLOCK.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise self._unreadable(path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise invalid(str(path), "expected a file, found something else")
            yield descriptor
        except OSError as error:
            raise self._unreadable(path, error) from error
        finally:
            os.close(descriptor)

    def _unreadable(self, path: Path, error: OSError) -> DeployError:
        if error.errno == errno.ENOENT:
            what = "is a link to a file that is not there" if path.is_symlink() else "is missing"
        elif error.errno == errno.ELOOP:
            what = "is a link that leads to itself"
        else:
            what = f"cannot be read: {error.strerror}"
        return DeployError(f"{path}: {what}", fix=self.repair, exit_code=_exit_code(error))


def _exit_code(error: OSError) -> ExitCode:
    match error.errno:
        case errno.ENOENT:
            return ExitCode.MISSING
        case errno.EACCES | errno.EPERM | errno.EIO:
            return ExitCode.UNAVAILABLE
        case _:
            return ExitCode.INVALID_INPUT
