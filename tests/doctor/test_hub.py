from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_deploy.doctor import hub as checks
from dflash_deploy.doctor.finding import Status

from .builders import subject
from .conftest import write_profile

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def token_file() -> Path:
    return Path(os.environ["HF_HOME"]) / "token"


def test_no_token_is_no_fault():
    assert checks.token(subject()).status is Status.PASS


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_in_a_variable(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, SECRET)
    answer = checks.token(subject())
    assert answer.status is Status.PASS
    assert SECRET not in repr(answer)
    monkeypatch.setenv(name, "paste your token here")
    answer = checks.token(subject())
    assert answer.status is Status.WARN
    assert "paste" not in repr(answer)


def test_a_token_that_others_can_read_is_shut_away():
    token_file().write_text(SECRET + "\n")
    token_file().chmod(0o644)
    answer = checks.token(subject())
    assert answer.status is Status.WARN
    assert SECRET not in repr(answer)
    assert answer.repair is not None
    answer.repair.run()
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert token_file().read_text() == SECRET + "\n"
    assert checks.token(subject()).status is Status.PASS


def test_a_token_of_somebody_else_is_not_offered_to_be_changed(monkeypatch: pytest.MonkeyPatch):
    token_file().write_text(SECRET)
    token_file().chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: token_file().stat().st_uid + 1)
    answer = checks.token(subject())
    assert (answer.status, answer.repair) == (Status.WARN, None)
    assert "its owner" in (answer.fix or "")


def test_a_file_that_holds_no_token():
    token_file().write_text("\x00\xff")
    token_file().chmod(0o600)
    assert checks.token(subject()).status is Status.WARN
    token_file().unlink()
    token_file().mkdir()
    assert checks.token(subject()).status is Status.WARN


def test_offline_mode_matters_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, pair, tmp_path: Path
):
    missing = subject(profile="rtx5090-single-user")
    assert checks.offline(missing).status is Status.PASS
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    answer = checks.offline(missing)
    assert answer.status is Status.FAIL
    assert "hf download RadixArk/Qwen3.8-27B-NVFP4" in (answer.fix or "")
    assert checks.offline(subject(profile=str(write_profile(tmp_path, *pair)))).status is Status.PASS
    assert "HF_HUB_OFFLINE=1" in checks.offline(subject()).text


def test_offline_mode_of_the_profiles_own_environment(tmp_path: Path):
    offline = subject(profile="rtx5090-single-user", overrides=("env.HF_HUB_OFFLINE='1'",))
    assert checks.offline(offline).status is Status.FAIL
