"""The unit of an existing service, as systemd has it."""

from __future__ import annotations

import re
import shutil
import subprocess

from dflash_deploy.engine.sglang.pasted.words import MAX_CHARS, shown
from dflash_deploy.errors import DeployError, ExitCode

_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}")
_ASK_S = 10.0


def unit_text(name: str) -> str:
    """What ``systemctl cat`` prints of a unit, the machine's manager asked first, then the user's own.

    Raises:
        DeployError: there is no systemd to ask, or no such unit.
    """
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise DeployError(f"{shown(name)!r} cannot be the name of a unit", exit_code=ExitCode.INVALID_INPUT)
    if shutil.which("systemctl") is None:
        raise DeployError(
            f"unit {name} cannot be looked up: there is no systemctl here",
            fix="copy the unit file here and give it with --from FILE",
            exit_code=ExitCode.MISSING,
        )
    said = ""
    for manager in ("--system", "--user"):
        try:
            done = subprocess.run(
                ["systemctl", manager, "--no-pager", "cat", "--", name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ASK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = said or f"systemctl does not answer ({type(error).__name__})"
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout[: 4 * MAX_CHARS].decode(errors="replace")
        said = said or done.stderr.decode(errors="replace").strip()
    raise DeployError(
        f"unit {name} cannot be read: {shown(said, 200) or 'systemd knows none of this name'}",
        fix="systemctl list-units --type=service   (or give the unit's file with --from FILE)",
        exit_code=ExitCode.MISSING,
    )
