"""What releases size differently: figures that their own code gave (``tests/real/test_sizing_oracle.py``)."""

from __future__ import annotations

import pytest

from dflash_deploy.checkpoint.cards import ModelCard, load_model_card
from dflash_deploy.engine.launch import Flags
from dflash_deploy.plan.cells import Cells, cells_of
from dflash_deploy.plan.settings import read_settings
from dflash_deploy.plan.sizing import Refused, Sizing, size_pools

TARGET = load_model_card("qwen3.8-27b-nvfp4")
DFLASH2 = load_model_card("qwen3.8-27b-dflash2")
MTP = load_model_card("qwen3.8-27b-mtp")
DFLASH: Flags = {"speculative-algorithm": "DFLASH", "speculative-num-draft-tokens": 8}
NEXTN: Flags = {"speculative-algorithm": "NEXTN", "speculative-num-draft-tokens": 4}


def dense(full: int, window: int = 0, *, kv_heads: int = 4, head_dim: int = 128) -> ModelCard:
    return TARGET.model_copy(
        update={
            "layers": full + window,
            "full_attention_layers": full + window,
            "linear_attention_layers": 0,
            "linear": None,
            "sliding_layers": window,
            "sliding_window": 1024 if window else None,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "kv_cache_dtype": None,
            "vision": False,
        }
    )


def cells(model: ModelCard, version: str, draft: ModelCard | None = None, **flags: object) -> Cells:
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    if draft is not None:
        given |= DFLASH if draft is DFLASH2 else NEXTN
    read = read_settings(given, version=version, card_memory_mib=32607, target=model, draft=draft)
    return cells_of(read, model, draft)


def sized(model: ModelCard, version: str, free_gib: float, **flags: object) -> Sizing | Refused:
    given: Flags = {name.replace("_", "-"): value for name, value in flags.items()} | DFLASH
    read = read_settings(given, version=version, card_memory_mib=32607, target=model, draft=DFLASH2)
    return size_pools(
        read,
        cells_of(read, model, DFLASH2),
        free_before_load_gib=30.0,
        free_after_load_gib=free_gib,
        target=model,
    )


@pytest.mark.parametrize("version", ["0.5.16", "0.5.20", "0.5.23"])
def test_four_bits_are_charged_with_their_scales_and_one_layer_unpacked(version: str):
    model = dense(14, kv_heads=2, head_dim=64)
    assert cells(model, version, kv_cache_dtype="nvfp4").charged == 2272


@pytest.mark.parametrize(("version", "charged"), [("0.5.16", 1583), ("0.5.21", 1583), ("0.5.22", 1584)])
def test_an_mtp_drafts_share_was_multiplied_and_is_added(version: str, charged: int):
    model = dense(11, kv_heads=1, head_dim=64)
    assert cells(model, version, MTP, kv_cache_dtype="mxfp8").charged == charged


def test_a_dflash_draft_beside_window_layers_counts_from_0_5_18_on():
    model = dense(17, 24)
    alone = cells(model, "0.5.17").charged
    assert cells(model, "0.5.17", DFLASH2).charged == alone
    counted = cells(model, "0.5.18", DFLASH2)
    assert counted.charged == alone + counted.draft > alone


def test_a_window_pool_by_request_limit_counts_the_draft_from_0_5_23_on():
    model = dense(17, 24)
    flags = {"max_running_requests": 4, "disable_radix_cache": True, "mem_fraction_static": 0.9}
    before, now = (sized(model, version, 12.0, **flags) for version in ("0.5.22", "0.5.23"))
    assert isinstance(before, Sizing)
    assert isinstance(now, Sizing)
    assert before.window_tokens == now.window_tokens
    assert before.kv_tokens > now.kv_tokens


def test_a_window_pool_by_request_limit_may_leave_no_room():
    refused = sized(
        dense(17, 24),
        "0.5.23",
        6.0,
        max_running_requests=48,
        disable_radix_cache=True,
        mem_fraction_static=0.9,
    )
    assert isinstance(refused, Refused)
    assert refused.message.startswith("SWA pool cap (")
    assert refused.pool == "window KV"


def test_prefill_graphs_ended_with_the_context_in_0_5_16():
    model = dense(17)
    longest = {}
    for version in ("0.5.16", "0.5.17"):
        read = read_settings(
            {"context-length": 512}, version=version, card_memory_mib=32607, target=model, draft=None
        )
        longest[version] = max(read.prefill_sizes)
    assert longest == {"0.5.16": 512, "0.5.17": 2048}
