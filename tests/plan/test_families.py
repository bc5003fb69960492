"""Other models, several cards, and whatever a person may type: a plan or an error, never a crash."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import LinearAttention, ModelCard, list_model_cards, load_model_card
from dflash_deploy.engine.boot import Stage
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.cards import list_cards
from dflash_deploy.plan.advice import advise
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.cells import cells_of
from dflash_deploy.plan.settings import read_settings
from dflash_deploy.plan.vram import Question, plan, plan_budget

TARGET = load_model_card("qwen3.8-27b-nvfp4")
GLIMMER = load_model_card("muse-glimmer-30b")


def planned(model: str | ModelCard, memory_mib: int, flags: dict | None = None, **others: object) -> Budget:
    card = load_model_card(model) if isinstance(model, str) else model
    given = {"version": "0.5.23", "users": 1, "draft": None, **others}
    return plan_budget(card_memory_mib=memory_mib, target=card, flags=flags or {}, **given)


@pytest.mark.parametrize(
    ("model", "slot_mib", "kv_bytes"),
    [
        ("qwen3.8-27b-bf16", 146.8125, 65_536),
        ("qwen3.6-27b", 146.8125, 65_536),
        ("qwen3.5-9b", 49.125, 32_768),
        ("qwen3.5-4b", 49.125, 32_768),
        ("qwen3.6-35b-a3b", 61.40625, 20_480),
        ("qwen3-8b", 0, 147_456),
        ("llama-3.1-8b-instruct", 0, 131_072),
        ("muse-glimmer-30b", 0, 13_312),
    ],
)
def test_shapes(model: str, slot_mib: float, kv_bytes: int):
    card = load_model_card(model)
    read = read_settings({}, version="0.5.23", card_memory_mib=97_887, target=card, draft=None)
    cells = cells_of(read, card, None)
    assert cells.slot / 2**20 == slot_mib
    assert cells.target == kv_bytes
    assert planned(model, 143_771).fits


def test_a_mixture_of_experts_loads_all_and_reads_some():
    card = load_model_card("qwen3.6-35b-a3b")
    assert card.loaded_gib * 2**30 > 8 * card.read_bytes_per_token


def test_window_layers_keep_less():
    budget = planned(GLIMMER, 97_887, {"mem-fraction-static": 0.85})
    assert budget.window_tokens == int(budget.kv_tokens * 0.8)
    assert budget.pool_mib("window KV") == pytest.approx((budget.window_tokens + 1) * 39 * 1024 / 2**20)
    small = planned(GLIMMER, 97_887, {"mem-fraction-static": 0.85, "swa-full-tokens-ratio": 0.1})
    assert small.kv_tokens > 1.5 * budget.kv_tokens


def test_a_window_pool_below_the_window_is_refused():
    flags = {"mem-fraction-static": 0.85, "max-total-tokens": 2_000}
    budget = planned(GLIMMER, 97_887, flags)
    assert budget.fails_at is Stage.SIZING
    assert "cannot hold even one request" in budget.failure
    assert budget.binding_pool == "window KV"


def test_without_prefixes_the_window_pool_follows_the_requests():
    flags = {"mem-fraction-static": 0.85, "disable-radix-cache": True, "max-running-requests": 2}
    budget = planned(GLIMMER, 97_887, flags)
    assert budget.window_tokens < 30_000
    assert budget.kv_tokens > 10 * budget.window_tokens


def test_several_cards_share_heads_and_weights():
    flags = {"mem-fraction-static": 0.85, "kv-cache-dtype": "fp8_e4m3", "max-running-requests": 4}
    one = planned("qwen3.8-27b-fp8", 97_887, flags)
    two = planned("qwen3.8-27b-fp8", 97_887, {**flags, "tp-size": 2})
    assert two.pool_mib("weights") == pytest.approx(14.49 * 1024, rel=0.005)
    assert two.kv_tokens > 2 * one.kv_tokens
    four = planned("qwen3.6-35b-a3b", 97_887, {"mem-fraction-static": 0.85, "tp-size": 4})
    eight = planned("qwen3.6-35b-a3b", 97_887, {"mem-fraction-static": 0.85, "tp-size": 8})
    assert eight.pool_mib("target KV") / eight.kv_tokens == pytest.approx(
        four.pool_mib("target KV") / four.kv_tokens, rel=0.001
    ), "two heads: each of four cards keeps one, and so does each of eight"


def test_an_unknown_architecture_is_named_and_planned_with_a_margin():
    unknown = TARGET.model_copy(update={"architecture": "SomethingNewForCausalLM", "vision": False})
    budget = planned(unknown, 32_607, {"mem-fraction-static": 0.9, "max-running-requests": 1})
    assert "SomethingNewForCausalLM" in budget.unknown[0]
    assert budget.margin_mib == pytest.approx(0.1 * budget.predicted_peak_mib)
    assert budget.kv_tokens > 0
    assert planned(TARGET, 32_607).margin_mib == 0


def test_a_draft_that_nobody_knows_is_said():
    flags = {"speculative-algorithm": "DFLASH", "mem-fraction-static": 0.9, "max-running-requests": 1}
    assert any("draft" in text for text in planned(TARGET, 97_887, flags).unknown)


def test_pools_sized_after_capture():
    flags = {"max-running-requests": 2, "chunked-prefill-size": 2048, "max-mamba-cache-size": 10}
    env = {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}
    before = planned(TARGET, 97_887, flags)
    after = planned(TARGET, 97_887, flags, env=env)
    assert after.fits
    assert after.headroom_mib > 5_000, "what a large card keeps for activations"
    assert after.kv_tokens != before.kv_tokens
    few = {"chunked-prefill-size": 2048, "max-running-requests": 8}
    captured = planned("qwen3-8b", 24_576, few, env=env)
    assert captured.fits
    assert captured.kv_tokens > 20_000
    many = planned("qwen3-8b", 24_576, {"chunked-prefill-size": 2048}, env=env)
    assert many.kv_tokens < captured.kv_tokens, "batches beyond the graphs need activations of their own"


def test_environment_variables():
    flags = {"mem-fraction-static": 0.9, "max-running-requests": 1}
    plain = planned(TARGET, 32_607, flags)
    half = planned(TARGET, 32_607, flags, env={"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"})
    assert half.pool_mib("state ssm") / (half.state_slots + 1) == pytest.approx(72)
    assert plain.pool_mib("state ssm") / (plain.state_slots + 1) == pytest.approx(144)
    growing = planned(TARGET, 32_607, flags, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert growing.predicted_peak_mib < plain.predicted_peak_mib
    fixed = {**flags, "max-mamba-cache-size": 5}
    images = planned(TARGET, 32_607, fixed, env={"SGLANG_VLM_CACHE_SIZE_MB": "0"})
    assert images.kv_tokens - planned(TARGET, 32_607, fixed).kv_tokens == pytest.approx(3200, abs=1)
    skip = planned(TARGET, 97_887, flags, env={"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "true"})
    assert skip.slots_per_request == 4


def test_free_memory_that_is_known_takes_the_place_of_guesses():
    flags = {"mem-fraction-static": 0.9, "max-running-requests": 1}
    budget = planned(TARGET, 32_607, flags, free_mib=31_000.0)
    assert budget.pool_mib("context") + budget.driver_mib == 32_607 - 31_000
    assert planned(TARGET, 32_607, flags, free_mib=20_000.0).fails_at is Stage.LOAD
    with pytest.raises(DeployError):
        planned(TARGET, 32_607, flags, free_mib=40_000.0)


# Whatever comes.

NAMES = [
    *("mem-fraction-static", "max-running-requests", "max-mamba-cache-size", "max-total-tokens"),
    *("mamba-full-memory-ratio", "mamba-ssm-dtype", "mamba-radix-cache-strategy", "mamba-track-interval"),
    *("kv-cache-dtype", "speculative-algorithm", "speculative-num-draft-tokens", "speculative-num-steps"),
    *("speculative-eagle-topk", "speculative-dflash-block-size", "speculative-dspark-block-size"),
    *("speculative-draft-window-size", "speculative-draft-kv-cache-dtype", "page-size", "context-length"),
    *("chunked-prefill-size", "max-prefill-tokens", "cuda-graph-max-bs-decode", "cuda-graph-bs-decode"),
    *("cuda-graph-max-bs-prefill", "cuda-graph-bs-prefill", "cuda-graph-config", "tp-size", "pp-size"),
    *("disable-radix-cache", "disable-overlap-schedule", "disable-cuda-graph", "enable-dp-attention"),
    *("enable-linear-replayssm-spec", "linear-replayssm-cache-len", "language-model-only"),
    *("swa-full-tokens-ratio", "attention-backend", "mm-feature-transport", "linear-attn-backend"),
]
WORDS = [
    "auto",
    "bf16",
    "fp8_e4m3",
    "mxfp8",
    "nvfp4",
    "DFLASH",
    "dspark",
    "NEXTN",
    "NGRAM",
    "no_buffer",
    "8k",
]
WORDS += ["extra_buffer_lazy", "float32", "aiter", "cuda_ipc", "{}", '{"decode": {"max_bs": 3}}', "disabled"]
VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 64),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=12),
    st.lists(st.integers(-2, 10**6), max_size=5).map(tuple),
)
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(
        [
            "SGLANG_MAMBA_SSM_DTYPE",
            "SGLANG_MAMBA_CONV_DTYPE",
            "SGLANG_VLM_CACHE_SIZE_MB",
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
            "PYTORCH_CUDA_ALLOC_CONF",
        ]
    ),
    st.sampled_from(["1", "true", "bfloat16", "-5", "", "x", "expandable_segments:True"]),
    max_size=2,
)
DRAFTS = [None, *(card for card in list_model_cards() if card.role == "draft")]


@st.composite
def targets(draw: st.DrawFn) -> ModelCard:
    if draw(st.booleans()):
        return draw(st.sampled_from([card for card in list_model_cards() if card.role == "target"]))
    full, linear_layers = draw(st.integers(0, 80)), draw(st.integers(0, 80))
    if not full + linear_layers:
        full = 1
    linear = None
    if linear_layers:
        sizes = [draw(st.integers(1, 256)) for _ in range(4)]
        linear = LinearAttention(
            value_heads=sizes[0],
            key_heads=sizes[1],
            value_dim=sizes[2],
            key_dim=sizes[3],
            conv_kernel=draw(st.integers(2, 8)),
        )
    sliding = draw(st.integers(0, full))
    return TARGET.model_copy(
        update={
            "architecture": draw(st.sampled_from(["Qwen3ForCausalLM", "Unheard", TARGET.architecture])),
            "layers": full + linear_layers,
            "full_attention_layers": full,
            "linear_attention_layers": linear_layers,
            "linear": linear,
            "sliding_layers": sliding,
            "sliding_window": draw(st.integers(1, 10**6)) if sliding else None,
            "kv_heads": draw(st.integers(1, 128)),
            "head_dim": draw(st.integers(1, 1024)),
            "hidden_size": draw(st.integers(1, 20_000)),
            "max_context_tokens": draw(st.integers(1, 10**7)),
            "loaded_gib": draw(st.floats(0.001, 400)),
            "vision": draw(st.booleans()),
        }
    )


@settings(max_examples=600)
@given(
    target=targets(),
    draft=st.sampled_from(DRAFTS),
    flags=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8),
    env=ENVIRONMENTS,
    memory_mib=st.one_of(st.sampled_from([card.memory_mib for card in list_cards()]), st.integers(-5, 10**6)),
    users=st.integers(-1, 100),
    version=st.sampled_from(["0.5.16", "0.5.18", "0.5.19", "0.5.21", "0.5.23", "9.9", "", "main"]),
    free_mib=st.none() | st.floats(allow_nan=False, max_value=200_000),
    advised=st.integers(0, 9),
)
def test_any_question_gets_a_plan_or_an_error_for_people(  # noqa: PLR0917
    target, draft, flags, env, memory_mib, users, version, free_mib, advised
):
    question = Question(memory_mib, target, draft, flags, version, users, free_mib=free_mib, env=env)
    try:
        budget = plan(question)
        found = advise(question) if not advised else ()
    except DeployError as error:
        assert str(error)
        return
    assert all(pool.mib >= 0 for pool in budget.pools), budget.pools
    assert (budget.fails_at is None) == (budget.failure is None)
    assert not budget.fits or budget.kv_tokens > 0
    assert budget.as_json(found)["pools"].keys() == {pool.name for pool in budget.pools}
