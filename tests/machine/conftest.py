from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tool import run_tool

from .nvml_stub import StubCard, stub_env, stub_folder

RunProbe = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def stub_library() -> Path:
    return stub_folder()


def on_cards(variables: dict[str, str]) -> dict[str, str]:
    """The variables of a process with those of ``stub_env``, and none of the person's who runs the tests."""
    dropped = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH"}
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, **variables}


def run_python(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=on_cards(variables),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
        check=False,
    )


@pytest.fixture
def probe(stub_library: Path) -> RunProbe:
    """Runs ``dflash-deploy probe`` on a machine with the given cards."""

    def run(
        *cards: StubCard,
        options: tuple[str, ...] = ("--json",),
        environ: dict[str, str] | None = None,
        **stub: object,
    ) -> subprocess.CompletedProcess[str]:
        variables = {**stub_env(stub_library, *cards, **stub), **(environ or {})}
        result = run_tool("probe", *options, env=on_cards(variables))
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def on_stub(stub_library: Path) -> Callable[..., str]:
    """Runs a few lines of Python on a machine with the given cards; gives what they print."""

    def run(code: str, *cards: StubCard, **stub: object) -> str:
        result = run_python(["-c", code], stub_env(stub_library, *cards, **stub))
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run
