"""Telling people what became of a service: by a command of theirs, or by an address that is posted to.

Nothing that goes wrong here is an error of what was to be told: it comes back as a sentence.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import httpx

from dflash_deploy.files import read_regular
from dflash_deploy.profile.schema import Notify

Event = Literal["down", "restarted", "rolled back", "recovered"]

_LIMIT_S = 10.0
_LONGEST_WHY = 2000
_ADDRESS_LIMIT_BYTES = 4096


@dataclass(frozen=True)
class Message:
    """One change of a service's state.

    Attributes:
        at: UTC, ISO 8601.
        host: name of the machine.
        why: in words.
    """

    event: Event
    service: str
    why: str
    at: str
    host: str

    def as_json(self) -> str:
        """As it is sent; ``text`` and ``content`` are what chat services show."""
        line = f"{self.host}: {self.service} {_WORDS[self.event]}: {self.why}"
        return json.dumps({"schema_version": 1, **asdict(self), "text": line, "content": line})


_WORDS: dict[Event, str] = {
    "down": "is down",
    "restarted": "was restarted",
    "rolled back": "was rolled back",
    "recovered": "serves again",
}


def message(event: Event, service: str, why: str) -> Message:
    """A message of this moment."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Message(event, service, why[:_LONGEST_WHY], now, socket.gethostname())


def send(notify: Notify, told: Message) -> tuple[str, ...]:
    """Tell it everywhere; what could not be done, a sentence each. Takes twenty seconds at most."""
    content = told.as_json()
    problems = []
    if notify.command is not None:
        problems.append(_run(notify.command, content))
    if notify.url is not None or notify.url_file is not None:
        problems.append(_post(notify, content))
    return tuple(problem for problem in problems if problem is not None)


def _run(command: Sequence[str], content: str) -> str | None:
    try:
        process = subprocess.Popen(
            [*_out_of_the_sandbox(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        return f"{command[0]} could not be started: {error.strerror}"
    try:
        process.communicate(content.encode(), timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{command[0]} had not ended after {_LIMIT_S:.0f} s"
    except OSError as error:
        return f"{command[0]} took no message: {error.strerror}"
    finally:
        # Not yet waited for where it still runs, so the group is its own.
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"{command[0]} ended with status {process.returncode}" if process.returncode else None


def _out_of_the_sandbox() -> tuple[str, ...]:
    """A machine's health check is confined, and may write nowhere; what a person named is not."""
    if os.geteuid() != 0 or "INVOCATION_ID" not in os.environ or not shutil.which("systemd-run"):
        return ()
    limit = f"--property=RuntimeMaxSec={_LIMIT_S:.0f}"
    return ("systemd-run", "--system", "--quiet", "--collect", "--pipe", "--wait", limit, "--")


def _post(notify: Notify, content: str) -> str | None:
    """An address may be a secret: it stands in no sentence."""
    named = f"the address in {notify.url_file}" if notify.url_file is not None else "the address of the hook"
    try:
        url = notify.url or _address(notify.url_file)
        answer = httpx.post(
            url, content=content, headers={"Content-Type": "application/json"}, timeout=_LIMIT_S
        )
    except OSError as error:
        return f"{named} cannot be read: {error.strerror}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"{named} was not reached: {type(error).__name__}"
    except ImportError:
        return f"{named} was not reached: a proxy by SOCKS needs the package socksio"
    return None if answer.is_success else f"{named} answered {answer.status_code}"


def _address(file: Path | None) -> str:
    assert file is not None  # noqa: S101 - asked for by the caller
    if file.stat().st_mode & 0o077:
        raise PermissionError(1, f"others may read it: chmod 600 {file}")
    return read_regular(file, most_bytes=_ADDRESS_LIMIT_BYTES).decode("ascii", "replace").strip()
