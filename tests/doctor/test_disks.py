from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from dflash_deploy.doctor import disks as checks
from dflash_deploy.doctor.finding import Status

from .builders import subject
from .conftest import write_profile

FULL = "/proc"
"""A file system without a free byte."""


def test_room_for_weights_without_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "yet" / "there"))
    free_mib = psutil.disk_usage(str(tmp_path)).free >> 20
    wanted = Status.PASS if free_mib >= 30 * 1024 else Status.WARN
    assert checks.models(subject()).status is wanted
    monkeypatch.setenv("HF_HUB_CACHE", f"{FULL}/hub")
    answer = checks.models(subject())
    assert answer.status is Status.WARN
    assert answer.text.startswith("0 MiB free")


def test_a_download_that_does_not_fit_fails(monkeypatch: pytest.MonkeyPatch, pair, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", f"{FULL}/hub")
    answer = checks.models(subject(profile="rtx5090-single-user"))
    assert answer.status is Status.FAIL
    assert "have to be downloaded" in answer.text
    here = subject(profile=str(write_profile(tmp_path, *pair)))
    answer = checks.models(here)
    assert answer.status is Status.PASS
    assert "nothing to download" in answer.text


def test_a_download_of_unknown_size_is_unknown(tmp_path: Path):
    profile = write_profile(tmp_path, "somebody/something", "somebody/draft")
    assert checks.models(subject(profile=str(profile))).status is Status.UNKNOWN


def test_room_for_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    free_mib = psutil.disk_usage(str(tmp_path)).free >> 20
    answer = checks.caches(subject())
    assert answer.status is (Status.PASS if free_mib >= 10 * 1024 else Status.WARN)
    monkeypatch.setenv("XDG_CACHE_HOME", FULL)
    answer = checks.caches(subject())
    assert answer.status is Status.FAIL
    assert "0 MiB free where kernels" in answer.text


def test_a_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch(mode=0o444)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "below"))
    answer = checks.caches(subject())
    assert answer.status is Status.FAIL
    assert "(records)" in answer.text
    assert "Not a directory" in answer.text
    assert "chown" not in (answer.fix or "")


def test_a_folder_that_a_variable_names_is_made_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert checks.folders(subject()).status is Status.PASS
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    answer = checks.folders(subject())
    assert answer.status is Status.WARN
    assert answer.repair is not None
    answer.repair.run()
    assert (tmp_path / "tmp").is_dir()
    assert checks.folders(subject()).status is Status.PASS


def test_a_file_in_the_place_of_a_folder_is_not_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "tmp").write_text("mine")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    answer = checks.folders(subject())
    assert answer.status is Status.FAIL
    assert answer.repair is None


def test_a_link_to_a_disk_that_is_not_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "models").symlink_to(tmp_path / "mnt" / "models")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    answer = checks.models(subject(profile="rtx5090-single-user"))
    assert answer.status is Status.FAIL
    assert answer.text.endswith(f"{tmp_path / 'models'}: No such file or directory")
    assert checks.folders(subject()).status is Status.FAIL


def test_what_may_not_be_written_is_told_once_and_nobody_is_told_to_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Where nothing stands but the system's own folders, those are not to change hands."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and str(path) != str(tmp_path))
    for variable in ("CACHE", "DATA", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{variable}_HOME", str(tmp_path / "not" / "yet"))
    answer = checks.caches(subject())
    assert answer.status is Status.FAIL
    assert answer.text.count(str(tmp_path)) == 1
    for use in ("kernels", "environments", "records", "profiles"):
        assert use in answer.text
    assert "export HOME=" in (answer.fix or "")
    assert "chown" not in (answer.fix or "")


def test_a_disk_that_takes_no_more_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_free_inodes", lambda _: 3)
    answer = checks.caches(subject())
    assert answer.status is Status.FAIL
    assert "only 3 files more" in answer.text
    assert "df -i" in (answer.fix or "")
