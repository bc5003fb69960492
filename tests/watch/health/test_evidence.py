from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.errors import DeployError
from dflash_deploy.watch.health import evidence
from dflash_deploy.watch.health.evidence import Decision, Policy, State, decide
from dflash_deploy.watch.health.verdict import Health, Layer, Verdict

DEAD = Health("qwen", (Layer("scheduler", Verdict.CRITICAL, "its counters stand still"),), 1, pid=7)
WELL = Health("qwen", (Layer("scheduler", Verdict.OK, "it generates"),), 1, pid=7)
HOT = Health("qwen", (Layer("GPU errors", Verdict.CRITICAL, "Xid 79"),), 1, pid=7)
POLICY = Policy(checks=3, cool_down_s=900, most_a_day=3)


def run(*checks: tuple[float, Health], active: bool = True, state: State | None = None) -> list[Decision]:
    state = state or State(service="qwen")
    decisions = []
    for now_s, health in checks:
        decision = decide(state, health, active=active, now_s=now_s, policy=POLICY)
        # What is written is what the next check reads.
        state = State.model_validate_json(decision.state.model_dump_json())
        decisions.append(decision)
    return decisions


def restarts(decisions: list[Decision]) -> list[bool]:
    return [decision.restart for decision in decisions]


def test_only_checks_in_a_row_end_in_a_restart_and_why_is_kept():
    decisions = run((60, DEAD), (120, DEAD), (180, DEAD))
    assert restarts(decisions) == [False, False, True]
    assert "1 of 3" in decisions[0].why
    (made,) = decisions[-1].state.restarts
    assert made.at_s == 180
    assert "scheduler: its counters stand still" in made.why
    assert decisions[-1].state.findings == ()


def test_one_good_check_between_begins_anew():
    assert not any(restarts(run((60, DEAD), (120, DEAD), (180, WELL), (240, DEAD), (300, DEAD))))


def test_what_a_restart_cannot_mend_brings_none():
    assert not any(restarts(run(*((60.0 * at, HOT) for at in range(1, 10)))))


def test_a_unit_that_starts_failed_or_was_stopped_is_left_alone():
    starting = replace(DEAD, starting=True)
    assert not any(restarts(run(*((60.0 * at, starting) for at in range(1, 10)))))
    assert not any(restarts(run(*((60.0 * at, DEAD) for at in range(1, 10)), active=False)))


def test_another_process_and_checks_far_apart_begin_anew():
    other = replace(DEAD, pid=8)
    assert not any(restarts(run((60, DEAD), (120, DEAD), (180, other), (240, other))))
    assert not any(restarts(run((60, DEAD), (120, DEAD), (5000, DEAD), (5060, DEAD))))


def test_no_second_restart_within_the_cool_down():
    decisions = run(*((60.0 * at, DEAD) for at in range(1, 30)))
    at = [60 * (place + 1) for place, decision in enumerate(decisions) if decision.restart]
    assert at == [180, 1080]
    assert "not again for" in decisions[6].why


def test_after_many_restarts_a_day_a_person_must_look():
    decisions = run(*((60.0 * at, DEAD) for at in range(1, 120)))
    assert sum(restarts(decisions)) == 3
    assert "a person must look" in decisions[-1].why


def test_findings_of_another_boot_do_not_count():
    state = run((60, DEAD), (120, DEAD))[-1].state.model_copy(update={"boot_id": "another"})
    assert not any(restarts(run((180, DEAD), state=state)))


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e9), st.sampled_from([DEAD, WELL, HOT, replace(DEAD, pid=None)])),
        max_size=40,
    )
)
def test_however_the_clock_jumps_restarts_keep_their_distance(checks):
    decisions = run(*checks)
    times = [now_s for (now_s, _), decision in zip(checks, decisions, strict=True) if decision.restart]
    assert all(later - sooner >= POLICY.cool_down_s for sooner, later in pairwise(times) if later >= sooner)
    assert len(decisions[-1].state.restarts if decisions else ()) <= 50


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"service": "other"}', b"[]", b"{" * 4000])
def test_a_damaged_state_is_none(tmp_path: Path, content: bytes):
    file = tmp_path / "qwen.json"
    file.write_bytes(content)
    assert evidence.read(file, "qwen") == State(service="qwen")


def test_the_state_lies_where_systemd_says_and_one_check_acts_at_a_time(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    with evidence.held("qwen") as file:
        assert file == tmp_path / "qwen.json"
        evidence.write(file, State(service="qwen", boot_id="b"))
        with pytest.raises(DeployError, match="right now"), evidence.held("qwen"):
            pass
        with evidence.held("other"):
            pass
    with evidence.held("qwen") as file:
        assert evidence.read(file, "qwen").boot_id == "b"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a\nb"])
def test_a_name_that_is_no_services_is_refused(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(DeployError), evidence.held(name):
        pass
