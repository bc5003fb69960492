"""Our units as systemd knows them, the machine's manager and the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_deploy.deploy.systemctl import Systemd
from dflash_deploy.deploy.unit import UNIT_PREFIX
from dflash_deploy.errors import DeployError

_PATTERN = "dflash-sglang*.service"
_SHOWN = "Id,LoadState,ActiveState,SubState,Result,MainPID,NRestarts,UnitFileState"
_HEALTH_UNITS = f"{UNIT_PREFIX}health@"
# As the unit's template calls it.
_KEY_CREDENTIAL = "engine.yaml"
_ASK_S = 5.0


@dataclass(frozen=True)
class UnitState:
    """One unit, in systemd's own words.

    Attributes:
        name: with ``.service``.
        active: ``active``, ``activating``, ``failed``, ``inactive`` …
        sub: ``running``, ``start-post``, ``auto-restart`` …
        result: why it failed (``exit-code``, ``timeout``, ``start-limit-hit`` …), or ``success``.
        main_pid: None while it does not run.
    """

    name: str
    manager: Literal["system", "user"]
    active: str
    sub: str
    result: str
    enabled: bool
    restarts: int
    main_pid: int | None

    @property
    def service(self) -> str:
        """The service's name, without what all our units have in common."""
        return self.name.removeprefix(UNIT_PREFIX).removesuffix(".service")


def read_units() -> tuple[UnitState, ...]:
    """Every unit of ours; none where there is no systemd to ask."""
    if not shutil.which("systemctl"):
        return ()
    return (*_of_manager("system"), *_of_manager("user"))


def api_key_file(unit: UnitState) -> Path | None:
    """The file that systemd takes the unit's API key from, as its unit says; None where it has none.

    (`systemctl show` does not print credentials, and their copies are hidden from other units.)
    """
    found = None
    for line in _systemctl(unit.manager, "cat", unit.name).splitlines():
        name, _, path = line.removeprefix("LoadCredential=").partition(":")
        if line.startswith("LoadCredential=") and name == _KEY_CREDENTIAL and path.startswith("/"):
            found = Path(path.replace("%%", "%"))
    return found


def restart(unit: UnitState) -> str | None:
    """Have systemd restart it if it is still the process that was looked at; does not wait.

    Returns:
        why it was not restarted, or None.
    """
    now = next((one for one in _of_manager(unit.manager) if one.name == unit.name), None)
    if now is None or now.active != "active" or now.main_pid != unit.main_pid:
        return "it is not the process any more that was looked at"
    try:
        done = Systemd(unit.manager).run(["--no-block", "restart", unit.name], limit_s=_ASK_S)
    except DeployError as error:
        return error.message
    if done.returncode:
        return f"systemctl restart: {done.stderr.decode(errors='replace').strip()[:500]}"
    return None


def read_unit(properties: Mapping[str, str], manager: Literal["system", "user"]) -> UnitState | None:
    """One unit from what ``systemctl show`` prints; None where it is not there."""
    name = properties.get("Id", "")
    if not name.endswith(".service") or properties.get("LoadState") == "not-found":
        return None
    return UnitState(
        name=name,
        manager=manager,
        active=properties.get("ActiveState", "unknown"),
        sub=properties.get("SubState", "unknown"),
        result=properties.get("Result", "unknown"),
        enabled=properties.get("UnitFileState", "").startswith("enabled"),
        restarts=_number(properties.get("NRestarts")),
        main_pid=_number(properties.get("MainPID")) or None,
    )


def _of_manager(manager: Literal["system", "user"]) -> tuple[UnitState, ...]:
    # Loaded units (a stopped one may not be), and those that have a file.
    listed = (
        _systemctl(manager, "list-units", "--all", "--plain", "--no-legend", _PATTERN),
        _systemctl(manager, "list-unit-files", "--no-legend", _PATTERN),
    )
    names = sorted({line.split()[0] for text in listed for line in text.splitlines() if line.split()})
    # A template has no state of its own, only its instances have; those of the health check are no service.
    names = [
        name
        for name in names
        if name.startswith("dflash-sglang")
        and not name.endswith("@.service")
        and not name.startswith(_HEALTH_UNITS)
    ]
    if not names:
        return ()
    shown = _systemctl(manager, "show", f"--property={_SHOWN}", *names)
    blocks = (dict(_property(line) for line in block.splitlines()) for block in shown.split("\n\n"))
    return tuple(unit for block in blocks if (unit := read_unit(block, manager)) is not None)


def _systemctl(manager: Literal["system", "user"], *arguments: str) -> str:
    try:
        done = Systemd(manager).run(arguments, limit_s=_ASK_S)
    except DeployError:
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _property(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
