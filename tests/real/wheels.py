"""The wheels of SGLang's releases, downloaded once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .environment import cache_root

RELEASES = tuple(f"0.5.{number}" for number in range(16, 24))
_WHEELS = cache_root() / "sglang-wheels"


def wheel(release: str) -> Path:
    """The release's wheel."""
    folder = _WHEELS / release
    if not list(folder.glob("*.whl")):
        _WHEELS.mkdir(parents=True, exist_ok=True)
        wanted = ["--only-binary=:all:", "--platform", "manylinux_2_34_x86_64", "--python-version", "3.11"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        made = folder.with_name(f"{release}.making")
        subprocess.run([*pip, *wanted, "--dest", str(made), f"sglang=={release}"], check=True)
        made.rename(folder)
    return next(folder.glob("*.whl"))
