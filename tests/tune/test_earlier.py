"""What won before on this machine is tried early in a new study."""

from datetime import UTC, datetime

from dflash_deploy.tune.records import trial_folder, write_record
from dflash_deploy.tune.studies import studies_dir
from dflash_deploy.tune.study import earlier_bests

from .samples import profile, study, trial


def kept(name, day, trials, **given):
    record = study().model_copy(
        update={"name": name, "created": datetime(2026, 1, day, tzinfo=UTC), "simulated": False, **given}
    )
    folder = studies_dir() / name
    for one in trials:
        write_record(trial_folder(folder, one.number) / "trial.json", one)
    write_record(folder / "study.json", record)
    return record


def test_the_best_of_earlier_studies_of_the_same_service_come_newest_first(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept("old", 1, [trial(1, (100.0,)), trial(2, (120.0,))])
    kept("newer", 2, [trial(3, (110.0,))], engine_version="0.5.20")
    kept("failed", 3, [trial(1)])
    kept("other-card", 3, [trial(1, (900.0,))], card="rtx-3090")
    kept("simulated", 3, [trial(1, (900.0,))], simulated=True)
    now = kept("now", 4, [])
    kept("later", 5, [trial(1, (900.0,))])
    assert [(one.name, best.number) for one, best in earlier_bests(now)] == [("newer", 3), ("old", 2)]
    assert earlier_bests(now.model_copy(update={"simulated": True})) == []


def test_a_best_that_drafts_in_a_way_that_is_not_to_be_tried_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    wide = profile(search={"method": {"choices": ["none", "ngram", "mtp"]}})
    narrow = profile(search={"method": {"choices": ["none", "mtp"]}})
    kept("ngram", 1, [trial(1, (100.0,), flags={"method": "ngram"})], profile=wide)
    kept("mtp", 2, [trial(1, (100.0,), flags={"method": "mtp"})], profile=wide)
    kept("plain", 3, [trial(1, (100.0,))])
    assert [one.name for one, _ in earlier_bests(kept("now", 4, [], profile=narrow))] == ["plain", "mtp"]
    assert [one.name for one, _ in earlier_bests(kept("now2", 4, []))] == ["plain"]


def test_a_damaged_study_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept("old", 1, [trial(1, (100.0,))])
    (studies_dir() / "old" / "trials" / "0001" / "trial.json").write_text("{")
    assert earlier_bests(kept("now", 4, [])) == []
