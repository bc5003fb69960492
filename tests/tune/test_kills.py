"""The tuner is killed at any moment, again and again; a resumed study loses nothing and finds the same."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback

import pytest

from dflash_deploy.server.orphans import end_orphans
from dflash_deploy.tune import ledger  # noqa: F401  (so that every child has it already)
from dflash_deploy.tune.opening import Place, open_again, open_new
from dflash_deploy.tune.records import read_study, read_trials
from dflash_deploy.tune.screen import PlainScreen
from dflash_deploy.tune.select import best_trial
from dflash_deploy.tune.studies import find_study, studies_dir
from dflash_deploy.tune.study import Effort, run_study

KILLS = 50
TRIALS = 5
PLACE = Place(None, "127.0.0.1", None)
SMALL = ("workload.output_tokens=64", "workload.users=1", "measure.rounds=1")


def tuner(name: str, profile: str) -> int:
    """What the command does, in a process of its own that need not load everything again."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_orphans()
        if (studies_dir() / name / "study.json").exists():
            opened = open_again(name, PLACE)
        else:
            opened = open_new(
                profile,
                overrides=SMALL,
                simulate="rtx-5090",
                time_scale=5000.0,
                seed=7,
                name=name,
                place=PLACE,
            )
        run_study(
            opened.folder,
            opened.study,
            opened.rig,
            Effort(TRIALS, worth=0.0),
            PlainScreen(None, opened.study, ()),
        )
        code = 0
    except BaseException:  # noqa: BLE001  (a child must never go on with the test)
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int, within_s: float) -> int | None:
    """Exit status of the child, None while it runs."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def best_of_study(name: str):
    folder = find_study(name)
    return best_trial(read_study(folder), read_trials(folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_lose_no_finished_trial_and_change_no_best_configuration(tool, monkeypatch):
    for kind in ("state", "config", "cache"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tool.home / kind))
    assert ended(tuner("straight", str(tool.profile)), 120) == 0
    wanted = best_of_study("straight")
    rng = random.Random(20261130)  # noqa: S311
    kills, studies = 0, 0
    while kills < KILLS:
        studies += 1
        name = f"killed-{studies}"
        kept: dict[int, dict] = {}
        while True:
            child = tuner(name, str(tool.profile))
            # Some are killed before they have begun, some in the middle of a trial, some between two.
            code = ended(child, rng.expovariate(1.0) if kills < KILLS else 120)
            if code is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
            records = tool.trials(name)
            assert {number: records[number] for number in kept} == kept, "a finished trial was lost"
            kept = records
            if code is not None:
                assert code == 0
                break
        finished = [record for record in kept.values() if record["outcome"] != "interrupted"]
        tried = [(str(sorted(one["flags"].items())), one["proves"] is not None) for one in finished]
        assert len(set(tried)) == len(tried), "something was launched twice"
        found = best_of_study(name)
        assert found.flags == wanted.flags
        assert found.objective >= 0.99 * wanted.objective
        end_orphans()
        deadline = time.monotonic() + 30
        while tool.servers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not tool.servers(), "an orphan"
