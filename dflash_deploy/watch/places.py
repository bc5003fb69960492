"""Where servers may be found on this machine: units, records of our own runs, and addresses to try."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from dflash_deploy.engine.launch import Launch
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.server.processes import alive, boot_id, pid_namespace
from dflash_deploy.server.records import read_records
from dflash_deploy.watch.recorded import installed
from dflash_deploy.watch.units import UnitState

_COMMAND_LIMIT_BYTES = 1 << 20

FoundBy = Literal["unit", "record", "url", "port"]


@dataclass(frozen=True)
class Place:
    """One place where a server is, or may be.

    Attributes:
        found_by: a systemd unit, the record of a server that the tool runs right now, an address that was
            asked for, or the port that services have by default (where often nothing is).
        base_url: None for a unit whose process does not run, or does not say where it listens.
        api_key: sent to this place alone.
        key_problem: why its own key could not be read, None where it was or there is none.
    """

    found_by: FoundBy
    name: str
    base_url: str | None
    pid: int | None = None
    unit: UnitState | None = None
    api_key: str | None = field(default=None, repr=False)
    key_problem: str | None = None

    def answers_to(self, name: str) -> bool:
        """It is called so: by its service's name, or by its unit's."""
        unit_names = (self.unit.name, self.unit.name.removesuffix(".service")) if self.unit else ()
        return name in (self.name, *unit_names)


def unit_places(units: Sequence[UnitState]) -> list[Place]:
    """A place for each unit; the command line of its process says where it listens, else its generation."""
    return [Place("unit", unit.service, _listens_at(unit), unit.main_pid, unit) for unit in units]


def record_places() -> list[Place]:
    """A place for each server that a run of the tool has up right now, such as a trial's."""
    places = []
    for record in read_records():
        here = record.boot_id == boot_id() and record.pid_namespace == pid_namespace()
        if here and record.server is not None and alive(record.server):
            url = address(record.host, record.port)
            places.append(Place("record", f"run by this tool on port {record.port}", url, record.server.pid))
    return places


def merged(places: Sequence[Place]) -> list[Place]:
    """One place for each address, the first that names it; a key that any of them has is kept."""
    found: dict[object, Place] = {}
    for place in places:
        at = place.base_url or place
        first = found.setdefault(at, place)
        if first.api_key is None and place.api_key is not None:
            found[at] = replace(first, api_key=place.api_key)
    return list(found.values())


def address(host: str, port: int) -> str:
    """Root of the HTTP interface of a server of this machine that listens there."""
    return Launch((), _reached_at(host), port).base_url


def checked_url(url: str) -> str:
    """The root of a server's HTTP interface, from what a person typed.

    Raises:
        DeployError: it is no http(s) address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
        secret = parts.username is not None
    except ValueError:
        good = secret = False
    if secret:
        # Not to be shown again, here or beside the server.
        raise DeployError(
            "--url takes no user or password",
            fix="leave out what stands before the @, and give a key with --api-key-file FILE",
            exit_code=ExitCode.USAGE,
        )
    if not good or not url.isprintable() or " " in url:
        raise DeployError(
            f"{url!r} is not the address of a server",
            fix="--url http://127.0.0.1:30000   (IPv6: --url http://[::1]:30000)",
            exit_code=ExitCode.USAGE,
        )
    # People paste the OpenAI base URL, which ends in /v1.
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _listens_at(unit: UnitState) -> str | None:
    if unit.main_pid is None:
        return None
    try:
        with Path(f"/proc/{unit.main_pid}/cmdline").open("rb") as file:
            words = file.read(_COMMAND_LIMIT_BYTES).decode(errors="replace").split("\0")
    except OSError:
        return None
    port = _option(words, "--port")
    # A router puts a title in the place of its command.
    if port is None and (known := installed(unit)) is not None:
        return address(known.health_host, known.port)
    port = port or "30000"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return None
    return address(_option(words, "--host") or "127.0.0.1", int(port))


def _option(words: Sequence[str], name: str) -> str | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return following or None
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=") or None
    return None


def _reached_at(host: str) -> str:
    """A server that listens on every address is reached on the loopback one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "::1" if address.version == 6 else "127.0.0.1"
