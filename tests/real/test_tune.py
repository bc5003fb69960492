"""``dflash-deploy tune`` of the real server: whole, cut down midway, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dflash_deploy import paths

from .conftest import RealSglang

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

STUDY = "real-lane"
TRIALS = 5
"""The fewest that a study has to have for the last one to be the proof of the best: it is started again, and
used up to all that was promised."""
THOROUGH = ("--trials", str(TRIALS), "--least-gain", "0")
PATIENCE_S = 900


def test_a_study_that_is_killed_midway_is_resumed_and_finds_the_best(sglang, tmp_path):
    output = tmp_path / "output"
    with output.open("w") as file:
        tuner = subprocess.Popen(
            command(sglang, *THOROUGH, "--name", STUDY), stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait_for(lambda: len(ended()) == 2 and serving_children(tuner.pid), tuner, output)
        finally:
            tuner.kill()
            tuner.wait()
    # Its server follows it, though nobody is left to stop it.
    assert psutil.wait_procs(processes_of_this_test(), timeout=PATIENCE_S)[1] == []
    kept = ended()
    assert len(kept) == 2

    before = time.monotonic()
    resumed = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "tune", STUDY, "--resume", *THOROUGH, "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    print_overhead(time.monotonic() - before, kept)
    assert {name: ended()[name] for name in kept} == kept
    result = json.loads(resumed.stdout)
    check_result(result)
    check_unit(sglang, result)
    assert processes_of_this_test() == []


def print_overhead(lasted_s: float, kept: dict[str, str]) -> None:
    """How much of a run was neither launching nor measuring; it starts the command and thinks."""
    trials = [json.loads(content) for name, content in ended().items() if name not in kept]
    in_trials_s = sum(trial["wall_s"] for trial in trials if trial["outcome"] != "interrupted")
    share = 1 - in_trials_s / lasted_s
    print(f"\nnot in a trial: {lasted_s - in_trials_s:.1f} of {lasted_s:.1f} s, {share:.1%} (measured)")  # noqa: T201


def check_result(result) -> None:
    trials = [json.loads(content) for content in ended().values()]
    served = [trial for trial in trials if trial["outcome"] == "served"]
    assert [trial["outcome"] for trial in trials].count("interrupted") == 1
    assert len(served) == TRIALS == len(trials) - 1
    # What was cut short was tried again, and nothing else twice but the winner.
    (proof,) = (trial["proof"] for trial in served if trial["proves"])
    assert proof["problem"] is None
    assert 0.9 * 1024 < proof["context_tokens"] <= 1024
    served = [trial for trial in served if not trial["proves"]]
    searched = [json.dumps(trial["flags"], sort_keys=True) for trial in served]
    assert len(set(searched)) == TRIALS - 1
    for trial in served:
        check_trial(trial)
    by_drafts = sorted(served, key=lambda trial: trial["flags"]["speculative-num-draft-tokens"])
    assert by_drafts[0]["measured"]["accept_length"] < by_drafts[-1]["measured"]["accept_length"]
    best = result["best"]
    assert not result["simulated"]
    assert not best["simulated"]
    # Of what cannot be told apart the simplest is taken, not the luckiest.
    assert best["objective"] >= 0.98 * max(trial["objective"] for trial in served)
    assert [baseline["name"] for baseline in result["baselines"]] == ["first-boot"]
    assert "sglang.launch_server" in best["command"]


def check_trial(trial) -> None:
    """What was asked for is what the server said it has, and what was measured."""
    flags, boot, measured = trial["flags"], trial["boot"], trial["measured"]
    drafts = flags["speculative-num-draft-tokens"]
    assert boot["kv_tokens"] == flags["max-total-tokens"]
    assert boot["max_running_requests"] == flags["max-running-requests"]
    assert 1 < measured["accept_length"] <= drafts
    assert measured["faults"] == []
    assert measured["output_tokens"] == 2 * 64
    assert trial["objective"] == measured["total_tokens_per_s"]["median"] > 0
    assert trial["feasible"]


def check_unit(sglang: RealSglang, result) -> None:
    """The unit starts the best configuration in its environment."""
    emitted = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "emit", STUDY], check=True, capture_output=True, text=True
    ).stdout
    drafts = result["best"]["flags"]["speculative-num-draft-tokens"]
    assert f"ExecStart={sglang.environment.python} " in emitted
    assert f"--speculative-num-draft-tokens {drafts} " in emitted
    for name, value in sglang.environment.variables().items():
        assert f"Environment={name}={value}\n" in emitted


def command(sglang: RealSglang, *options: str) -> Sequence[str]:
    return [sys.executable, "-m", "dflash_deploy", "tune", "sglang-cpu-smoke", *sglang.settings(), *options]


def ended() -> dict[str, str]:
    """The records of ended trials, by trial."""
    trials = (paths.state_dir() / "studies" / STUDY / "trials").glob("*/trial.json")
    return {path.parent.name: path.read_text() for path in sorted(trials)}


def serving_children(pid: int) -> list[psutil.Process]:
    """The engine's processes among those that ``pid`` started, once it has begun to load its model."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if child.name().startswith("sglang::")]
    except psutil.Error:
        return []


def processes_of_this_test() -> list[psutil.Process]:
    """All that was started with this test's own folders."""
    own = os.environ["XDG_STATE_HOME"]
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("XDG_STATE_HOME") == own:
                found.append(process)
    return found


def wait_for(condition: Callable[[], object], tuner: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert tuner.poll() is None, f"the tuner ended with {tuner.returncode}\n{output.read_text()}"
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
