"""Who uses an environment: the tool's own choice, processes that run from it, unit files that name it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable
from dflash_deploy.serving_env.environments import Environment

_UNIT_FOLDERS = ("/etc/systemd/system", "~/.config/systemd/user")
_MAX_UNIT_BYTES = 1 << 20


def running_from(environment: Environment) -> tuple[str, ...]:
    """Processes whose program lies in the environment, in words."""
    inside = f"{environment.prefix}{os.sep}"
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(inside):
            found.append(f"process {process.info['pid']} ({printable(' '.join(words), longest=100)})")
    return tuple(found)


def named_by_units(environment: Environment) -> tuple[str, ...]:
    """Unit files of systemd that name the environment's folder."""
    return tuple(
        f"unit {path}" for path in _unit_files() if f"{environment.prefix}{os.sep}" in _head_of(path)
    )


def refuse_while_running(environment: Environment, what: str, *, force: bool) -> None:
    """Stop where a server runs from it: it would load the rest of its modules from another tree.

    Raises:
        DeployError: one does, and ``force`` is not given.
    """
    running = running_from(environment)
    if running and not force:
        raise DeployError(
            f"environment {environment.name} is not {what} while it is in use by {', '.join(running[:5])}",
            fix="stop that first, or give --force",
            exit_code=ExitCode.UNAVAILABLE,
        )


def _unit_files() -> Iterator[Path]:
    for folder in _UNIT_FOLDERS:
        yield from sorted(Path(folder).expanduser().glob("*.service"))


def _head_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_UNIT_BYTES).decode(errors="replace")
    except OSError:
        return ""
