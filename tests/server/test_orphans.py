import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_deploy.server import processes
from dflash_deploy.server.orphans import end_orphans
from dflash_deploy.server.processes import TOKEN_VARIABLE, Identity
from dflash_deploy.server.records import ServerRecord, read_records, write_record
from dflash_deploy.server.temp_dir import make_temp_dir

TOKEN = secrets.token_hex(6)
SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
FAMILY = [
    sys.executable,
    "-S",
    "-c",
    f"import subprocess, time; c = subprocess.Popen({SLEEP!r}); print(c.pid, flush=True); time.sleep(600)",
]


def runs(pid: str) -> bool:
    identity = processes.identity_of(int(pid))
    return identity is not None and processes.alive(identity)


@pytest.fixture
def dead_tool() -> Identity:
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    identity = processes.identity_of(process.pid)
    process.kill()
    process.communicate()
    assert identity
    return identity


@pytest.fixture
def start(monkeypatch):
    """Starts a process that is not tied to its parent, as if the kernel had sent no death signal."""
    started = []

    def start(command: list[str], token: str | None = None) -> tuple[subprocess.Popen[str], Identity, str]:
        environment = {**os.environ, **({TOKEN_VARIABLE: token} if token else {})}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )
        started.append(process)
        assert process.stdout
        line = process.stdout.readline().strip()
        identity = processes.identity_of(process.pid)
        assert identity
        return process, identity, line

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def record(tmp_path, dead_tool):
    temp_dir = make_temp_dir(TOKEN)

    def make(**fields: object) -> ServerRecord:
        values = {
            "token": TOKEN,
            "boot_id": processes.boot_id(),
            "pid_namespace": processes.pid_namespace(),
            "tool": dead_tool,
            "command": ("python", "-m", "server"),
            "host": "127.0.0.1",
            "port": 3000,
            "run_dir": tmp_path,
            "temp_dir": temp_dir,
            "started_s": time.time(),
        }
        made = ServerRecord.model_validate(values | fields)
        write_record(made)
        return made

    yield make
    shutil.rmtree(temp_dir, ignore_errors=True)


def test_orphan_and_its_family_are_ended(start, record):
    process, identity, child = start(FAMILY)
    made = record(server=identity)
    (sentence,) = end_orphans()
    assert str(process.pid) in sentence
    assert "port 3000" in sentence
    assert process.wait(60) < 0
    assert not runs(child)
    assert not made.temp_dir.exists()
    assert list(read_records()) == []
    assert end_orphans() == ()


def test_child_is_found_when_the_main_process_is_gone(start, record):
    process, identity, child = start(FAMILY, TOKEN)
    process.kill()
    process.wait()
    record(server=identity)
    assert len(end_orphans()) == 1
    assert not runs(child)


def test_child_on_record_is_found_though_it_has_lost_the_mark(start, record):
    process, identity, child = start(FAMILY)
    known = processes.identity_of(int(child))
    process.kill()
    process.wait()
    record(server=identity, children=(known,))
    assert len(end_orphans()) == 1
    assert not runs(child)


def test_server_of_a_tool_killed_in_the_moment_of_the_start(start, record):
    process, _, _ = start(SLEEP, TOKEN)
    record(server=None)
    assert len(end_orphans()) == 1
    assert process.wait(60) < 0


def test_shared_memory_that_was_theirs_goes_and_no_other(start, record, own_shared_memory):
    names = [f"sglang_loads_{name}_0badcafe.shm" for name in ("held", "recorded", "another")]
    for name in names:
        (own_shared_memory / name).touch()
    outside = own_shared_memory.parent / f"{own_shared_memory.name}.outside"
    outside.touch()
    holds = f"held = open({str(own_shared_memory / names[0])!r}); {SLEEP[-1]}"
    _, identity, _ = start([*SLEEP[:-1], holds], TOKEN)
    # A record is a file that anybody of this account may have written.
    record(server=identity, segments=(names[1], "../" + outside.name, "sgl_shm_/../../x", "unknown"))
    try:
        assert len(end_orphans()) == 1
        assert [path.name for path in own_shared_memory.iterdir()] == [names[2]]
        assert outside.exists()
    finally:
        outside.unlink()


def test_recycled_pid_is_left_alone(start, record):
    process, identity, _ = start(FAMILY)
    record(server=Identity(identity.pid, identity.start_ticks - 1))
    assert end_orphans() == ()
    assert process.poll() is None
    assert list(read_records()) == []


def test_recycled_pid_of_the_tool_does_not_pass_for_the_tool(start, record):
    process, identity, _ = start(SLEEP)
    record(server=identity, tool=Identity(os.getpid(), 1))
    assert len(end_orphans()) == 1
    assert process.wait(60) < 0


@pytest.mark.parametrize("elsewhere", [{"tool": None}, {"pid_namespace": "pid:[1]"}])
def test_server_of_a_tool_that_lives_or_of_another_container_is_left_alone(start, record, elsewhere):
    process, identity, _ = start(SLEEP)
    fields = {key: value or processes.identity_of(os.getpid()) for key, value in elsewhere.items()}
    made = record(server=identity, **fields)
    assert end_orphans() == ()
    assert process.poll() is None
    assert made.temp_dir.exists()
    assert list(read_records()) == [made]


def test_record_of_an_earlier_boot_is_only_forgotten(start, record):
    process, identity, _ = start(SLEEP)
    made = record(server=identity, boot_id="another", pid_namespace="pid:[1]")
    assert end_orphans() == ()
    assert process.poll() is None
    assert not made.temp_dir.exists()
    assert list(read_records()) == []


def test_folder_that_is_not_a_servers_is_not_removed(record, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    record(temp_dir=precious)
    end_orphans()
    assert precious.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b"0" * 2_000_000])
def test_unreadable_records_are_passed_over(state_home: Path, content):
    path = state_home / "dflash-deploy/servers/0.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert end_orphans() == ()
