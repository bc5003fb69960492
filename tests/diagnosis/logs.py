"""Logs as SGLang writes them, cut off where a start failed."""

from __future__ import annotations

ARGUMENTS = (
    "[2026-08-24 13:31:10] server_args=ServerArgs(model_path='RadixArk/Qwen3.8-27B-NVFP4', port=30000, "
    "mem_fraction_static=0.9, max_running_requests=4, "
    "speculative_algorithm='DFLASH', disable_cuda_graph=False, "
    "mamba_radix_cache_strategy='extra_buffer', device='cuda', api_key='sk-very-secret-key')"
)
# What a start says, by the stage that follows.
BOOT: dict[str, tuple[str, ...]] = {
    "arguments": (),
    "environment": (
        ARGUMENTS,
        "[2026-08-24 13:31:11] Ignore import error when loading sglang.srt.models.midashenglm: "
        "No module named 'torchaudio'",
        "[2026-08-24 13:31:12] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
    ),
    "load": (
        "[2026-08-24 13:31:18] Init torch distributed ends. elapsed=0.05 s, mem usage=0.12 GB",
        "[2026-08-24 13:31:19] Load weight begin. avail mem=30.22 GB",
        "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:03<00:03,  1.60s/it]",
    ),
    "sizing": (
        "[2026-08-24 13:31:26] Load weight end. elapsed=7.12 s, type=Qwen3_5ForConditionalGeneration, "
        "quant=modelopt_mixed, avail mem=10.52 GB, mem usage=19.70 GB.",
        "[2026-08-24 13:31:26] Load weight begin. avail mem=10.48 GB",
        "[2026-08-24 13:31:27] Load weight end. elapsed=0.40 s, type=DFlash2DraftModel, avail mem=6.75 GB, "
        "mem usage=3.73 GB.",
    ),
    "pools": (
        "[2026-08-24 13:31:27] Mamba Cache is allocated. max_mamba_cache_size: 8, conv_state size: 0.02GB, "
        "ssm_state size: 0.63GB intermediate_ssm_state_cache size: 1.38GB "
        "intermediate_conv_window_cache size: 0.03GB ",
        "[2026-08-24 13:31:27] KV Cache is allocated. dtype: torch.float8_e4m3fn, "
        "#tokens: 44884, K size: 0.68 GB, "
        "V size: 0.68 GB",
        "[2026-08-24 13:31:27] Memory pool end. avail mem=3.59 GB",
    ),
    "prefill-capture": (
        "[2026-08-24 13:31:37] FlashInfer autotune completed.",
        "[2026-08-24 13:31:37] Capture target prefill CUDA graph begin. "
        "backend=breakable, num_tokens=[4, 8], "
        "avail mem=3.25 GB",
        "\rCapturing prefill shape (num_tokens=8 avail_mem=3.20 GB):   0%|          | 0/2 [00:00<?, ?it/s]",
    ),
    "verify-capture": (
        "[2026-08-24 13:31:48] Capture target prefill CUDA graph end. elapsed=11.69 s, mem usage=0.42 GB, "
        "avail mem=2.83 GB.",
        "[2026-08-24 13:31:48] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, "
        "bs=[1, 2], avail mem=2.83 GB",
        "\rCapturing batches (bs=2 avail_mem=2.80 GB):   0%|          | 0/2 [00:00<?, ?it/s]",
    ),
    "draft-capture": (
        "[2026-08-24 13:31:49] Capture target verify CUDA graph end. elapsed=1.12 s, mem usage=0.13 GB, "
        "avail mem=2.70 GB.",
        "[2026-08-24 13:31:49] Capture draft verify CUDA graph begin. backend=full, num_tokens_per_req=8, "
        "bs=[1, 2], avail mem=2.70 GB",
    ),
    "first-request": (
        "[2026-08-24 13:31:52] Capture draft verify CUDA graph end. elapsed=2.34 s, mem usage=0.12 GB, "
        "avail mem=2.58 GB.",
        "[2026-08-24 13:31:52] max_total_num_tokens=44884, chunked_prefill_size=2048, "
        "max_prefill_tokens=16384, "
        "max_running_requests=4, context_len=262144, available_gpu_mem=2.58 GB",
        "[2026-08-24 13:31:52] INFO:     Started server process [1234]",
        "[2026-08-24 13:31:52] INFO:     Application startup complete.",
        "[2026-08-24 13:31:52] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
        '[2026-08-24 13:31:52] INFO:     172.17.0.1:36124 - "GET /health HTTP/1.1" 503 Service Unavailable',
    ),
    "serving": (
        "[2026-08-24 13:31:54] The server is fired up and ready to roll!",
        "[2026-08-24 13:32:25] Prefill batch, #new-seq: 1, #new-token: 414, "
        "#cached-token: 0, full token usage: "
        "0.00, mamba usage: 0.38, #running-req: 0, #queue-req: 0, cuda graph: False, "
        "input throughput (token/s): 51.9",
        "[2026-08-24 13:32:26] Decode batch, #running-req: 1, #full token: 414, full "
        "token usage: 0.01, mamba num: 3, "
        "mamba usage: 0.38, accept len: 4.70, accept rate: 0.54, cuda graph: True, gen "
        "throughput (token/s): 181.9, "
        "#queue-req: 0",
        '[2026-08-24 13:32:27] INFO:     172.17.0.1:36124 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    ),
}
HINT = (
    "Possible solutions:",
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
    "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)",
    "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. (Not "
    "recommended. Huge performance loss)",
    "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose ",
)
_FRAMES = {
    "load": ("managers/scheduler.py", "init_model_worker", "model_loader/loader.py", "load_model"),
    "sizing": (
        "model_executor/model_runner.py",
        "init_memory_pool",
        "mem_cache/kv_cache_configurator.py",
        "configure",
    ),
    "serving": (
        "managers/scheduler.py",
        "event_loop_overlap",
        "managers/tp_worker.py",
        "forward_batch_generation",
    ),
}


def boot(stage: str, *, until_ready: bool = False) -> list[str]:
    """A start that stands in a stage."""
    lines: list[str] = []
    for name, said in BOOT.items():
        lines += said
        if name == stage and not until_ready:
            break
    return lines


def traceback(message: str, stage: str) -> list[str]:
    """What Python prints of an error in a scheduler."""
    files = _FRAMES.get(stage, _FRAMES["load"])
    frames = [
        line
        for file, name in (files[:2], files[2:])
        for line in (
            f'  File "/sgl-workspace/sglang/python/sglang/srt/{file}", line 413, in {name}',
            "    run()",
        )
    ]
    return ["Traceback (most recent call last):", *frames, *message.splitlines()]


def failed(message: str, stage: str, *, rank: str = "") -> list[str]:
    """A whole log of a start that ended with a message in a stage."""
    if stage == "arguments":
        if "error: unrecognized" in message:
            return ["usage: launch_server.py [-h] --model-path MODEL_PATH", message]
        return traceback(message, stage)
    first, *rest = traceback(message, stage)
    capturing = stage.endswith("capture")
    return [
        *boot(stage),
        f"[2026-08-24 13:33:00{rank}] Scheduler hit an exception: {first}",
        *rest,
        *(HINT if capturing else ()),
        "",
        "[2026-08-24 13:33:00] Received sigquit from a child process. It usually means the child failed.",
    ]
