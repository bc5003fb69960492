"""Where studies are kept, and which one is meant. What runs one stands in ``study``."""

from __future__ import annotations

from pathlib import Path

from dflash_deploy import paths
from dflash_deploy.errors import DeployError, ExitCode


def studies_dir() -> Path:
    """Folder of all studies."""
    return paths.state_dir() / "studies"


def last_study() -> Path:
    """The study that was made last.

    Raises:
        DeployError: there is none.
    """
    records = list(studies_dir().glob("*/study.json"))
    if not records:
        raise DeployError(
            f"there is no study in {studies_dir()}", fix="dflash-deploy tune", exit_code=ExitCode.MISSING
        )
    # By the time it was written, which a damaged one has too: none of those before it is meant.
    return max(records, key=lambda record: (record.stat().st_mtime, record)).parent


def find_study(study: str | None) -> Path:
    """The folder of a study that is named, or given by its folder; without either, of the last one made.

    Raises:
        DeployError: there is none.
    """
    if study is None:
        return last_study()
    if study and "/" not in study and study not in (".", ".."):
        named = studies_dir() / study
        if (named / "study.json").is_file():
            return named
    folder = Path(study).expanduser()
    if "/" in study or (folder / "study.json").is_file():
        return folder
    raise DeployError(
        f"there is no study {study!r} in {studies_dir()}",
        fix="dflash-deploy tune, or give the folder of the study",
        exit_code=ExitCode.MISSING,
    )
