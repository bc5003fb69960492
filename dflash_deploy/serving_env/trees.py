"""Folders copied and compared byte for byte: content, permissions, times and links.

Copies never share content with their origin in a way that a later write could reach: where the file system
can, blocks are shared until one side is written (reflink); else they are copied. Hard links are not used: not
every program replaces files in one step (an editor, say, often writes in place), and such a write would
change the backup too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode

_FICLONE = 0x40049409
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 10

OnFile = Callable[[int], None]
"""Called with the bytes of each file that is done."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file (``f``), folder (``d``) or link (``l``); ``content`` is a digest or a link's target."""

    path: str
    kind: str
    mode: int
    mtime_ns: int
    size: int
    content: str


def scan(tree: Path, on_file: OnFile = lambda _size: None) -> tuple[Entry, ...]:
    """Every entry of a tree with its digest, the tree's own folder (``.``) first.

    Raises:
        DeployError: it holds something that is no file, folder or link.
        OSError: it cannot be read.
    """
    return tuple(_entry(tree, path, on_file) for path in _walk(tree))


def copy(tree: Path, destination: Path, on_file: OnFile = lambda _size: None) -> tuple[Entry, ...]:
    """Copy a tree to a place where nothing is; returns what was copied, as ``scan`` would of the copy.

    Raises:
        DeployError: it holds something that is no file, folder or link.
        OSError: it cannot be read, or the copy cannot be written.
    """
    entries: list[Entry] = []
    folders: list[tuple[Path, os.stat_result]] = []
    for path in _walk(tree):
        place = destination if path == "." else destination / path
        about = os.lstat(tree / path)
        if stat.S_ISDIR(about.st_mode):
            place.mkdir(mode=0o700)
            folders.append((place, about))
            entries.append(_entry(tree, path, on_file))
        elif stat.S_ISLNK(about.st_mode):
            entry = _entry(tree, path, on_file)
            place.symlink_to(entry.content)
            os.utime(place, ns=(about.st_atime_ns, about.st_mtime_ns), follow_symlinks=False)
            entries.append(entry)
        elif stat.S_ISREG(about.st_mode):
            digest = _copy_file(tree / path, place, about)
            on_file(about.st_size)
            entries.append(
                Entry(path, "f", stat.S_IMODE(about.st_mode), about.st_mtime_ns, about.st_size, digest)
            )
        else:
            raise _strange(tree / path)
    for place, about in reversed(folders):
        place.chmod(stat.S_IMODE(about.st_mode))
        os.utime(place, ns=(about.st_atime_ns, about.st_mtime_ns))
    _sync_file_system(destination)
    return tuple(entries)


def differences(expected: tuple[Entry, ...], found: tuple[Entry, ...]) -> Iterator[str]:
    """What differs between two listings of a tree, a line for each entry."""
    left: Mapping[str, Entry] = {entry.path: entry for entry in expected}
    right: Mapping[str, Entry] = {entry.path: entry for entry in found}
    for path in sorted(left.keys() | right.keys()):
        one, other = left.get(path), right.get(path)
        if one == other:
            continue
        if one is None:
            yield f"{path}: was added"
        elif other is None:
            yield f"{path}: is missing"
        elif (one.kind, one.size, one.content) != (other.kind, other.size, other.content):
            yield f"{path}: has another content"
        else:
            yield f"{path}: has other permissions or another time"


def write_manifest(entries: tuple[Entry, ...]) -> bytes:
    """A listing as a file holds it: one JSON list a line."""
    lines = (
        json.dumps([entry.path, entry.kind, entry.mode, entry.mtime_ns, entry.size, entry.content])
        for entry in entries
    )
    return "".join(f"{line}\n" for line in lines).encode()


def read_manifest(path: Path) -> tuple[Entry, ...]:
    """A listing from its file.

    Raises:
        DeployError: it is missing or wrong.
    """
    entries: list[Entry] = []
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                entries.append(_read_entry(line))
    except OSError as error:
        raise DeployError(
            f"{path}: cannot be read: {error.strerror}", exit_code=ExitCode.UNAVAILABLE
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DeployError(
            f"{path}: line {len(entries) + 1} is not a line of a manifest", exit_code=ExitCode.INVALID_INPUT
        ) from error
    return tuple(entries)


def _read_entry(line: bytes) -> Entry:
    path, kind, mode, mtime_ns, size, content = json.loads(line)
    if not (isinstance(path, str) and isinstance(kind, str) and isinstance(content, str)):
        raise TypeError
    return Entry(path, kind, int(mode), int(mtime_ns), int(size), content)


def size_bytes(tree: Path) -> int:
    """Bytes of all its files."""
    statuses = (os.lstat(tree / path) for path in _walk(tree))
    return sum(about.st_size for about in statuses if stat.S_ISREG(about.st_mode))


def can_share_blocks(folder: Path) -> bool:
    """Whether files of this folder can be reflinked, by trying it on two files without names."""
    try:
        with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=folder) as target:
            source.write(b"x" * 4096)
            source.flush()
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def exchange(new: Path, old: Path, aside: Path) -> Path:
    """Put ``new`` in the place of ``old``, in one step where the file system can; returns where old is then.

    Where it cannot, ``old`` is moved to ``aside`` first: whoever finds that and no ``old`` moves it back.
    """
    if not os.path.lexists(old):
        new.rename(old)
        return aside
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
            return new
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(old))
    old.rename(aside)
    new.rename(old)
    return aside


def _walk(tree: Path) -> Iterator[str]:
    """Paths within a tree, folders before what is in them, ``.`` first; in the same order every time."""
    yield "."
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(tree / folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            yield path
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _entry(tree: Path, path: str, on_file: OnFile) -> Entry:
    place = tree / path
    about = os.lstat(place)
    kind, content, size = "d", "", 0
    if stat.S_ISLNK(about.st_mode):
        kind, content = "l", str(place.readlink())
    elif stat.S_ISREG(about.st_mode):
        kind, size = "f", about.st_size
        with place.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        on_file(size)
    elif not stat.S_ISDIR(about.st_mode):
        raise _strange(place)
    return Entry(path, kind, stat.S_IMODE(about.st_mode), about.st_mtime_ns, size, content)


def _copy_file(source: Path, target: Path, about: os.stat_result) -> str:
    digest = hashlib.sha256()
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with source.open("rb") as read, os.fdopen(descriptor, "r+b") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        except OSError:
            while chunk := read.read(_CHUNK_BYTES):
                write.write(chunk)
                digest.update(chunk)
        else:
            while chunk := write.read(_CHUNK_BYTES):
                digest.update(chunk)
        write.flush()
        os.fchmod(write.fileno(), stat.S_IMODE(about.st_mode))
        os.utime(write.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))
    return digest.hexdigest()


def _sync_file_system(folder: Path) -> None:
    """What was written is on the disk when this returns; one call for a hundred thousand files."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(AttributeError):
            ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def _strange(path: Path) -> DeployError:
    return DeployError(
        f"{path} is neither a file, a folder nor a link, and cannot be copied",
        fix=f"rm {shlex.quote(str(path))}",
        exit_code=ExitCode.INVALID_INPUT,
    )
