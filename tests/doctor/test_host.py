from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dflash_deploy import paths
from dflash_deploy.doctor import host as checks
from dflash_deploy.doctor.finding import Status

from .builders import gpu, host, subject

HARD_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({}, Status.PASS, "60,000 of 65,536"),
        ({"memory_available_mib": 2000}, Status.FAIL, "6,144 MiB"),
        ({"memory_available_mib": 2000, "swap_free_mib": 32768}, Status.PASS, "swap free"),
        ({"memory_total_mib": 12000, "memory_available_mib": 11000}, Status.WARN, "kernels"),
        ({"memory_limit_mib": 12000}, Status.WARN, "limit of this container"),
        ({"memory_limit_mib": 4000}, Status.FAIL, "limit of this container"),
    ],
)
def test_memory_of_the_host(facts, status, words):
    answer = checks.memory(subject(host=host(**facts)))
    assert answer.status is status
    assert words in answer.text
    assert bool(answer.fix) == (status is not Status.PASS)


def test_memory_against_the_checkpoint():
    facts = host(memory_total_mib=16000, memory_available_mib=14000)
    answer = checks.memory(subject(gpu(), profile="rtx5090-single-user", host=facts))
    assert answer.status is Status.WARN
    assert "less than the checkpoint's" in answer.text
    assert checks.memory(subject(gpu(), profile="rtx5090-single-user")).status is Status.PASS


@pytest.mark.parametrize(
    ("free", "status"), [(32768, Status.PASS), (64, Status.WARN), (3, Status.FAIL), (None, Status.FAIL)]
)
def test_shared_memory(free, status):
    facts = host(shared_memory_free_mib=free, container="docker")
    answer = checks.shared_memory(subject(host=facts))
    assert answer.status is status
    if status is Status.WARN:
        assert "--shm-size" in (answer.fix or "")
    outside = checks.shared_memory(subject(host=host(shared_memory_free_mib=64)))
    assert "remount" in (outside.fix or "")


@pytest.mark.parametrize(
    ("limit", "value", "status", "fix"),
    [
        ("RLIMIT_NOFILE", (1024, HARD_FILES), "warn", "ulimit -n 65536"),
        ("RLIMIT_NOFILE", (1024, 1024), "warn", "/etc/security/limits.conf"),
        ("RLIMIT_NOFILE", (8192, 8192), "pass", ""),
        ("RLIMIT_NPROC", (3000, 3000), "warn", "ulimit -u unlimited"),
        ("RLIMIT_AS", (1 << 34, 1 << 34), "fail", "ulimit -v unlimited"),
    ],
)
def test_limits_of_the_shell(limit, value, status, fix):
    if value[0] > resource.getrlimit(getattr(resource, limit))[1] > 0:
        pytest.skip("the limit here is lower than the test's")
    said, saying = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_NOFILE, (HARD_FILES, HARD_FILES))
            resource.setrlimit(getattr(resource, limit), value)
            os.geteuid = lambda: 1000
            answer = checks.limits(subject())
            os.write(saying, f"{answer.status} {answer.fix}".encode())
        os._exit(0)
    os.close(saying)
    os.waitpid(child, 0)
    with os.fdopen(said) as words:
        told = words.read()
    assert told.startswith(status)
    assert fix in told


def test_a_guard_of_the_memory_is_told_where_it_would_strike(tmp_path: Path):
    if any(one.info["name"] in checks._GUARDS for one in psutil.process_iter(["name"])):
        pytest.skip("a guard runs here already")
    assert checks.guard(subject(gpu())).status is Status.PASS
    named = shutil.copy(shutil.which("sleep") or "", tmp_path / "earlyoom")
    running = subprocess.Popen([named, "600"])
    try:
        while psutil.Process(running.pid).name() != "earlyoom":
            time.sleep(0.01)
        answer = checks.guard(subject(gpu()))
        assert answer.status is Status.PASS
        assert "earlyoom runs" in answer.text
        unified = gpu(memory_total_mib=None)
        answer = checks.guard(subject(unified))
        assert answer.status is Status.WARN
        assert "exit status -15" in answer.text
        little = host(memory_available_mib=4000)
        assert checks.guard(subject(gpu(), host=little)).status is Status.WARN
    finally:
        running.kill()
        running.wait()


def test_windows_subsystem(monkeypatch: pytest.MonkeyPatch):
    assert checks.wsl(subject()) is None
    monkeypatch.setattr(checks, "systemd_runs", lambda: False)
    bare = checks.wsl(subject(host=host(wsl=2)))
    assert bare is not None
    assert bare.status is Status.WARN
    assert "systemd=true" in (bare.fix or "")
    monkeypatch.setattr(checks, "systemd_runs", lambda: True)
    first = checks.wsl(subject(host=host(wsl=1)))
    second = checks.wsl(subject(host=host(wsl=2)))
    small = checks.wsl(subject(host=host(wsl=2, memory_total_mib=8000)))
    assert first is not None
    assert second is not None
    assert small is not None
    assert (first.status, second.status, small.status) == (Status.FAIL, Status.PASS, Status.WARN)
    assert ".wslconfig" in (small.fix or "")


def test_checkpoints_on_a_slow_file_system_under_windows(monkeypatch: pytest.MonkeyPatch):
    kind = checks.file_system(Path("/proc"))
    assert kind == "proc"
    monkeypatch.setattr(checks, "_SLOW_FILE_SYSTEMS", frozenset({"proc"}))
    monkeypatch.setenv("HF_HUB_CACHE", "/proc/hub")
    answer = checks.wsl(subject(host=host(wsl=2)))
    assert answer is not None
    assert answer.status is Status.WARN
    assert "/proc/hub, proc" in answer.text


def test_the_clock_is_behind_when_own_files_are_from_the_future():
    before = checks.clock(subject())
    assert before.status is not Status.FAIL
    paths.state_dir().mkdir(parents=True)
    record = paths.state_dir() / "environment.json"
    record.touch()
    os.utime(record, (time.time() + 90_000, time.time() + 90_000))
    answer = checks.clock(subject())
    assert answer.status is Status.FAIL
    assert "1.0 days in the future" in answer.text
    os.utime(record, (time.time() + 3600, time.time() + 3600))
    assert "60 minutes" in checks.clock(subject()).text


def test_the_clock_is_judged_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch):
    told = checks._synchronised()
    wanted = {True: Status.PASS, False: Status.WARN, None: Status.UNKNOWN}
    assert checks.clock(subject()).status is wanted[told]
    for answer, status in wanted.items():
        monkeypatch.setattr(checks, "_synchronised", lambda answer=answer: answer)
        assert checks.clock(subject()).status is status


def test_whoever_may_not_set_the_clock_is_sent_to_who_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_synchronised", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/timedatectl")
    assert checks.clock(subject()).fix == "sudo timedatectl set-ntp true; timedatectl"
    inside = checks.clock(subject(host=host(container="docker"))).fix or ""
    assert inside.startswith("on the machine that runs this container")
    assert "wsl --shutdown" in (checks.clock(subject(host=host(wsl=2))).fix or "")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "chrony" in (checks.clock(subject()).fix or "")


def test_memory_is_added_where_that_can_be_done():
    short = {"memory_available_mib": 2000}
    assert "swapon" in (checks.memory(subject(host=host(**short))).fix or "")
    assert ".wslconfig" in (checks.memory(subject(host=host(**short, wsl=2))).fix or "")
    assert "swapon" not in (checks.memory(subject(host=host(**short, container="docker"))).fix or "")
    assert "--memory" in (
        checks.memory(subject(host=host(memory_limit_mib=4000, container="docker"))).fix or ""
    )


def test_shared_memory_of_several_cards_and_of_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    small = host(shared_memory_free_mib=64, container="kubernetes")
    several = ("flags.tensor-parallel-size=2",)
    answer = checks.shared_memory(subject(profile="rtx5090-single-user", overrides=several, host=small))
    assert answer.status is Status.FAIL
    assert "emptyDir" in (answer.fix or "")
    monkeypatch.setattr(checks, "_SHM", str(tmp_path / "shm"))
    assert checks.shared_memory(subject()).status is Status.FAIL
    (tmp_path / "shm").mkdir()
    assert checks.shared_memory(subject()).status is Status.PASS
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path / "shm"))
    assert "cannot be written" in checks.shared_memory(subject()).text
