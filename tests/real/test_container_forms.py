"""Quadlets and compose files as podman and compose themselves read them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dflash_deploy.deploy.formats import Format, render
from dflash_deploy.deploy.unit import UnitSpec
from tests.deploy import systemd_syntax as systemd

from .container_tools import COMPOSE, QUADLET, Package

pytestmark = pytest.mark.real

MODEL = '/data/my "own"  models'
WORDS = ("x y", 'q"q', "it's", "ü中", "#no", "-", "{}", "\\n", "*", "yes", "1.0", "null", MODEL)
SPEC = UnitSpec(
    service="qwen",
    argv=("/env/python", "-m", "sglang.launch_server", *WORDS),
    host="127.0.0.1",
    port=30000,
    env={"EMPTY": "", "ODD": "1 x '\" # \\"},
)
ENGINE = ["-m", "sglang.launch_server", *WORDS]


def program(package: Package) -> Path:
    try:
        return package.fetched()
    except httpx.HTTPError as error:
        pytest.skip(f"cannot be downloaded: {error}")


def written(form: Format, spec: UnitSpec) -> str:
    return render(spec, form, image="docker.io/lmsysorg/sglang:v0.5.23").text


@pytest.mark.parametrize("key", [None, "/etc/dflash/my key.yaml"])
def test_podman_starts_what_the_quadlet_says(tmp_path, key):
    spec = replace(SPEC, api_key_file=key, host="0.0.0.0" if key else SPEC.host)
    (tmp_path / "qwen.container").write_text(written("quadlet", spec))
    _, _, unit = subprocess.run(
        [program(QUADLET), "--dryrun"],
        env={"QUADLET_UNIT_DIRS": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.partition("---\n")
    command = systemd.command(systemd.settings(unit)["ExecStart"][0])
    at = command.index("docker.io/lmsysorg/sglang:v0.5.23")
    inside = ["--config", "/run/secrets/engine.yaml"] if key else []
    assert command[at + 1 :][-len(ENGINE + inside) :] == ENGINE + inside
    podman = command[:at]
    assert "--entrypoint=python3" in podman
    assert [podman[n + 1] for n, word in enumerate(podman) if word == "--env"] == [
        f"{name}={value}" for name, value in SPEC.env.items()
    ]
    binds = [podman[n + 1] for n, word in enumerate(podman) if word == "-v"]
    assert f"{MODEL}:{MODEL}:ro" in binds
    assert not key or f"{key}:/run/secrets/engine.yaml:ro" in binds


def test_compose_reads_what_was_meant(tmp_path):
    odd = ("$x", "${HOME}", "100%")
    spec = replace(SPEC, argv=(*SPEC.argv, *odd), env={**SPEC.env, "DOLLAR": "$x ${Y} $$"})
    file = tmp_path / "compose.yaml"
    file.write_text(written("compose", spec))
    command = [program(COMPOSE), "--file", file, "config", "--format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    service = json.loads(done.stdout)["services"]["sglang"]
    # It prints what it read with its dollars doubled again.
    undone = [word.replace("$$", "$") for word in service["entrypoint"]]
    assert systemd.engine(undone) == ["python3", *ENGINE, *odd]
    assert {name: value.replace("$$", "$") for name, value in service["environment"].items()} == spec.env
    assert {"type": "bind", "source": MODEL, "target": MODEL} in [
        {name: volume.get(name) for name in ("type", "source", "target")} for volume in service["volumes"]
    ]
