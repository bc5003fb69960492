"""Where the tool keeps what it makes (the XDG base directories)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs

from dflash_deploy.errors import DeployError, ExitCode

_APP = "dflash-deploy"


def config_dir() -> Path:
    """The person's own profiles: ``~/.config/dflash-deploy``."""
    return _known(platformdirs.user_config_path)


def state_dir() -> Path:
    """Studies and records of running servers: ``~/.local/state/dflash-deploy``."""
    return _known(platformdirs.user_state_path)


def data_dir() -> Path:
    """Serving environments and their backups: ``~/.local/share/dflash-deploy``."""
    return _known(platformdirs.user_data_path)


def cache_dir() -> Path:
    """What can be made again: ``~/.cache/dflash-deploy``."""
    return _known(platformdirs.user_cache_path)


def expanded(path: str) -> Path:
    """``path`` with a leading ``~`` written out.

    Raises:
        DeployError: nothing says where this user's home is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise _homeless() from None


def _known(find: Callable[[str], Path]) -> Path:
    """The folder that ``find`` names.

    Raises:
        DeployError: nothing says where this user's home is, as in a container that runs under a bare number.
    """
    try:
        folder = find(_APP)
    except RuntimeError:
        folder = Path("~")
    if not folder.is_absolute():
        raise _homeless()
    return folder


def _homeless() -> DeployError:
    return DeployError(
        "this user has no home folder: HOME is not set, and the system knows none",
        fix="export HOME=/a/folder/of/yours",
        exit_code=ExitCode.MISSING,
    )
