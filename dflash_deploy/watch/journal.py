"""The journal of a unit: what its last start logged."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import cast

from dflash_deploy.deploy.unit import UNIT_PREFIX
from dflash_deploy.errors import DeployError, ExitCode

_NAME = re.compile(r"[A-Za-z0-9:_.@\\-]{1,255}")
_MOST_LINES = 200_000
_ASK_S = 20.0


@contextmanager
def unit_log(unit: str) -> Iterator[BufferedIOBase]:
    """What a unit logged since it was last started by hand or at boot, as a stream.

    Raises:
        DeployError: there is no journal to ask (MISSING), or no such unit in it.
    """
    if not shutil.which("journalctl"):
        raise DeployError(
            "there is no journalctl here, so a unit's log cannot be read",
            fix="give the log as a file, or pipe it: … | dflash-deploy diagnose -",
            exit_code=ExitCode.MISSING,
        )
    names = [unit] if "." in unit else [f"{unit}.service"]
    if not _NAME.fullmatch(names[-1]) or unit.startswith("-"):
        raise DeployError(f"{unit!r} is no name of a unit", exit_code=ExitCode.USAGE)
    if "." not in unit and not unit.startswith(UNIT_PREFIX):
        # A service's own name is enough.
        names.insert(0, f"{UNIT_PREFIX}{unit}.service")
    places = ((manager, name) for name in names for manager in ("system", "user"))
    manager, name = next((place for place in places if _logged(*place)), (None, names[0]))
    if manager is None:
        raise DeployError(
            f"the journal holds nothing of {name} that may be read here",
            fix="dflash-deploy status lists services; a system unit wants sudo or the group systemd-journal",
            exit_code=ExitCode.MISSING,
        )
    with subprocess.Popen(
        ["journalctl", *_of(manager, name), "--boot", f"--lines={_MOST_LINES}", "--output=short-iso"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield cast(BufferedIOBase, process.stdout)
        finally:
            process.kill()


def _of(manager: str, name: str) -> list[str]:
    return [f"--{'user-unit' if manager == 'user' else 'unit'}={name}", "--no-pager", "--quiet"]


def _logged(manager: str, name: str) -> bool:
    try:
        done = subprocess.run(
            ["journalctl", *_of(manager, name), "--lines=1", "--output=cat"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(done.stdout.strip())
