"""Studies that go on without their terminal, and what looks at them."""

import io
import os
import signal
import threading
from contextlib import suppress
from datetime import UTC, datetime

import psutil
import pytest
from typer.testing import CliRunner

from dflash_deploy.cli import app_of
from dflash_deploy.errors import ExitCode
from dflash_deploy.tune.detached import watch
from dflash_deploy.tune.journal import Begun, Ended, Journal, Noted, Over, Reader, Staged, tuner_of
from dflash_deploy.tune.outlook import Outlook, duration, time_left_s
from dflash_deploy.tune.records import Candidate, trial_folder, write_record
from dflash_deploy.tune.screen import PlainScreen

from . import samples
from .conftest import wait_for


def plain(tool, *words, **options):
    """A simulated study with its progress on standard output."""
    return [word for word in tool.command(*words, **options) if word != "--json"]


def tuner(tool, name="s"):
    found = tuner_of(tool.studies / name)
    assert found is not None
    return psutil.Process(found.process.pid)


def test_a_detached_study_is_looked_at_left_and_ends(tool):
    left = tool.run(*plain(tool, "--trials", "3", "--name", "s", "--detach", scale=15))
    assert left.code == 0, left.err
    assert "tune --attach s" in left.out
    assert "tune --stop s" in left.out
    working = tuner(tool)
    assert (working.terminal(), os.getsid(working.pid)) == (None, working.pid), "a session of its own"
    working.send_signal(signal.SIGHUP)
    # It waits until everybody has looked, or a busy machine would find it at its end already.
    working.suspend()

    killed, interrupted = (tool.start("tune", "--attach", "s") for _ in range(2))
    for looking in (killed, interrupted):
        assert "Ctrl-C leaves it running" in looking.stdout.readline()
    killed.kill()
    killed.communicate()
    interrupted.send_signal(signal.SIGINT)
    out, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 0, err
    assert f"goes on without this terminal (process {working.pid})" in out

    # Without a name: the one that runs. It is followed to its end, which is told as its own terminal would.
    last = tool.start("tune", "--attach")
    assert "Ctrl-C leaves it running" in last.stdout.readline()
    working.resume()
    out, err = last.communicate(timeout=120)
    assert last.returncode == 0, err
    assert "all launches done" in out
    assert "next: dflash-deploy emit s" in out
    assert "why: " in out
    assert [record["outcome"] for record in tool.trials("s").values()].count("served") == 3
    log = tool.studies / "s" / "tune.log"
    assert "next: dflash-deploy emit s" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    over = tool.run("tune", "--attach", "s")
    assert over.code == ExitCode.UNAVAILABLE
    assert "no tuner works on s now" in over.err


def test_a_detached_study_is_stopped_and_one_that_cannot_begin_says_why(tool):
    assert tool.run(*plain(tool, "--trials", "9", "--name", "s", "--detach", scale=20)).code == 0
    working = tuner(tool)
    wait_for(tool.servers)
    second = tool.run("tune", "--resume", "s", "--detach")
    assert second.code == ExitCode.UNAVAILABLE
    assert "another dflash-deploy works on s" in second.err
    stopped = tool.run("tune", "--stop")
    assert stopped.code == 0
    assert f"process {working.pid}" in stopped.out
    while tool.studies and tuner_of(tool.studies / "s"):
        tool.run("tune", "--stop", "s")
        with suppress(psutil.TimeoutExpired):
            working.wait(timeout=20)
    assert not tool.servers()
    assert "stopped by hand" in (tool.studies / "s" / "tune.log").read_text()


@pytest.mark.slow
def test_on_a_terminal_the_table_is_shown_again(tool):
    assert tool.run(*plain(tool, "--trials", "3", "--name", "s", "--detach", scale=6)).code == 0
    wait_for(lambda: 1 in tool.trials("s"))
    text = tool.on_terminal("tune", "--attach").out
    for word in ("s (simulated)", "hand-tuned", "best so far", "launch 2 of at most 3", "left (predicted"):
        assert word in text
    assert "next: dflash-deploy emit s" in text


@pytest.mark.parametrize(
    "words",
    [["--attach", "--stop"], ["--detach", "--attach"], ["--attach", "--resume"], ["--detach", "--json"]],
)
def test_options_that_exclude_each_other(words):
    assert CliRunner().invoke(app_of(["tune"]), ["tune", *words]).exit_code == ExitCode.USAGE


def candidate(number):
    return Candidate(number=number, source="search", flags={}, started=datetime(2026, 1, 1, tzinfo=UTC))


OUTLOOK = Outlook("it might help", "the search's choice", launched=1, trials=4)


@pytest.fixture
def study(tmp_path):
    record = samples.study()
    write_record(tmp_path / "study.json", record)
    return record


def test_a_journal_is_read_while_it_grows(tmp_path, study):
    reader = Reader(tmp_path)
    assert list(reader.new()) == []
    shown = io.StringIO()
    with Journal(tmp_path, PlainScreen(shown, study, [])) as journal:
        assert tuner_of(tmp_path).process.pid == os.getpid()
        journal.begun(candidate(2), OUTLOOK)
        journal.stage("loading weights")
        assert list(reader.new()) == [
            Begun(candidate=candidate(2), outlook=OUTLOOK),
            Staged(text="loading weights"),
        ]
        with (tmp_path / "progress.jsonl").open("a") as file:
            file.write('{"event": "note", "te')
            file.flush()
            assert list(reader.new()) == []
            file.write('xt": "whole now"}\n{"event": "of a later version"}\nnot json\n')
        journal.over("trials")
        assert list(reader.new()) == [Noted(text="whole now"), Over(ending="trials")]
    assert tuner_of(tmp_path) is None
    assert "trial 2:   why: it might help; next: the search's choice" in shown.getvalue()
    with Journal(tmp_path, PlainScreen(None, study, [])) as journal:
        journal.ended(samples.trial(9))
    assert list(reader.new()) == [Ended(number=9)], "another run begins anew"


def test_who_looks_late_sees_what_runs_now_and_what_comes(tmp_path, study):
    before, after = samples.trial(1, rounds=(100.0,)), samples.trial(2, rounds=(120.0,))
    shown = io.StringIO()
    endings = []
    with Journal(tmp_path, PlainScreen(None, study, [])) as journal:
        journal.begun(candidate(1), OUTLOOK)
        write_record(trial_folder(tmp_path, 1) / "trial.json", before)
        journal.ended(before)
        journal.begun(candidate(2), OUTLOOK)
        journal.stage("loading weights")
        journal.stage("round 1/3")
        looking = threading.Thread(target=lambda: endings.append(watch(tmp_path, study, shown)))
        looking.start()
        wait_for(lambda: "round 1/3" in shown.getvalue())
        write_record(trial_folder(tmp_path, 2) / "trial.json", after)
        journal.ended(after)
        journal.over("minutes")
        looking.join(timeout=30)
    assert endings == ["minutes"]
    lines = shown.getvalue().splitlines()
    assert not any(line.startswith("trial 1:") for line in lines), "what has ended is not told again"
    assert "loading weights" not in shown.getvalue()
    assert "trial 2: served, 120.00 tokens/s in all (simulated)" in lines
    assert lines[-1].startswith("best so far: trial 2, 120.00")


def test_a_higher_figure_that_is_not_the_best_is_explained(study):
    shown = io.StringIO()
    screen = PlainScreen(shown, study, [])
    screen.ended(samples.trial(1, source="known:hand-tuned", rounds=(100.0, 104.0, 96.0)))
    screen.ended(samples.trial(2, rounds=(100.5, 105.0, 96.0)))
    screen.ended(samples.trial(3, rounds=(200.0, 201.0, 202.0)))
    told = [line for line in shown.getvalue().splitlines() if line.startswith("best so far")]
    assert [line.partition(",")[0] for line in told] == [f"best so far: trial {one}" for one in (1, 1, 3)]
    assert [line.endswith("; trial 2 is not surely better") for line in told] == [False, True, False]


def test_a_tuner_that_ends_without_a_word_is_noticed(tmp_path, study):
    with Journal(tmp_path, PlainScreen(None, study, [])) as journal:
        journal.begun(candidate(1), OUTLOOK)
    assert watch(tmp_path, study, io.StringIO()) is None


def test_time_left():
    trials = [
        samples.trial(1, wall_s=60.0),
        samples.trial(2, wall_s=80.0),
        samples.trial(3, argv=[], wall_s=0.0),
    ]
    assert time_left_s(OUTLOOK, []) is None
    assert time_left_s(OUTLOOK, trials) == 3 * 70.0
    assert time_left_s(Outlook("", "", 1, 4, left_s=30.0), trials) == 30.0 + 70.0
    assert [duration(s) for s in (0.0, 89.0, 120.0, 5399.0, 5400.0, 10_000.0)] == [
        "0 s",
        "89 s",
        "2 min",
        "1 h 30 min",
        "1 h 30 min",
        "2 h 47 min",
    ]


def test_long_counts_are_told_in_short_outside_a_terminal(study):
    shown = io.StringIO()
    screen = PlainScreen(shown, study, [])
    for number in range(1, 52):
        screen.stage(f"prefill graph {number}/51")
    for number in range(1, 4):
        screen.stage(f"round {number}/3")
    told = [line.split(":   ")[1] for line in shown.getvalue().splitlines()]
    assert told == ["prefill graph 1/51", "prefill graph 51/51", "round 1/3", "round 2/3", "round 3/3"]
