from __future__ import annotations

import re
from dataclasses import fields

import pytest

from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.simulator.virtual import Ask, run_virtual

from .conftest import FOUR_USERS, ONE_USER


def said(flags: str, version: str = "0.5.23") -> list[str]:
    run = run_virtual(flags.split(), [[Ask(new_tokens=400)]], version=version)
    assert run.served, run.message
    return list(run.log)


def test_a_start_says_everything_in_sglangs_order() -> None:
    lines = [line for line in said(ONE_USER) if not line.startswith("\r")]
    order = [
        r"Init parallel begin\.",
        r"Memory baseline taken\. mem usage=[\d.]+ GB",
        r"Load weight begin\. avail mem=31\.16 GB",
        r"Load weight end\. elapsed=[\d.]+ s, type=Qwen3_5ForConditionalGeneration, quant=modelopt_mixed, "
        r"quant_algo=MIXED_PRECISION, avail mem=11\.02 GB, mem usage=20\.14 GB\.",
        r"Load weight begin\. avail mem=11\.02 GB",
        r"Load weight end\. elapsed=[\d.]+ s, type=DFlash2DraftModel, avail mem=7\.30 GB, mem "
        r"usage=3\.72 GB\.",
        r"Initialized DFLASH draft runner\. attention_backend=flashinfer, model=DFlash2DraftModel, "
        r"block_size=8, "
        r"draft_window_size=None, compact_cache=False",
        r"DFLASH draft runner ready\. mask_token=",
        r"Reserving 0\.10 GB of the KV budget for post-sizing multimodal allocations",
        r"Mamba Cache is allocated\. max_mamba_cache_size: 4, conv_state size: 0\.01GB, ssm_state "
        r"size: 0\.35GB "
        r"intermediate_ssm_state_cache size: 1\.12GB intermediate_conv_window_cache size: 0\.02GB",
        r"KV Cache is allocated\. dtype: torch\.float8_e4m3fn, #tokens: (\d+), K size: [\d.]+ GB, V size: ",
        r"Memory pool end\. avail mem=[\d.]+ GB",
        r"KV Cache is allocated\. dtype: torch\.float8_e4m3fn, #tokens: (\d+), K size: [\d.]+ GB, V size: ",
        r"Memory pool end\. avail mem=[\d.]+ GB",
        r"Capture target verify CUDA graph begin\. backend=full, num_tokens_per_req=8, avail mem=[\d.]+ GB",
        r"Capture target verify CUDA graph end\. bs=\[1\], elapsed=[\d.]+ s, mem usage=[\d.]+ GB, avail mem=",
        r"Capture draft verify CUDA graph begin\. ",
        r"Capture draft verify CUDA graph end\. ",
        r"max_total_num_tokens=\d+, chunked_prefill_size=4096, max_prefill_tokens=16384, "
        r"max_running_requests=1, context_len=262144, available_gpu_mem=[\d.]+ GB",
        r"Engine startup timings \(s\): load_weight=[\d.]+, kv_cache_allocation=[\d.]+, "
        r"scheduler_e2e=[\d.]+, "
        r"cuda_graph=\{prefill=0\.00, ",
        r"Prefill batch, #new-seq: 1, #new-token: 60, #cached-token: 0, #full token: \d+, full token usage: "
        r"[\d.]+, mamba num: \d+, mamba usage: [\d.]+, #running-req: 0, #queue-req: 0, #pending-token: 0, "
        r"cuda graph: False, input throughput \(token/s\): [\d.]+",
        r"Decode batch, #running-req: 1, #full token: \d+, full token usage: [\d.]+, mamba num: "
        r"\d+, mamba usage: "
        r"[\d.]+, accept len: [\d.]+, accept rate: [\d.]+, cuda graph: True, gen throughput "
        r"\(token/s\): [\d.]+, "
        r"#queue-req: 0",
    ]
    at = 0
    for pattern in order:
        found = next((place for place in range(at, len(lines)) if re.match(pattern, lines[place])), None)
        assert found is not None, f"{pattern}\nnot after line {at} of\n" + "\n".join(lines)
        at = found + 1


def test_progress_returns_the_carriage() -> None:
    bars = [line for line in said(FOUR_USERS) if line.startswith("\r")]
    assert re.match(r"\rCapturing batches \(bs=4 avail_mem=[\d.]+ GB\):\s+0%\|", bars[0])
    assert sum(bar.endswith("\n") for bar in bars) == 2


@pytest.mark.parametrize(
    ("version", "begin"),
    [
        ("0.5.23", "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, avail"),
        (
            "0.5.21",
            "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, bs=[1], avail",
        ),
        (
            "0.5.19",
            "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, bs=[1], avail",
        ),
    ],
)
def test_lines_change_with_the_release(version: str, begin: str) -> None:
    lines = said(ONE_USER, version)
    assert any(line.startswith(begin) for line in lines)
    old = version == "0.5.19"
    assert any(line.startswith("Init torch distributed ends.") for line in lines) is old


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_our_reader_of_logs_understands_all_of_it(version: str) -> None:
    flags = ONE_USER.replace("--disable-prefill-cuda-graph", "--chunked-prefill-size 1024")
    record = read_boot_log(line for text in said(flags, version) for line in text.splitlines())
    assert [weights.architecture for weights in record.weights] == [
        "Qwen3_5ForConditionalGeneration", "DFlash2DraftModel",
    ]  # fmt: skip
    assert {(graph.role, graph.what) for graph in record.graphs} == {
        ("target", "prefill"), ("target", "verify"), ("draft", "verify"),
    }  # fmt: skip
    assert len(record.kv_pools) == 2
    assert record.max_running_requests == 1
    silent = {field.name for field in fields(record) if getattr(record, field.name) in (None, ())}
    assert silent == {"version", "degradations", "failure"}


def test_dflash2_came_with_0_5_19() -> None:
    run = run_virtual(ONE_USER.split(), [[Ask()]], version="0.5.18")
    assert run.stage == "draft-load"
    assert "Model architectures ['DFlash2DraftModel'] are not supported" in run.message


def test_another_block_size_is_noted() -> None:
    lines = said(f"{ONE_USER} --speculative-num-draft-tokens 6")
    assert (
        "DFLASH block size mismatch: using speculative_num_draft_tokens=6 but draft config block_size=8."
        in lines
    )


def test_the_draft_pool_follows_an_explicit_dtype_only() -> None:
    automatic = said(ONE_USER.replace("--kv-cache-dtype fp8_e4m3", ""))
    dtypes = [line.split("dtype: ")[1].split(",")[0] for line in automatic if line.startswith("KV Cache")]
    assert dtypes == ["torch.float8_e4m3fn", "torch.bfloat16"]
