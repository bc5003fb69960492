from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.files import hold_room


def test_room_is_held_without_a_name_and_given_back(tmp_path: Path):
    folder = tmp_path / "runs"
    with hold_room(folder) as room:
        assert os.fstat(room.fileno()).st_blocks * 512 >= 1 << 20
        assert list(folder.iterdir()) == []


def test_a_disk_without_room_is_named(tmp_path: Path):
    held = (
        "import sys, pathlib; from dflash_deploy.files import hold_room; hold_room(pathlib.Path(sys.argv[1]))"
    )
    words = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", sys.executable, "-c", held, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert f"OSError: [Errno 27] File too large: '{tmp_path}'" in done.stderr
    tmp_path.chmod(0o500)
    if os.geteuid():
        with pytest.raises(PermissionError, match=str(tmp_path)):
            hold_room(tmp_path)
