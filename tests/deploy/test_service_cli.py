"""``dflash-deploy service`` as a person types it, short of systemd (``tests/real`` goes there)."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.cli.service import _with_persons_studies
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.paths import data_dir, state_dir
from dflash_deploy.serving_env.patches.bmm import to_measure
from dflash_deploy.serving_env.patches.choices import PATCH
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from tests.serving_env.patches.trees import FP8, FP8_SOURCE
from tests.tool import run_tool

from .test_emit import trial, write_study


@pytest.fixture
def python(tmp_path: Path) -> Path:
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    for made in (tmp_path / "env" / "bin", site / "sglang", site / "sglang-0.5.23.dist-info"):
        made.mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    interpreter = tmp_path / "env" / "bin" / "python"
    interpreter.symlink_to(sys.executable)
    return interpreter


def service(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_tool(
        "service",
        *arguments,
        # No manager of the person who runs the tests is to be reached.
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": "/nonexistent",
            "DBUS_SESSION_BUS_ADDRESS": "unix:path=/nonexistent",
        },
    )


@pytest.mark.skipif(not shutil.which("systemctl"), reason="systemctl is missing")
def test_what_would_be_installed_is_shown_and_nothing_written(python: Path):
    write_study(state_dir() / "studies" / "mine", trial(0, 150.0))
    done = service("install", "--user", "--from", "mine", "--python", python, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"ExecStart={python}" in done.stdout
    assert "sglang-*" not in done.stdout
    assert "0.5.23" in done.stdout
    assert "would write generation 1" in done.stderr
    assert not (data_dir() / "services").exists()


def test_a_back_end_that_the_environment_does_not_read_is_no_service(python: Path):
    """It was tuned in an environment that was patched for it."""
    chosen = ("env.DFLASH_BMM_FP8_BACKEND=cudnn",)
    write_study(state_dir() / "studies" / "mine", trial(0, 150.0), overrides=chosen)
    module = python.parents[1] / "lib/python3.11/site-packages" / FP8
    module.parent.mkdir(parents=True)
    module.write_text(FP8_SOURCE)
    words = ("install", "--user", "--from", "mine", "--python", python, "--dry-run")
    refused = service(*words)
    assert refused.returncode == ExitCode.MISSING
    assert "DFLASH_BMM_FP8_BACKEND=cudnn would do nothing here" in refused.stderr
    assert "fix: dflash-deploy patch apply bmm-fp8-backend" in refused.stderr
    apply(load_patch(PATCH), find_tree(python), {"backend": "cublas"}, decision=to_measure())
    assert "would do nothing" not in service(*words).stderr


def test_without_a_manager_to_talk_to_nothing_is_left_behind(python: Path):
    write_study(state_dir() / "studies" / "mine", trial(0, 150.0))
    done = service("install", "--user", "--from", "mine", "--python", python)
    assert done.returncode in (4, 5)
    assert "systemd" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (data_dir() / "services").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["install", "--from", "no-such"], 4, "no study 'no-such'"),
        (["install", "--from", ""], 2, "expected a path"),
        (["install", "--from", "simulated"], 2, "--allow-simulated"),
        (["install", "--from", "mine", "--python", "/no/such/python"], 4, "give --python the interpreter"),
        (["install", "--from", "mine", "--name", ""], 2, "--name is empty"),
        (["install", "--user", "--from", "mine", "--run-as", "me"], 2, "--run-as"),
        (["show", "none"], 4, "no service 'none'"),
        (["show", "../.."], 4, "no service '../..'"),
        (["start", ""], 4, "no service ''"),
        (["rollback", "none", "--dry-run"], 4, "no service 'none'"),
        (["uninstall", "none"], 4, "no service 'none'"),
        (["diff", "none", "1", "2", "--user"], 4, "no service 'none'"),
    ],
)
def test_what_cannot_be_had_is_one_clear_message(arguments, status: int, said: str):
    write_study(state_dir() / "studies" / "mine", trial(0, 150.0))
    write_study(state_dir() / "studies" / "simulated", trial(0, 150.0), simulated=True)
    done = service(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_empty_list_is_one():
    done = service("list", "--user", "--json")
    assert json.loads(done.stdout) == {"schema_version": 1, "services": []}
    assert "No service" in service("list", "--user").stdout


def test_a_service_with_a_damaged_generation_is_shown_with_what_can_be_read():
    folder = data_dir() / "services" / "box" / "generations"
    for number in (1, 2):
        (folder / f"000{number}").mkdir(parents=True)
        (folder / f"000{number}" / "generation.json").write_text("{")
    done = service("show", "--user", "box")
    assert done.returncode == 0
    assert done.stdout.count("is no record that this tool reads") == 2
    listed = json.loads(service("list", "--user", "--json").stdout)["services"]
    assert [one["generations"] for one in listed] == [[1, 2]]


def test_with_sudo_a_persons_own_study_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("older", "newer"):
        folder = tmp_path / ".local" / "state" / "dflash-deploy" / "studies" / name
        folder.mkdir(parents=True)
        (folder / "study.json").touch()
    os.utime(tmp_path / ".local/state/dflash-deploy/studies/older/study.json", (0, 0))
    entry = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.struct_passwd((*entry[:5], str(tmp_path), entry[6])))
    monkeypatch.setenv("SUDO_USER", "somebody")
    missing = DeployError("there is no study", exit_code=ExitCode.MISSING)
    for source, study in ((None, "newer"), ("older", "older")):
        assert f"--from {tmp_path}/.local/state/dflash-deploy/studies/{study}" in str(
            _with_persons_studies(missing, source).fix
        )
    assert _with_persons_studies(missing, "absent") is missing
    assert _with_persons_studies(missing, "/a/folder") is missing
    monkeypatch.delenv("SUDO_USER")
    assert _with_persons_studies(missing, None) is missing
