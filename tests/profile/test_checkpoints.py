from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile import checkpoints
from dflash_deploy.profile.load import load_profile


def test_paths_come_from_the_cards() -> None:
    profile = load_profile("rtx5090-single-user")
    assert checkpoints.target_path(profile) == "RadixArk/Qwen3.8-27B-NVFP4"
    assert checkpoints.draft_path(profile) == "incoai/Qwen3.8-27B-DFlash2"


def test_paths_given_in_the_profile_come_first(tmp_path: Path) -> None:
    profile = load_profile(
        "rtx5090-single-user", overrides=[f"model.path={tmp_path}", "speculation.draft_path=me/other"]
    )
    assert checkpoints.target_path(profile) == str(tmp_path)
    assert checkpoints.draft_path(profile) == "me/other"


def test_a_folder_without_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    profile = load_profile("sglang-cpu-smoke", overrides=["model.target=./tiny"])
    assert checkpoints.target_card(profile) is None
    assert checkpoints.target_path(profile) == str(tmp_path / "tiny")
    assert checkpoints.draft_path(profile) is None


def test_a_draft_inside_the_target_has_no_path() -> None:
    overrides = ["speculation.method=mtp", "speculation.draft=qwen3.8-27b-mtp"]
    assert checkpoints.draft_path(load_profile("h200", overrides=overrides)) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "does not say where the model 'tiny-random' lies"),
        (["model.path=/no/such"], "/no/such: no such model"),
    ],
)
def test_a_model_that_is_not_there(overrides: list[str], said: str) -> None:
    with pytest.raises(DeployError, match=said) as caught:
        checkpoints.target_path(load_profile("sglang-cpu-smoke", overrides=overrides))
    assert caught.value.exit_code == ExitCode.MISSING
    assert caught.value.fix is not None
    assert "--set model.path=" in caught.value.fix
