"""``dflash-deploy diagnose`` as a person or a script runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash_deploy import paths
from dflash_deploy.diagnosis.redact import redacted
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.records import StudyRecord, TrialRecord, trial_folder, write_record
from tests.tool import run_tool

from . import logs
from .test_verdict import NO_KV


def run(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return run_tool("diagnose", *words, text=given)


@pytest.fixture
def failed_log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("\n".join(logs.failed(NO_KV, "sizing")))
    return path


def test_people_read_the_cause_the_fix_and_the_lines(failed_log):
    result = run(str(failed_log))
    assert result.returncode == 1
    assert result.stdout.startswith("root cause: no-kv-memory")
    assert "use" not in result.stderr
    assert "--mem-fraction-static 0.75" in result.stdout
    assert "Not enough memory" in result.stdout
    assert "\x1b" not in result.stdout


def test_scripts_read_json_with_the_root_cause_first(failed_log):
    result = run("-", "--json", given=failed_log.read_text())
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert found[0]["id"] == "no-kv-memory"
    assert set(found[0]) == {
        "id",
        "stage",
        "severity",
        "cause",
        "fix",
        "flags",
        "lines",
        "confidence",
        "count",
    }
    assert found[0]["flags"] == {"mem-fraction-static": 0.75}
    number = found[0]["lines"][0]["number"]
    assert failed_log.read_text().splitlines()[number - 1] == found[0]["lines"][0]["text"]


def test_a_healthy_log_ends_with_success(tmp_path):
    result = run("-", given="\n".join(logs.boot("serving")))
    assert (result.returncode, "No failure found" in result.stdout) == (0, True)


def test_what_is_no_log_of_a_server_is_not_taken_for_a_healthy_one():
    result = run("-", given="trial 1: served, 239.22 tokens/s in all (measured)\nstudy cpu: 3 launches\n")
    assert "is it the right log" in result.stdout
    assert "is it the right log" not in run("-", given="\n".join(logs.boot("serving"))).stdout


def test_metrics_that_are_off_are_no_wrong_address():
    line = 'INFO:     127.0.0.1:36124 - "GET /metrics HTTP/1.1" 404 Not Found'
    result = run("-", given="\n".join([*logs.boot("serving"), line]))
    assert "--enable-metrics" in result.stdout
    assert "base URL" not in result.stdout


def test_an_unknown_failure_ends_with_1_and_says_so():
    result = run("-", given="\n".join(logs.failed("WeirdError: the flux is negative", "load")))
    assert result.returncode == 1
    assert "not a failure that the catalogue knows" in result.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("/no/such/log",), 4),
        (("/",), 3),
        ((), 2),
        (("-", "--unit", "x"), 2),
        (("--study", "x", "-"), 2),
        (("--trial", "3"), 4),
        (("--unit", "no-such-unit-of-ours"), 4),
        (("-",), 3),
    ],
)
def test_what_cannot_be_read_is_told_with_its_status(words, status):
    result = run(*words)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr


def test_the_log_of_a_trial_is_read_with_its_flags(failed_log):
    folder = paths.state_dir() / "studies" / "night"
    now = datetime.now(UTC)
    study = StudyRecord(
        name="night",
        created=now,
        tool_version="1",
        simulated=True,
        seed=0,
        card=None,
        engine_version="0.5.23",
        profile=load_profile("rtx5090-single-user"),
    )
    trial = TrialRecord(
        number=3,
        source="search",
        flags={"mem-fraction-static": 0.8},
        argv=["x"],
        env={},
        outcome="failed",
        feasible=False,
        started=now,
        wall_s=1.0,
    )
    write_record(folder / "study.json", study)
    write_record(trial_folder(folder, 3) / "trial.json", trial)
    log = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB."
    (trial_folder(folder, 3) / "server.log").write_text(log)
    for words in ((), ("--study", "night")):
        result = run("--trial", "3", *words, "--json")
        assert json.loads(result.stdout)[0]["flags"]["mem-fraction-static"] == 0.77


def test_a_report_can_be_shown_to_others():
    secret = [
        "[2026-08-24 13:33:00] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/home/martha/venv/sglang/srt/managers/scheduler.py", line 9, in run',
        "WeirdError: 10.11.12.13 hf_abcdefghijklmnop prompt='tell me of my illness' "
        "/home/martha/x api_key=sk-1234567",
    ]
    text = run("-", "--report", given="\n".join(secret)).stdout
    assert "WeirdError" in text
    assert "scheduler.py" in text
    for word in ("martha", "10.11.12.13", "hf_abc", "illness", "sk-1234"):
        assert word not in text


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("--api-key abcdefgh12345 --port 1", "abcdefgh12345"),
        ("Authorization: Bearer abcdefgh12345", "abcdefgh12345"),
        ("https://me:pw123456@proxy:80/x", "pw123456"),
        ("Aug 24 13:33:00 bigbox python[1]: x", "bigbox"),
        ("at fe80:1:2:3:4:5:6:7 now", "fe80"),
        ("mail martha@example.org now", "martha"),
        ("GPU-1234abcd-12ab-12ab-12ab-123456abcdef", "1234abcd"),
        ("messages=[{'role': 'user', 'content': 'my secret'}]", "secret"),
    ],
)
def test_what_is_private_is_taken_out(text, gone):
    assert gone not in redacted(text)


def test_what_helps_others_stays():
    text = (
        "[2026-08-24 13:33:00 TP0] sglang 0.5.23 on 127.0.0.1:30000, #tokens: 44884, cuda 12.8.1, "
        "fix_bos_eos_token: failed to read tokenizer_config.json"
    )
    assert redacted(text) == text


def test_the_self_test_runs():
    result = run("--selftest")
    assert result.returncode == 0, result.stdout
    assert "none wrong" in result.stdout


def test_output_into_a_closed_pipe_is_quiet(failed_log):
    done = subprocess.run(  # noqa: S602  (a pipe, as in a shell)
        f"{sys.executable} -m dflash_deploy diagnose {failed_log} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.stderr == ""
