"""A temporary folder for one server, so that what the server forgets there is removed with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode

_PREFIX = "dflash-"
_LONGEST_BYTES = 107 - 48
"""A Unix socket's path has 107 bytes at most, and engines put sockets with names of up to 48 bytes in here
(``/pymp-????????/listener-????????``). So the folder cannot stand deep in a study."""


def make_temp_dir(token: str) -> Path:
    """Make the folder where temporary files go, or in ``/tmp`` where that path would be too long for sockets.

    Raises:
        DeployError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / (_PREFIX + token)
    if len(os.fsencode(folder)) > _LONGEST_BYTES:
        folder = Path("/tmp") / folder.name  # noqa: S108
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise DeployError(
            f"the server's temporary folder {folder} cannot be made: {error.strerror}",
            fix=f"make room and check permissions in {folder.parent}",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    return folder


def remove_temp_dir(folder: Path, token: str) -> tuple[str, ...]:
    """Remove a folder of ``make_temp_dir`` with all in it; any other folder is left alone.

    Returns:
        What could not be removed, in words.
    """
    if folder.name != _PREFIX + token or folder.is_symlink() or not folder.is_dir():
        return ()
    shutil.rmtree(folder, ignore_errors=True)
    return (f"temporary folder {folder} cannot be removed",) if folder.exists() else ()
