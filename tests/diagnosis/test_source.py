"""Logs in files of all kinds, whole and damaged."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.diagnosis import diagnose
from dflash_deploy.errors import DeployError, ExitCode

from . import logs
from .test_verdict import NO_KV

LOG = "\n".join(logs.failed(NO_KV, "sizing")).encode()
FRAGMENTS = [
    *(line.encode() for line in logs.failed(NO_KV, "verify-capture")),
    b'{"log": "',
    b"\x1b[31m",
    b"\r",
    b"\x00",
    b"\xff\xfe",
    b"Traceback (most recent call last):",
    b"server_args=(",
    b"> ",
    b"CUDA out of memory. Tried to allocate 1 GiB",
    b"During handling of the above exception",
    b"error: argument ",
]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_packed_logs_are_read(tmp_path, pack):
    path = tmp_path / "log"
    path.write_bytes(pack(LOG))
    diagnosis = diagnose(path)
    assert diagnosis.root.id == "no-kv-memory"
    assert diagnosis.lines_read == LOG.count(b"\n") + 1
    assert diagnosis.notes == ()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_an_archive_cut_short_tells_what_is_left_and_that_it_is(tmp_path, pack):
    path = tmp_path / "log"
    path.write_bytes(pack(LOG + b"\n" + bytes(range(256)) * 50)[:-20])
    assert "cut short" in diagnose(path).notes[0]


def test_several_archives_in_one_file_are_one_log(tmp_path):
    path = tmp_path / "log.gz"
    half = len(LOG) // 2
    path.write_bytes(gzip.compress(LOG[:half]) + gzip.compress(LOG[half:]))
    assert diagnose(path).root.id == "no-kv-memory"


def test_what_a_windows_shell_writes_is_read(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(LOG.decode().replace("\n", "\r\n").encode("utf-16"))
    assert diagnose(path).root.id == "no-kv-memory"


def test_lines_across_blocks_are_whole_and_endless_ones_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_deploy.diagnosis.source.BLOCK_BYTES", 97)
    path = tmp_path / "log"
    path.write_bytes(LOG + b"\n" + b"x" * 300_000 + b"\n" + LOG)
    diagnosis = diagnose(path)
    lines = path.read_bytes().split(b"\n")
    assert diagnosis.lines_read == len(lines)
    assert [line.text.encode() in lines[line.number - 1] for line in diagnosis.root.lines] == [True]


def test_a_bomb_takes_no_memory(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"\0" * 100_000_000, 1))
    diagnose(["first use"])
    tracemalloc.start()
    diagnose(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000


def test_a_long_log_of_lines_that_are_all_unlike_takes_little_memory(tmp_path):
    path = tmp_path / "log"
    said = "he-asked-where-the-river-bends-and-who-had-been-there-before " * 60
    letters = str.maketrans("0123456789", "abcdefghij")
    with path.open("w") as file:
        file.writelines(f"{number} {said}\n".translate(letters) for number in range(10_000))
        file.write("\n".join(logs.failed(NO_KV, "sizing")))
    assert path.stat().st_size > 36_000_000
    diagnose(["first use"])
    tracemalloc.start()
    found = diagnose(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.root.id == "no-kv-memory"
    assert peak < 28_000_000


def test_a_log_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DeployError) as missing:
        diagnose(tmp_path / "none")
    assert missing.value.exit_code is ExitCode.MISSING
    with pytest.raises(DeployError) as unreadable:
        diagnose(tmp_path)
    assert unreadable.value.exit_code is ExitCode.INVALID_INPUT


@given(
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=80)), max_size=40),
    st.sampled_from([b"\n", b""]),
)
def test_any_bytes_are_diagnosed(tmp_path_factory, parts, between):
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(between.join(parts))
    diagnosis = diagnose(path)
    for finding in (*diagnosis.findings, *diagnosis.benign):
        assert finding.cause
        assert all(0 <= line.number <= diagnosis.lines_read for line in finding.lines)
