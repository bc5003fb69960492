"""The budget against the engine's own figures: worked examples, published boot logs, rules of its own."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import ModelCard, load_model_card
from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.launch import Flags
from dflash_deploy.errors import DeployError
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.settings import read_settings
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import Refused, Sizing, cells_of, plan_budget, size_pools

RTX_5090_MIB = 32607
TARGET = load_model_card("qwen3.8-27b-nvfp4")
DFLASH2 = load_model_card("qwen3.8-27b-dflash2")
DSPARK = load_model_card("qwen3.8-27b-dspark")
MTP = load_model_card("qwen3.8-27b-mtp")
TINY = load_model_card("tiny-random")

DFLASH = {"speculative-algorithm": "DFLASH", "speculative-num-draft-tokens": 8}
BF16_STATE = {"mamba-ssm-dtype": "bfloat16"}
FP8 = {"kv-cache-dtype": "fp8_e4m3"}
ONE_USER: Flags = {
    **DFLASH,
    **BF16_STATE,
    **FP8,
    "mem-fraction-static": 0.85,
    "max-running-requests": 1,
    "max-mamba-cache-size": 4,
    "mamba-radix-cache-strategy": "extra_buffer_lazy",
    "cuda-graph-bs-decode": (1,),
    "disable-prefill-cuda-graph": True,
}
FOUR_USERS: Flags = {
    **DFLASH,
    **BF16_STATE,
    **FP8,
    "mem-fraction-static": 0.95,
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "max-mamba-cache-size": 4,
    "disable-radix-cache": True,
    "cuda-graph-bs-decode": (1, 2, 3, 4),
    "disable-prefill-cuda-graph": True,
}


def plan(flags: Flags, *, users: int = 1, draft: ModelCard | None = DFLASH2, **others: object) -> Budget:
    given = {"card_memory_mib": RTX_5090_MIB, "target": TARGET, "version": "0.5.23", **others}
    return plan_budget(flags=flags, users=users, draft=draft, **given)


def size(
    flags: Flags,
    before_gib: float,
    after_gib: float,
    *,
    draft: ModelCard | None = DFLASH2,
    target: ModelCard = TARGET,
    version: str = "0.5.23",
) -> Sizing | Refused:
    settings = read_settings(flags, version=version, card_memory_mib=RTX_5090_MIB, target=target, draft=draft)
    cells = cells_of(settings, target, draft)
    return size_pools(settings, cells, free_before_load_gib=before_gib, free_after_load_gib=after_gib)


def mib(budget: Budget, name: str) -> float:
    """A pool, or all whose name begins so."""
    return sum(pool.mib for pool in budget.pools if pool.name == name or pool.name.startswith(f"{name} "))


# The two settings that were tuned by hand on an RTX 5090.


def test_one_user_of_the_write_up():
    budget = plan(ONE_USER)
    assert budget.fits
    assert budget.slots_per_request == 4
    assert (budget.state_slots, budget.max_running_requests) == (4, 1)
    assert mib(budget, "state") == pytest.approx(0.365 * 1024, abs=1)
    assert mib(budget, "verify ssm") + mib(budget, "verify conv") == pytest.approx(1.143 * 1024, abs=1)
    assert budget.context_per_user == budget.kv_tokens
    assert budget.predicted_peak_mib == pytest.approx(29_076, abs=512)


def test_four_users_of_the_write_up():
    budget = plan(FOUR_USERS, users=4)
    assert budget.fits
    assert (budget.state_slots, budget.max_running_requests, budget.slots_per_request) == (4, 4, 1)
    assert (budget.kv_tokens, budget.context_per_user) == (8192, 2048)
    assert mib(budget, "verify ssm") + mib(budget, "verify conv") == pytest.approx(2.858 * 1024, abs=1)
    assert mib(budget, "target KV") + mib(budget, "draft KV") == pytest.approx(0.328 * 1024, abs=1)
    assert budget.predicted_peak_mib == pytest.approx(31_211, abs=512)


PROJECTIONS = 100 * 2**20 // 43_008
"""Tokens that the draft's stacked projections take the room of."""


@pytest.mark.parametrize(("context_mib", "tokens"), [(500, 28_900), (700, 24_800), (900, 20_700)])
def test_tokens_by_what_the_context_takes(context_mib: int, tokens: int):
    terms = dataclasses.replace(terms_for(RTX_5090_MIB), after_load=0.0)
    one = plan(ONE_USER, free_mib=RTX_5090_MIB - context_mib, terms=terms)
    assert one.kv_tokens == pytest.approx(tokens - PROJECTIONS, abs=100)


@pytest.mark.parametrize(("context_mib", "tokens"), [(500, 63_000), (700, 59_000), (900, 54_000)])
def test_tokens_of_four_users_without_the_clamp(context_mib: int, tokens: int):
    flags = {name: value for name, value in FOUR_USERS.items() if name != "max-total-tokens"}
    terms = dataclasses.replace(terms_for(RTX_5090_MIB), after_load=0.0)
    budget = plan(flags, free_mib=RTX_5090_MIB - context_mib, terms=terms)
    assert budget.kv_tokens == pytest.approx(tokens - PROJECTIONS, abs=600)
    assert budget.headroom_mib < 0, "without the clamp it does not serve"


def test_four_users_without_the_clamp_as_their_author_says():
    """About 40,000 tokens, and out of memory."""
    flags = {name: value for name, value in FOUR_USERS.items() if name != "max-total-tokens"}
    budget = plan(flags, users=4)
    assert budget.kv_tokens == pytest.approx(40_000, rel=0.03)
    assert budget.fails_at is not None
    assert not budget.certain
    assert not budget.fits


FREE_MIB = RTX_5090_MIB - 700


@pytest.mark.parametrize(("flags", "least"), [(ONE_USER, 0.815), (FOUR_USERS, 0.875)])
def test_least_fraction_that_starts(flags: Flags, least: float):
    starting = [
        f
        for f in range(700, 960)
        if plan({**flags, "mem-fraction-static": f / 1000}, free_mib=FREE_MIB).fails_at is None
    ]
    assert starting[0] / 1000 == pytest.approx(least, abs=0.01)
    below = plan({**flags, "mem-fraction-static": starting[0] / 1000 - 0.001}, free_mib=FREE_MIB)
    assert below.certain
    assert below.fails_at is Stage.SIZING
    assert not below.fits
    assert "for the KV cache under --mem-fraction-static=" in below.failure
    # The engine's own hint counts the weights alone, and would advise a share below the one that was given.
    assert "Raise --mem-fraction-static above" not in below.failure


# Checked with the engine's real functions: bfloat16 state, eight draft tokens.


def charged_gib(flags: Flags, *, before_gib: float = 31.0) -> float:
    """What the state takes of the pools' memory: the token count with and without it."""
    settings = read_settings(
        {"mem-fraction-static": 1.0, **FP8, **flags},
        version="0.5.23",
        card_memory_mib=RTX_5090_MIB,
        target=TARGET,
        draft=DFLASH2,
    )
    cells = cells_of(settings, TARGET, DFLASH2)
    full = size_pools(settings, cells, free_before_load_gib=before_gib, free_after_load_gib=10.0)
    assert isinstance(full, Sizing)
    return 10.0 - 100 / 1024 - full.kv_tokens * cells.charged / 2**30


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer_lazy"])
def test_four_slots_serve_one_request(strategy: str):
    flags = {**DFLASH, **BF16_STATE, "max-mamba-cache-size": 4, "max-running-requests": 1}
    flags |= {"mamba-radix-cache-strategy": strategy}
    assert charged_gib(flags) == pytest.approx(1.534, abs=0.001)
    assert size({**flags, **FP8, "mem-fraction-static": 0.9}, 31.0, 7.0).running_requests == 1


@pytest.mark.parametrize("strategy", ["extra_buffer", "auto"])
def test_four_slots_are_too_few_for_extra_buffers(strategy: str):
    flags = {**ONE_USER, "mamba-radix-cache-strategy": strategy}
    budget = plan(flags)
    assert budget.fails_at is Stage.SIZING
    assert budget.failure.startswith("Hybrid (mamba/linear-attention) state cache is too small to serve any")
    assert "max_mamba_cache_size=4, mamba_ratio=5, resulting max_num_reqs=0" in budget.failure
    assert plan({**flags, "disable-overlap-schedule": True}).fails_at is None


def test_four_slots_serve_four_without_the_radix_cache():
    flags = {**DFLASH, **BF16_STATE, "max-mamba-cache-size": 4, "max-running-requests": 4}
    assert charged_gib({**flags, "disable-radix-cache": True}) == pytest.approx(3.288, abs=0.001)


def test_float32_state_takes_twice():
    flags = {**DFLASH, "mamba-ssm-dtype": "float32", "max-mamba-cache-size": 4, "max-running-requests": 1}
    flags |= {"mamba-radix-cache-strategy": "no_buffer"}
    assert charged_gib(flags) == pytest.approx(3.011, abs=0.001)


def test_slots_that_the_engine_chooses():
    flags = {**DFLASH, **BF16_STATE, **FP8, "mem-fraction-static": 1.0, "language-model-only": True}
    sized = size({**flags, "mamba-radix-cache-strategy": "extra_buffer"}, 31.0, 5.7)
    assert (sized.state_slots, sized.running_requests) == (10, 2)
    assert sized.kv_tokens == pytest.approx(78_000, abs=600)


def test_slots_follow_the_requests_without_the_radix_cache():
    flags = {**DFLASH, **BF16_STATE, **FP8, "mem-fraction-static": 0.9, "disable-radix-cache": True}
    sized = size({**flags, "max-running-requests": 3}, 31.0, 7.0)
    assert (sized.state_slots, sized.running_requests) == (3, 3)


def test_no_room_for_any_state():
    flags = {**DFLASH, "mem-fraction-static": 0.88, "mamba-ssm-dtype": "float32"}
    refused = size(flags, 30.5, 5.0)
    assert isinstance(refused, Refused)
    assert "Not enough GPU memory for hybrid (mamba/linear-attention) state cache" in refused.message
    assert "mamba_cache_per_req=146.81 MB" in refused.message


# Published boot logs. The free memory is logged to a hundredth of a GiB, about 250 tokens of fp8.

PRO_6000: Flags = {
    **DFLASH,
    "mem-fraction-static": 0.85,
    "mamba-ssm-dtype": "float32",
    "mamba-radix-cache-strategy": "extra_buffer_lazy",
}


@pytest.mark.parametrize(
    ("dtype", "requests", "slots", "tokens"),
    [("bf16", 2, 8, 644_884), ("fp8_e4m3", 2, 8, 1_289_769), ("fp8_e4m3", 3, 12, 1_246_816)],
)
def test_rtx_pro_6000_logs(dtype: str, requests: int, slots: int, tokens: int):
    flags = {
        **PRO_6000,
        "kv-cache-dtype": dtype,
        "max-running-requests": requests,
        "max-mamba-cache-size": slots,
    }
    sized = size(flags, 94.22, 70.75)
    assert sized.kv_tokens == pytest.approx(tokens, rel=0.004)
    assert (sized.state_slots, sized.running_requests) == (slots, requests)


def test_rtx_pro_6000_state_to_the_byte():
    flags = {**PRO_6000, **FP8, "max-running-requests": 2, "max-mamba-cache-size": 8}
    budget = plan(flags, card_memory_mib=97_887)
    assert mib(budget, "state") * 2**20 == 1_385_496_576
    assert (mib(budget, "verify ssm") + mib(budget, "verify conv")) * 2**20 == 3_653_369_856
    assert mib(budget, "target KV") * 2**20 == (budget.kv_tokens + 1) * 32_768
    assert mib(budget, "draft KV") * 2**20 == (budget.kv_tokens + 1) * 10_240
    more = plan({**flags, "max-running-requests": 3, "max-mamba-cache-size": 12}, card_memory_mib=97_887)
    assert mib(more, "state") * 2**20 == 2_001_272_832
    assert (mib(more, "verify ssm") + mib(more, "verify conv")) * 2**20 == 4_871_159_808
    assert budget.kv_tokens - more.kv_tokens == pytest.approx(1_289_769 - 1_246_816, abs=1)


def test_slots_cap_the_requests_as_a_gb10_logged():
    flags = {**DFLASH, **BF16_STATE, **FP8, "mem-fraction-static": 0.9, "max-mamba-cache-size": 32}
    flags |= {
        "max-running-requests": 8,
        "mamba-radix-cache-strategy": "extra_buffer",
        "max-total-tokens": 200_000,
    }
    sized = size(flags, 90.0, 61.3)
    assert (sized.kv_tokens, sized.state_slots, sized.running_requests) == (200_000, 32, 6)
    assert sized.limited_by == "state ssm"


def test_kv_types_as_a_gb10_logged():
    """``auto`` gives the target what its checkpoint asks for, and leaves the draft in bfloat16."""
    flags = {**DFLASH, **BF16_STATE, "mem-fraction-static": 0.85, "max-total-tokens": 200_000}
    automatic = plan(flags, card_memory_mib=124_000)
    assert mib(automatic, "target KV") / 1024 == pytest.approx(6.10, abs=0.01)
    assert mib(automatic, "draft KV") / 1024 == pytest.approx(3.82, abs=0.01)
    given = plan({**flags, **FP8}, card_memory_mib=124_000)
    assert mib(given, "draft KV") / 1024 == pytest.approx(1.91, abs=0.01)


@pytest.mark.parametrize(
    ("ratio", "requests"),
    [(3.51, 21), (2.3, 19), (1.2, 14)],
)
def test_share_of_the_state_as_a_gb10_logged(ratio: float, requests: int):
    flags = {**DFLASH, **BF16_STATE, "mem-fraction-static": 1.0, "max-running-requests": 48}
    flags |= {"mamba-radix-cache-strategy": "extra_buffer_lazy", "mamba-full-memory-ratio": ratio}
    sized = size(flags, 120.0, 24.8)
    assert sized.running_requests == pytest.approx(requests, abs=1)


def test_share_of_the_state_without_speculation():
    """A 9B hybrid on two cards, each with half the heads: 186 slots, of 0.10 GiB conv and 4.38 GiB ssm."""
    linear = TARGET.linear.model_copy(update={"value_heads": 16, "key_heads": 8})
    shape = {"layers": 32, "full_attention_layers": 8, "linear_attention_layers": 24, "kv_heads": 2}
    half = TARGET.model_copy(update={**shape, "linear": linear, "vision": False, "kv_cache_dtype": None})
    flags = {
        "mem-fraction-static": 0.8,
        "mamba-radix-cache-strategy": "no_buffer",
        "mamba-ssm-dtype": "float32",
    }
    sized = size(flags, 22.93, 14.08, target=half, draft=None)
    assert sized.state_slots == pytest.approx(186, abs=2)
    assert sized.running_requests == pytest.approx(62, abs=1)
    assert sized.kv_tokens == pytest.approx(327_310, rel=0.01)


# Rules of their own.


def test_sizes_of_a_token_and_a_slot():
    def cells(flags: Flags, draft: ModelCard | None, version: str = "0.5.23"):
        settings = read_settings(
            flags, version=version, card_memory_mib=RTX_5090_MIB, target=TARGET, draft=draft
        )
        return cells_of(settings, TARGET, draft)

    assert cells({**DFLASH, **FP8}, DFLASH2).charged == 43_008
    assert cells({**DFLASH, "kv-cache-dtype": "bf16"}, DFLASH2).charged == 65_536 + 20_480
    assert cells({"speculative-algorithm": "NEXTN", **FP8}, MTP).charged == 34_816
    assert cells({"speculative-algorithm": "NGRAM", **FP8}, None).charged == 32_768
    assert cells(FP8, None).charged == 32_768
    assert cells({**DFLASH, **FP8}, DFLASH2, "0.5.17").charged == 32_768 * 21 // 16
    assert cells({**DFLASH, **FP8, "speculative-draft-attention-backend": "fa4"}, DFLASH2).draft == 20_480
    assert cells({**DFLASH, "speculative-draft-kv-cache-dtype": "fp8_e4m3"}, DFLASH2).draft == 10_240
    assert cells(BF16_STATE, None).slot / 2**20 == pytest.approx(74.8125)
    assert cells({}, None).slot / 2**20 == pytest.approx(146.8125)


def test_a_dense_model_has_no_state():
    budget = plan({"mem-fraction-static": 0.8}, target=TINY, draft=None, card_memory_mib=24_576)
    assert (budget.state_slots, budget.slots_per_request) == (0, 0)
    assert budget.max_running_requests == 4096
    used = terms_for(24_576).driver + terms_for(24_576).context + 6.5
    assert budget.kv_tokens == pytest.approx((24_576 - used) * 2**20 * 0.8 / 2_048, rel=0.01)
    assert not any("state" in pool.name for pool in budget.pools)


def test_requests_are_halved_tokens_at_most():
    budget = plan({"max-total-tokens": 100}, target=TINY, draft=None)
    assert budget.max_running_requests == 50
    assert (
        plan(
            {"max-total-tokens": 100, "max-running-requests": 7}, target=TINY, draft=None
        ).max_running_requests
        == 7
    )


def test_pages_round_tokens_down():
    budget = plan({"max-total-tokens": "8k", "page-size": 64}, target=TINY, draft=None)
    assert budget.kv_tokens == 8_000 // 64 * 64


def test_context_is_shared_out_and_bounded():
    flags = {**FOUR_USERS, "context-length": 1_024}
    assert plan(flags, users=4).context_per_user == 1_024


def test_a_pool_without_a_single_token():
    refused = size({"mem-fraction-static": 0.5, "max-total-tokens": 0}, 10.0, 8.0, target=TINY, draft=None)
    assert isinstance(refused, Refused)
    assert refused.message.startswith("Not enough memory. Please try to increase --mem-fraction-static")


def test_weights_larger_than_the_card():
    budget = plan(FP8, card_memory_mib=16_384, draft=None)
    assert budget.fails_at is Stage.LOAD
    assert "out of memory" in budget.failure
    crowded = plan(ONE_USER, other_mib=9_000)
    assert crowded.fails_at is Stage.DRAFT_LOAD


@pytest.mark.parametrize(
    ("flags", "draft", "message"),
    [
        ({**DFLASH, "enable-linear-replayssm-spec": True}, DFLASH2, "requires a KDA (kimi_linear) model"),
        (
            {**ONE_USER, "disable-overlap-schedule": True},
            DFLASH2,
            "Lazy extra buffer requires overlap schedule",
        ),
        ({**ONE_USER, "mamba-track-interval": 4}, DFLASH2, "mamba_track_interval (4)"),
        (
            {"speculative-algorithm": "DSPARK", "speculative-num-draft-tokens": 5},
            DSPARK,
            "must equal gamma + 1 (= 8 for gamma=7)",
        ),
    ],
)
def test_arguments_that_the_engine_refuses(flags: Flags, draft: ModelCard, message: str):
    budget = plan(flags, draft=draft)
    assert budget.fails_at is Stage.ARGUMENTS
    assert message in budget.failure
    assert not budget.fits


@pytest.mark.parametrize(
    ("flags", "draft", "tokens"),
    [
        ({"speculative-algorithm": "DFLASH"}, DFLASH2, 8),
        ({"speculative-algorithm": "dflash"}, None, 16),
        ({"speculative-algorithm": "DSPARK"}, DSPARK, 8),
        ({"speculative-algorithm": "NEXTN"}, MTP, 4),
        ({"speculative-algorithm": "EAGLE", "speculative-num-steps": 2}, MTP, 3),
        ({"speculative-algorithm": "NGRAM"}, None, 12),
        ({}, None, 0),
    ],
)
def test_draft_tokens_by_default(flags: Flags, draft: ModelCard | None, tokens: int):
    settings = read_settings(
        flags, version="0.5.23", card_memory_mib=RTX_5090_MIB, target=TARGET, draft=draft
    )
    assert settings.draft_tokens == tokens
    assert settings.running_requests == (48 if tokens else None)


def test_rings_replace_the_verify_states():
    flags = {
        "speculative-algorithm": "NEXTN",
        "enable-linear-replayssm-spec": True,
        "max-running-requests": 1,
    }
    flags |= {**BF16_STATE, **FP8, "mem-fraction-static": 0.93, "max-mamba-cache-size": 5}
    with_rings = plan(flags, draft=MTP)
    without = plan({**flags, "enable-linear-replayssm-spec": False}, draft=MTP)
    assert mib(with_rings, "verify ssm") == 0
    assert mib(with_rings, "replay rings") < mib(without, "verify ssm") / 5
    assert mib(with_rings, "verify conv") == mib(without, "verify conv") > 0
    assert with_rings.kv_tokens > without.kv_tokens


@pytest.mark.parametrize(
    "flags",
    [
        {"pp-size": 2},
        {"tp-size": 5},
        {"page-size": 0},
        {"mem-fraction-static": "nan"},
        {"context-length": -1},
        {"cuda-graph-max-bs-decode": 10**9},
        {"chunked-prefill-size": "1T"},
        {"cuda-graph-config": "{"},
        {"max-total-tokens": "many"},
        {"mem-fraction-static": "high"},
        {"kv-cache-dtype": "int3"},
        {"speculative-algorithm": "CRYSTAL"},
    ],
)
def test_what_cannot_be_planned_is_said(flags: Flags):
    with pytest.raises(DeployError):
        plan(flags)


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "mem-fraction-static": st.floats(0.3, 0.99),
        "max-running-requests": st.integers(1, 64),
        "max-mamba-cache-size": st.integers(1, 128),
        "max-total-tokens": st.integers(1, 500_000),
        "speculative-num-draft-tokens": st.integers(2, 16),
        "speculative-algorithm": st.sampled_from(["DFLASH", "NEXTN", "NGRAM"]),
        "disable-radix-cache": st.booleans(),
        "mamba-radix-cache-strategy": st.sampled_from(
            ["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
        ),
        "kv-cache-dtype": st.sampled_from(["auto", "fp8_e4m3", "bf16"]),
        "mamba-ssm-dtype": st.sampled_from(["float32", "bfloat16"]),
        "page-size": st.sampled_from([1, 16, 64]),
        "chunked-prefill-size": st.sampled_from([-1, 1024, 4096]),
        "disable-prefill-cuda-graph": st.booleans(),
    },
)


@given(FLAGS, st.integers(20_000, 150_000), st.integers(1, 8), st.sampled_from([TARGET, TINY]))
def test_every_plan_is_whole(flags: Flags, memory_mib: int, users: int, target: ModelCard):
    method = flags.get("speculative-algorithm")
    draft = {"DFLASH": DFLASH2, "NEXTN": MTP}.get(method) if target is TARGET else None
    budget = plan(flags, users=users, draft=draft, card_memory_mib=memory_mib, target=target)
    assert all(pool.mib >= 0 for pool in budget.pools)
    assert budget.predicted_peak_mib == pytest.approx(sum(pool.mib for pool in budget.pools))
    assert (budget.fails_at is None) == (budget.failure is None) == budget.fits
    assert not (budget.certain and budget.kv_tokens)
    assert not budget.fits or (budget.headroom_mib >= 0 and budget.kv_tokens > 0)
    if budget.fails_at is None:
        assert budget.max_running_requests >= 1 or budget.kv_tokens < 2
        assert budget.kv_tokens <= flags.get("max-total-tokens", budget.kv_tokens)
        assert budget.slots_per_request * budget.max_running_requests <= budget.state_slots or target is TINY
    else:
        assert not budget.fits


@given(FLAGS, st.integers(26_000, 100_000))
def test_a_larger_card_holds_no_fewer_tokens(flags: Flags, memory_mib: int):
    flags = {"mem-fraction-static": 0.85, "max-mamba-cache-size": 24, **flags}
    draft = {"DFLASH": DFLASH2, "NEXTN": MTP}.get(flags.get("speculative-algorithm"))
    small = plan(flags, draft=draft, card_memory_mib=memory_mib)
    large = plan(flags, draft=draft, card_memory_mib=memory_mib + 1_000)
    assert large.kv_tokens >= small.kv_tokens


DEARER = [
    ("mem-fraction-static", 0.9, 0.8),
    ("kv-cache-dtype", "fp8_e4m3", "bf16"),
    ("kv-cache-dtype", "nvfp4", "fp8_e4m3"),
    ("mamba-ssm-dtype", "bfloat16", "float32"),
    ("max-mamba-cache-size", 24, 32),
    ("max-running-requests", 2, 4),
    ("speculative-num-draft-tokens", 4, 8),
    ("language-model-only", True, False),
    ("mm-feature-transport", "cpu", "cuda_ipc"),
]


@pytest.mark.parametrize("change", DEARER, ids=lambda change: f"{change[0]} {change[2]}")
@settings(max_examples=15)
@given(FLAGS, st.integers(28_000, 100_000), st.sampled_from(["0.5.16", "0.5.18", "0.5.20", "0.5.23"]))
def test_what_costs_memory_leaves_no_more_tokens(
    change: tuple[str, object, object], flags: Flags, memory_mib: int, version: str
):
    flag, cheap, dear = change
    # With a number of slots left to the engine, tokens go up and down with each slot that fits.
    flags = {"mem-fraction-static": 0.85, "max-mamba-cache-size": 24, "max-running-requests": 4, **flags}
    draft = {"DFLASH": DFLASH2, "NEXTN": MTP}.get(flags.get("speculative-algorithm"))
    few, many = (
        plan({**flags, flag: value}, draft=draft, card_memory_mib=memory_mib, version=version)
        for value in (dear, cheap)
    )
    assert few.certain or few.kv_tokens <= many.kv_tokens


def test_a_budget_is_a_value():
    assert plan(ONE_USER) == plan(dict(ONE_USER))
    assert dataclasses.is_dataclass(plan(ONE_USER))
