"""Published messages, each in a log of its stage as SGLang writes it, are named for what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_deploy.diagnosis import Diagnosis, diagnose
from dflash_deploy.diagnosis.catalogue import load_catalogue

from . import logs

ROWS = json.loads(Path(__file__).with_name("published.json").read_text())
ENTRIES = {entry.id: entry for entry in load_catalogue()}
ENDS = [
    row
    for row in ROWS
    if ENTRIES[row["entry"]].severity == "error" and ENTRIES[row["entry"]].role != "symptom"
]
SPEAKS_ALONE = {
    "port-taken",
    "health-timeout",
    "driver-library-mismatch",
    "sampler-nan",
    "capture-cute-dsl-hang",
}


def log_of(row: dict[str, str]) -> list[str]:
    message, stage = row["message"], row["stage"]
    if row["entry"] == "earlyoom":
        died = "Rank 0 scheduler died during initialization (exit code: -15). If exit code is -9 (SIGKILL), a"
        return [*logs.boot(stage), f"[2026-08-24 13:33:00] {died} common cause is the OS OOM killer."]
    if row["entry"] in SPEAKS_ALONE or "container" in message:
        return [*logs.boot(stage), message]
    return logs.failed(message, stage)


def named(diagnosis: Diagnosis) -> str | None:
    return diagnosis.root.id if diagnosis.root else None


def test_nearly_every_message_is_named_right():
    found = {row["id"]: named(diagnose(log_of(row))) for row in ENDS}
    right = [row for row in ENDS if found[row["id"]] == row["entry"]]
    wrong = {row["id"]: found[row["id"]] for row in ENDS if row not in right}
    assert len(right) / len(ENDS) >= 0.98, wrong


@pytest.mark.parametrize("row", ENDS, ids=[row["id"] for row in ENDS])
def test_the_line_that_shows_it_is_quoted_and_something_helps(row):
    lines = log_of(row)
    root = diagnose(lines).root
    assert root is not None
    assert root.fix is not None
    assert root.lines
    for line in root.lines:
        assert line.text.strip() in lines[line.number - 1]


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if ENTRIES[row["entry"]].severity in ("benign", "note", "warning")],
    ids=lambda row: row["id"],
)
def test_what_a_server_lives_with_is_no_failure(row):
    lines = logs.boot("serving", until_ready=True)
    at = len(logs.boot(row["stage"]))
    traced = row["message"].startswith("OSError")
    said = logs.traceback(row["message"], "load") if traced else [f"[2026-08-24 13:31:40] {row['message']}"]
    diagnosis = diagnose([*lines[:at], *said, *lines[at:]])
    assert diagnosis.root is None
    assert row["entry"] in [finding.id for finding in (*diagnosis.findings, *diagnosis.benign)]


def test_the_end_that_names_no_reason_is_told_as_such():
    diagnosis = diagnose(
        [*logs.boot("load"), "[2026-08-24 13:33:00] Received sigquit from a child process. It"]
    )
    assert named(diagnosis) == "child-died"
    assert diagnosis.root.confidence == "low"


@pytest.mark.parametrize(
    "stage", ["load", "sizing", "pools", "prefill-capture", "verify-capture", "draft-capture"]
)
def test_memory_that_runs_out_is_told_by_stage(stage):
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 352.00 MiB. GPU 0 "
        "has a total capacity of "
        "31.36 GiB of which 30.12 MiB is free."
    )
    if stage in ("verify-capture", "draft-capture"):
        message = message.replace("torch.OutOfMemoryError", "Exception: Capture cuda graph failed")
    root = diagnose(logs.failed(message, stage)).root
    assert root is not None
    names = {"sizing": "oom-pools", "verify-capture": "oom-decode-capture"}
    assert root.id == names.get(stage, f"oom-{stage}")
    if stage == "verify-capture":
        assert dict(root.fix.flags) == {"cuda-graph-max-bs-decode": 4, "mem-fraction-static": 0.87}
