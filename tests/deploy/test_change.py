from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.deploy import change
from dflash_deploy.errors import DeployError, ExitCode


def test_a_new_file_is_shown_then_written(tmp_path: Path):
    planned = change.change_of(tmp_path / "x.service", "a\nb\n")
    assert "+a\n+b\n" in planned.diff()
    assert "/dev/null" in planned.diff()
    assert not planned.path.exists()
    change.apply(planned, replace=False)
    assert planned.path.read_text() == "a\nb\n"


def test_a_folder_that_is_not_there_is_not_made_up(tmp_path: Path):
    with pytest.raises(DeployError, match="is not there") as caught:
        change.change_of(tmp_path / "sytem units" / "x.service", "a\n")
    assert caught.value.fix == f"mkdir -p '{tmp_path}/sytem units'"


def test_the_same_content_is_no_change(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text("a\n")
    stamp = path.stat().st_mtime_ns
    planned = change.change_of(path, "a\n")
    assert planned.empty
    assert planned.diff() == ""
    change.apply(planned, replace=False)
    assert path.stat().st_mtime_ns == stamp


def test_another_content_is_replaced_only_on_demand_and_kept(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text("mine")
    planned = change.change_of(path, "ours\n")
    assert "-mine\n" in planned.diff()
    with pytest.raises(DeployError) as caught:
        change.apply(planned, replace=False)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert path.read_text() == "mine"
    change.apply(planned, replace=True)
    assert path.read_text() == "ours\n"
    assert (tmp_path / "x.previous").read_text() == "mine"


def test_links_folders_and_binaries_are_left_alone(tmp_path: Path):
    """A masked unit is a link to /dev/null, which must never be replaced through it."""
    masked, folder, binary = tmp_path / "masked", tmp_path / "folder", tmp_path / "binary"
    masked.symlink_to("/dev/null")
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe")
    for path in (masked, folder, binary):
        with pytest.raises(DeployError):
            change.change_of(path, "x")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DeployError):
        change.apply(change.change_of(tmp_path / "file" / "below", "x"), replace=False)


def test_a_script_can_be_run_and_a_unit_cannot(tmp_path):
    for name, text, mode in (("x.sh", "#!/bin/bash\n", 0o755), ("x.service", "[Unit]\n", 0o644)):
        change.apply(change.change_of(tmp_path / name, text), replace=False)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
