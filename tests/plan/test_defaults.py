"""Defaults against what the real functions of each release gave for a card of 32,607 MiB."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import load_model_card
from dflash_deploy.plan.defaults import decode_graph_batches, prefill_graph_tokens
from dflash_deploy.plan.settings import read_settings

RTX_5090_MIB = 32607
TEXT = {"language-model-only": True}
NO_PREFILL = {"disable-prefill-cuda-graph": True}


@pytest.mark.parametrize(
    ("flags", "old", "middle", "new"),
    [
        (TEXT, 0.874, 0.777, 0.777),
        ({**TEXT, **NO_PREFILL}, 0.885, 0.789, 0.789),
        ({}, 0.808, 0.718, 0.718),
        (NO_PREFILL, 0.818, 0.730, 0.730),
        ({"max-running-requests": 1}, 0.808, 0.718, 0.721),
        ({**TEXT, "max-running-requests": 4, "max-total-tokens": 8192}, 0.874, 0.777, 0.779),
    ],
)
def test_default_fraction(flags: dict, old: float, middle: float, new: float):
    expected = {
        "0.5.18": old,
        "0.5.19": old,
        "0.5.20": middle,
        "0.5.21": middle,
        "0.5.22": new,
        "0.5.23": new,
    }
    target = load_model_card("qwen3.8-27b-nvfp4")
    for version, fraction in expected.items():
        settings = read_settings(
            flags, version=version, card_memory_mib=RTX_5090_MIB, target=target, draft=None
        )
        assert settings.fraction == pytest.approx(fraction, abs=0.0008), version


def test_a_fraction_given_is_taken():
    target = load_model_card("qwen3.8-27b-nvfp4")
    flags = {"mem-fraction-static": 0.9}
    settings = read_settings(flags, version="0.5.23", card_memory_mib=RTX_5090_MIB, target=target, draft=None)
    assert settings.fraction == 0.9


@pytest.mark.parametrize(
    ("largest", "plain", "speculation"),
    [
        (1, [1], [1]),
        (4, [1, 2, 4], [1, 2, 3, 4]),
        (8, [1, 2, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        (24, [1, 2, 4, 8, 12, 16, 24], [*range(1, 9), *range(10, 25, 2)]),
        (48, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48], [*range(1, 9), *range(10, 33, 2), 40, 44, 48]),
    ],
)
def test_decode_graph_batches(largest: int, plain: list[int], speculation: list[int]):
    assert list(decode_graph_batches(largest, speculation=False)) == plain
    assert list(decode_graph_batches(largest, speculation=True)) == speculation


@pytest.mark.parametrize(("largest", "count"), [(512, 30), (1024, 38), (2048, 42), (4096, 50), (8192, 58)])
def test_prefill_graphs(largest: int, count: int):
    assert len(prefill_graph_tokens(largest)) == count


@given(st.integers(1, 2000), st.booleans(), st.booleans())
def test_graphs_end_with_the_largest_batch(largest: int, speculation: bool, padding: bool):
    batches = decode_graph_batches(largest, speculation=speculation, padding=padding)
    assert list(batches) == sorted(set(batches))
    assert batches[0] == 1
    assert batches[-1] == largest
