"""The same service in other forms than a unit: a shell script, one command, a compose file, a quadlet.

Each starts the same command with the same variables, listening at the same place, with the key from the same
file, ended by SIGTERM to the engine alone and given the same time for it. What a form cannot say is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from dflash_deploy.deploy import escape, gate
from dflash_deploy.deploy.gate import reached_at
from dflash_deploy.deploy.unit import UNIT_PREFIX, UnitSpec, checked, engine_argv, render_unit, template
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.proxy import own_addresses, sparing

Format = Literal["systemd", "quadlet", "compose", "shell", "command"]

STOP_S = 90
_KEY_IN_CONTAINER = "/run/secrets/engine.yaml"
_CACHE_IN_CONTAINER = "/root/.cache"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
# Quadlet hands the words on to podman within a unit of its own; podman's pages do not say how often these
# two are read on the way.
_NOT_IN_QUADLET = re.compile(r"[%$]")


@dataclass(frozen=True)
class Rendered:
    """A file's content, and what it is called in a folder."""

    name: str
    text: str


def render(spec: UnitSpec, form: Format, *, image: str | None = None) -> Rendered:
    """Write the service in a form.

    Args:
        spec: the service, as for a unit.
        form: systemd, quadlet, compose, shell or command.
        image: container image, for compose and quadlet.

    Raises:
        DeployError: something in ``spec`` cannot be said in this form, or would not be safe to run.
    """
    checked(spec)
    name = f"{UNIT_PREFIX}{spec.service}"
    match form:
        case "systemd":
            return Rendered(spec.unit_name, render_unit(spec))
        case "shell":
            return Rendered(f"{name}.sh", _shell(spec))
        case "command":
            return Rendered(f"{name}.command", f"{_one_line(spec)}\n")
        case "compose":
            return Rendered("compose.yaml", _compose(spec, _container(spec, image)))
        case "quadlet":
            return Rendered(f"{name}.container", _quadlet(spec, _container(spec, image)))


def _shell(spec: UnitSpec) -> str:
    _require_text(spec)
    return template("dflash-sglang.sh.j2").render(
        comments=spec.comments,
        environment=[f"export {name}={shlex.quote(value)}" for name, value in sorted(spec.env.items())],
        python=shlex.quote(spec.argv[0]),
        command=_lines(map(shlex.quote, engine_argv(spec))),
        own_addresses=own_addresses(spec.host),
        key_file=shlex.quote(spec.api_key_file) if spec.api_key_file else None,
        host=shlex.quote(spec.host),
        port=spec.port,
    )


def _one_line(spec: UnitSpec) -> str:
    _require_text(spec)
    env = {**spec.env, **sparing(spec.host, spec.env)}
    variables = [f"{name}={value}" for name, value in sorted(env.items())]
    key = ["--config", spec.api_key_file] if spec.api_key_file else []
    return shlex.join([*(["env", *variables] if variables else []), *engine_argv(spec), *key])


@dataclass(frozen=True)
class _Container:
    image: str
    command: tuple[str, ...]
    models: tuple[str, ...]


def _container(spec: UnitSpec, image: str | None) -> _Container:
    _require_text(spec)
    if image is None or not _IMAGE.fullmatch(image):
        raise DeployError(
            "a container needs an image that has SGLang" if image is None else f"{image!r} names no image",
            fix="add --image, such as docker.io/lmsysorg/sglang:TAG with the tag of your SGLang's version",
            exit_code=ExitCode.USAGE,
        )
    key = ("--config", _KEY_IN_CONTAINER) if spec.api_key_file else ()
    # Folders of this machine stand at the same place inside.
    folders = {word for word in spec.argv[1:] if word.startswith("/") and Path(word).is_absolute()}
    for folder in sorted(folders):
        if ":" in folder:
            raise DeployError(
                f"a container cannot be given a folder whose path holds a colon: {folder}",
                fix="rename it, or use --format systemd",
                exit_code=ExitCode.INVALID_INPUT,
            )
    command = gate.past_proxies(("python3", *engine_argv(spec)[1:], *key), spec.host)
    return _Container(image, command, tuple(sorted(folders)))


def _compose(spec: UnitSpec, container: _Container) -> str:
    name = f"{UNIT_PREFIX}{spec.service}"
    service: dict[str, object] = {
        "image": container.image,
        "container_name": name,
        "entrypoint": [_in_compose(word) for word in container.command],
        "environment": {key: _in_compose(value) for key, value in sorted(spec.env.items())},
        "network_mode": "host",
        "ipc": "host",
        "restart": "on-failure:6",
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{STOP_S}s",
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"memlock": -1, "nofile": 65536},
        "volumes": [
            f"cache:{_CACHE_IN_CONTAINER}",
            *(
                {
                    "type": "bind",
                    "source": _in_compose(folder),
                    "target": _in_compose(folder),
                    "read_only": True,
                }
                for folder in container.models
            ),
        ],
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
            }
        },
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH, _reached(spec), str(spec.port)],
            "interval": "30s",
            "timeout": "40s",
            "retries": 5,
            "start_period": "30m",
        },
    }
    content: dict[str, object] = {"name": name, "services": {"sglang": service}, "volumes": {"cache": {}}}
    if spec.api_key_file:
        service["secrets"] = ["engine.yaml"]
        content["secrets"] = {"engine.yaml": {"file": _in_compose(spec.api_key_file)}}
    comments = "".join(f"# {escape.comment(line)}\n" for line in spec.comments)
    return comments + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)


_HEALTH = (
    "import sys, urllib.request as r; r.build_opener(r.ProxyHandler({}))"
    ".open('http://%s:%s/health' % tuple(sys.argv[1:]), timeout=30)"
)


def _quadlet(spec: UnitSpec, container: _Container) -> str:
    words = [*container.command, *container.models, *(f"{name}={value}" for name, value in spec.env.items())]
    if spec.api_key_file:
        words.append(spec.api_key_file)
    if bad := next((word for word in words if _NOT_IN_QUADLET.search(word)), None):
        raise DeployError(
            f"a quadlet cannot carry % or $ for certain: {bad!r}",
            fix="take the character out, or use --format systemd",
            exit_code=ExitCode.INVALID_INPUT,
        )
    binds = [f"{folder}:{folder}:ro" for folder in container.models]
    if spec.api_key_file:
        binds.append(f"{spec.api_key_file}:{_KEY_IN_CONTAINER}:ro")
    return template("dflash-sglang.container.j2").render(
        name=f"{UNIT_PREFIX}{spec.service}",
        comments=spec.comments,
        image=container.image,
        program=container.command[0],
        command=_lines(map(escape.command_word, container.command[1:])),
        environment=[escape.environment_assignment(*item) for item in sorted(spec.env.items())],
        # Taken as it stands to the end of the line, quotation marks among it.
        binds=binds,
        cache=_CACHE_IN_CONTAINER,
        system=spec.manager == "system",
        stop_s=STOP_S,
    )


def _lines(words: Iterable[str]) -> str:
    """A command with an option and its values to a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)


def _in_compose(text: str) -> str:
    """Compose puts variables in for a dollar sign."""
    return text.replace("$", "$$")


def _reached(spec: UnitSpec) -> str:
    host = reached_at(spec.host)
    return f"[{host}]" if ":" in host else host


def _require_text(spec: UnitSpec) -> None:
    """Hold every form to what a unit can carry, so that one form says no less than another."""
    variables: Mapping[str, str] = spec.env
    for word in (*spec.argv, *([spec.api_key_file] if spec.api_key_file else [])):
        escape.command_word(word)
    for name, value in variables.items():
        escape.environment_assignment(name, value)
