from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_deploy.serving_env.create import create
from dflash_deploy.serving_env.environments import Environment
from dflash_deploy.serving_env.pins import EnginePin

from .command import run
from .wheels import write_engine

PYTHON = "{}.{}".format(*sys.version_info)
UV = shutil.which("uv")
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed")

Tool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_engine(folder, "0.5.23", "2.14.1")
    write_engine(folder, "0.5.19", "2.13.0")
    return folder


@pytest.fixture(autouse=True)
def _offline(wheels: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installers see the wheels above and nothing else."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "UV_NO_CONFIG": "1",
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(wheels),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv-cache")),
    }.items():
        monkeypatch.setenv(name, value)


def pin(version: str = "0.5.23", **more: object) -> EnginePin:
    """A pin as the shipped ones, for the wheels above and a small disk."""
    given: dict[str, object] = {
        "id": f"sglang-{version}",
        "summary": "a stand-in",
        "python": PYTHON,
        "version": version,
        "disk_mib": 1,
        "download_mib": 0,
    }
    return EnginePin.model_validate(given | more)


def write_pin(folder: Path, version: str = "0.5.23", **more: object) -> Path:
    """The same as a file for the command line."""
    path = folder / f"sglang-{version}.yaml"
    lines = [f"{key}: {value!r}" for key, value in pin(version, **more).model_dump(exclude_none=True).items()]
    path.write_text("\n".join(lines).replace("'", '"') + "\n")
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def environment(said: list[str]) -> Environment:
    """A whole environment, made by whichever installer is there."""
    return create("main", pin(), say=said.append)


@pytest.fixture
def tool() -> Tool:
    """Runs ``dflash-deploy`` as a process."""
    return run


def ask(python: Path, code: str) -> str:
    """What an environment's interpreter prints."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
