"""Other interpreters of this machine, such as Debian's own: installed there, the tool does its main job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def version_of(interpreter: Path) -> tuple[int, ...]:
    shown = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", shown)))


def others() -> list[Path]:
    """One of each version from 3.11 on that is not the one that runs the tests."""
    found = [Path("/usr/bin/python3")]
    found += [Path(path) for minor in range(11, 16) if (path := shutil.which(f"python3.{minor}"))]
    versions = {version_of(path): path for path in found if path.exists()}
    return [
        path for version, path in versions.items() if version >= (3, 11) and version != sys.version_info[:3]
    ]


@pytest.mark.parametrize("interpreter", others(), ids=str)
def test_it_is_installed_and_finds_a_best_configuration(interpreter, tmp_path, monkeypatch):
    for kind in ("CONFIG", "STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", interpreter, tmp_path / "env"], check=True)
    install = [
        *uv,
        "pip",
        "install",
        "--python",
        tmp_path / "env",
        "--constraints",
        "requirements.lock",
        ROOT,
    ]
    subprocess.run(install, check=True, cwd=ROOT)
    tune = ["tune", "rtx5090-single-user", "--simulate", "rtx-5090", "--time-scale", "200", "--trials", "2"]
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "dflash-deploy", *tune, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["best"]["objective"] > 0
