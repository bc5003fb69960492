"""What a check does: counts, restarts, tells; and keeps its hands off while a command works."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash_deploy.deploy.generations import Generation, PendingChange, Store, root_of
from dflash_deploy.deploy.versions import Versions
from dflash_deploy.profile.schema import Notify
from dflash_deploy.server.processes import Identity, identity_of
from dflash_deploy.watch import history
from dflash_deploy.watch.health import act, evidence
from dflash_deploy.watch.health.verdict import Figure, Health, Layer, Verdict
from dflash_deploy.watch.units import UnitState

UNIT = UnitState("dflash-sglang-qwen.service", "user", "active", "running", "success", True, 0, 7)
DEAD = Health("qwen", (Layer("scheduler", Verdict.CRITICAL, "its counters stand still"),), 1, pid=7)
BUSY = Layer(
    "scheduler", Verdict.OK, "it generates", None,
    (Figure("generation_throughput", 200.0, "tokens_per_s"), Figure("vram_free", 900, "mib", None, None, 0),
     Figure("vram_free", 700, "mib", None, None, 1)),
)  # fmt: skip
WELL = Health("qwen", (BUSY,), 1, pid=7)
POLICY = evidence.Policy(checks=1)


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The manager of the person who runs the tests is not touched."""
    made: list[str] = []
    monkeypatch.setattr(act.units, "restart", lambda unit: made.append(unit.name))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(root_of("user") / "qwen", "qwen")
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told; echo >> {tmp_path}/told; exit 9\n")
    hook.chmod(0o755)
    generation = Generation(
        service="qwen", number=1, created=datetime.now(UTC), tool_version="1", manager="user",
        source="s", simulated=False, flags={}, argv=("/p",), env={}, host="127.0.0.1",
        health_host="127.0.0.1", port=1, versions=Versions(), unit_sha256="",
        notify=Notify(command=[str(hook)]),
    )  # fmt: skip
    store.add(generation, "[Unit]\n", None)
    store.switch(1)
    return store


def test_nothing_is_done_while_a_command_changes_the_service(store: Store, restarted: list[str]):
    change = PendingChange(
        operation="install", before=1, after=2, running=True, process=identity_of(os.getpid())
    )
    store.begin(change)
    (said,) = act.act(UNIT, DEAD, POLICY)
    assert said == f"nothing is done: install of generation 2 is under way (process {os.getpid()})"
    assert restarted == []
    assert not evidence.state_folder().exists()
    # One that was cut short keeps nothing from being mended.
    store.begin(change.model_copy(update={"process": Identity(os.getpid(), 0)}))
    assert "restarting" in act.act(UNIT, DEAD, POLICY)[0]
    assert restarted == [UNIT.name]


def test_a_restart_is_told_and_a_hook_that_fails_changes_nothing(
    store: Store, restarted: list[str], tmp_path: Path
):
    said = act.act(UNIT, DEAD, POLICY)
    assert said[0].startswith("restarting dflash-sglang-qwen.service: ")
    assert "ended with status 9" in said[1]
    assert json.loads((tmp_path / "told").read_text())["event"] == "restarted"
    assert restarted == [UNIT.name]
    (again, problem) = act.act(UNIT, WELL, POLICY)
    assert again == "nothing to do: it serves"
    assert "nobody was told" in problem
    told = [json.loads(line)["event"] for line in (tmp_path / "told").read_text().splitlines() if line]
    assert told == ["restarted", "recovered"]


def test_each_check_leaves_a_sample(restarted: list[str]):
    act.act(UNIT, WELL, POLICY)
    (sample,) = history.read(evidence.state_folder() / "qwen.sqlite", since_s=0)
    assert (sample.tokens_per_s, sample.vram_free_mib, sample.kv_usage) == (200.0, 700.0, None)
