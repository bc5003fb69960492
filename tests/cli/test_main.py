"""What every command has in common when something outside of it goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.errors import ExitCode
from tests.tool import run_tool

_TOOL = [sys.executable, "-m", "dflash_deploy"]


@pytest.mark.parametrize("words", [["--help"], ["profile", "list"], ["probe", "--json"]])
def test_an_output_that_is_full_is_one_clear_message(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run([*_TOOL, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == ExitCode.UNAVAILABLE
    assert run.stderr.splitlines()[0] == "error: the output: No space left on device"
    assert len(run.stderr.splitlines()) == 2


def test_a_reader_that_leaves_is_no_failure_to_speak_of() -> None:
    tool = subprocess.Popen([*_TOOL, "profile", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert tool.stdout is not None
    tool.stdout.close()
    _, said = tool.communicate(timeout=60)
    assert (tool.returncode, said) == (ExitCode.FAILED, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "new", "x", "--out", "./" + "a" * 300],
        ["emit", "./" + "a" * 300],
    ],
)
def test_a_name_longer_than_any_file_s_is_told(words: list[str]) -> None:
    run = run_tool(*words)
    assert run.returncode in (ExitCode.INVALID_INPUT, ExitCode.UNAVAILABLE, ExitCode.MISSING)
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith("error: ")


def test_nothing_in_a_message_reaches_the_terminal_as_a_command() -> None:
    run = run_tool("profile", "show", "./\x1b]0;title\x07\x9b31m\u202ered.yaml")
    assert run.returncode == ExitCode.MISSING
    assert run.stderr == "error: ?]0;title??31m?red.yaml: no such file\n"


@pytest.mark.parametrize("words", [["profile", "list"], ["emit"], ["status"]])
def test_a_user_without_a_home_is_told_to_set_one(words: list[str]) -> None:
    run = _run_homeless(*words)
    assert run.returncode == ExitCode.MISSING
    assert run.stderr.splitlines() == [
        "error: this user has no home folder: HOME is not set, and the system knows none",
        "  fix: export HOME=/a/folder/of/yours",
    ]


def test_a_user_without_a_home_can_probe() -> None:
    run = _run_homeless("probe", "--json")
    assert json.loads(run.stdout)["host"]["disks"] == []


def _run_homeless(*words: str) -> subprocess.CompletedProcess[str]:
    # A user without an entry in the system's list, as one who may not read this interpreter cannot be here.
    script = (
        "import pwd, sys\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "from dflash_deploy.cli import main\n"
        "main()"
    )
    kept = {name: value for name, value in os.environ.items() if name != "HOME" and "XDG" not in name}
    return subprocess.run(
        [sys.executable, "-c", script, *words], env=kept, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "words", [["profile", "show", "x"], ["profile", "new", "x"], ["emit", "x"], ["status", "x"]]
)
def test_a_folder_that_cannot_be_looked_into_is_named(words: list[str]) -> None:
    place = "/" + "a" * 300
    places = {f"XDG_{name}_HOME": place for name in ("CONFIG", "STATE", "CACHE", "DATA")}
    run = run_tool(*words, env=os.environ | places)
    assert run.returncode == ExitCode.UNAVAILABLE, run.stderr
    assert run.stderr.startswith(f"error: {place}/dflash-deploy/")
    assert "File name too long" in run.stderr
    assert len(run.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    "moment",
    [
        "raise KeyboardInterrupt\n",
        # In the middle of a class, where Python 3.11 makes a RuntimeError of it.
        "class Late:\n"
        "    def __set_name__(self, owner, name):\n"
        "        raise KeyboardInterrupt\n"
        "class Made:\n"
        "    late = Late()\n",
    ],
    ids=["import", "class"],
)
def test_ctrl_c_before_the_command_is_there_ends_without_a_trace(tmp_path: Path, moment: str):
    (tmp_path / "typer.py").write_text(moment)
    done = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
