"""Workers that share a study, in one storage that they all reach."""

import threading
from datetime import UTC, datetime

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.tune.crew import Crew
from dflash_deploy.tune.meeting import Meeting, meet, read_meeting
from dflash_deploy.tune.records import Candidate
from dflash_deploy.tune.space import space_of

from . import samples
from .conftest import wait_for

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def crew(tmp_path):
    def join(worker, records=(), beat_s=600.0, **given):
        study = samples.study(**given)
        meeting = Meeting(
            storage=f"sqlite:///{tmp_path / 'shared.db'}", study="s", worker=worker, beat_s=beat_s
        )
        return Crew(meeting, study, space_of(study.profile), {"model-path": "m"}, records)

    return join


def candidate(running, **given):
    content = {"number": 0, "source": "search", "flags": {"max-running-requests": running}, "started": START}
    return Candidate(**(content | given))


def served(number, running):
    return samples.trial(number, rounds=(100.0,), flags={"max-running-requests": running})


def race(workers):
    """All of them want the same configurations at the same moments."""
    granted = {number: [] for number in range(len(workers))}
    together = threading.Barrier(len(workers))

    def work(place):
        for running in range(1, 5):
            together.wait()
            claimed = workers[place].claim(candidate(running))
            if claimed is not None:
                granted[place].append((running, claimed.number))
                workers[place].publish(served(claimed.number, running))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_granted = [one for own in granted.values() for one in own]
    assert sorted(running for running, _ in all_granted) == [1, 2, 3, 4], "each once"
    assert len({number for _, number in all_granted}) == 4, "under a number of its own"
    for place, worker in enumerate(workers):
        others = {one for other, own in granted.items() if other != place for one in own}
        assert {(r.flags["max-running-requests"], r.number) for r in worker.news()} == others
        assert worker.news() == []


def test_each_configuration_is_one_worker_s(crew):
    race([crew(f"w{number}") for number in range(3)])


def test_results_reach_the_others_without_what_is_private(crew):
    one, two = crew("one"), crew("two")
    claimed = one.claim(candidate(2, source="known:x", flags={"model-path": "m", "max-running-requests": 2}))
    assert [other.flags for other in two.pending()] == [claimed.flags]
    assert one.pending() == []
    assert two.claim(candidate(2)) is None, "another spelling of the model is the same configuration"
    record = served(claimed.number, 2).model_copy(update={"env": {"HF_TOKEN": "private"}})
    one.publish(record)
    assert two.news() == [record.model_copy(update={"env": {}})]
    assert two.pending() == []
    assert one.news() == []
    assert crew("three").claim(candidate(2)) is None, "also of who comes later"


def test_what_was_interrupted_is_free_again(crew):
    one, two = crew("one"), crew("two")
    claimed = one.claim(candidate(2))
    one.publish(samples.trial(claimed.number, outcome="interrupted", reason="stopped by hand"))
    assert [record.outcome for record in two.news()] == ["interrupted"]
    assert two.claim(candidate(2)).number > claimed.number


def test_a_lost_worker_s_trial_is_taken_back(crew):
    lost = crew("lost")  # it never shows a sign of life
    claimed = lost.claim(candidate(2))
    with crew("one", beat_s=0.05) as one:
        news = []
        wait_for(lambda: news.extend(one.news()) or news)
        (record,) = news
        assert (record.number, record.outcome) == (claimed.number, "interrupted")
        assert record.reason == "worker lost was lost"
        assert record.flags == claimed.flags
        assert one.pending() == []
        again = one.claim(candidate(2))
        assert again is not None
        one.publish(served(again.number, 2))
        # It was only asleep: its result is not needed any more, and harms nothing.
        lost.publish(served(claimed.number, 2))
        assert one.news() == []


def test_who_comes_back_late_with_a_result_that_nobody_has_brings_it(crew):
    late = crew("late")
    claimed = late.claim(candidate(2))
    with crew("one", beat_s=0.05) as one:
        wait_for(lambda: not one.pending())
        one.news()
        late.publish(served(claimed.number, 2))
        assert [record.outcome for record in one.news()] == ["served"]
        assert one.claim(candidate(2)) is None


def test_signs_of_life_keep_a_trial(crew):
    # Six of the latter's beats without one of the former's, as on a busy disk, and it would count as lost.
    with crew("slow", beat_s=0.05) as slow, crew("one", beat_s=0.3) as one:
        slow.claim(candidate(2))
        assert not threading.Event().wait(2.2)
        assert len(one.pending()) == 1


def test_a_worker_that_was_killed_tidies_up_when_it_comes_back(crew):
    one, two = crew("one"), crew("two")
    claimed = one.claim(candidate(2))
    crew("one", [served(claimed.number, 2)])  # it had written its record, and not published it
    assert [record.outcome for record in two.news()] == ["served"]
    one.claim(candidate(3))
    crew("one")  # it had not even begun
    assert two.pending() == []
    assert two.claim(candidate(3)) is not None


def test_a_worker_that_leaves_gives_up_its_claim(crew):
    with crew("one") as one:
        one.claim(candidate(2))
    assert crew("two").claim(candidate(2)) is not None


def test_workers_of_different_studies_do_not_mix(crew):
    crew("one")
    with pytest.raises(DeployError, match="of another profile"):
        crew("two", workload={"users": 3, "context_tokens": 1000, "output_tokens": 64})
    crew("three", env={"MINE": "alone"}, service={"name": "other"})


@pytest.mark.parametrize(
    "storage",
    [
        "postgresql://me:secret@db/x",
        "postgresql://db/x?password=secret",
        "postgresql+psycopg://me:secret@db/x",
        "postgresql://db/x?sslpassword=secret",
    ],
)
def test_no_password_stands_in_an_address(storage):
    with pytest.raises(DeployError, match="a password in the storage's address") as caught:
        meet(storage, "s", None, None)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "PGPASSFILE" in caught.value.fix
    assert "secret" not in f"{caught.value.message} {caught.value.fix}"


@pytest.mark.parametrize(
    "storage", ["", "mysql://x/y", "postgres", "grpc://host", "grpc://a b:1", "http://x"]
)
def test_storages_that_are_none(storage):
    with pytest.raises(DeployError, match="is given as postgresql://"):
        meet(storage, "s", None, None)


def test_a_worker_finds_back(tmp_path):
    meeting = meet("postgresql://me@db/x", "s", None, 1)
    assert meeting.worker.endswith("-gpu1")
    assert read_meeting(tmp_path) is None
    meeting.keep(tmp_path)
    assert read_meeting(tmp_path) == meeting


def test_a_storage_that_is_not_there_is_told_at_once(tmp_path):
    meeting = Meeting(storage=f"sqlite:///{tmp_path}/no/such/folder.db", study="s", worker="w")
    with pytest.raises(DeployError, match="cannot be used: unable to open database file") as caught:
        meeting.open()
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
