"""What people paste: causes in other words, behind other prefixes, and conditions without a message."""

from __future__ import annotations

import pytest

from dflash_deploy.diagnosis import diagnose

from . import logs

OTHER_WORDS = """
cuda-error | torch.AcceleratorError: CUDA error: invalid argument
cuda-error | RuntimeError: [SymmDeviceMemory] CUDA error
kernel-card | RuntimeError: FlashInfer requires sm75+
kernel-card | AssertionError: flashinfer_trtllm MoE backend requires SM100
module-missing | ValueError: FlashInfer backend is not available: No module named 'flashinfer'
module-missing | ImportError: Using `flash_attn` requires flash-attn
compiler-version | gcc: error: unrecognized command line option '-std=c++20'
json-damaged | json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
device-io | OSError: [Errno 5] Input/output error: '/mnt/models/model-00001-of-00005.safetensors'
weights-shape | KeyError: 'model.layers.0.mlp.gate_up_proj.weight_scale'
weights-shape | KeyError: 'lm_head.weight_scale'
weights-shape | ValueError: Following weights were not initialized from checkpoint: {'model.layers.0.q_proj'}
dflash-quantized-head | AttributeError: 'ParallelLMHead' object has no attribute 'weight'
dtype-card | RuntimeError: "index_cuda" not implemented for 'Float8_e4m3fn'
oom | RuntimeError: CUDA driver error: out of memory
oom | RuntimeError: Triton Error [CUDA]: out of memory
no-kv-memory | ValueError: Not enough memory; increase --mem-fraction-static
pool-leak | ValueError: token_to_kv_pool_allocator memory leak detected! available_size=1000
pool-leak | RuntimeError: Memory pool leak detected! total_tokens=8192
host-memory | OSError: [WinError 1455] The paging file is too small for this operation to complete
host-memory | OSError: [Errno 12] Nicht genügend Hauptspeicher verfügbar
port-taken | OSError: [Errno 98] Die Adresse wird bereits verwendet
port-taken | OSError: [WinError 10048] Only one usage of each socket address is normally permitted
disk-full | OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar
disk-full | cp: error writing 'x': No queda espacio en el dispositivo
permission-denied | PermissionError: [Errno 13] Keine Berechtigung: '/models'
permission-denied | OSError: [Errno 30] Sistema de archivos de solo lectura: '/models/.cache'
argument-refused | ValueError: Speculative decoding with overlap schedule requires --speculative-eagle-topk 1
argument-refused | RuntimeError: speculative_num_draft_tokens (16) must be <= block_size (8)
draft-target-mismatch | ValueError: draft vocab size 151936 does not match target vocab size 248320
draft-target-mismatch | AssertionError: Draft model hidden size (4096) does not match target (5120)
wrong-architecture | exec /usr/bin/bash: exec format error
image-missing | Error response from daemon: pull access denied for lmsysorg/sglangg, repository does not exist
llama-model | main: error: unable to load model
hub-unreachable | urllib3.exceptions.SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed
weights-damaged | _pickle.UnpicklingError: invalid load key, 'v'.
weights-damaged | version https://git-lfs.github.com/spec/v1
weights-damaged | OSError: Unable to load weights from pytorch checkpoint file for '/models/x.bin'
torch-without-arch | UserWarning: NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with \
the current PyTorch installation.
no-gpu | UserWarning: CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up \
environment
"""
CASES = [tuple(line.split(" | ", 1)) for line in OTHER_WORDS.strip().splitlines()]
PREFIXES = {
    "none": "{}",
    "tensor parallel": "[2026-08-24 13:31:54 TP1] {}",
    "compose": "sglang-1  | {}",
    "docker time": "2026-08-24T13:31:54.123456789Z {}",
    "journal": "Aug 24 13:31:54 box python[4711]: {}",
    "windows": "{}\r",
    "quoted": "> {}",
    "indented": "    {}",
    "colour": "\x1b[31m{}\x1b[0m",
    "vllm": "(EngineCore_DP0 pid=123) ERROR 08-24 13:31:54 [core.py:718] {}",
    "ray": "(RayWorkerWrapper pid=123) {}",
    "logging": "2026-08-24 13:31:54,123 - ERROR - {}",
}


@pytest.mark.parametrize(("entry", "line"), CASES)
def test_other_words_for_the_same(entry: str, line: str):
    root = diagnose([line]).root
    assert root is not None
    assert root.id == entry


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=list(PREFIXES))
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no-kv-memory", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        ("oom-decode-capture", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB."),
        (
            "weights-damaged",
            "SafetensorError: Error while deserializing header: HeaderTooLarge",
        ),
        (
            "illegal-memory-access",
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        ),
    ],
)
def test_whatever_stands_before_each_line(entry: str, message: str, prefix: str):
    stages = {"no-kv-memory": "sizing", "oom-decode-capture": "verify-capture", "weights-damaged": "load"}
    lines = [prefix.format(line) for line in logs.failed(message, stages.get(entry, "serving"))]
    found = diagnose(lines)
    assert found.root is not None
    assert found.root.id == entry
    # The tail alone, as people paste it.
    tail = diagnose(lines[-12:])
    assert tail.root is not None
    assert tail.root.id in (entry, "oom" if entry.startswith("oom") else entry)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=list(PREFIXES))
def test_a_healthy_start_raises_nothing_behind_any_prefix(prefix: str):
    found = diagnose([prefix.format(line) for line in logs.boot("serving")])
    assert [one.id for one in found.findings if one.severity == "error"] == []


def served(arguments: str) -> list[str]:
    """A start that came to serve, with more arguments."""
    first, *rest = logs.boot("serving")
    return [first.replace("port=30000", f"port=30000, {arguments}"), *rest]


OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of "
    "31.36 GiB of which 20.00 MiB is free."
)
CONDITIONS = {
    "the default list of graphs on a small card": (
        logs.failed(
            f"Exception: Capture cuda graph failed: {OUT}of which 20.00 MiB is free.", "verify-capture"
        ),
        "oom-decode-capture",
    ),
    "memory in fragments at the first request": (
        logs.failed(
            f"{OUT} Of the allocated memory 29.00 GiB is allocated by PyTorch, and "
            "487.12 MiB is reserved by PyTorch but unallocated.",
            "serving",
        ),
        "oom-hint-fragments",
    ),
    "unified memory runs out while capturing": (
        [*logs.boot("verify-capture"), "sglang-1 exited with code 137 (OOMKilled)"],
        "host-oom-killed",
    ),
    "an uncapped pool": (
        ["[2026-08-24 13:31:27] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 744276"],
        "pool-uncapped",
    ),
    "another program holds the card": (
        logs.failed(
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=12.31, local_gpu_memory=23.52",
            "load",
        ),
        "gpu-shared",
    ),
    "AWQ on Ada": (
        [*logs.boot("verify-capture"), "RuntimeError: awq_gemm: CUDA error: an illegal memory access"],
        "awq-ada-capture",
    ),
    "decode graphs turned off": (
        served("cuda_graph_backend_decode='disabled'"),
        "decode-graphs-off",
    ),
    "mixed chunks with a hybrid model": (
        served("enable_mixed_chunk=True"),
        "mixed-chunk-corrupts",
    ),
    "one rank's check, the others wait": (
        logs.failed("AssertionError: top_k_renorm_probs: CHECK_INPUT(logits) failed", "serving"),
        "topk-rank-hang",
    ),
    "NVFP4 before Blackwell": (
        logs.failed(
            "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum "
            "capability: 100. Current capability: 86.",
            "load",
        ),
        "quantization-card",
    ),
    "FP8 experts on Ampere": (
        logs.failed(
            "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are "
            "('fp8e4b15', 'fp8e5')",
            "serving",
        ),
        "fp8-type-in-triton",
    ),
    "a silent first boot": (
        [*logs.boot("pools"), "[2026-08-24 13:31:30] flashinfer.jit: Loading JIT ops: batch_prefill"],
        "jit-first-boot",
    ),
    "NCCL on consumer cards": (
        logs.failed(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error",
            "environment",
        ),
        "nccl-error",
    ),
    "extra_buffer without a prefix cache": (
        logs.failed(
            "ValueError: mamba_radix_cache_strategy extra_buffer is incompatible with --disable-radix-cache "
            "without speculative decoding",
            "arguments",
        ),
        "extra-buffer-refused",
    ),
    "a tokenizer without its file": (
        logs.failed("ValueError: Couldn't instantiate the backend tokenizer from one of", "load"),
        "tokenizer-missing",
    ),
    "vLLM that answers nobody": (
        ["INFO 08-24 13:31:54 [gpu_model_runner.py:4000] Graph capturing finished in 12 secs, took 0.61 GiB"],
        "vllm-hang-after-capture",
    ),
}


@pytest.mark.parametrize(("lines", "entry"), CONDITIONS.values(), ids=list(CONDITIONS))
def test_conditions_that_were_reported_without_a_message(lines: list[str], entry: str):
    assert entry in [finding.id for finding in diagnose(lines).findings]
