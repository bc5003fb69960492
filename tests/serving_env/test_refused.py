"""What the system refuses, told with what helps: folders closed, owned by others, full, read-only."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy import paths
from dflash_deploy.errors import ExitCode
from dflash_deploy.serving_env.refused import refused

from .command import like_another_account
from .conftest import Tool, write_pin

HOMES = {"data": "XDG_DATA_HOME", "state": "XDG_STATE_HOME"}


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder for all that the tool keeps, which this account may neither read nor write."""
    folder = paths.data_dir()
    (folder / "envs").mkdir(parents=True)
    paths.state_dir().mkdir(parents=True, exist_ok=True)
    shut = [folder, paths.state_dir()]
    for one in shut:
        one.chmod(0)
    yield folder
    for one in shut:
        one.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "home"),
    [
        (["env", "create", "main"], "data"),
        (["env", "list"], "data"),
        (["env", "list", "--json"], "data"),
        (["env", "show", "main"], "data"),
        (["env", "show"], "state"),
        (["env", "doctor", "main"], "data"),
        (["env", "use", "main"], "data"),
        (["env", "use", "--none"], "state"),
        (["env", "backup", "main"], "data"),
        (["env", "restore", "main"], "data"),
        (["env", "remove", "main"], "data"),
        (["patch", "check"], "state"),
        (["patch", "check", "--env", "main"], "data"),
    ],
)
def test_closed_folders_of_the_tools_own(closed: Path, tool: Tool, words: list[str], home: str) -> None:
    done = tool(*words, before=like_another_account)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stdout == ""
    assert "Permission denied" in done.stderr
    at = paths.data_dir() if home == "data" else paths.state_dir()
    assert f"fix: chmod u+rwX {at}, or set {HOMES[home]} to a folder of your own" in done.stderr


def test_a_home_in_which_nothing_can_be_made(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a system account, or in a container that runs under a bare number."""
    home = tmp_path / "no home"
    home.mkdir(mode=0o555)
    for name in ("DATA", "STATE", "CACHE", "CONFIG"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    for words in (
        ["env", "create", "main"],
        ["env", "create", "main", "--pin", str(write_pin(tmp_path))],
        ["env", "create", "theirs", "--path", "/usr"],
        ["env", "restore", "main"],
    ):
        done = tool(*words, before=like_another_account)
        assert done.returncode == ExitCode.UNAVAILABLE
        assert f"fix: chmod u+rwX '{home}', or set XDG_DATA_HOME to a folder of your own" in done.stderr
    assert tool("env", "list", before=like_another_account).returncode == 0
    assert list(home.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_whose_a_folder_is_is_said(tool: Tool) -> None:
    folder = paths.data_dir()
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    done = tool("env", "create", "main", before=like_another_account)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert f"fix: run this as nobody, who owns {folder}, or set XDG_DATA_HOME" in done.stderr


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "free some space, or set XDG_STATE_HOME to a folder on a larger disk; then run this again",
        ),
        (
            errno.EDQUOT,
            "free some space, or set XDG_STATE_HOME to a folder on a larger disk; then run this again",
        ),
        (
            errno.EROFS,
            "mount that file system for writing, or set XDG_STATE_HOME to a folder that can be written",
        ),
        (errno.EIO, "mend that, or set XDG_STATE_HOME to a folder that can be used"),
    ],
)
def test_each_refusal_has_its_own_fix(number: int, said: str) -> None:
    told = refused(OSError(number, os.strerror(number)), paths.state_dir() / "environment.json")
    assert said in str(told.fix)
    assert str(paths.state_dir() / "environment.json") in told.message
    elsewhere = refused(OSError(number, os.strerror(number), "/elsewhere/x"), paths.state_dir())
    assert elsewhere.message.startswith("/elsewhere/x: ")
    assert "XDG" not in str(elsewhere.fix)


def test_a_backup_that_is_not_there_is_told_with_a_command_that_works(
    tool: Tool, environment: object
) -> None:
    assert "fix: dflash-deploy env backup main" in tool("env", "restore", "main").stderr
    assert "fix: dflash-deploy env create other" in tool("env", "restore", "other").stderr
