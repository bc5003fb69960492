"""Asking systemd for things, and waiting for what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine import system

_ASK_S = 30.0
# Longer than any TimeoutStartSec or TimeoutStopSec of ours: systemd itself ends what takes too long.
_CHANGE_S = 45 * 60.0
_MOST_LINES = 12
_SECRET = re.compile(r"api[_-]key", re.IGNORECASE)


@dataclass(frozen=True)
class Systemd:
    """One manager: the machine's, or the user's own."""

    manager: Literal["system", "user"]

    def version(self) -> int | None:
        """Its version, None where it does not say."""
        found = re.match(rb"systemd (\d+)", self.run(["--version"], _ASK_S).stdout)
        return int(found[1]) if found else None

    def require(self) -> None:
        """See that it can be asked, before anything is changed.

        Raises:
            DeployError: it cannot.
        """
        done = self.run(["show", "--property=Version"], _ASK_S)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            raise DeployError(
                f"the {'user' if self.manager == 'user' else 'machine'}'s systemd cannot be asked: {said}",
                fix=self._how_to_ask(),
                exit_code=ExitCode.UNAVAILABLE,
            )

    def _how_to_ask(self) -> str:
        if system.systemd_runs() and self.manager == "user":
            return (
                "log in as that user (by ssh or at the console, not by su or sudo); or: sudo loginctl "
                "enable-linger $USER, then export XDG_RUNTIME_DIR=/run/user/$(id -u)"
            )
        if not system.systemd_runs() and system.wsl() is not None:
            return f"{system.SYSTEMD_IN_WSL}; without it: dflash-deploy emit --format shell"
        return "run it on a machine that systemd runs; elsewhere: dflash-deploy emit --format shell"

    def reload(self) -> None:
        """Read units again.

        Raises:
            DeployError: it refused.
        """
        self._must(["daemon-reload"], _ASK_S)

    def start(self, unit: str) -> bool:
        """Start, and wait until it answers or has failed; a count of failed starts begins anew."""
        self.run(["reset-failed", unit], _ASK_S)
        return self.run(["start", unit], _CHANGE_S).returncode == 0

    def stop(self, unit: str) -> None:
        """Stop, and wait until nothing of it runs.

        Raises:
            DeployError: it refused.
        """
        if self.known(unit):
            self._must(["stop", unit], _CHANGE_S)
            self.run(["reset-failed", unit], _ASK_S)

    def enable(self, unit: str) -> None:
        """Have it started at boot (a user's: at login).

        Raises:
            DeployError: it refused.
        """
        self._must(["enable", "--quiet", unit], _ASK_S)

    def disable(self, unit: str) -> None:
        """Have it not started at boot; no matter where it is not there."""
        self.run(["disable", "--quiet", unit], _ASK_S)

    def known(self, unit: str) -> bool:
        """It is loaded, by its file or because it runs."""
        return self.property(unit, "LoadState") not in ("", "not-found")

    def active(self, unit: str) -> str:
        """``active``, ``activating``, ``failed``, ``inactive`` …; ``unknown`` where it does not say."""
        return self.property(unit, "ActiveState") or "unknown"

    def property(self, unit: str, name: str) -> str:
        """One property, empty where there is none."""
        done = self.run(["show", f"--property={name}", "--value", unit], _ASK_S)
        return done.stdout.decode(errors="replace").strip()

    def last_lines(self, unit: str) -> str:
        """The end of what its last start logged, without lines that could hold a key."""
        invocation = self.property(unit, "InvocationID")
        match = [f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else []
        scope = ["--user"] if self.manager == "user" else []
        named = [f"--{'user-unit' if self.manager == 'user' else 'unit'}={unit}"]
        try:
            done = subprocess.run(
                [
                    "journalctl",
                    *scope,
                    *(match or named),
                    "--lines=40",
                    "--output=cat",
                    "--no-pager",
                    "--quiet",
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ASK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        lines = [line.rstrip() for line in done.stdout.decode(errors="replace").splitlines()]
        # A program that a unit runs where it is there; that it is not says nothing.
        lines = [line for line in lines if line and " missing, skipping: " not in line]
        kept = [line for line in lines if not _SECRET.search(line)]
        return "\n".join(kept[-_MOST_LINES:])

    def _must(self, arguments: list[str], limit_s: float) -> None:
        done = self.run(arguments, limit_s)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            raise DeployError(
                f"systemctl {' '.join(arguments)}: {said}",
                fix=None if self.manager == "user" else "run the command with sudo",
                exit_code=ExitCode.UNAVAILABLE,
            )

    def run(self, arguments: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[bytes]:
        """Call systemctl, whatever comes of it.

        Raises:
            DeployError: there is none, or it does not answer.
        """
        if not shutil.which("systemctl"):
            raise DeployError(
                "there is no systemctl here: services are run by systemd",
                fix="dflash-deploy emit --format shell (or compose, quadlet) runs it another way",
                exit_code=ExitCode.MISSING,
            )
        command = ["systemctl", f"--{self.manager}", "--no-pager", *arguments]
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeployError(
                f"{' '.join(command)} did not answer: {error}", exit_code=ExitCode.UNAVAILABLE
            ) from error
