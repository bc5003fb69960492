"""The systemd unit of one service, as text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from dflash_deploy.deploy import escape, gate
from dflash_deploy.deploy.seal import Seal
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.resources import resource_dir

if TYPE_CHECKING:
    import jinja2

UNIT_PREFIX = "dflash-sglang-"
"""What every unit of ours is called, before the service's own name."""

WRITTEN_FOR_SYSTEMD = 252
"""The version that units are written for where the machine's own is not known (Debian 12)."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_SYSTEM_PATH = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VRAM_WAIT_S = 120
_BACKS_OFF_SINCE = 254
_SECRET_OPTION = re.compile(r"--(admin-)?api-key(=|$)")
_SECRET_VARIABLE = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)", re.IGNORECASE
)
# An address that tells a password, as that of a proxy may.
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


@dataclass(frozen=True)
class UnitSpec:
    """What a unit is rendered from.

    Attributes:
        service: the service's name; the unit is called ``dflash-sglang-<service>``.
        argv: the engine's whole command, its interpreter (an absolute path) first, without a secret in it.
        host: address that the engine listens on.
        port: TCP port that the engine listens on.
        env: variables of the engine; they win over those that the unit sets itself.
        manager: whose unit it is: the machine's, or one user's own (``systemctl --user``).
        user: who runs it under the machine's manager; None lets systemd make a user for it.
        api_key_file: absolute path of a YAML file with one line, ``api-key: …``.
        comments: lines put at the top: where the configuration comes from and what was measured.
        seal: the environment that it must find at each start, None to start with whatever is there.
        vram_free_mib: memory that each of its cards must have free before it starts, None not to look.
        cards: how many cards the engine uses.
        systemd_version: settings that a newer one has are left out.
    """

    service: str
    argv: tuple[str, ...]
    host: str
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    manager: Literal["system", "user"] = "system"
    user: str | None = None
    api_key_file: str | None = None
    comments: tuple[str, ...] = ()
    seal: Seal | None = None
    vram_free_mib: int | None = None
    cards: int = 1
    systemd_version: int = WRITTEN_FOR_SYSTEMD

    @property
    def unit_name(self) -> str:
        """File name of the unit."""
        return f"{UNIT_PREFIX}{self.service}.service"


def render_unit(spec: UnitSpec) -> str:
    """Write the unit.

    Raises:
        DeployError: something in ``spec`` cannot stand in a unit, would put a secret into it, or would open
            the engine to other machines without a key.
    """
    checked(spec)
    python = spec.argv[0]
    _, *arguments = gate.past_proxies(engine_argv(spec), spec.host)
    return template("dflash-sglang.service.j2").render(
        name=f"{UNIT_PREFIX}{spec.service}",
        system=spec.manager == "system",
        user=spec.user,
        api_key_file=spec.api_key_file,
        comments=spec.comments,
        command=escape.command_line(python, arguments),
        port_check=gate.port_check(python, spec.host, spec.port),
        ready_wait=gate.ready_wait(python, spec.host, spec.port),
        seal_check=gate.seal_check(python, spec.seal) if spec.seal else None,
        vram_wait=gate.vram_wait(python, spec.vram_free_mib, bound_s=_VRAM_WAIT_S, cards=spec.cards)
        if spec.vram_free_mib
        else None,
        backs_off=spec.systemd_version >= _BACKS_OFF_SINCE,
        # Tools of the serving environment (ninja) and of CUDA (nvcc) compile kernels on the first start.
        path=escape.environment_assignment("PATH", f"{PurePosixPath(python).parent}:{_SYSTEM_PATH}"),
        environment=[escape.environment_assignment(*item) for item in sorted(spec.env.items())],
    )


def engine_argv(spec: UnitSpec) -> tuple[str, ...]:
    """The engine's command, its key kept out of what it logs."""
    return gate.engine_with_key(spec.argv) if spec.api_key_file else spec.argv


def checked(spec: UnitSpec) -> UnitSpec:
    """A service that is safe to run in whatever form.

    Raises:
        DeployError: its names are wrong, it would show a secret, or serve other machines without a key.
    """
    if not _NAME.fullmatch(spec.service):
        raise _wrong(f"{spec.service!r} cannot name a service", "use a-z, 0-9 and '-', at most 63")
    if spec.user is not None and not _USER.fullmatch(spec.user):
        raise _wrong(f"{spec.user!r} cannot be a user's name", "name an account, such as llm")
    if spec.user == "root":
        raise _wrong(
            "a service that answers requests does not run as root",
            "leave the account out (systemd makes one), or name one that has no rights of its own",
        )
    if spec.user is not None and spec.manager == "user":
        raise _wrong("a unit of the user manager runs as that user", "leave the account out")
    if any(_SECRET_OPTION.match(argument) for argument in spec.argv):
        raise _wrong(
            "an API key stands in the engine's flags, where every user of the machine could read it",
            "put the line `api-key: ...` into a 0600 YAML file and name it in service.api_key_file",
        )
    if secret := next((name for name, value in spec.env.items() if value and _secret(name, value)), None):
        raise _wrong(
            f"the variable {secret} would stand in a file that every user of the machine can read",
            f"leave {secret} out of the profile's env: fetch models with it beforehand (hf download), or "
            "give it to the unit alone by an EnvironmentFile= of mode 0600 in a drop-in (systemctl edit)",
        )
    if not spec.api_key_file and not _is_loopback(spec.host):
        raise _wrong(
            f"the service would listen on {spec.host}, where other machines can use it without a key",
            "set service.api_key_file to a 0600 YAML file with the line `api-key: ...`, or host to 127.0.0.1",
        )
    return spec


def _secret(variable: str, value: str) -> bool:
    return bool(_SECRET_VARIABLE.fullmatch(variable) or _WITH_PASSWORD.search(value))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wrong(message: str, fix: str) -> DeployError:
    return DeployError(message, fix=fix, exit_code=ExitCode.INVALID_INPUT)


def template(name: str) -> jinja2.Template:
    """A shipped template of something that is no HTML."""
    import jinja2  # noqa: PLC0415 - not for who only asks what a unit is called

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_dir("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a unit is no HTML; the filters below escape
    )
    environment.filters["comment"] = escape.comment
    environment.filters["setting_path"] = escape.setting_path
    return environment.get_template(name)
