"""What people are told of a service, from check to check."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.watch.health.evidence import Policy, State, decide
from dflash_deploy.watch.health.notices import notices
from dflash_deploy.watch.health.verdict import Health, Layer, Verdict
from dflash_deploy.watch.units import UnitState

UNIT = UnitState("dflash-sglang-qwen.service", "system", "active", "running", "success", True, 0, 7)
CRASHING = replace(UNIT, active="activating", sub="auto-restart", result="exit-code", main_pid=None)
FAILED = replace(UNIT, active="failed", sub="failed", result="exit-code", restarts=5, main_pid=None)
STOPPED = replace(UNIT, active="inactive", sub="dead", main_pid=None)
STARTING = replace(UNIT, active="activating", sub="start-post")
DEAD = Health("qwen", (Layer("scheduler", Verdict.CRITICAL, "its counters stand still"),), 1, pid=7)
WELL = Health("qwen", (Layer("scheduler", Verdict.OK, "it generates"),), 1, pid=7)
NOT_ASKED = Health("qwen", (Layer("unit", Verdict.CRITICAL, "it failed so often"),), 1)


def told(
    *checks: tuple[float, UnitState, Health], every_s: float = 300.0, cool_down_s: float = 10_000.0
) -> list[tuple[float, str, str]]:
    state = State(service="qwen")
    found = []
    for now_s, unit, health in checks:
        active = unit.active == "active"
        policy = Policy(checks=2, cool_down_s=cool_down_s)
        decision = decide(state, health, active=active, now_s=now_s, policy=policy)
        said, after = notices(state, decision, health, unit, now_s=now_s, every_s=every_s)
        # What is written is what the next check reads.
        state = State.model_validate_json(after.model_dump_json())
        found += [(now_s, notice.event, notice.why) for notice in said]
    return found


def events(*checks: tuple[float, UnitState, Health], every_s: float = 300.0) -> list[tuple[float, str]]:
    return [(at_s, event) for at_s, event, _why in told(*checks, every_s=every_s)]


def test_a_service_that_is_well_tells_nothing():
    assert events((60, UNIT, WELL), (120, UNIT, WELL), (180, STOPPED, NOT_ASKED), (240, STARTING, WELL)) == []


def test_a_dead_one_is_restarted_and_serves_again():
    again = replace(UNIT, main_pid=8)
    found = told(
        (60, UNIT, DEAD), (120, UNIT, DEAD), (180, STARTING, WELL), (240, again, WELL), (300, again, WELL)
    )
    assert [(at_s, event) for at_s, event, _why in found] == [(120, "restarted"), (240, "recovered")]
    assert "its counters stand still" in found[0][2]


def test_a_crash_that_systemd_mends_is_told_with_how_it_ended():
    again = replace(UNIT, restarts=1, result="signal")
    found = told((60, UNIT, WELL), (120, again, WELL), (180, again, WELL))
    assert [(at_s, event) for at_s, event, _why in found] == [(120, "restarted")]
    assert "(signal)" in found[0][2]


def test_one_that_systemd_gave_up_is_down_once_and_told_when_it_serves():
    found = told((60, UNIT, WELL), (120, CRASHING, NOT_ASKED), (180, FAILED, NOT_ASKED), (1000, UNIT, WELL))
    assert [event for _at_s, event, _why in found] == ["down", "restarted", "recovered"]
    assert "it failed so often" in found[0][2]


def test_one_kind_is_not_told_again_too_soon_but_the_end_is_told():
    checks = [(60.0 * at, FAILED if at % 2 else UNIT, NOT_ASKED if at % 2 else WELL) for at in range(1, 12)]
    found = events(*((at_s, replace(unit, restarts=0), health) for at_s, unit, health in checks))
    assert found == [(60, "down"), (120, "recovered"), (420, "down"), (480, "recovered")]
    # It is down at the end, and that is told as soon as it may be.
    checks += [(720.0, FAILED, NOT_ASKED), (780.0, FAILED, NOT_ASKED)]
    found = events(*((at_s, replace(unit, restarts=0), health) for at_s, unit, health in checks))
    assert found[-1] == (720, "down")


def test_restarts_that_came_too_often_are_counted():
    checks = [(60.0 * at, replace(UNIT, restarts=at), WELL) for at in range(1, 8)]
    found = told(*checks)
    assert [at_s for at_s, _event, _why in found] == [120, 420]
    assert "4 restarts before were not told" in found[1][2]


@given(
    st.lists(
        st.tuples(st.floats(0, 4000), st.sampled_from([UNIT, CRASHING, FAILED, STOPPED, STARTING]),
                  st.sampled_from([DEAD, WELL, NOT_ASKED])),
        max_size=60,
    )
)  # fmt: skip
def test_never_more_than_twelve_an_hour_nor_one_kind_twice_within_its_time(checks):
    found = events(*sorted(checks, key=lambda check: check[0]), every_s=100)
    for kind in ("down", "restarted", "recovered"):
        times = [at_s for at_s, event in found if event == kind]
        assert all(later - sooner >= 100 for sooner, later in pairwise(times))
    for at_s, _event in found:
        assert sum(at_s - 3600 < other <= at_s for other, _ in found) <= 12
