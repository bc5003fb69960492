from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash_deploy.deploy.generations import Generation, Store, root_of
from dflash_deploy.deploy.versions import Versions
from dflash_deploy.watch.memory import Part
from dflash_deploy.watch.recorded import recorded
from dflash_deploy.watch.units import UnitState

UNIT = UnitState("dflash-sglang-qwen.service", "user", "active", "running", "success", True, 0, 1)
EVIDENCE = (
    '{"number": 3, "measured": {"accept_length": 4.5}, "boot": {"stage": "serving", "weights": ['
    '{"architecture": "T", "memory_gib": 17.0, "elapsed_s": 1, "free_after_gib": 14}]}}'
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return Store(root_of("user") / "qwen", "qwen")


def generation(number: int) -> Generation:
    return Generation(
        service="qwen", number=number, created=datetime.now(UTC), tool_version="1", manager="user",
        source="s", simulated=False, flags={}, argv=("/p",), env={}, host="127.0.0.1",
        health_host="127.0.0.1", port=1, versions=Versions(), vram_expected_mib=29_000, unit_sha256="",
    )  # fmt: skip


def test_the_current_generation_tells_what_was_measured(store: Store):
    for number in (1, 2):
        store.add(generation(number), "[Unit]\n", EVIDENCE)
    store.switch(2)
    known = recorded(UNIT)
    assert known is not None
    assert (known.generation, known.expected_mib, known.accept_length) == (2, 29_000, 4.5)
    assert known.memory == (Part("weights", 17_408), Part("rest", 29_000 - 17_408))


@pytest.mark.parametrize("evidence", [None, "{}", '{"measured": null}'])
def test_a_generation_without_a_trial_is_known_all_the_same(store: Store, evidence: str | None):
    store.add(generation(1), "[Unit]\n", evidence)
    store.switch(1)
    known = recorded(UNIT)
    assert known is not None
    assert (known.generation, known.accept_length, known.memory) == (1, None, ())


def test_what_is_not_installed_or_damaged_is_none(store: Store):
    assert recorded(UNIT) is None
    store.add(generation(1), "[Unit]\n", "{")
    store.switch(1)
    assert recorded(UNIT) is None
