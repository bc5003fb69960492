from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_deploy import paths
from dflash_deploy.doctor import host as checks
from dflash_deploy.doctor.finding import Status

from .builders import gpu, host, subject
from .conftest import write_profile

HARD_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
FULL = "/proc"
"""A file system without a free byte."""


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


def test_room_for_weights_without_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "yet" / "there"))
    free_mib = psutil.disk_usage(str(tmp_path)).free >> 20
    wanted = Status.PASS if free_mib >= 30 * 1024 else Status.WARN
    assert checks.disk_models(subject()).status is wanted
    monkeypatch.setenv("HF_HUB_CACHE", f"{FULL}/hub")
    answer = checks.disk_models(subject())
    assert answer.status is Status.WARN
    assert answer.text.startswith("0 MiB free")


def test_a_download_that_does_not_fit_fails(monkeypatch: pytest.MonkeyPatch, pair, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", f"{FULL}/hub")
    answer = checks.disk_models(subject(profile="rtx5090-single-user"))
    assert answer.status is Status.FAIL
    assert "have to be downloaded" in answer.text
    here = subject(profile=str(write_profile(tmp_path, *pair)))
    answer = checks.disk_models(here)
    assert answer.status is Status.PASS
    assert "nothing to download" in answer.text


def test_a_download_of_unknown_size_is_unknown(tmp_path: Path):
    profile = write_profile(tmp_path, "somebody/something", "somebody/draft")
    assert checks.disk_models(subject(profile=str(profile))).status is Status.UNKNOWN


def test_room_for_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    free_mib = psutil.disk_usage(str(tmp_path)).free >> 20
    answer = checks.disk_caches(subject())
    assert answer.status is (Status.PASS if free_mib >= 10 * 1024 else Status.WARN)
    monkeypatch.setenv("XDG_CACHE_HOME", FULL)
    answer = checks.disk_caches(subject())
    assert answer.status is Status.FAIL
    assert "0 MiB free where kernels" in answer.text


def test_a_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch(mode=0o444)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "below"))
    answer = checks.disk_caches(subject())
    assert answer.status is Status.FAIL
    assert "(records)" in answer.text
    assert answer.fix == f"sudo chown -R $(id -un): {tmp_path / 'file'}"


def test_a_folder_that_a_variable_names_is_made_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert checks.folders(subject()).status is Status.PASS
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    answer = checks.folders(subject())
    assert answer.status is Status.WARN
    assert answer.repair is not None
    answer.repair.run()
    assert (tmp_path / "tmp").is_dir()
    assert checks.folders(subject()).status is Status.PASS


def test_a_file_in_the_place_of_a_folder_is_not_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "tmp").write_text("mine")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    answer = checks.folders(subject())
    assert answer.status is Status.WARN
    assert answer.repair is None


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
    code = (
        "import resource\n"
        "from dflash_deploy.doctor import host\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        f"resource.setrlimit(resource.{limit}, {value})\n"
        "answer = host.limits(None)\n"
        "print(answer.status, answer.fix)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(status)
    assert fix in done.stdout


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
