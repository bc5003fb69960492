"""A file that is to be written: shown before, and never over something else without leave."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic

_LARGEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Change:
    """What stands in a file now (None: there is no file) and what is to stand there."""

    path: Path
    before: str | None
    after: str

    @property
    def empty(self) -> bool:
        """The file is already as it should be."""
        return self.before == self.after

    @property
    def previous(self) -> Path:
        """Where the old content is kept when it is replaced."""
        return self.path.with_name(f"{self.path.name}.previous")

    def diff(self) -> str:
        """The change as a unified diff; empty where there is none."""
        lines = difflib.unified_diff(
            (self.before or "").splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            fromfile="/dev/null" if self.before is None else str(self.path),
            tofile=str(self.path),
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def change_of(path: Path, after: str, *, name_in_folder: str | None = None) -> Change:
    """Look at what stands in a file.

    Args:
        path: the file, or, where ``name_in_folder`` is given, the folder to put a file of that name into.
        after: what is to stand in it.
        name_in_folder: what a file in a folder is called.

    Raises:
        DeployError: it cannot be read, is no plain text file (a link, a folder, a device), or would stand in
            a folder that is not there.
    """
    try:
        if name_in_folder is not None and path.is_dir():
            path /= name_in_folder
        if path.is_symlink():
            raise _unfit(f"{path} is a link, to {path.readlink()}", "give --out another path")
        if not path.exists():
            if not path.parent.is_dir():
                raise _unfit(f"{path.parent} is not there", f"mkdir -p {shlex.quote(str(path.parent))}")
            return Change(path, None, after)
        if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
            raise _unfit(f"{path} is there and is no text file", "give --out another path")
        return Change(path, path.read_bytes().decode(), after)
    except UnicodeDecodeError as error:
        raise _unfit(f"{path} is there and is no text file", "give --out another path") from error
    except OSError as error:
        raise _unfit(f"{path} cannot be read: {error.strerror}", "give --out another path") from error


def _unfit(message: str, fix: str) -> DeployError:
    return DeployError(message, fix=fix, exit_code=ExitCode.UNAVAILABLE)


def apply(change: Change, *, replace: bool) -> None:
    """Write the file in one step, a script as one that can be run.

    Content that is replaced is kept beside it, as ``change.previous``.

    Raises:
        DeployError: another content stands there and ``replace`` is off, or the file cannot be written.
    """
    if change.empty:
        return
    if change.before is not None and not replace:
        raise DeployError(
            f"{change.path} is there already, with another content",
            fix=f"--dry-run shows the difference; --force replaces it and keeps it as {change.previous.name}",
            exit_code=ExitCode.UNAVAILABLE,
        )
    try:
        if change.before is not None:
            write_atomic(change.previous, change.before)
        write_atomic(change.path, change.after, mode=0o755 if change.after.startswith("#!") else 0o644)
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise _unfit(
            f"{change.path} cannot be written: {error.strerror}",
            "run the command with sudo, or give --out another path"
            if denied
            else "make room there, or give --out another path",
        ) from error
