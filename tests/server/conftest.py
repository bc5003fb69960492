import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_deploy.engine.launch import Launch
from dflash_deploy.server import shared_memory
from dflash_deploy.server.ports import free_port

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
TOOL = Path(__file__).with_name("tool.py")

MakeLaunch = Callable[..., Launch]


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch) -> Path:
    """A state folder of the test's own; the subprocesses of the test have it too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def no_process_left(state_home) -> Iterator[None]:
    """Every process that has this test's state folder in its environment is gone at the end."""
    yield
    left = [process for process in psutil.process_iter() if _carries(process, str(state_home))]
    names = [f"{process.pid} {process.cmdline()}" for process in left]
    for process in left:
        process.kill()
    assert not names


def _carries(process: psutil.Process, state_home: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("XDG_STATE_HOME") == state_home
    except psutil.Error:
        return False


@pytest.fixture
def notes(tmp_path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(notes) -> MakeLaunch:
    """Builds the launch of a fake server with the trouble asked for, on a free port."""

    def make(trouble: str | None = None, **fields: object) -> Launch:
        port = fields.pop("port", None) or free_port("127.0.0.1")
        argv = [sys.executable, "-S", str(FAKE_SERVER), "--port", str(port), "--notes", str(notes)]
        argv += ["--trouble", trouble] if trouble else []
        return Launch(argv=tuple(argv), host="127.0.0.1", port=port, **fields)

    return make


@pytest.fixture
def own_shared_memory(monkeypatch) -> Iterator[Path]:
    """A folder of the test's own in shared memory, apart from what servers of other tests have there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(shared_memory, "_FOLDER", Path(folder))
        yield Path(folder)
