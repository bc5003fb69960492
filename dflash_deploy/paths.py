"""Where the tool keeps what it makes (the XDG base directories)."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_APP = "dflash-deploy"


def config_dir() -> Path:
    """The person's own profiles: ``~/.config/dflash-deploy``."""
    return platformdirs.user_config_path(_APP)


def state_dir() -> Path:
    """Studies and records of running servers: ``~/.local/state/dflash-deploy``."""
    return platformdirs.user_state_path(_APP)


def data_dir() -> Path:
    """Serving environments and their backups: ``~/.local/share/dflash-deploy``."""
    return platformdirs.user_data_path(_APP)


def cache_dir() -> Path:
    """What can be made again: ``~/.cache/dflash-deploy``."""
    return platformdirs.user_cache_path(_APP)
