"""What the system refused to do with a file, told with what helps."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})


def refused(error: OSError, where: Path, *, then: str = "", left: str = "") -> DeployError:
    """The error for a person.

    Args:
        error: what was raised.
        where: the file or folder, where the error names none.
        then: what to run once it is mended, where that is not the same command.
        left: how everything stands now, for the message.
    """
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else where
    what = error.strerror or str(error)
    if error.errno in FULL:
        what = f"the disk is full ({what})"
    again = f"; then: {then}" if then else "; then run this again"
    return DeployError(
        f"{path}: {what}{'; ' if left else ''}{left}",
        fix=_fix(error.errno, path) + again,
        exit_code=ExitCode.UNAVAILABLE,
    )


def _fix(number: int | None, path: Path) -> str:
    variable = _variable(path)
    elsewhere = f", or set {variable} to a folder " if variable else ""
    if number in FULL:
        return "free some space" + (elsewhere and f"{elsewhere}on a larger disk")
    if number == errno.EROFS:
        return "mount that file system for writing" + (elsewhere and f"{elsewhere}that can be written")
    if number not in _FORBIDDEN:
        return "mend that" + (elsewhere and f"{elsewhere}that can be used")
    owned, owner = _owned(path)
    mine = elsewhere and f"{elsewhere}of your own"
    if owner == os.geteuid():
        return f"chmod u+rwX {shlex.quote(str(owned))}{mine}"
    return f"run this as {_name(owner)}, who owns {shlex.quote(str(owned))}{mine}"


def _variable(path: Path) -> str | None:
    """The variable that moves what lies there, where it is a folder of this tool's own."""
    from dflash_deploy import paths  # noqa: PLC0415 - a gate before a service needs none of it

    folders = {
        "XDG_DATA_HOME": paths.data_dir,
        "XDG_STATE_HOME": paths.state_dir,
        "XDG_CACHE_HOME": paths.cache_dir,
    }
    for variable, find in folders.items():
        try:
            folder = find()
        except DeployError:
            return None
        # Making the folder may be what was refused.
        if path.is_relative_to(folder) or folder.is_relative_to(path):
            return variable
    return None


def _owned(path: Path) -> tuple[Path, int]:
    """What stands in the way, and its owner: a file may be open to all in a folder that is not."""
    seen: list[tuple[Path, int]] = []
    for place in (path, *path.parents):
        try:
            about = place.lstat()
        except OSError:
            continue
        seen.append((place, about.st_uid))
        wanted = os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(about.st_mode) else 0)
        if not os.access(place, wanted):
            return seen[-1]
    return seen[0]


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"
