from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.profile.conftest import MINIMAL, ProfileWriter
from tests.tool import run_tool


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool("profile", *arguments)


def test_list_has_one_line_a_profile_and_no_colour_in_a_pipe(write: ProfileWriter) -> None:
    write(MINIMAL, "mine", own=True)
    run = _run("list")
    assert run.returncode == 0
    assert "mine\tuser\tsmallest profile" in run.stdout.splitlines()
    assert "\x1b" not in run.stdout


def test_list_json() -> None:
    listed = json.loads(_run("list", "--json").stdout)
    entry = next(entry for entry in listed["profiles"] if entry["name"] == "h200")
    assert entry.keys() == {"name", "path", "layer", "summary", "card", "shadowed_by", "problem"}
    assert (entry["layer"], entry["card"], entry["problem"]) == ("shipped", "h200", None)


def test_what_show_prints_is_a_profile(tmp_path: Path) -> None:
    shown = _run("show", "rtx5090-four-users", "--set", "workload.output_tokens=512")
    assert shown.returncode == 0
    path = tmp_path / "shown.yaml"
    path.write_text(shown.stdout)
    assert _run("validate", str(path)).returncode == 0
    again = _run("show", str(path))
    assert again.stdout == shown.stdout


def test_show_json() -> None:
    shown = json.loads(_run("show", "rtx5090-single-user", "--json").stdout)
    assert shown["schema_version"] == 1
    assert shown["name"] == "rtx5090-single-user"
    assert shown["profile"]["workload"]["users"] == 1
    assert shown["profile"]["known"][0]["flags"]["cuda-graph-bs-decode"] == [1]


def test_new_writes_a_file_that_validates_and_is_not_replaced_unasked(own_config: Path) -> None:
    assert _run("new", "mine", "--from", "h200", "--set", "workload.users=12").returncode == 0
    path = own_config / "mine.yaml"
    before = path.read_bytes()
    assert _run("validate", "mine").returncode == 0

    again = _run("new", "mine")
    assert again.returncode == 5
    assert "is there already" in again.stderr
    assert path.read_bytes() == before

    assert _run("new", "mine", "--force").returncode == 0
    assert path.read_bytes() != before


def test_new_tells_how_a_file_with_a_blank_in_its_path_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "my own.yaml"
    assert f"profile validate '{path}'" in _run("new", "mine", "--out", str(path)).stdout


@pytest.mark.parametrize("name", ["../x", "a/b", "x.yaml", "", "-x-"])
def test_new_refuses_names_that_are_no_names(name: str) -> None:
    assert _run("new", "--", name).returncode == 2


def test_new_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = _run("new", "mine", "--out", str(tmp_path / "file" / "mine.yaml"))
    assert run.returncode == 5
    assert "cannot be written" in run.stderr
    assert "Traceback" not in run.stderr


def test_validate_tells_every_mistake_and_the_worst_status(write: ProfileWriter) -> None:
    path = write("summary: 5\nmodle: {}\n")
    run = _run("validate", "h200", str(path))
    assert run.returncode == 3
    assert "h200: right" in run.stdout
    assert f"{path}:1:1: summary: expected text" in run.stdout
    assert f"{path}:2:1: modle: unknown key; did you mean 'model'?" in run.stdout

    told = json.loads(_run("validate", "--json", "h200", str(path)).stdout)["profiles"]
    assert [entry["valid"] for entry in told] == [True, False]
    assert {"source": str(path), "line": 2, "column": 1, "key": "modle"}.items() <= told[1]["problems"][
        -1
    ].items()


def test_validate_of_one_that_is_not_there() -> None:
    run = _run("validate", "rtx5090-singel-user")
    assert run.returncode == 4
    assert "did you mean 'rtx5090-single-user'" in run.stdout
    assert "fix: dflash-deploy profile list" in run.stdout


def test_json_is_plain_ascii_and_so_the_same_on_every_terminal(write: ProfileWriter) -> None:
    path = write(MINIMAL.replace("smallest profile", "größte"))
    run = _run("show", "--json", str(path))
    assert run.stdout.isascii()
    assert json.loads(run.stdout)["profile"]["summary"] == "größte"


def test_new_does_not_write_over_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "nowhere")
    assert _run("new", "mine", "--out", str(link)).returncode == 5
    assert link.is_symlink()
