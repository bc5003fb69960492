"""Advice on flags: each entry holds where it should, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.advice import Case, Model, Weight, advise
from dflash_deploy.engine.sglang.advice_entries import ENTRIES
from dflash_deploy.engine.sglang.flags import FlagTable

HYBRID = Model(
    path="RadixArk/Qwen3.8-27B-NVFP4",
    hybrid=True,
    lm_head="fp4",
    kv_cache_dtype="fp8_e4m3",
    state_dtype="float32",
    draft_dflash2=True,
    draft_block=8,
)
DFLASH: dict[str, FlagValue] = {"speculative-algorithm": "DFLASH", "speculative-draft-model-path": "d/d"}
CALM: dict[str, FlagValue] = {
    **DFLASH,
    "mem-fraction-static": 0.85,
    "max-running-requests": 1,
    "max-mamba-cache-size": 4,
    "mamba-radix-cache-strategy": "extra_buffer_lazy",
    "mamba-ssm-dtype": "bfloat16",
    "kv-cache-dtype": "fp8_e4m3",
    "disable-prefill-cuda-graph": True,
    "cuda-graph-bs-decode": (1,),
    "speculative-num-draft-tokens": 8,
}
"""A published setting with what today's releases need: there is nothing to say of it."""


def case(*drop: str, version: str = "0.5.23", users: int = 1, **more: FlagValue) -> Case:
    flags = {name: value for name, value in CALM.items() if name not in drop}
    flags |= {name.replace("_", "-"): value for name, value in more.items()}
    return Case(
        flags=flags,
        version=version,
        users=users,
        model=HYBRID,
        card_memory_mib=32607,
        compute_capability="12.0",
    )


def ids(asked: Case) -> set[str]:
    return {one.id for one in advise(asked)}


def test_a_good_setting_is_left_alone():
    assert ids(case()) == set()


@pytest.mark.parametrize(
    ("expected", "asked"),
    [
        ("slots-below-request", case("mamba-radix-cache-strategy")),
        ("slots-below-request", case(max_mamba_cache_size=3)),
        ("radix-with-few-slots", case("mamba-radix-cache-strategy", users=4, max_running_requests=4)),
        ("requests-capped-by-slots", case(max_mamba_cache_size=8, max_running_requests=12)),
        ("requests-below-users", case(users=4)),
        ("decode-graph-off", case(disable_cuda_graph=True)),
        ("decode-graph-off", case(cuda_graph_backend_decode="disabled")),
        ("disable-cuda-graph-old", case(disable_cuda_graph=True)),
        ("torch-compile", case(enable_torch_compile=True)),
        ("fp32-head", case(enable_fp32_lm_head=True)),
        ("default-capture-list", case("cuda-graph-bs-decode")),
        ("default-capture-list", case("cuda-graph-bs-decode", "max-running-requests")),
        ("dspark-block", case(speculative_algorithm="DSPARK", speculative_dspark_block_size=8)),
        ("mixed-chunk", case(*DFLASH, enable_mixed_chunk=True)),
        ("mixed-chunk-off", case(enable_mixed_chunk=True)),
        ("replayssm-refused", case(enable_linear_replayssm_spec=True)),
        ("default-fraction-fell", case("mem-fraction-static")),
        ("fraction-too-high", case(mem_fraction_static=0.94)),
        ("segments", case(mem_fraction_static=0.9)),
        ("state-float32", case("mamba-ssm-dtype")),
        ("implicit-requests", case("max-running-requests")),
        ("chunk-too-large", case(chunked_prefill_size=8192)),
        ("chunk-too-large", case(chunked_prefill_size=-1)),
        ("prefill-graphs", case("disable-prefill-cuda-graph")),
        ("key-in-command", case(api_key="***")),
        ("open-to-all", case(host="0.0.0.0")),
        ("draft-window", case(speculative_draft_window_size=4)),
        ("track-interval", case(mamba_track_interval=4)),
        ("lazy-needs-overlap", case(disable_overlap_schedule=True)),
        ("kv-bfloat16", case(kv_cache_dtype="bfloat16")),
        ("kv-by-checkpoint", case("kv-cache-dtype")),
        ("attention-backend", case(attention_backend="fa3")),
        ("attention-backend", case(attention_backend="trtllm_mha")),
        ("fp4-gemm-card", case(fp4_gemm_backend="flashinfer_trtllm")),
        ("linear-backend-float32", case("mamba-ssm-dtype", linear_attn_decode_backend="flashinfer")),
        ("steps-ignored", case(speculative_num_steps=3)),
        ("ratio-ignored", case(mamba_full_memory_ratio=4.21)),
        ("strategy-ignored", case(disable_radix_cache=True)),
        ("compile-size-ignored", case(torch_compile_max_bs=4)),
        ("graph-size-ignored", case(cuda_graph_max_bs_decode=4)),
        ("draft-missing", case("speculative-draft-model-path")),
        ("draft-without-algorithm", case("speculative-algorithm")),
        ("block-differs", case(speculative_num_draft_tokens=16)),
        ("dflash2-needs-0-5-19", case(version="0.5.18")),
        ("quantized-head", case(version="0.5.18")),
        ("dflash-pipeline", case(pp_size=2)),
        ("yarn-with-draft", case(json_model_override_args='{"rope_scaling": {"type": "yarn"}}')),
        ("float16-conv", case(dtype="float16")),
        ("draft-cache-fa4", case(speculative_draft_attention_backend="fa4")),
        (
            "graphs-below-users",
            case("cuda-graph-bs-decode", cuda_graph_max_bs_decode=2, max_running_requests=4),
        ),
        ("thousands", replace(case(), argv=("--context-length", "8k"))),
        ("images-not-needed", replace(case(), model=replace(HYBRID, vision=True))),
        (
            "image-transport",
            replace(case(mm_feature_transport="cuda_ipc"), model=replace(HYBRID, vision=True)),
        ),
        ("language-only", case(language_only=True)),
        (
            "fp8-gemm-card",
            replace(case(fp8_gemm_backend="deep_gemm"), model=replace(HYBRID, path="q/model-FP8")),
        ),
        ("nvfp4-card", replace(case(), compute_capability="8.9")),
        ("awq-on-ada", replace(case(), compute_capability="8.9", model=replace(HYBRID, path="q/x-AWQ"))),
        ("unified-fraction", replace(case(), unified=True)),
        ("uncapped-unified", replace(case(), unified=True)),
        ("strategy-without-state", replace(case(), model=replace(HYBRID, hybrid=False))),
        ("dspark-needs-0-5-16", case(speculative_algorithm="DSPARK", version="0.5.15")),
    ],
)
def test_an_entry_holds(expected: str, asked: Case):
    found = {one.id: one for one in advise(asked)}
    assert expected in found
    assert found[expected].text
    assert found[expected].cost
    assert found[expected].evidence


def test_every_entry_is_tried_above():
    tried = {
        mark.args[1][at][0] for mark in test_an_entry_holds.pytestmark for at in range(len(mark.args[1]))
    }
    assert {entry.id for entry in ENTRIES} == tried


@pytest.mark.parametrize(
    ("absent", "asked"),
    [
        ("default-fraction-fell", case("mem-fraction-static", version="0.5.19")),
        ("default-fraction-fell", replace(case("mem-fraction-static"), card_memory_mib=97887)),
        ("mixed-chunk", replace(case(*DFLASH, enable_mixed_chunk=True), model=replace(HYBRID, hybrid=False))),
        ("fraction-too-high", case(mem_fraction_static=0.95, max_total_tokens=8192)),
        ("torch-compile", case(enable_torch_compile=True, disable_cuda_graph=True)),
        ("fp32-head", replace(case(enable_fp32_lm_head=True), model=replace(HYBRID, lm_head="bf16"))),
        ("replayssm-refused", case(speculative_algorithm="NEXTN", enable_linear_replayssm_spec=True)),
        ("open-to-all", case(host="0.0.0.0", api_key="***")),
        ("thousands", replace(case(), argv=("--context-length", "8Ki"))),
        ("radix-with-few-slots", case(users=4, max_running_requests=4, disable_radix_cache=True)),
    ],
)
def test_an_entry_does_not_hold(absent: str, asked: Case):
    assert absent not in ids(asked)


def test_every_flag_that_is_advised_is_one_of_the_newest_release():
    table = FlagTable.for_version("0.5.23")
    for mark in test_an_entry_holds.pytestmark:
        for _, asked in mark.args[1]:
            for one in advise(asked):
                assert all(table.find(name) for name in one.flags), one.id
                table.spell({name: value for name, value in one.flags.items() if value is not None})


def test_what_keeps_a_server_from_starting_comes_first_and_has_a_stage():
    found = advise(case("mamba-radix-cache-strategy", torch_compile_max_bs=4, disable_cuda_graph=True))
    assert [one.weight for one in found] == sorted(one.weight for one in found)
    assert found[0].id == "slots-below-request"
    assert found[0].stage is Stage.SIZING
    assert found[0].flags == {"mamba-radix-cache-strategy": "extra_buffer_lazy"}
    assert all((one.stage is None) == (one.weight is not Weight.REFUSED) for one in found)


def test_what_the_parser_refuses_is_advice_too():
    table = FlagTable.for_version("0.5.23")
    asked = replace(case("cuda-graph-bs-decode", cuda_graph_max_bs_decode=4), argv=())
    found = advise(asked, table.problems(["--model-path", "m", "--cuda-graph-max-bs", "4", "--foo"]))
    assert [one.id for one in found[:2]] == ["flag-ambiguous", "flag-unknown"]
    assert found[0].flags == {"cuda-graph-max-bs": None, "cuda-graph-max-bs-decode": 4}


def test_the_published_slowdown_is_told():
    (graph,) = (one for one in advise(case(disable_cuda_graph=True)) if one.id == "decode-graph-off")
    assert "3 times" in graph.text
    assert "207.5" in graph.cost
    assert "63.9" in graph.cost
