"""The file operations of a patch: each leaves the old file or the new, and each is told of when done."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SUFFIX = ".dflash-deploy-new"


def _untold(_operation: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Disk:
    """File operations.

    Attributes:
        told: called after every single operation with what was done.
    """

    told: Callable[[str], None] = _untold

    def make_folder(self, path: Path) -> None:
        """Make a folder if it is not there."""
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.told(f"mkdir {path.name}")

    def keep(self, path: Path, kept: Path) -> None:
        """Keep a file under another name: the very same file where the filesystem can, else a copy of it."""
        if kept.exists():
            return
        try:
            os.link(path.resolve(), kept)
            self.told(f"link {kept.name}")
        except OSError:
            # Another filesystem, or one without hard links.
            self.replace(kept, path.read_bytes(), like=path.stat(), same_time=True)

    def restore(self, kept: Path, path: Path) -> None:
        """Put a kept file back, which takes no space where it is the very same file."""
        new = _temporary(path)
        self._clear(new)
        try:
            os.link(kept, new)
            self.told(f"link {new.name}")
        except OSError:
            self.replace(path, kept.read_bytes(), like=kept.stat(), same_time=True)
            return
        new.replace(path)
        self.told(f"rename {path.name}")
        self._sync_folder(path.parent)

    def restore_link(self, target: str, path: Path) -> None:
        """Put a symbolic link back."""
        new = _temporary(path)
        self._clear(new)
        new.symlink_to(target)
        self.told(f"symlink {new.name}")
        new.replace(path)
        self.told(f"rename {path.name}")
        self._sync_folder(path.parent)

    def replace(
        self, path: Path, content: bytes, *, like: os.stat_result | None = None, same_time: bool = False
    ) -> None:
        """Write a file in one step.

        Args:
            path: file to write.
            content: its bytes.
            like: whose permissions and owner the new file has.
            same_time: the new file has that one's time too; else a time of another second, so that no
                bytecode compiled from that one is taken for the new file's.
        """
        new = _temporary(path)
        self._clear(new)
        try:
            descriptor = os.open(
                new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            self.told(f"create {new.name}")
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                self.told(f"write {new.name}")
                if like is not None:
                    with contextlib.suppress(PermissionError):
                        os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode) if like is not None else 0o644)
                os.fsync(descriptor)
                self.told(f"sync {new.name}")
            if like is not None:
                self._set_time(new, like, same_time=same_time)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self.told(f"rename {path.name}")
        self._sync_folder(path.parent)

    def rename(self, path: Path, new: Path) -> None:
        """Give a file another name in its folder."""
        path.replace(new)
        self.told(f"rename {new.name}")
        self._sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        path.unlink(missing_ok=True)
        self.told(f"remove {path.name}")

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError):
            path.rmdir()
            self.told(f"rmdir {path.name}")

    def clear_leftover(self, path: Path) -> None:
        """Remove what a writing of ``path`` that was cut short left beside it."""
        self._clear(_temporary(path))

    def remove_bytecode(self, source: Path) -> None:
        """Remove what any interpreter compiled from a source file."""
        for compiled in sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")):
            self.remove(compiled)

    def _set_time(self, path: Path, like: os.stat_result, *, same_time: bool) -> None:
        if same_time:
            os.utime(path, ns=(like.st_atime_ns, like.st_mtime_ns))
        elif int(path.stat().st_mtime) == int(like.st_mtime):
            now_ns = path.stat().st_mtime_ns
            os.utime(path, ns=(now_ns, now_ns + 2_000_000_000))
        self.told(f"time {path.name}")

    def _clear(self, new: Path) -> None:
        if new.is_symlink() or new.exists():
            new.unlink()
            self.told(f"remove {new.name}")

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.told(f"sync {folder.name}")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_SUFFIX}")
