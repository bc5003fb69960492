from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ProfileWriter = Callable[..., Path]

MINIMAL = """\
summary: smallest profile
model: {target: /models/some-model}
engine: {version: 0.5.23}
workload: {users: 1, context_tokens: 1024, output_tokens: 64}
objective: {optimize: user_tokens_per_s}
search:
  mem-fraction-static: {low: 0.5, high: 0.9, step: 0.1}
service: {name: smallest}
"""


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder of the test's own; its profiles lie in the folder given back."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "dflash-deploy" / "profiles"


@pytest.fixture
def write(tmp_path: Path, own_config: Path) -> ProfileWriter:
    def write_profile(content: str | bytes, name: str = "given", *, own: bool = False) -> Path:
        folder = own_config if own else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_profile
