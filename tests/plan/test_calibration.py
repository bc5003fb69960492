"""One boot log makes the next prediction of that machine a good one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy import calibration as kept
from dflash_deploy.checkpoint.cards import load_model_card
from dflash_deploy.engine.boot import BootRecord, GraphCapture, KvPool, LoadedWeights, Stage, StateCache
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.plan.calibration import calibrate
from dflash_deploy.plan.terms import Terms, terms_for
from dflash_deploy.plan.vram import Question, plan
from tests.simulator.conftest import FOUR_USERS, ONE_USER, Launcher, launching

from .published import accuracy

TARGET = load_model_card("qwen3.8-27b-nvfp4")
DFLASH2 = load_model_card("qwen3.8-27b-dflash2")
COMMON = {
    "speculative-algorithm": "DFLASH",
    "mamba-ssm-dtype": "bfloat16",
    "kv-cache-dtype": "fp8_e4m3",
    "disable-prefill-cuda-graph": True,
}
ONE = Question(
    32607,
    TARGET,
    DFLASH2,
    {
        **COMMON,
        "mem-fraction-static": 0.85,
        "max-running-requests": 1,
        "max-mamba-cache-size": 4,
        "mamba-radix-cache-strategy": "extra_buffer_lazy",
    },
    "0.5.23",
)
FOUR = Question(
    32607,
    TARGET,
    DFLASH2,
    {
        **COMMON,
        "mem-fraction-static": 0.95,
        "max-total-tokens": 8192,
        "max-running-requests": 4,
        "max-mamba-cache-size": 4,
        "disable-radix-cache": True,
        "cuda-graph-bs-decode": (1, 2, 3, 4),
    },
    "0.5.23",
    users=4,
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    with launching(tmp_path_factory.mktemp("simulated")) as start:
        yield start


def simulated_log(launch: Launcher, flags: str, seed: int) -> BootRecord:
    server = launch(flags, scale=5000, DFLASH_SIM_SEED=str(seed))
    server.process.kill()
    return read_boot_log(server.text().splitlines())


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
def test_one_log_of_a_simulated_machine(launch: Launcher, seed: int):
    logs = {"one": simulated_log(launch, ONE_USER, seed), "four": simulated_log(launch, FOUR_USERS, seed)}
    for first, seen, second, wanted in (
        (ONE, logs["one"], FOUR, logs["four"]),
        (FOUR, logs["four"], ONE, logs["one"]),
    ):
        learnt = calibrate(first, seen)
        assert abs(learnt.after_mib) < 16
        following = plan(replace(second, terms=learnt.terms))
        assert following.ready_free_mib == pytest.approx(wanted.free_at_ready_gib * 1024, abs=256)
        assert following.kv_tokens == pytest.approx(wanted.kv_tokens, rel=0.05)


def test_memory_seen_after_the_first_requests(launch: Launcher):
    log = simulated_log(launch, ONE_USER, 3)
    learnt = calibrate(ONE, log, used_mib=29_500.0)
    assert plan(replace(ONE, terms=learnt.terms)).predicted_peak_mib == pytest.approx(29_500, abs=1)
    assert "kernels" in learnt.learnt


def test_a_plan_that_ends_early_is_not_held_against_a_server_under_load():
    short = replace(ONE, flags={**ONE.flags, "mem-fraction-static": 0.6})
    assert plan(short).fails_at is not None
    learnt = calibrate(short, BootRecord(Stage.SERVING), used_mib=29_500.0)
    assert "kernels" not in learnt.learnt


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.8-27b-nvfp4"])
def test_memory_seen_is_learnt_of_small_models_too(model: str):
    flags = {"mem-fraction-static": 0.85, "disable-prefill-cuda-graph": True}
    asked = Question(32607, load_model_card(model), None, flags, "0.5.23")
    assert plan(asked).fails_at is None
    used_mib = plan(asked).predicted_peak_mib + 400
    learnt = calibrate(asked, BootRecord(Stage.SERVING), used_mib=used_mib)
    assert plan(replace(asked, terms=learnt.terms)).predicted_peak_mib == pytest.approx(used_mib, abs=1)


def test_a_server_that_serves_where_the_plan_ran_out_of_memory():
    """Less is taken than was thought: the plan without the log would end at the capture."""
    heavy = Terms(workspace=4000.0, graphs=3.0)
    asked = replace(ONE, flags={**ONE.flags, "mem-fraction-static": 0.92}, terms=heavy)
    light = plan(replace(asked, terms=terms_for(32607)))
    assert plan(asked).fails_at is not None
    assert light.fails_at is None
    seen = BootRecord(
        Stage.SERVING,
        free_before_load_gib=(32607 - light.driver_mib - light.pool_mib("context")) / 1024,
        graphs=tuple(
            GraphCapture(role, "verify", (1,), 1.0, light.pool_mib(pool) / 1024)
            for role, pool in (("target", "verify graphs"), ("draft", "draft graphs"))
        ),
        free_at_ready_gib=light.ready_free_mib / 1024,
    )
    learnt = calibrate(asked, seen)
    assert learnt.before_mib < -1000
    assert abs(learnt.after_mib) < 16
    assert learnt.agrees
    assert plan(replace(asked, terms=learnt.terms)).fails_at is None


def test_a_log_of_another_configuration_is_told_apart():
    """No server serves where the sizing leaves nothing."""
    other = replace(ONE, flags={**ONE.flags, "mem-fraction-static": 0.6})
    learnt = calibrate(other, BootRecord(Stage.SERVING, free_at_ready_gib=3.0))
    assert not learnt.agrees
    assert learnt.before_mib is None


def test_two_boots_of_one_published_machine():
    rows = {row["id"]: row for row in json.loads(accuracy().DATA.read_text())["boots"]}
    first, second = rows["pro6000-bf16-2"], rows["pro6000-fp8-3"]

    def question(row: dict) -> Question:
        return Question(row["card_memory_mib"], TARGET, DFLASH2, row["flags"], row["version"], users=2)

    learnt = calibrate(question(first), read_boot_log(first["log"]))
    assert abs(learnt.after_mib) < 16
    budget = plan(replace(question(second), terms=learnt.terms))
    assert budget.kv_tokens == pytest.approx(second["observed"]["kv_tokens"], rel=0.001)
    graphs = sum(pool.mib for pool in budget.pools if pool.name.endswith("graphs"))
    assert graphs == pytest.approx(second["observed"]["all_graphs_gib"] * 1024, abs=64)


def test_a_log_that_tells_nothing_changes_nothing():
    learnt = calibrate(ONE, BootRecord(Stage.ARGUMENTS))
    assert learnt.terms == terms_for(32607)
    assert (learnt.before_mib, learnt.after_mib, learnt.learnt) == (None, None, ())


GIB = st.floats(-5, 200)
LOGS = st.builds(
    BootRecord,
    stage=st.sampled_from(list(Stage)),
    free_before_load_gib=st.none() | GIB,
    weights=st.lists(st.builds(LoadedWeights, st.just("A"), GIB, GIB, GIB), max_size=3).map(tuple),
    state_cache=st.none() | st.builds(StateCache, st.integers(0, 500), GIB, GIB),
    kv_pools=st.lists(st.builds(KvPool, st.integers(0, 10**7), GIB), max_size=2).map(tuple),
    free_after_pools_gib=st.none() | GIB,
    graphs=st.lists(
        st.builds(
            GraphCapture, st.just("target"), st.sampled_from(["prefill", "verify"]), st.just((1,)), GIB, GIB
        ),
        max_size=3,
    ).map(tuple),
    kv_tokens=st.none() | st.integers(0, 10**7),
    max_running_requests=st.none() | st.integers(0, 500),
    free_at_ready_gib=st.none() | GIB,
)


@settings(max_examples=200)
@given(LOGS, st.sampled_from([ONE, FOUR]), st.none() | st.floats(0, 100_000))
def test_any_log_can_be_read(record: BootRecord, question: Question, used_mib: float | None):
    learnt = calibrate(question, record, used_mib=used_mib)
    budget = plan(replace(question, terms=learnt.terms))
    assert all(pool.mib >= 0 for pool in budget.pools)


# What is kept between runs.

SUBJECT = kept.Subject("NVIDIA GeForce RTX 5090", "0.5.23", TARGET.id, None)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dflash-deploy" / "calibration"


def test_kept_shown_and_forgotten(state: Path):
    assert kept.load(SUBJECT) is None
    learnt = replace(
        calibrate(ONE, BootRecord(Stage.ARGUMENTS)), terms=Terms(context=901.5), before_mib=-70.0
    )
    kept.keep(SUBJECT, learnt)
    record = kept.keep(SUBJECT, learnt)
    assert (record.boots, record.before_mib) == (2, -70.0)
    assert kept.load(SUBJECT) == record
    assert record.corrected() == Terms(context=901.5)
    assert list(kept.records()) == [record]
    assert kept.reset(machine="another machine") == 0
    assert kept.reset() == 1
    assert kept.load(SUBJECT) is None
    assert list(kept.records()) == []


@pytest.mark.parametrize(
    "other", [{"machine": "another"}, {"version": "0.5.22"}, {"target": "qwen3-8b"}, {"draft": "another"}]
)
def test_what_is_learnt_of_one_is_not_used_for_another(state: Path, other: dict[str, str]):
    kept.keep(SUBJECT, calibrate(ONE, BootRecord(Stage.ARGUMENTS)))
    assert kept.load(replace(SUBJECT, **other)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema_version": 1}',
        "x" * 100_000,
        '{"terms": {"context": NaN}}',
        # A figure beyond any card.
        lambda text: text.replace('"driver":490.0', '"driver":1e300'),
    ],
)
def test_a_spoilt_record_is_none(state: Path, text: object):
    kept.keep(SUBJECT, calibrate(ONE, BootRecord(Stage.ARGUMENTS)))
    (file,) = state.glob("*.json")
    before = file.read_text()
    file.write_text(text(before.replace(": ", ":")) if callable(text) else str(text))
    assert file.read_text() != before
    assert kept.load(SUBJECT) is None
    assert list(kept.records()) == []
    kept.keep(SUBJECT, calibrate(ONE, BootRecord(Stage.ARGUMENTS)))
    assert kept.load(SUBJECT) is not None


def test_weights_that_a_log_shows_are_those_of_the_whole_model():
    """What is learnt with the vision tower, or on two cards, holds without it, or on one."""
    text_only = replace(ONE, flags={**ONE.flags, "language-model-only": True})
    for asked in (ONE, text_only, replace(ONE, flags={**ONE.flags, "tp-size": 2})):
        free = 31.0
        size = plan(asked).pool_mib("weights") / 1024
        seen = BootRecord(
            Stage.LOAD, free_before_load_gib=free, weights=(LoadedWeights("A", size, 1.0, free - size),)
        )
        learnt = calibrate(asked, seen).terms
        assert learnt.target_weights == pytest.approx(TARGET.loaded_gib * 1024, abs=1)
        assert plan(replace(text_only, terms=learnt)).pool_mib("weights") == pytest.approx(
            plan(text_only).pool_mib("weights"), abs=1
        )
