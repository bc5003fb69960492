"""An environment of its own for the router, which is no part of SGLang's and need not agree with it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from dflash_deploy.engine.interpreter import ask
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env.installer import (
    Job,
    Say,
    find_installer,
    find_python,
    install_packages,
    make_venv,
)

VERSION = "1.13.0"
"""Of ``smg`` on PyPI: the release that the router's unit is written for."""

_STAMP = ".complete"
_PYTHON = "3.11"
_VERSION_SCRIPT = "import importlib.metadata as m; print(m.version('smg'))"


def make(root: Path, *, say: Say) -> Path:
    """The interpreter of the router's environment, which is made where it is not there yet.

    Args:
        root: folder for it.
        say: told each step.

    Raises:
        DeployError: it cannot be made; nothing is left of it then.
    """
    folder = root / f"router-{VERSION}"
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root / ".router.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _STAMP).is_file():
            # What an earlier making left, which was cut short.
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, lock, say)
    finally:
        os.close(lock)
    return folder / "bin" / "python"


def is_own_place(folder: Path) -> bool:
    """It is an environment that this tool made for a router."""
    return folder.name.startswith("router-") and (folder / _STAMP).is_file()


def version_of(python: Path) -> str:
    """The router's version in an interpreter's environment.

    Raises:
        DeployError: it has none.
    """
    try:
        answer = ask([python, "-c", _VERSION_SCRIPT], timeout_s=60)
        found = answer.output.decode(errors="replace").strip() if answer.status == 0 else ""
    except OSError:
        found = ""
    if not found:
        raise DeployError(
            f"{python} has no router (smg)",
            fix=f"{python} -m pip install smg=={VERSION}, or leave out --router-python",
            exit_code=ExitCode.MISSING,
        )
    return found


def _make(folder: Path, lock: int, say: Say) -> None:
    log_path = folder.parent / f"{folder.name}.log"
    installer = find_installer(None)
    # For its owner alone: addresses of indexes may hold a password.
    opened = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(opened, "w+b") as log:
            say(f"making {folder} with {installer} (about 160 MiB; log: {log_path})")
            job = Job(installer, log, log_path, say, lock)
            make_venv(folder, find_python(_PYTHON, installer), job)
            install_packages(folder, [f"smg=={VERSION}"], job)
        write_atomic(folder / _STAMP, "")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
