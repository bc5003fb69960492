"""What holds for every test: nothing of the person who runs them is read or written."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

XDG_FOLDERS = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")


def pytest_configure() -> None:
    """Tests run alike, whoever starts them."""
    # A shell ignores these for the commands that it starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # As in an activated environment: uv lies there, and without it pip makes environments five times slower.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Else each of a thousand processes compiles the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _session_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders for what lives longer than one test, such as a server that several tests share."""
    with pytest.MonkeyPatch.context() as patch:
        _set_folders(patch, tmp_path_factory.mktemp("session-xdg"))
        yield


@pytest.fixture(autouse=True)
def _own_folders(
    _session_folders: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of this test's own, for the code under test and for the processes it starts."""
    _set_folders(monkeypatch, tmp_path_factory.mktemp("xdg"))


def _set_folders(patch: pytest.MonkeyPatch, root: Path) -> None:
    for name in XDG_FOLDERS:
        patch.setenv(name, str(root / name.removeprefix("XDG_").removesuffix("_HOME").lower()))
