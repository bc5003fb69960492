"""Where the shipped data lies: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "_shipped"


def resource_dir(name: str) -> Path:
    """Folder of shipped data.

    Args:
        name: a top-level folder of the repository, such as ``profiles`` or ``templates``.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    for root in (_INSTALLED, _PACKAGE.parent):
        folder = root / name
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"dflash-deploy is installed without its {name}/ folder; install it again")
