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
kernel-card | RuntimeError: No supported CUDA architectures found for major versions [10].
fp4-kernel-missing | flashinfer.utils.BackendSupportedError: mm_fp4 does not support backend 'trtllm' with \
capability 120
kernel-card | AssertionError: AWQ-Marlin requires compute capability >= 8.0
attention-backend-card | AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90.
cudnn-version | RuntimeError: cuDNN FP4 GEMM requires backend version >= 91002, found 90800. Please upgrade \
cuDNN: pip install --upgrade nvidia-cudnn-cu12
cache-lock-held | filelock._error.Timeout: The file lock '/home/u/.cache/flashinfer/120a/.lock' could not \
be acquired.
parallel-size | AssertionError: 14 is not divisible by 4
quantized-shape | ValueError: Weight output_size_per_partition = 1216 is not divisible by min_n_threads = 64.
shared-memory | RuntimeError: unable to allocate shared memory(shm) for file </torch_4711_1>: No space \
left on device (28)
no-gpu | RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 999: unknown error
driver-too-old | torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported \
toolchain.
distributed-init | torch.distributed.DistNetworkError: The client socket has timed out after 600000ms \
while trying \
to connect to (192.168.1.5, 29500).
earlyoom | Aug 24 13:31:54 spark earlyoom[812]: sending SIGTERM to process 4711 uid 1000 "sglang::schedul": \
badness 1100, VmRSS 812 MiB
killed-from-outside | sglang-1 exited with code 137
"""
CASES = [tuple(line.split(" | ", 1)) for line in OTHER_WORDS.strip().splitlines()]
# Messages that the newest release has no more, with the release that was the last to have them.
OLDER_RELEASES = """
0.5.16 | kv-dtype-backend | RuntimeError: TRTLLM MHA with native FP4 KV cache supports decode only; use a \
separate \
prefill backend such as flashinfer or triton.
0.5.17 | hybrid-backend-blackwell | AssertionError: Only {'triton'} backends are supported on Blackwell \
GPUs for hybrid \
GDN models. Got attention_backend=fa3.
0.5.17 | speculation-no-logprobs | ValueError: DSpark speculative decoding does not support return_logprob \
yet.
0.5.18 | prefix-cache-broken | AssertionError: Unexpected overallocated KV cache, req.kv_committed_len=9, \
req.kv.kv_allocated_len=12
0.5.19 | dtype-quantization | ValueError: The params dtype must be float16, but got torch.bfloat16
0.5.19 | quantized-shape | ValueError: Weight input_size_per_partition = 9728 is not divisible by \
group_size = 128.
0.5.19 | unified-pool-refused | AssertionError: unified allocator virtual space smaller than the token \
budget: \
size_full=8 < max_total_num_tokens=9
0.5.20 | prefix-cache-broken | AssertionError: dec_swa_lock_only on swa_tombstone node, node.id=4
0.5.20 | prefix-cache-broken | AssertionError: Cached mamba slot is -1: keep_idx=0, buf=[-1], rid=a
0.5.20 | prefix-cache-page | AssertionError: Page size must be 1 for MambaRadixCache v1, got 64
0.5.20 | sampling-seed | AssertionError: Sampling seed is not supported for flashinfer backend
0.5.20 | sampling-batch-broken | AssertionError: The number of batch mask (3) does not match the number of \
sampling_batch_info (4)
0.5.20 | argument-refused | AssertionError: PP is not compatible with MTP models.
0.5.21 | quantization-card | NotImplementedError: Current platform does not support w4a4 nvfp4 quantization.
0.5.21 | capture-request-slots | AssertionError: Mixed chunk prefill requires the breakable prefill CUDA \
graph \
backend; got 'full'.
"""
OLDER = [tuple(line.split(" | ", 2)) for line in OLDER_RELEASES.strip().splitlines()]
EARLY = """
Currently DFLASH speculative decoding does not support dp attention.
--enable-unified-memory is not yet compatible with speculative decoding.
enable_mixed_chunk is required for speculative decoding
Ngram speculative decoding only supports CUDA or CPU devices.
extra_buffer needs CUDA/MUSA/NPU/ROCm (FLA).
"""
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


@pytest.mark.parametrize(("release", "entry", "message"), OLDER)
def test_what_older_releases_said(release: str, entry: str, message: str):
    root = diagnose(logs.failed(message, "serving")).root
    assert root is not None
    assert root.id == entry


@pytest.mark.parametrize("message", EARLY.strip().splitlines())
def test_what_the_argument_checks_of_older_releases_said(message: str):
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/sglang/srt/server_args.py", line 5000, in __post_init__',
        "    self._handle_speculative_decoding()",
        f"AssertionError: {message}",
    ]
    root = diagnose(lines).root
    assert root is not None
    assert root.stage == "arguments"
    assert root.id != "unknown-failure"


@pytest.mark.parametrize(
    "end", ["Killed", "sglang-1 exited with code 137", "bash: line 7:  4711 Killed  python"]
)
def test_the_kill_that_a_failure_ends_in_is_not_its_cause(end: str):
    unknown = diagnose([*logs.failed("WeirdError: the flux is negative", "load"), end])
    assert unknown.root is not None
    assert (unknown.root.id, unknown.unknown is not None) == ("unknown-failure", True)
    # The tail alone, and a container that does not print what its main process was told.
    told = diagnose(["[2026-08-24 13:31:55] Received sigquit from a child process.", end]).root
    assert told is not None
    assert told.id == "child-died"
    failed = logs.failed("WeirdError: the flux is negative", "load")
    no_word = diagnose([*(line for line in failed if "sigquit" not in line.lower()), end]).root
    assert no_word is not None
    assert no_word.id == "unknown-failure"


def test_an_error_that_comes_again_while_it_serves_was_not_outlived():
    xid = "Aug 24 13:31:50 box kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."
    died = logs.traceback("torch.AcceleratorError: CUDA error: unspecified launch failure", "serving")
    assert diagnose([xid, *logs.boot("serving")]).root is None
    root = diagnose([xid, *logs.boot("serving"), *died]).root
    assert root is not None
    assert (root.id, root.severity) == ("gpu-lost", "error")


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
