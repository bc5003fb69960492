"""A service lends its card. systemd is a list of what it was told; the files and the kill are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dflash_deploy.deploy import lend
from dflash_deploy.deploy.lend import Unit, give_back_lost, lent, not_back, require_consent, unit_of, units_of
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.gpu import GpuProcess

SERVICE = Unit(manager="system", name="dflash-qwen.service")
OTHER = Unit(manager="user", name="llm.service")


class Told:
    """What a service manager was told.

    ``broken`` units do not start, ``kept`` ones may not be stopped, ``gone`` ones are not there.
    """

    def __init__(self, broken=(), kept=(), gone=(), running=(SERVICE.name, OTHER.name)):
        self.said = []
        self.broken, self.kept, self.gone = broken, kept, gone
        self.running = set(running)

    def __call__(self, kind):
        self.kind = kind
        return self

    def known(self, unit):
        return unit not in self.gone

    def active(self, unit):
        return "active" if unit in self.running else "inactive"

    def start(self, unit):
        self.said.append(f"start {unit}")
        if unit in self.broken:
            return False
        self.running.add(unit)
        return True

    def stop(self, unit):
        if unit in self.kept:
            raise DeployError(f"{unit} may not be stopped")
        self.said.append(f"stop {unit}")
        self.running.discard(unit)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def given_back(told):
    return list(give_back_lost(told))


def test_it_is_stopped_and_started_again():
    told, heard = Told(), []
    with lent([SERVICE], told, heard.append) as failed:
        assert told.said == ["stop dflash-qwen.service"]
        assert given_back(told) == [], "who borrowed it still works"
    assert told.said == ["stop dflash-qwen.service", "start dflash-qwen.service"]
    assert failed == []
    assert "started again" in heard[-1]
    assert given_back(told) == []


def test_also_when_the_study_fails():
    told = Told()
    with pytest.raises(KeyboardInterrupt), lent([SERVICE], told, lambda _: None):
        raise KeyboardInterrupt
    assert told.said[-1] == "start dflash-qwen.service"


def test_one_that_may_not_be_stopped_is_named_and_what_was_stopped_before_it_runs_again():
    told, heard = Told(kept=(OTHER.name,)), []
    with (
        pytest.raises(DeployError, match=r"llm\.service may not be stopped"),
        lent([SERVICE, OTHER], told, heard.append),
    ):
        pytest.fail("the study must not begin")
    assert told.said == ["stop dflash-qwen.service", "start dflash-qwen.service"]
    assert not any("does not start" in line for line in heard)


def test_two_who_borrow_from_different_services_do_not_lose_each_other(home):
    borrower = """
import os, signal, sys
sys.path.insert(0, "tests")
from deploy.test_lend import OTHER, Told
from dflash_deploy.deploy.lend import lent
with lent([OTHER], Told(), lambda _: None):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    told = Told(running=())
    with lent([SERVICE], told, lambda _: None):
        subprocess.run([sys.executable, "-c", borrower], env=dict(os.environ), check=False)
        assert given_back(told) == ["llm.service is started again"]
    assert told.said[-1] == "start dflash-qwen.service"
    assert list((home / "dflash-deploy" / "lent").iterdir()) == []


def test_a_killed_borrower_is_followed_by_a_run_that_gives_back():
    borrower = """
import os, signal, sys
sys.path.insert(0, "tests")
from deploy.test_lend import SERVICE, Told
from dflash_deploy.deploy.lend import lent
with lent([SERVICE], Told(), lambda _: None):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", borrower], env=dict(os.environ), check=False)
    assert ended.returncode == -signal.SIGKILL
    told = Told(running=())
    assert given_back(told) == ["dflash-qwen.service is started again"]
    assert told.said == ["start dflash-qwen.service"]
    assert given_back(told) == []


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        (Told(broken=(SERVICE.name,), running=()), "does not start: journalctl -u dflash-qwen.service"),
        (Told(gone=(SERVICE.name,), running=()), "is not there any more"),
    ],
)
def test_what_was_lost_for_good_is_told_once_and_keeps_nobody_from_tuning(home, monkeypatch, manager, said):
    with lent([SERVICE], Told(), lambda _: None):
        (record,) = (home / "dflash-deploy" / "lent").iterdir()
        kept = record.read_bytes()
    record.write_bytes(kept)
    monkeypatch.setattr(lend, "alive", lambda _: False)
    (sentence,) = given_back(manager)
    assert said in sentence
    assert given_back(manager) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"units": 1}', b"\xff" * 100])
def test_a_damaged_record_does_no_harm(home, content):
    (home / "dflash-deploy" / "lent").mkdir(parents=True)
    (home / "dflash-deploy" / "lent" / "1-1.json").write_bytes(content)
    assert given_back(Told()) == []


def test_what_does_not_start_after_the_study_is_handed_out_and_told():
    told, heard = Told(broken=(SERVICE.name,)), []
    with lent([SERVICE], told, heard.append) as failed:
        pass
    assert failed == [SERVICE]
    assert "does not start" in heard[-1]
    assert "systemctl start dflash-qwen.service" in str(not_back(failed).fix)


def test_what_cannot_be_written_down_is_not_stopped(home):
    (home / "dflash-deploy").mkdir()
    (home / "dflash-deploy" / "lent").write_text("")
    told = Told()
    with pytest.raises(DeployError, match="would stay stopped"), lent([SERVICE], told, lambda _: None):
        pytest.fail("the study must not begin")
    assert told.said == []


def test_nobody_is_stopped_without_consent():
    with pytest.raises(DeployError, match=r"dflash-qwen.service is running on this card") as refused:
        require_consent([SERVICE], given=False)
    assert refused.value.exit_code == ExitCode.UNAVAILABLE
    assert "--stop-service" in (refused.value.fix or "")
    require_consent([SERVICE], given=True)
    require_consent([], given=False)


def test_a_desktop_that_a_service_runs_is_no_service_to_stop(monkeypatch):
    units = {10: Unit(manager="system", name="lightdm.service"), 11: SERVICE, 12: SERVICE, 13: OTHER}
    monkeypatch.setattr(lend, "unit_of", units.get)
    process = lambda pid, kind, desktop=False: GpuProcess(pid, "x", None, 100, kind, desktop)  # noqa: E731
    holders = [
        process(10, "graphics", True),
        process(11, "compute"),
        process(12, "both"),
        process(13, "both", True),
        process(14, "compute"),
    ]
    assert units_of(holders) == (SERVICE,)


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/dflash-qwen.service", Unit(manager="system", name="dflash-qwen.service")),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service",
            Unit(manager="user", name="llm.service"),
        ),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-term.scope", None),
        (
            "12:devices:/docker/abc\n1:name=systemd:/system.slice/docker.service/x",
            Unit(manager="system", name="docker.service"),
        ),
        ("", None),
    ],
)
def test_a_process_tells_its_service(tmp_path, cgroup, unit):
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(cgroup + "\n")
    assert unit_of(77, proc=tmp_path) == unit
    assert unit_of(78, proc=tmp_path) is None
