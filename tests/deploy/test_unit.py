from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.deploy.seal import Seal, SealedFile
from dflash_deploy.deploy.unit import UnitSpec, render_unit
from dflash_deploy.errors import DeployError

from . import systemd_syntax as systemd

_SPEC = UnitSpec(
    service="qwen",
    argv=(sys.executable, "-m", "sglang.launch_server", "--model-path", "/data/my models/100%"),
    host="127.0.0.1",
    port=30000,
    env={"CUDA_HOME": "/usr/local/cuda", "ODD": 'a "b" $c %d'},
    comments=("study rtx, trial 3", "a comment\nExecStart=/bin/evil"),
)
_WITH_KEY = replace(_SPEC, host="0.0.0.0", api_key_file="/etc/dflash/key 50%.yaml")
_SPECS = {
    "dynamic-user": _SPEC,
    "named-user": replace(_SPEC, user="serve"),
    "with-key": _WITH_KEY,
    "ipv6": replace(_WITH_KEY, host="::", user="serve"),
    "sealed": replace(
        _SPEC,
        seal=Seal("/env 5%/site-packages", "0.5.23", (SealedFile("x", "/env 5%/a.py", "00" * 32),)),
        vram_free_mib=30000,
    ),
    "user-manager": replace(_SPEC, manager="user"),
    "user-manager-with-key": replace(_WITH_KEY, manager="user"),
}


@pytest.fixture(params=_SPECS)
def spec(request: pytest.FixtureRequest) -> UnitSpec:
    return _SPECS[request.param]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
def test_systemd_finds_nothing_wrong(spec: UnitSpec, tmp_path: Path):
    unit = tmp_path / spec.unit_name
    unit.write_text(render_unit(spec))
    checked = subprocess.run(
        ["systemd-analyze", f"--{spec.manager}", "verify", "--recursive-errors=yes", "--man=no", unit],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
def test_a_machines_unit_is_confined_as_far_as_cuda_allows(spec: UnitSpec, tmp_path: Path):
    unit = tmp_path / spec.unit_name
    unit.write_text(render_unit(spec))
    if spec.manager == "user":
        pytest.skip("a person's own manager cannot confine a service so")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", "--no-pager", unit]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout[-200:] + checked.stderr


def test_a_newer_systemd_is_told_to_back_off():
    assert "RestartSteps" not in systemd.settings(render_unit(_SPEC))
    assert systemd.settings(render_unit(replace(_SPEC, systemd_version=254)))["RestartSteps"] == ["5"]


def test_the_engine_gets_its_command_and_variables_unchanged(spec: UnitSpec):
    unit = systemd.settings(render_unit(spec))
    command = systemd.engine(systemd.command(unit["ExecStart"][0]))
    key = ["--config", "<d>/engine.yaml"] if spec.api_key_file else []
    # A program may stand in front of the module, which it starts.
    start = command.index("-m")
    assert [command[0], *command[start:]] == [*spec.argv, *key]
    assert (start == 1) is (spec.api_key_file is None)
    variables = [
        systemd.specifiers_expanded(word) for line in unit["Environment"] for word in systemd.words(line)
    ]
    # The last assignment of a variable is the one that counts.
    assert dict(line.split("=", 1) for line in variables).items() >= spec.env.items()


def test_the_profiles_variables_win_over_the_units_own():
    unit = systemd.settings(render_unit(replace(_SPEC, env={"HF_HOME": "/models/hf"})))
    assert [line for line in unit["Environment"] if line.startswith("HF_HOME=")][-1] == "HF_HOME=/models/hf"


def test_comments_cannot_become_settings():
    assert len(systemd.settings(render_unit(_SPEC))["ExecStart"]) == 1


def test_the_key_file_is_handed_over_by_systemd_and_never_named_in_the_command():
    unit = systemd.settings(render_unit(_WITH_KEY))
    assert unit["LoadCredential"] == ["engine.yaml:/etc/dflash/key 50%%.yaml"]
    assert "/etc/dflash" not in unit["ExecStart"][0]


@pytest.mark.parametrize("option", [("--api-key", "sesame"), ("--api-key=sesame",), ("--admin-api-key", "x")])
def test_a_key_in_the_flags_is_refused_and_not_repeated(option: tuple[str, ...]):
    with pytest.raises(DeployError, match="API key") as caught:
        render_unit(replace(_SPEC, argv=(*_SPEC.argv, *option)))
    assert "sesame" not in caught.value.message


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SGLANG_API_KEY", "WANDB_API_KEY"])
def test_a_secret_in_a_variable_is_refused_and_not_repeated(name: str):
    with pytest.raises(DeployError, match=name) as caught:
        render_unit(replace(_SPEC, env={name: "sesame"}))
    assert "sesame" not in f"{caught.value.message} {caught.value.fix}"
    render_unit(replace(_SPEC, env={"TOKENIZERS_PARALLELISM": "false", name: ""}))


def test_a_proxys_password_is_a_secret():
    render_unit(replace(_SPEC, env={"https_proxy": "http://proxy:3128"}))
    with pytest.raises(DeployError, match="https_proxy") as caught:
        render_unit(replace(_SPEC, env={"https_proxy": "http://me:sesame@proxy:3128"}))
    assert "sesame" not in f"{caught.value.message} {caught.value.fix}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu-box", ""])
def test_an_address_that_others_reach_needs_a_key(host: str):
    with pytest.raises(DeployError, match="without a key") as caught:
        render_unit(replace(_SPEC, host=host))
    assert "api_key_file" in str(caught.value.fix)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_address_needs_none(host: str):
    assert host in render_unit(replace(_SPEC, host=host))


@pytest.mark.parametrize(
    "wrong",
    [
        {"service": "Qwen 3"},
        {"service": "../x"},
        {"service": ""},
        {"user": "root\nUser=x"},
        {"user": "root"},
        {"user": "me", "manager": "user"},
        {"argv": ("python", "-m", "sglang.launch_server")},
        {"argv": (sys.executable, "a\nb")},
        {"env": {"A B": "x"}},
        {"env": {"A": "x\ny"}},
        {"host": "0.0.0.0", "api_key_file": "key.yaml"},
    ],
)
def test_what_cannot_stand_in_a_unit_is_refused(wrong: dict[str, object]):
    with pytest.raises(DeployError):
        render_unit(replace(_SPEC, **wrong))  # type: ignore[arg-type]


def test_a_machines_unit_never_runs_as_root():
    for user in (None, "serve"):
        unit = systemd.settings(render_unit(replace(_SPEC, user=user)))
        assert unit.get("User", []) == ([user] if user else [])
        assert unit.get("DynamicUser", []) == ([] if user else ["yes"])
