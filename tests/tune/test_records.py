"""What is found on disk: damaged, half written, from another version; and how a study gets its name."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.tune.records import Candidate, cut_short, read_study, read_trials, write_record
from dflash_deploy.tune.studies import last_study, studies_dir
from dflash_deploy.tune.study import create_study

from .samples import profile, trial


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def created(name=None):
    return create_study(
        name,
        profile(),
        profile_name="small",
        simulated=True,
        card="rtx-5090",
        engine_version="0.5.23",
        time_scale=60.0,
        seed=0,
    )[0]


def kept(folder, number=1):
    path = folder / "trials" / f"{number:04d}" / "trial.json"
    write_record(path, trial(number, (100.0,)))
    return path


def test_tuners_that_start_at_one_moment_get_names_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: created(), range(16)))
    assert len(set(folders)) == 16
    assert all(read_study(folder).name == folder.name for folder in folders)


def test_a_name_that_was_chosen_is_not_changed():
    created("mine")
    with pytest.raises(DeployError, match="mine already") as caught:
        created("mine")
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert "tune --resume --name mine" in caught.value.fix


def test_the_last_study_is_found_beside_damaged_ones():
    old, new = created("old"), created("new")
    (old / "study.json").write_text("{")
    os.utime(old / "study.json", (1, 1))
    assert last_study() == new
    os.utime(new / "study.json", (0, 0))
    assert last_study() == old
    with pytest.raises(DeployError, match=r"old/study\.json"):
        read_study(last_study())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:300]),
        lambda path: path.write_bytes(b"\xff\0" * 50),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1})),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["cut", "binary", "newer", "folder"],
)
def test_a_record_that_cannot_be_read_says_which_and_what_helps(spoil):
    folder = created("s")
    path = kept(folder)
    spoil(path)
    with pytest.raises(DeployError) as caught:
        read_trials(folder)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    assert f"move {path.parent} away" in caught.value.fix


def test_what_else_lies_about_does_not_disturb():
    folder = created("s")
    kept(folder)
    cut = trial(2, None)
    write_record(
        folder / "trials" / "0002" / "candidate.json",
        Candidate(number=2, source=cut.source, flags=cut.flags, started=cut.started),
    )
    (folder / "trials" / "0003").mkdir()
    (folder / "trials" / "notes").write_text("x")
    (folder / "trials" / "0001" / ".trial.json.abc").write_text("{")
    assert [record.number for record in read_trials(folder)] == [1]
    assert [candidate.number for candidate in cut_short(folder)] == [2]
    assert studies_dir() == folder.parent
