import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.boot import Stage
from dflash_deploy.errors import DeployError
from dflash_deploy.server.log import ServerLog


def write_through(log: ServerLog, chunks: list[bytes]) -> None:
    reading, writing = os.pipe()
    log.follow(os.fdopen(reading, "rb"), on_lost=lambda: None)
    for chunk in chunks:
        os.write(writing, chunk)
    os.close(writing)
    log.finish(60)
    log.close()


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_whatever_comes_is_kept_byte_for_byte(tmp_path_factory, chunks):
    path = tmp_path_factory.mktemp("log") / "server.log"
    write_through(ServerLog(path), chunks)
    assert path.read_bytes() == b"".join(chunks)


def test_lines_are_put_together_from_pieces(tmp_path):
    log = ServerLog(tmp_path / "server.log")
    write_through(log, [b"[2026-01-01 00:00:00] Load wei", b"ght begin. avail mem=31.0", b"0 GB\r", b"last"])
    assert log.boot.stage is Stage.LOAD
    assert log.boot.free_before_load_gib == 31.0
    assert log.last_line == "last"


def test_a_log_without_end_keeps_its_head_and_its_tail(tmp_path):
    path = tmp_path / "server.log"
    log = ServerLog(path, head_limit_bytes=1000, tail_limit_bytes=2000)
    lines = [b"line %06d\n" % number for number in range(5000)]
    reading, writing = os.pipe()
    log.follow(os.fdopen(reading, "rb"), on_lost=lambda: None)
    for line in lines:
        os.write(writing, line)
        if line.endswith(b"00\n"):
            time.sleep(0.001)
    os.close(writing)
    log.finish(60)
    log.close()
    content, whole = path.read_bytes(), b"".join(lines)
    head, note, tail = content[:1000], *content[1000:].split(b" bytes of this log left out here]\n", 1)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(tail) >= 2000
    assert int(note.rsplit(b" ", 1)[1]) == len(whole) - len(head) - len(tail)


def test_a_disk_that_is_full_is_told_once_and_the_pipe_is_emptied_all_the_same(tmp_path):
    path = tmp_path / "server.log"
    path.symlink_to("/dev/full")
    log, told = ServerLog(path), []
    reading, writing = os.pipe()
    log.follow(os.fdopen(reading, "rb"), on_lost=lambda: told.append(log.problem))
    for _ in range(100):
        os.write(writing, b"x" * 10_000)
    os.write(writing, b"\nThe server is fired up and ready to roll!\n")
    os.close(writing)
    log.finish(60)
    log.close()
    assert len(told) == 1
    assert "No space left on device" in told[0].message
    assert log.boot.stage is Stage.SERVING


def test_a_folder_that_cannot_be_made():
    with pytest.raises(DeployError, match="cannot be written"):
        ServerLog(Path("/proc/nothing/server.log"))
