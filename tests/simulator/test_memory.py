from __future__ import annotations

import argparse
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.simulator.physics import memory
from dflash_deploy.simulator.physics.residuals import Residuals, draw_residuals
from dflash_deploy.simulator.settings import (
    ArgumentsRefusedError,
    Settings,
    decode_size_list,
    resolve,
)
from dflash_deploy.simulator.shipped import load_card

from .conftest import DFLASH2, FOUR_USERS, NVFP4, ONE_USER


@cache
def parser_of(version: str) -> argparse.ArgumentParser:
    return FlagTable.for_version(version).parser()


def settings_of(flags: str, card: str = "rtx-5090", version: str = "0.5.23") -> Settings:
    args = parser_of(version).parse_args(flags.split())
    return resolve(args, card=load_card(card), version=version, env={})


def pools_of(flags: str, free_at_start: float, free: float, card: str = "rtx-5090") -> memory.Pools:
    return memory.size_pools(settings_of(flags, card), free_at_start=free_at_start, free=free)


def test_a_published_boot_log_is_sized_as_it_was() -> None:
    flags = (
        f"{NVFP4} {DFLASH2} --kv-cache-dtype bf16 --mem-fraction-static 0.85 --max-running-requests 2 "
        "--chunked-prefill-size 2048 --max-mamba-cache-size 8 --mamba-ssm-dtype float32 "
        "--mamba-radix-cache-strategy extra_buffer_lazy --speculative-num-draft-tokens 8"
    )
    pools = pools_of(flags, 94.22, 70.75, "rtx-pro-6000")
    assert pools.running == 2
    assert pools.tokens == pytest.approx(644_884, rel=0.004)
    assert pools.ssm == pytest.approx(1.27, abs=0.01)
    assert pools.verify_ssm == pytest.approx(3.38, abs=0.01)
    assert pools.verify_conv == pytest.approx(0.03, abs=0.005)
    assert pools.kv == pytest.approx(2 * 19.68, rel=0.004)
    assert pools.draft_kv == pytest.approx(2 * 6.15, rel=0.004)


def test_published_state_bytes_to_the_byte() -> None:
    flags = (
        f"{NVFP4} {DFLASH2} --mem-fraction-static 0.85 --max-running-requests 3 --max-mamba-cache-size 12 "
        "--mamba-ssm-dtype float32 --mamba-radix-cache-strategy extra_buffer_lazy"
    )
    pools = pools_of(flags, 94.22, 70.75, "rtx-pro-6000")
    assert round((pools.conv + pools.ssm) * 2**30) == 2_001_272_832
    assert round((pools.verify_ssm + pools.verify_conv) * 2**30) == 4_871_159_808


def test_automatic_slots_of_a_published_run() -> None:
    flags = (
        f"{NVFP4} {DFLASH2} --mem-fraction-static 0.85 --max-running-requests 48 "
        "--mamba-full-memory-ratio 3.51 "
        "--mamba-radix-cache-strategy extra_buffer_lazy --mamba-ssm-dtype bfloat16"
    )
    slack = 113.0 * 0.15
    pools = pools_of(flags, 113.0, 25.0 + slack + memory.mm_reserve(settings_of(flags)), "dgx-spark")
    assert (pools.slots, pools.running) == (85, 21)
    assert pools.tokens == pytest.approx(117_125, rel=0.02)


@pytest.mark.parametrize(
    ("version", "flags", "fraction"),
    [
        ("0.5.19", "--language-model-only", 0.874),
        ("0.5.21", "--language-model-only", 0.777),
        ("0.5.23", "--language-model-only", 0.777),
        ("0.5.19", "--language-model-only --disable-prefill-cuda-graph", 0.885),
        ("0.5.23", "--language-model-only --disable-prefill-cuda-graph", 0.789),
        ("0.5.19", "", 0.808),
        ("0.5.23", "", 0.718),
        ("0.5.23", "--max-running-requests 1", 0.721),
        ("0.5.23", "--language-model-only --max-running-requests 4 --max-total-tokens 8192", 0.779),
    ],
)
def test_default_fraction(version: str, flags: str, fraction: float) -> None:
    settings = settings_of(f"{NVFP4} {flags}", version=version)
    assert settings.mem_fraction_static == pytest.approx(fraction, abs=0.0011)


@pytest.mark.parametrize(
    ("largest", "speculative", "sizes"),
    [
        (1, True, [1]),
        (4, False, [1, 2, 4]),
        (4, True, [1, 2, 3, 4]),
        (24, False, [1, 2, 4, 8, 12, 16, 24]),
        (24, True, [*range(1, 9), *range(10, 25, 2)]),
        (48, True, [*range(1, 9), *range(10, 33, 2), 40, 44, 48]),
    ],
)
def test_captured_sizes(largest: int, speculative: bool, sizes: list[int]) -> None:
    assert list(decode_size_list(largest, speculative)) == sizes


@pytest.mark.parametrize(("size", "count"), [(512, 30), (1024, 38), (2048, 42), (4096, 50), (8192, 58)])
def test_prefill_sizes(size: int, count: int) -> None:
    assert len(settings_of(f"{NVFP4} --chunked-prefill-size {size}").prefill_sizes) == count


@pytest.mark.parametrize(
    ("strategy", "slots"),
    [("--disable-radix-cache", 1), ("", 5), ("--mamba-radix-cache-strategy extra_buffer_lazy", 4)],
)
def test_slots_for_each_request(strategy: str, slots: int) -> None:
    assert settings_of(f"{NVFP4} {strategy}").state_slots_per_request == slots


def test_four_slots_serve_nobody_under_the_default_strategy() -> None:
    flags = ONE_USER.replace("--mamba-radix-cache-strategy extra_buffer_lazy", "")
    with pytest.raises(memory.SizingError, match="state cache is too small to serve any requests") as refused:
        pools_of(flags, 31.16, 7.3)
    assert "max_mamba_cache_size=4, mamba_ratio=5, resulting max_num_reqs=0" in refused.value.message


def test_the_minimum_fraction_is_told_and_a_larger_one_serves() -> None:
    with pytest.raises(memory.SizingError, match=r"Raise --mem-fraction-static above 0\.766"):
        pools_of(ONE_USER.replace("0.85", "0.80"), 31.16, 7.3)
    assert pools_of(ONE_USER.replace("0.85", "0.83"), 31.16, 7.3).tokens > 0


def test_requests_are_clamped_by_slots_with_sglangs_warning() -> None:
    pools = pools_of(ONE_USER.replace("--max-running-requests 1", "--max-running-requests 3"), 31.16, 7.3)
    assert pools.running == 1
    assert "max_running_requests is capped to 1 by the mamba state cache" in pools.warnings[0]


def test_a_pool_larger_than_there_is_room_for_is_cut() -> None:
    pools = pools_of(f"{ONE_USER} --max-total-tokens 900k", 31.16, 7.3)
    assert pools.tokens < 900_000
    assert pools.warnings == (
        f"max_total_tokens=900000 is larger than the profiled value {pools.tokens}. "
        "Use the profiled value instead.",
    )


def test_a_draft_window_needs_less_than_a_whole_draft_pool() -> None:
    whole = pools_of(ONE_USER, 31.16, 7.3)
    window = pools_of(f"{ONE_USER} --speculative-draft-window-size 1024", 31.16, 7.3)
    assert window.draft_kv < whole.draft_kv
    assert window.tokens > whole.tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model-path nobody/nothing", "is not a local folder and is not a valid model identifier"),
        (f"{NVFP4} --speculative-algorithm DFLASH", "requires setting --speculative-draft-model-path"),
        (f"{NVFP4} --speculative-algorithm FLASHY", "Unknown speculative algorithm name: FLASHY"),
        (f"{ONE_USER} --speculative-num-draft-tokens 8 --speculative-dflash-block-size 4", "but they differ"),
        (f"{ONE_USER} --speculative-draft-window-size 4", "must be >= --speculative-num-draft-tokens"),
        (f"{ONE_USER} --mamba-track-interval 4", "mamba_track_interval"),
        (f"{NVFP4} --context-length 400k", "greater than the derived context_length"),
    ],
)
def test_refused_arguments(flags: str, message: str) -> None:
    with pytest.raises(ArgumentsRefusedError) as refused:
        settings_of(flags)
    assert message in refused.value.message


@given(fraction=st.floats(0.80, 0.97), draft_tokens=st.integers(1, 16), running=st.integers(1, 8))
def test_more_fraction_never_means_fewer_tokens(fraction: float, draft_tokens: int, running: int) -> None:
    def tokens(share: float) -> int:
        flags = (
            f"{NVFP4} {DFLASH2} --mem-fraction-static {share} --speculative-num-draft-tokens {draft_tokens} "
            f"--max-running-requests {running} --mamba-ssm-dtype bfloat16 --disable-radix-cache"
        )
        try:
            return pools_of(flags, 31.16, 7.3).tokens
        except memory.SizingError:
            return 0

    assert tokens(fraction) <= tokens(fraction + 0.02)


def test_graphs_cost_more_for_more_sizes_and_rows() -> None:
    one, four = settings_of(ONE_USER), settings_of(FOUR_USERS)
    small = memory.verify_graphs(one, pools_of(ONE_USER, 31.16, 7.3), Residuals())
    large = memory.verify_graphs(four, pools_of(FOUR_USERS, 31.16, 7.3), Residuals())
    assert small.sizes == (1,)
    assert large.sizes == (1, 2, 3, 4)
    assert large.gib > small.gib


def test_residuals_are_of_the_seed_and_none_at_zero() -> None:
    assert draw_residuals("rtx-5090", 0) == Residuals()
    assert draw_residuals("rtx-5090", 7) == draw_residuals("rtx-5090", 7)
    drawn = [draw_residuals("rtx-5090", seed) for seed in range(1, 60)]
    assert len(set(drawn)) == len(drawn)
    bounds = SimpleNamespace(bandwidth=0.03, graph_memory=0.15, acceptance=0.05, verify=0.05)
    for name, spread in vars(bounds).items():
        values = [getattr(one, name) for one in drawn]
        assert max(values) <= 1 + spread
        assert min(values) >= 1 - spread
        assert max(values) - min(values) > spread
