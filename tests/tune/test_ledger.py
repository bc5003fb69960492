import sqlite3
from contextlib import closing

import optuna
import pytest

from dflash_deploy.errors import DeployError
from dflash_deploy.tune.ledger import Ledger
from dflash_deploy.tune.space import space_of

from .samples import profile, trial

SEARCH = {
    "mem-fraction-static": {"low": 0.8, "high": 0.95, "step": 0.01},
    "max-running-requests": {"low": 1, "high": 8, "step": 1},
    "max-total-tokens": {"choices": [None, 8192, 16384]},
    "cuda-graph-bs-decode": {"choices": [[1], [1, 2]]},
}
SPACE = space_of(profile(search=SEARCH))


def opened(folder, space=SPACE, records=()):
    folder.mkdir(exist_ok=True)
    return Ledger(folder, space, "total_tokens_per_s", records)


def play(ledger, count, records=()):
    """Begin and tell; every configuration above six requests fails."""
    records = list(records)
    for number in range(len(records) + 1, count + 1):
        requests = 1 + number % 8
        settings = {"mem-fraction-static": 0.8 + number / 100, "max-running-requests": requests}
        entry = ledger.begin(settings)
        record = trial(number, None if requests > 6 else (100.0 + requests,), flags=settings)
        ledger.tell(entry, record)
        records.append(record)
    return records


def stored(folder):
    (name,) = optuna.get_all_study_names(f"sqlite:///{folder}/optuna.db")
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/optuna.db")


def test_a_failure_is_infeasible_and_has_no_value(tmp_path):
    records = play(opened(tmp_path / "s"), 14)
    failed = [record for record in records if not record.feasible]
    assert failed
    by_record = {t.user_attrs.get("record"): t for t in stored(tmp_path / "s").trials}
    for record in records:
        told = by_record[record.number]
        if record.feasible:
            assert told.state is optuna.trial.TrialState.COMPLETE
            assert told.value == record.objective
            assert all(value <= 0 for value in told.constraints.values())
        else:
            assert told.state is optuna.trial.TrialState.PRUNED
            assert told.value is None
            assert any(value > 0 for value in told.constraints.values())


def test_the_storage_catches_up_with_the_records(tmp_path):
    records = play(opened(tmp_path / "a"), 8)
    known = trial(9, (140.0,), source="known:hand", flags={"max-running-requests": 5, "log-level": "info"})
    cut = trial(10, None, outcome="interrupted", flags={"max-running-requests": 2})
    for _ in range(2):
        opened(tmp_path / "b", records=[*records, known, cut])
    told = [t for t in stored(tmp_path / "b").trials if t.state.is_finished()]
    assert sorted(t.user_attrs["record"] for t in told) == list(range(1, 10))


def test_a_broken_limit_tells_how_far(tmp_path):
    ledger = opened(tmp_path / "s")
    ledger.add(
        trial(1, (90.0,), outcome="infeasible", feasible=False, violations={"ttft_p95_s": 0.25}, flags={})
    )
    (told,) = stored(tmp_path / "s").trials
    assert told.constraints["ttft_p95_s"] == 0.25
    assert told.state is optuna.trial.TrialState.PRUNED


@pytest.mark.parametrize("damage", [b"not a database, but long enough to look like one" * 40, b"\0" * 3000])
def test_a_damaged_storage_is_made_anew_from_the_records(tmp_path, damage):
    records = play(opened(tmp_path / "s"), 5)
    path = tmp_path / "s" / "optuna.db"
    path.write_bytes(damage + path.read_bytes()[len(damage) :])
    ledger = opened(tmp_path / "s", records=records)
    told = [t for t in stored(tmp_path / "s").trials if t.state.is_finished()]
    assert sorted(t.user_attrs["record"] for t in told) == [1, 2, 3, 4, 5]
    assert len(play(ledger, 6, records)) == 6


@pytest.mark.parametrize(
    "change",
    [
        "update alembic_version set version_num = 'v99.0.0'",
        "drop table studies",
        "update trial_params set distribution_json = 'x'",
    ],
)
def test_a_storage_that_optuna_cannot_make_sense_of_is_made_anew(tmp_path, change):
    records = play(opened(tmp_path / "s"), 5)
    with closing(sqlite3.connect(tmp_path / "s" / "optuna.db")) as other, other:
        other.execute(change)
    ledger = opened(tmp_path / "s", records=records)
    assert len(play(ledger, 8, records)) == 8
    told = [t for t in stored(tmp_path / "s").trials if t.state.is_finished()]
    assert {1, 2, 3, 4, 5} <= {t.user_attrs.get("record") for t in told}


def test_a_crash_while_telling_loses_nothing(tmp_path):
    ledger = opened(tmp_path / "s")
    records = play(ledger, 3)
    settings = {"max-running-requests": 4}
    ledger.begin(settings).trial.set_user_attr("record", 4)  # and then it was killed
    records.append(trial(4, (150.0,), flags=settings))
    for _ in range(2):
        opened(tmp_path / "s", records=records)
    told = [t for t in stored(tmp_path / "s").trials if t.state is optuna.trial.TrialState.COMPLETE]
    assert [t.value for t in told if t.user_attrs["record"] == 4] == [150.0]


def test_what_is_being_tried_is_seen_as_running(tmp_path):
    ledger = opened(tmp_path / "s")
    ledger.begin({"max-running-requests": 3, "cuda-graph-bs-decode": [1, 2], "max-total-tokens": 8192})
    (running,) = stored(tmp_path / "s").trials
    assert running.state is optuna.trial.TrialState.RUNNING
    assert running.params == {
        "max-running-requests": 3,
        "cuda-graph-bs-decode": "[1, 2]",
        "max-total-tokens": "8192",
    }


def test_a_locked_storage_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_deploy.tune.ledger._LOCKED_S", 0.1)
    ledger = opened(tmp_path / "s")
    with sqlite3.connect(tmp_path / "s" / "optuna.db", timeout=0) as held:
        held.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DeployError, match="locked"):
            ledger.begin({"max-running-requests": 3})
