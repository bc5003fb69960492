"""Workers on simulated cards that share one study through a real PostgreSQL, and through Optuna's proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from dflash_deploy.errors import ExitCode
from dflash_deploy.server.ports import free_port
from dflash_deploy.tune.crew import Crew
from dflash_deploy.tune.meeting import Meeting
from dflash_deploy.tune.space import space_of
from tests.tune import samples
from tests.tune.conftest import Tool, tool, wait_for
from tests.tune.test_crew import race

from .postgres import HOST, PASSWORD, Database, find_postgres, postgres

PROGRAMS = find_postgres()
HOW_TO_GET_IT = "no PostgreSQL: apt-get install postgresql (CONTRIBUTING.md)"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(PROGRAMS is None and os.environ.get("CI") != "true", reason=HOW_TO_GET_IT),
]

__all__ = ["tool"]
TRIALS = 7


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    assert PROGRAMS is not None, HOW_TO_GET_IT
    with postgres(PROGRAMS) as database:
        yield database


def start(tool: Tool, storage: str, study: str, gpu: int, *, trials: int = TRIALS, scale: float):
    shared = ("--storage", storage, "--name", study, "--gpu", str(gpu), "--beat-s", "0.3")
    effort = ("--trials", str(trials), "--least-gain", "0")
    return tool.start(*tool.command(*effort, *shared, scale=scale))


def folder_of(tool: Tool, study: str, gpu: int) -> Path:
    """Where that worker keeps what it knows of the study, once it has begun."""
    found: list[Path] = []
    wait_for(lambda: found.extend(tool.studies.glob(f"{study}.*-gpu{gpu}")) or found)
    return found[0]


def told(tool: Tool, folder: Path) -> dict[int, dict]:
    """By number, the records in a worker's folder that say something of their configuration."""
    records = tool.trials(folder.name).items()
    return {number: record for number, record in records if record["outcome"] != "interrupted"}


def begun(folder: Path) -> list[int]:
    """Numbers of trials that a worker has begun and not ended."""
    candidates = (folder / "trials").glob("*/candidate.json")
    return [int(path.parent.name) for path in candidates if not path.with_name("trial.json").exists()]


def check_shared(tool: Tool, *workers: Path) -> None:
    """Every worker knows every trial, as many as were wanted, each of another configuration."""
    first, *others = (told(tool, folder) for folder in workers)
    assert sum(bool(record["argv"]) for record in first.values()) == TRIALS
    tried = [
        (str(sorted(record["flags"].items())), record.get("proves") is None) for record in first.values()
    ]
    assert len(set(tried)) == len(tried), "a configuration was tried twice"
    for other in others:
        assert {number: record["objective"] for number, record in other.items()} == {
            number: record["objective"] for number, record in first.items()
        }


def test_two_workers_share_a_study_and_one_that_is_killed_is_made_up_for(tool, database):
    tool.env.update(database.env)
    # The second one takes long over a trial, and is killed in the middle of it.
    first = start(tool, database.url, "s", 0, scale=40)
    second = start(tool, database.url, "s", 1, scale=8)
    ours, lost = (folder_of(tool, "s", gpu) for gpu in (0, 1))
    wait_for(lambda: begun(lost) and len(tool.servers()) == 2)
    (number,) = begun(lost)
    second.kill()
    second.communicate()

    out, err = first.communicate(timeout=100)
    assert first.returncode == 0, err
    assert "Traceback" not in err
    taken_back = tool.trials(ours.name)[number]
    assert taken_back["outcome"] == "interrupted"
    assert "was lost" in taken_back["reason"]
    best = json.loads(out.splitlines()[-1])["best"]

    # It comes back to a study that is done, knows all of it, and finds the same.
    back = tool.run("tune", "--resume", lost.name, "--trials", str(TRIALS), "--least-gain", "0", "--json")
    assert back.code == 0, back.err
    assert back.result["best"]["flags"] == best["flags"]
    check_shared(tool, ours, lost)
    assert not tool.servers()
    for path in tool.home.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_both_work_to_the_end(tool, database):
    tool.env.update(database.env)
    workers = [start(tool, database.url, "both", gpu, scale=60) for gpu in (0, 1)]
    results = []
    for worker in workers:
        out, err = worker.communicate(timeout=100)
        assert worker.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    folders = [folder_of(tool, "both", gpu) for gpu in (0, 1)]
    check_shared(tool, *folders)
    assert results[0]["best"]["flags"] == results[1]["best"]["flags"]
    shares = [len(list((folder / "trials").glob("*/candidate.json"))) for folder in folders]
    assert min(shares) >= 1
    assert sum(shares) == TRIALS
    report = tool.run("report", folders[1].name, "--format", "json", "--out", "-")
    assert len(json.loads(report.out)["trials"]) == TRIALS
    # What Optuna itself, and so its dashboard, finds there.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in database.env.items():
            patch.setenv(name, value)
        study = optuna.load_study(
            study_name="both", storage=database.url.replace("://", "+psycopg://") + "?client_encoding=utf8"
        )
        assert study.best_value == pytest.approx(max(t["objective"] or 0 for t in results[0]["trials"]))
        assert all(trial.params for trial in study.trials)


def test_a_wrong_password_and_other_studies_are_told(tool, database, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("*:*:*:*:guessed\n")
    wrong.chmod(0o600)
    refused = tool.run(*tool.command("--storage", database.url, "--name", "x"), PGPASSFILE=str(wrong))
    assert refused.code == ExitCode.UNAVAILABLE
    assert "password authentication failed" in refused.err
    assert "Traceback" not in refused.err
    assert not list(tool.studies.glob("x.*")), "nothing is left of it"
    tool.env.update(database.env)
    made = tool.run(*tool.command("--storage", database.url, "--name", "x", "--trials", "1", scale=200))
    assert made.code == 0, made.err
    other = ("--seed", "7", "--worker", "other")
    differs = tool.run(*tool.command("--storage", database.url, "--name", "x", *other))
    assert differs.code == ExitCode.INVALID_INPUT
    assert "of another seed" in differs.err


def test_claims_hold_in_postgres_and_behind_optuna_s_proxy(database, monkeypatch, tmp_path):
    for name, value in database.env.items():
        monkeypatch.setenv(name, value)
    race([join(database.url, worker) for worker in "abc"])
    port = free_port(HOST)
    proxy = subprocess.Popen(
        [sys.executable, "-c", PROXY.format(file=tmp_path / "proxied.db", host=HOST, port=port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        race([join(f"grpc://{HOST}:{port}", worker) for worker in "abc"])
    finally:
        proxy.kill()
        proxy.wait()


PROXY = """
import optuna
storage = optuna.storages.RDBStorage("sqlite:///{file}")
optuna.storages.run_grpc_proxy_server(storage, host="{host}", port={port})
"""


def join(storage: str, worker: str) -> Crew:
    study = samples.study()
    meeting = Meeting(storage=storage, study="race", worker=worker, beat_s=600.0)
    return Crew(meeting, study, space_of(study.profile), {}, [])
