"""A service lends its card. systemd is a list of what it was told; the files and the kill are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dflash_deploy.deploy.lend import Unit, give_back_lost, lent, require_consent, unit_of
from dflash_deploy.errors import DeployError, ExitCode

SERVICE = Unit(manager="system", name="dflash-qwen.service")


class Told:
    """What a service manager was told; ``broken`` units do not start."""

    def __init__(self, broken=()):
        self.said = []
        self.broken = broken

    def __call__(self, kind):
        self.kind = kind
        return self

    def start(self, unit):
        self.said.append(f"start {unit}")
        return unit not in self.broken

    def stop(self, unit):
        self.said.append(f"stop {unit}")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_stopped_and_started_again():
    told, heard = Told(), []
    with lent([SERVICE], told, heard.append):
        assert told.said == ["stop dflash-qwen.service"]
        assert give_back_lost(told) == (), "who borrowed it still works"
    assert told.said == ["stop dflash-qwen.service", "start dflash-qwen.service"]
    assert "started again" in heard[-1]
    assert give_back_lost(told) == ()


def test_also_when_the_study_fails():
    told = Told()
    with pytest.raises(KeyboardInterrupt), lent([SERVICE], told, lambda _: None):
        raise KeyboardInterrupt
    assert told.said[-1] == "start dflash-qwen.service"


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
    told = Told()
    assert give_back_lost(told) == ("dflash-qwen.service is started again",)
    assert told.said == ["start dflash-qwen.service"]
    assert give_back_lost(told) == ()


def test_what_does_not_start_is_told_and_tried_again():
    told = Told(broken=("dflash-qwen.service",))
    with pytest.raises(DeployError, match="does not start again"), lent([SERVICE], told, lambda _: None):
        pass
    # The borrower is this very process; to anybody else it would be lost.
    assert told.said[-1] == "start dflash-qwen.service"


def test_nobody_is_stopped_without_consent():
    with pytest.raises(DeployError, match=r"dflash-qwen.service is running on this card") as refused:
        require_consent([SERVICE], given=False)
    assert refused.value.exit_code == ExitCode.UNAVAILABLE
    assert "--stop-service" in (refused.value.fix or "")
    require_consent([SERVICE], given=True)
    require_consent([], given=False)


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
