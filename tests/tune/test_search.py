import sqlite3
from contextlib import closing

import optuna
import pytest

from dflash_deploy.errors import DeployError
from dflash_deploy.tune.search import Search
from dflash_deploy.tune.space import key_of, space_of

from .samples import profile, trial

SEARCH = {
    "mem-fraction-static": {"low": 0.8, "high": 0.95, "step": 0.01},
    "max-running-requests": {"low": 1, "high": 8, "step": 1},
    "max-total-tokens": {"choices": [None, 8192, 16384]},
    "cuda-graph-bs-decode": {"choices": [[1], [1, 2]]},
}
SPACE = space_of(profile(search=SEARCH))


def opened(folder, space=SPACE, seed=3, records=()):
    folder.mkdir(exist_ok=True)
    return Search(folder, space, "total_tokens_per_s", seed, records)


def play(search, count, records=(), value=lambda flags: 100 + flags["max-running-requests"]):
    """Ask and tell; every configuration above six requests fails."""
    records = list(records)
    tried = {key_of(record.flags) for record in records}
    for number in range(len(records) + 1, count + 1):
        proposal = search.propose(tried)
        if proposal is None:
            break
        fails = proposal.settings["max-running-requests"] > 6
        record = trial(number, None if fails else (value(proposal.settings),), flags=proposal.settings)
        search.tell(proposal, record)
        tried.add(key_of(proposal.settings))
        records.append(record)
    return records


def stored(folder):
    (name,) = optuna.get_all_study_names(f"sqlite:///{folder}/optuna.db")
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/optuna.db")


def test_nothing_is_proposed_twice_and_every_value_is_of_the_space(tmp_path):
    records = play(opened(tmp_path / "s"), 25)
    assert len({key_of(record.flags) for record in records}) == 25
    for record in records:
        assert set(SPACE.places(record.flags)) == set(SEARCH)


def test_the_same_seed_proposes_the_same_also_across_an_interruption(tmp_path):
    straight = play(opened(tmp_path / "a"), 14)
    first = play(opened(tmp_path / "b"), 7)
    opened(tmp_path / "b").propose({key_of(record.flags) for record in first})  # asked, and then killed
    again = opened(tmp_path / "b", records=first)
    resumed = play(again, 14, first)
    assert [record.flags for record in resumed] == [record.flags for record in straight]
    assert [r.flags for r in play(opened(tmp_path / "c", seed=4), 14)] != [r.flags for r in straight]


def test_a_failure_is_infeasible_and_has_no_value(tmp_path):
    records = play(opened(tmp_path / "s"), 20)
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


def test_what_was_told_is_learned_from(tmp_path):
    records = play(opened(tmp_path / "s"), 40, value=lambda flags: 100 - flags["max-running-requests"])
    late = [record.flags["max-running-requests"] for record in records[20:]]
    # The best is one request at a time; left to chance, a quarter would fail and a quarter be near it.
    assert sum(value > 6 for value in late) <= 4
    assert sum(value <= 2 for value in late) >= 8


def test_a_small_space_is_tried_out_and_then_there_is_nothing_left(tmp_path):
    space = space_of(profile(search={"max-running-requests": {"choices": [1, 2, 3, 4, 5]}}))
    search = opened(tmp_path / "s", space)
    assert len(play(search, 50)) == 5
    assert search.propose({key_of({"max-running-requests": n}) for n in (1, 2, 3, 4, 5)}) is None


def test_the_storage_catches_up_with_the_records(tmp_path):
    records = play(opened(tmp_path / "a"), 8)
    known = trial(9, (140.0,), source="known:hand", flags={"max-running-requests": 5, "log-level": "info"})
    cut = trial(10, None, outcome="interrupted", flags={"max-running-requests": 2})
    for _ in range(2):
        opened(tmp_path / "b", records=[*records, known, cut])
    told = [t for t in stored(tmp_path / "b").trials if t.state.is_finished()]
    assert sorted(t.user_attrs["record"] for t in told) == list(range(1, 10))


def test_a_broken_limit_tells_how_far(tmp_path):
    search = opened(tmp_path / "s")
    search.add(
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
    search = opened(tmp_path / "s", records=records)
    told = [t for t in stored(tmp_path / "s").trials if t.state.is_finished()]
    assert sorted(t.user_attrs["record"] for t in told) == [1, 2, 3, 4, 5]
    assert len(play(search, 6, records)) == 6


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
    search = opened(tmp_path / "s", records=records)
    assert len(play(search, 8, records)) == 8
    told = [t for t in stored(tmp_path / "s").trials if t.state.is_finished()]
    assert {1, 2, 3, 4, 5} <= {t.user_attrs.get("record") for t in told}


def test_a_crash_while_telling_loses_nothing(tmp_path):
    search = opened(tmp_path / "s")
    records = play(search, 3)
    proposal = search.propose({key_of(record.flags) for record in records})
    proposal.trial.set_user_attr("record", 4)  # and then it was killed
    records.append(trial(4, (150.0,), flags=proposal.settings))
    for _ in range(2):
        opened(tmp_path / "s", records=records)
    told = [t for t in stored(tmp_path / "s").trials if t.state is optuna.trial.TrialState.COMPLETE]
    assert [t.value for t in told if t.user_attrs["record"] == 4] == [150.0]


def test_a_locked_storage_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_deploy.tune.search._LOCKED_S", 0.1)
    search = opened(tmp_path / "s")
    with sqlite3.connect(tmp_path / "s" / "optuna.db", timeout=0) as held:
        held.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DeployError, match="locked"):
            search.propose(set())
