from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.doctor.examination import CHECKS, Check, examine, exit_code
from dflash_deploy.doctor.finding import (
    Answer,
    Finding,
    NotCheckedError,
    Repair,
    Status,
    failed,
    passed,
    warned,
)
from dflash_deploy.doctor.repair import repair
from dflash_deploy.doctor.subject import Once, Request, look_at
from dflash_deploy.doctor.view import as_json, lines
from dflash_deploy.errors import DeployError, ExitCode

from .builders import gpu, subject

TEXT = st.text(max_size=300)
ANSWERS = st.builds(
    Answer,
    status=st.sampled_from(Status),
    text=TEXT,
    fix=st.none() | TEXT,
    evidence=st.lists(TEXT, max_size=3).map(tuple),
    kind=st.sampled_from(["measured", "predicted"]),
    waits_for=st.none() | st.sampled_from(["a", "b"]),
)
FINDINGS = st.lists(
    st.builds(
        Finding,
        id=st.sampled_from("abc"),
        group=st.sampled_from(["gpu", "host"]),
        title=st.text("xyz ", min_size=1, max_size=30),
        answer=ANSWERS,
    ),
    max_size=8,
)


def check(run, id_: str = "one", limit_s: float = 60.0) -> Check:
    return Check(id_, "group", id_, run, limit_s)


def test_a_check_that_hangs_is_unknown_and_keeps_no_other_back():
    never = threading.Event()
    hanging = check(lambda _: never.wait(600), "hanging", 0.2)
    found = examine(subject(), checks=(hanging, check(lambda _: passed("well"))))
    assert [one.status for one in found] == [Status.UNKNOWN, Status.PASS]
    assert "no answer within 0.2 s" in found[0].answer.text
    never.set()


def test_a_check_that_breaks_is_unknown_with_its_words():
    def breaks(_):
        raise ZeroDivisionError("by \x1b[31m zero")

    (found,) = examine(subject(), checks=(check(breaks),))
    assert found.status is Status.UNKNOWN
    assert "ZeroDivisionError" in found.answer.text
    assert "\x1b" not in found.answer.text


def test_what_a_person_must_mend_fails_and_what_waits_says_for_what():
    def refuses(_):
        raise DeployError("it is wrong", fix="mend it")

    def waits(_):
        raise NotCheckedError("refuses")

    first, second = examine(subject(), checks=(check(refuses, "refuses"), check(waits, "waits")))
    assert (first.status, first.answer.fix) == (Status.FAIL, "mend it")
    assert (second.status, second.answer.waits_for) == (Status.UNKNOWN, "refuses")


def test_one_trouble_is_told_once():
    def homeless(_):
        raise DeployError("no home", fix="export HOME")

    def forbidden(_):
        raise PermissionError(13, "Permission denied", "/root/x")

    table = [check(homeless, "a"), check(homeless, "b"), check(forbidden, "c"), check(forbidden, "d")]
    found = examine(subject(), checks=tuple(table))
    assert [one.status for one in found] == [Status.FAIL, Status.UNKNOWN] * 2
    assert [one.answer.waits_for for one in found] == [None, "a", None, "c"]
    assert found[2].answer.text == "/root/x: Permission denied"
    assert found[2].answer.fix


def test_a_host_that_cannot_be_read_is_told_by_one_check(monkeypatch: pytest.MonkeyPatch):
    def hidden():
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr("dflash_deploy.doctor.subject.read_host", hidden)
    facts = subject(gpu(), host=look_at(Request()).host)
    found = {one.id: one.answer for one in examine(facts)}
    assert "/proc/meminfo cannot be read" in found["memory"].text
    assert "mount -t proc" in (found["memory"].fix or "")
    assert {found[name].waits_for for name in ("shared-memory", "memory-guard", "wsl", "clock")} == {"memory"}
    assert not [one.text for one in found.values() if "the check itself" in one.text]


def test_checks_that_do_not_apply_are_left_out_and_some_can_be_chosen():
    table = (check(lambda _: None, "a"), check(lambda _: passed(""), "b"), check(lambda _: passed(""), "c"))
    assert [one.id for one in examine(subject(), checks=table)] == ["b", "c"]
    assert [one.id for one in examine(subject(), checks=table, only={"c"})] == ["c"]


def test_ids_are_unique_and_every_check_says_what_it_is_for():
    ids = [one.id for one in CHECKS]
    assert len(ids) == len(set(ids))
    assert all(one.run.__doc__ for one in CHECKS)


def test_a_fact_is_asked_for_once_also_when_it_cannot_be_had():
    asked: list[int] = []

    def refuse():
        asked.append(1)
        raise DeployError("no")

    fact = Once(refuse)
    for _ in range(3):
        with pytest.raises(DeployError):
            fact()
    assert asked == [1]


def finding(status: Status, **more: object) -> Finding:
    return Finding("a", "gpu", "a", replace(Answer(status, "text"), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ("pass warn unknown", ExitCode.OK),
        ("pass fail", ExitCode.FAILED),
        ("fail unknown", ExitCode.FAILED),
        ("unknown unknown", ExitCode.MISSING),
        ("", ExitCode.MISSING),
    ],
)
def test_exit_status(statuses: str, code: ExitCode):
    assert exit_code(tuple(finding(Status(one)) for one in statuses.split())) is code


@given(found=FINDINGS, everything=st.booleans())
def test_any_finding_is_shown_in_80_columns_but_for_fixes(found: list[Finding], everything: bool):
    shown = list(lines(found, Request(profile_name="mine"), 0.1, everything=everything))
    for line in shown:
        assert line.isprintable()
        assert len(line) <= 80 or line.startswith(" " * 11 + "fix: ")
    wrong = [
        one for one in found if one.status in (Status.FAIL, Status.WARN) and one.answer.waits_for is None
    ]
    assert sum(line.startswith(("  fail ", "  warn ")) for line in shown) >= len(wrong)


def test_what_is_wrong_comes_first_and_what_is_right_is_folded():
    found = [
        Finding("a", "host", "RAM", passed("enough", "measured so")),
        Finding("b", "host", "clock", warned("not synchronised", "sync it")),
        Finding("c", "gpu", "driver", failed("none", "a b c")),
        Finding("d", "gpu", "power", Answer(Status.UNKNOWN, "not checked", waits_for="c")),
        Finding("e", "hub", "token", passed("none")),
    ]
    short = list(lines(found, Request(), 0.1, everything=False))
    assert short[0].startswith("this machine: 1 fail, 1 warn, 1 unknown, 2 pass")
    assert [line for line in short if line and not line.startswith(" ")][1:] == ["gpu", "host", "hub"]
    assert "  pass     RAM" in short
    assert "  unknown  not checked because of driver: power" in short
    assert "           fix: a b c" in short
    whole = "\n".join(lines(found, Request(), 0.1, everything=True))
    assert "RAM: enough" in whole
    assert "- measured so" in whole


def test_json_has_every_finding_with_its_kind():
    document = as_json(Request(), [finding(Status.WARN, kind="predicted")], [], 0.25)
    (found,) = document["findings"]  # type: ignore[misc]
    assert found["kind"] == "predicted"
    assert document["summary"] == {"fail": 0, "warn": 1, "unknown": 0, "pass": 0}
    assert document["exit_status"] == 0


def test_repairs_are_asked_for_and_reported_each():
    done: list[str] = []

    def refuse() -> str:
        raise DeployError("it cannot be")

    def full() -> str:
        raise OSError(28, "No space left on device", "/a")

    def well() -> str:
        done.append("well")
        return "it is done"

    found = [
        finding(Status.WARN, repair=Repair("first", well)),
        finding(Status.WARN, repair=Repair("second", refuse)),
        finding(Status.WARN, repair=Repair("third", full)),
        finding(Status.WARN, repair=Repair("fourth", well)),
        finding(Status.WARN),
    ]
    asked: list[str] = []

    def allowed(what: str) -> bool:
        asked.append(what)
        return what != "fourth"

    outcomes = [(one.what, one.outcome) for one in repair(found, allowed)]
    assert asked == ["first", "second", "third", "fourth"]
    assert outcomes == [("first", "done"), ("second", "failed"), ("third", "failed"), ("fourth", "declined")]
    assert done == ["well"]


def test_a_machine_with_a_card_is_looked_at_whole():
    found = {one.id: one.status for one in examine(subject(gpu()))}
    assert {"driver", "vram", "memory", "port", "clock", "hub-token"} <= set(found)
    assert found["driver"] is Status.PASS
    assert found["cuda"] is Status.UNKNOWN
    assert found["engine"] is Status.FAIL
