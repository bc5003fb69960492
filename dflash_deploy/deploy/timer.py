"""The timer that checks a service again and again, and restarts it after evidence.

Two template units serve any number of services, by ``@NAME``; an instance of the timer is one service's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from dflash_deploy import paths
from dflash_deploy.deploy import escape
from dflash_deploy.deploy.unit import UNIT_PREFIX, template
from dflash_deploy.files import write_atomic

UNIT = f"{UNIT_PREFIX}health@"
"""What both units are called, before the service's name and their ending."""

_STATE = "dflash-sglang-health"
"""Name of the folder that the units' template asks systemd for."""


def timer_of(service: str) -> str:
    """Name of a service's timer."""
    return f"{UNIT}{service}.timer"


def render_timer_units(
    command: Sequence[str] = (),
    *,
    manager: Literal["system", "user"],
    every_s: int = 60,
    timeout_s: int = 30,
    options: Sequence[str] = (),
) -> dict[str, str]:
    """Both units by file name.

    Args:
        command: how the tool is called: an absolute path, then its arguments; empty for the one that runs.
        manager: whose units they are; a user's timer watches that user's services.
        every_s: pause between two checks.
        timeout_s: of one check.
        options: of ``dflash-deploy health``, beside those that the unit needs.
    """
    # Not resolved: the path inside a virtual environment is what makes it one.
    program, *arguments = command or (sys.executable, "-P", "-m", "dflash_deploy")
    check = ["health", "@INSTANCE@", "--act", "--timeout", str(timeout_s), *options]
    line = escape.command_line(program, [*arguments, *check])
    # The specifier is systemd's to fill in, so it stands outside of what was escaped.
    values = {"command": line.replace("@INSTANCE@", "%i"), "every_s": every_s, "timeout_s": timeout_s}
    values["system"] = manager == "system"
    return {f"{UNIT}.{kind}": template(f"{UNIT}.{kind}.j2").render(values) for kind in ("service", "timer")}


def place(units: Mapping[str, str], folder: Path) -> list[Path]:
    """Write both units; gives those that were others before, whose old content is kept as ``.previous``."""
    replaced = []
    for name, text in units.items():
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        if before == text.encode():
            continue
        if before is not None:
            write_atomic(folder / f"{name}.previous", before)
            replaced.append(path)
        write_atomic(path, text)
    return replaced


def unneeded(folder: Path) -> list[Path]:
    """The template units in a folder, when no service's timer needs them any more."""
    if any(folder.glob(f"*.wants/{UNIT}*.timer")):
        return []
    return [path for kind in ("service", "timer") if (path := folder / f"{UNIT}.{kind}").is_file()]


def state_folders(manager: Literal["system", "user"]) -> Iterator[Path]:
    """Where checks leave what they remember of services: the unit's folder first, then the tool's own."""
    if given := os.environ.get("STATE_DIRECTORY", "").split(":")[0]:
        yield Path(given)
        return
    if manager == "system":
        yield Path("/var/lib") / _STATE
    else:
        # From systemd 254 on in the state's folder; before that in the configuration's.
        yield paths.state_dir().parent / _STATE
        yield paths.config_dir().parent / _STATE
    yield paths.state_dir() / "health"


def remembered(manager: Literal["system", "user"], service: str) -> list[Path]:
    """The files that checks of a service have left."""
    endings = (".json", ".lock", ".sqlite", ".sqlite-journal")
    found = [folder / f"{service}{ending}" for folder in state_folders(manager) for ending in endings]
    return [path for path in found if path.is_file()]
