# ruff: noqa: E501 -- log lines stand here as a server writes them
from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.engine.boot import BootRecord, GraphCapture, Stage
from dflash_deploy.engine.sglang.bootlog import BootLog, read_boot_log

CASES = json.loads(Path(__file__).with_name("boot_logs.json").read_text())
WHOLE_START: list[str] = CASES[0]["lines"]
DATE = "[2026-10-03 10:00:00]"


def figures(record: BootRecord) -> dict[str, object]:
    """The record, flat, as the cases name its figures."""
    found: dict[str, object] = {
        "free_before_load_gib": record.free_before_load_gib,
        "multimodal_reserve_gib": record.multimodal_reserve_gib,
        "free_after_pools_gib": record.free_after_pools_gib,
        "free_at_ready_gib": record.free_at_ready_gib,
        "kv_tokens": record.kv_tokens,
        "max_running_requests": record.max_running_requests,
    }
    if record.weights:
        target, draft = record.weights[0], record.weights[-1]
        found |= {"target_weights_gib": target.memory_gib, "free_after_target_gib": target.free_after_gib}
        found |= {"draft_weights_gib": draft.memory_gib, "free_after_draft_gib": draft.free_after_gib}
    if record.state_cache:
        cache = record.state_cache
        found |= {
            "state_slots": cache.slots,
            "state_conv_gib": cache.conv_gib,
            "state_ssm_gib": cache.ssm_gib,
        }
        found |= {"verify_ssm_gib": cache.verify_ssm_gib, "verify_conv_gib": cache.verify_conv_gib}
    for name, pool in zip(("target", "draft"), record.kv_pools, strict=False):
        found[f"{name}_pool_gib"] = pool.memory_gib
    for graph in record.graphs:
        name = "draft" if graph.role == "draft" else graph.what
        found |= {f"{name}_graph_gib": graph.memory_gib, f"{name}_graph_s": graph.elapsed_s}
    return found | {f"timing.{name}": value for name, value in record.startup_timings_s}


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_published_lines_give_their_figures(case: dict[str, object]) -> None:
    lines, expected = case["lines"], case["expect"]
    assert isinstance(lines, list)
    assert isinstance(expected, dict)
    found = figures(read_boot_log(lines))
    assert {name: found.get(name) for name in expected} == expected


def test_a_whole_start() -> None:
    record = read_boot_log(WHOLE_START)
    assert record.ready
    assert [loaded.architecture for loaded in record.weights] == [
        "Qwen3_5ForConditionalGeneration",
        "DFlash2DraftModel",
    ]
    assert [(pool.tokens, pool.dtype) for pool in record.kv_pools] == [(644884, "bfloat16")] * 2
    assert record.graphs[1:] == (
        GraphCapture("target", "verify", (1, 2), 1.12, 0.13),
        GraphCapture("draft", "verify", (1, 2), 2.34, 0.12),
    )
    assert record.context_tokens == 262144
    assert record.chunked_prefill_size == 2048
    assert record.degradations == ()


def test_a_start_passes_through_its_stages() -> None:
    log = BootLog()
    seen = [log.progress.stage]
    for line in WHOLE_START:
        log.feed(line)
        if log.progress.stage is not seen[-1]:
            seen.append(log.progress.stage)
    order = list(Stage)
    assert seen[0] is Stage.ARGUMENTS
    assert seen[-1] is Stage.SERVING
    assert {Stage.LOAD, Stage.DRAFT_LOAD, Stage.POOLS, Stage.DECODE_CAPTURE, Stage.DRAFT_CAPTURE} <= set(seen)
    late = [stage for stage in seen if order.index(stage) >= order.index(Stage.POOLS)]
    assert late == sorted(late, key=order.index)


@pytest.mark.parametrize(
    "prefix",
    [
        "Oct 03 10:00:00 host sglang-serve[1234]: ",
        "2026-10-03T10:00:00+0200 host python[77]: ",
        "sglang-1  | ",
        "2026-10-03T10:00:00.123456789Z ",
        "2026-10-03T10:00:00.123456789Z stderr F ",
        "\x1b[32m",
    ],
)
def test_what_a_log_is_wrapped_in_does_not_matter(prefix: str) -> None:
    assert read_boot_log(prefix + line + "\x1b[0m\r\n" for line in WHOLE_START) == read_boot_log(WHOLE_START)


def test_a_log_in_one_piece_is_the_same_as_line_by_line() -> None:
    assert read_boot_log(["\n".join(WHOLE_START)]) == read_boot_log(WHOLE_START)


def test_one_rank_speaks_for_all() -> None:
    lines = [line.replace("]", f" TP{rank}]", 1) for line in WHOLE_START for rank in (0, 1)]
    assert read_boot_log(lines) == read_boot_log(WHOLE_START)


def test_a_journal_of_several_starts_gives_the_last() -> None:
    again = [f"{DATE} server_args={{'model_path': '/m'}}", f"{DATE} Load weight begin. avail mem=31.00 GB"]
    record = read_boot_log([*WHOLE_START, *again])
    assert record.stage is Stage.LOAD
    assert record.free_before_load_gib == 31.0
    assert record.kv_tokens is None


def test_captured_sizes_stand_in_either_line() -> None:
    newer = read_boot_log(
        [
            f"{DATE} Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=8, avail mem=2.00 GB",
            f"{DATE} Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=1.50 s, mem usage=0.40 GB, "
            "avail mem=1.60 GB.",
        ]
    )
    assert newer.graphs == (GraphCapture("target", "verify", (1, 2, 4), 1.5, 0.4),)


def test_pools_of_every_wording() -> None:
    record = read_boot_log(
        [
            f"{DATE} KV Cache VA upper bound. dtype: torch.float8_e4m3fn, #tokens: 90000, K size: 1.5 GB, "
            "V size: 1.5GB",
            f"{DATE} KV Cache is allocated. #tokens: 90000, KV size: 0.5 GB",
            f"{DATE} Post-capture KV sizing: KV cache allocated. dtype: torch.float8_e4m3fn, #tokens: 60000, "
            "KV size: 2.00 GB, avail mem=1.10 GB",
        ]
    )
    assert [(pool.tokens, pool.memory_gib) for pool in record.kv_pools] == [(60000, 2.0), (90000, 0.5)]


def test_cpu_memory_and_silent_servers() -> None:
    record = read_boot_log(
        [
            f"{DATE} max_total_num_tokens=8192, chunked_prefill_size=2048, max_prefill_tokens=16384, "
            "max_running_requests=8, context_len=4096, available_cpu_mem=9.75 GB",
        ]
    )
    assert record.free_at_ready_gib == 9.75
    assert record.stage is Stage.WARM_UP
    assert read_boot_log([]) == BootRecord(Stage.ARGUMENTS)


# Progress


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        (["x"], "reading arguments"),
        ([f"{DATE} Load weight begin. avail mem=31.00 GB"], "loading weights"),
        (
            [
                f"{DATE} Load weight begin. avail mem=31.00 GB",
                "\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.00s/it]"
                "\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:02<00:02,  1.00s/it]",
            ],
            "loading weights 2/4",
        ),
        (
            [
                f"{DATE} Capture draft verify CUDA graph begin. backend=full, avail mem=2.00 GB",
                "Capturing batches (bs=2 avail_mem=1.91 GB):  37%|███▊      | 3/8 [00:01<00:01,  1.10s/it]",
            ],
            "draft verify graph 3/8",
        ),
        (
            [
                f"{DATE} Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8]",
                "Capturing prefill shape (num_tokens=8 avail_mem=1.91 GB):  50%|█████     | 1/2 [00:01<00:01]",
            ],
            "prefill graph 1/2",
        ),
    ],
)
def test_progress_in_words(lines: list[str], detail: str) -> None:
    log = BootLog()
    for line in lines:
        log.feed(line)
    assert log.progress.detail == detail


# Degradations

ARGUMENTS = (
    f"{DATE} server_args={{'model_path': '/m', 'max_running_requests': %s, 'disable_prefill_cuda_graph': False, "
    "'cuda_graph_backend_prefill': None}"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "Disable DFLASH draft cuda graph because only 0.85 GB GPU memory is available after target backend "
            "initialization.",
            "draft-graph-lost",
        ),
        ("Disable DSpark draft cuda graph because only 0.85 GB GPU memory is available.", "draft-graph-lost"),
        (
            "max_running_requests is capped to 2 by the mamba state cache (max_mamba_cache_size=8, 4 state slots "
            "per request). To raise it: increase --mamba-full-memory-ratio",
            "requests-clamped",
        ),
        (
            "max_running_requests was reduced from the requested 48 to 21 (per dp worker) due to the available KV "
            "cache capacity.",
            "requests-clamped",
        ),
        (
            "max_total_tokens=200000 is larger than the profiled value 31000. Use the profiled value instead.",
            "tokens-clamped",
        ),
        ("Disable prefill CUDA graph because the capture size is not set", "prefill-graph-disabled"),
        (
            "DFLASH block size mismatch: using speculative_num_draft_tokens=16 but draft config block_size=8.",
            "block-size-mismatch",
        ),
        (
            "DFLASH non-greedy verification is unavailable on this build/device; falling back to greedy argmax",
            "non-greedy-unavailable",
        ),
        (
            "flashinfer is unavailable; the DFlash2 selector falls back to torch.topk, which roughly halves",
            "selector-torch-fallback",
        ),
        ("DFLASH draft greedy head kept eager (reason=quantized lm_head).", "draft-head-eager"),
    ],
)
def test_degradations_are_named(text: str, name: str) -> None:
    record = read_boot_log([ARGUMENTS % 48, f"{DATE} {text}", f"{DATE} {text}"])
    assert [(one.id, one.text) for one in record.degradations] == [(name, text)]
    assert record.failure is None


CAPPED = (
    f"{DATE} max_running_requests is capped to 6 by the mamba state cache (max_mamba_cache_size=32, 5 state"
)


def test_a_limit_that_nobody_set_is_not_clamped() -> None:
    implicit = f"{DATE} Max running requests is reset to 48 for speculative decoding. You can override this by explicitly"
    assert read_boot_log([ARGUMENTS % None, CAPPED]).degradations == ()
    assert read_boot_log([implicit, ARGUMENTS % 48, CAPPED]).degradations == ()
    assert read_boot_log([*WHOLE_START, implicit, ARGUMENTS % 48, CAPPED]).degradations == ()


def test_a_limit_cut_in_silence_is_found() -> None:
    summary = (
        f"{DATE} max_total_num_tokens=9000, chunked_prefill_size=2048, max_prefill_tokens=16384, "
        "max_running_requests=%d, context_len=4096, available_gpu_mem=2.50 GB"
    )
    (found,) = read_boot_log([ARGUMENTS % 8, summary % 6]).degradations
    assert (found.id, found.text) == ("requests-clamped", "max_running_requests is 6, below the requested 8")
    assert read_boot_log([ARGUMENTS % 8, summary % 8]).degradations == ()


def test_a_prefill_graph_switched_off_on_purpose_is_no_degradation() -> None:
    line = (
        f"{DATE} Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
        "--cuda-graph-backend-prefill=disabled or auto-disable rules)."
    )
    asked = f"{DATE} server_args={{'model_path': '/m', 'cuda_graph_backend_prefill': 'disabled'}}"
    on_cpu = f"{DATE} server_args={{'model_path': '/m', 'device': 'cpu', 'cuda_graph_backend_prefill': None}}"
    assert read_boot_log([asked, line]).degradations == ()
    assert read_boot_log([on_cpu, line]).degradations == ()
    assert [one.id for one in read_boot_log([ARGUMENTS % 1, line]).degradations] == ["prefill-graph-disabled"]


# Failures

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 970.00 MiB. GPU 0 has a total capacity of "
    "31.84 GiB of which 676.81 MiB is free."
)
DIED = f"{DATE} Received sigquit from a child process. It usually means the child failed."
TO_SIZING = [
    f"{DATE} server_args={{'model_path': '/m'}}",
    f"{DATE} Load weight begin. avail mem=31.00 GB",
    f"{DATE} Load weight end. elapsed=7.10 s, type=Qwen3_5ForConditionalGeneration, avail mem=8.00 GB, "
    "mem usage=20.00 GB.",
]
TO_CAPTURE = [*TO_SIZING, f"{DATE} Capture target verify CUDA graph begin. backend=full, avail mem=1.00 GB"]


def scheduler_dies(*parts: str) -> list[str]:
    lines = [f"{DATE} Scheduler hit an exception: Traceback (most recent call last):"]
    for number, part in enumerate(parts):
        lines += ["Traceback (most recent call last):"] if number else []
        lines += [
            '  File "/opt/venv/scheduler.py", line 10, in run',
            "    self.step()",
            "          ^^^^^^",
            part,
        ]
        if number + 1 < len(parts):
            lines += ["", "During handling of the above exception, another exception occurred:", ""]
    return [*lines, "", DIED]


@pytest.mark.parametrize(
    ("lines", "stage", "message"),
    [
        (
            [
                *TO_SIZING,
                *scheduler_dies(
                    "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7. "
                    "Raise --mem-fraction-static above 0.737 (minimum viable = 1 - available/pre = 0.7363)."
                ),
            ],
            Stage.SIZING,
            "ValueError: Loaded weights leave no GPU memory",
        ),
        (
            [
                *TO_SIZING,
                *scheduler_dies(
                    "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                    "max_mamba_cache_size=3, mamba_ratio=5, resulting max_num_reqs=0."
                ),
            ],
            Stage.SIZING,
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small",
        ),
        ([*TO_SIZING, *scheduler_dies(OUT_OF_MEMORY)], Stage.POOLS, OUT_OF_MEMORY),
        (
            [
                *TO_CAPTURE,
                *scheduler_dies(
                    OUT_OF_MEMORY,
                    f"Exception: Capture cuda graph failed: {OUT_OF_MEMORY.partition(': ')[2]}\n"
                    "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
                ),
            ],
            Stage.DECODE_CAPTURE,
            OUT_OF_MEMORY,
        ),
        (
            [
                *TO_CAPTURE,
                "Exception: Capture cuda graph failed: scheduler_metadata must have shape (metadata_size)",
            ],
            Stage.DECODE_CAPTURE,
            "Exception: scheduler_metadata must have shape (metadata_size)",
        ),
        (
            [*TO_SIZING, *scheduler_dies("KeyError: 'x'", "ValueError: unknown architecture Foo")],
            Stage.SIZING,
            "ValueError: unknown architecture Foo",
        ),
        (
            ["usage: sglang serve [-h]", "sglang serve: error: unrecognized arguments: --enable-reasoning"],
            Stage.ARGUMENTS,
            "unrecognized arguments: --enable-reasoning",
        ),
        (
            ["/usr/bin/python: No module named sglang"],
            Stage.ARGUMENTS,
            "/usr/bin/python: No module named sglang",
        ),
        (
            [
                "Traceback (most recent call last):",
                '  File "/opt/x.py", line 1, in <module>',
                "ValueError: DFLASH speculative decoding is not supported on CPU",
            ],
            Stage.ARGUMENTS,
            "ValueError: DFLASH speculative decoding is not supported on CPU",
        ),
        (
            [
                *WHOLE_START[:-3],
                "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8002): address already in "
                "use",
            ],
            Stage.WARM_UP,
            "ERROR:    [Errno 98] error while attempting to bind",
        ),
        ([*TO_CAPTURE, DIED], Stage.DECODE_CAPTURE, "Received sigquit from a child process."),
        (
            [*WHOLE_START, *scheduler_dies(OUT_OF_MEMORY)],
            Stage.SERVING,
            OUT_OF_MEMORY,
        ),
    ],
)
def test_failures_are_traced_to_their_innermost_message(lines: list[str], stage: Stage, message: str) -> None:
    record = read_boot_log(lines)
    assert record.failure is not None
    assert record.failure.stage is stage
    assert record.failure.message.startswith(message)
    assert not record.ready


def test_a_traceback_with_other_lines_in_between_is_read() -> None:
    lines = scheduler_dies(OUT_OF_MEMORY)
    mixed = [line for one in lines for line in (one, f"{DATE} Detokenizer heartbeat")]
    record = read_boot_log([*TO_CAPTURE, *mixed])
    assert record.failure is not None
    assert record.failure.message == OUT_OF_MEMORY
    assert record.failure.certain


def test_a_traceback_cut_short_leaves_the_symptom() -> None:
    lines = [*TO_CAPTURE, *scheduler_dies(OUT_OF_MEMORY)[:3], DIED]
    record = read_boot_log(lines)
    assert record.failure is not None
    assert record.failure.message.startswith("Received sigquit")


@pytest.mark.parametrize(
    "noise",
    [
        "RuntimeError: Could not load libtorchcodec. Likely causes: FFmpeg is not properly installed",
        "OSError: libavutil.so.58: cannot open shared object file",
    ],
)
def test_an_import_that_can_be_done_without_is_no_failure(noise: str) -> None:
    lines = ["Traceback (most recent call last):", '  File "/x.py", line 1, in <module>', noise]
    assert read_boot_log([*lines, *WHOLE_START]).ready
    assert read_boot_log(lines).failure is None


def test_an_exception_that_the_server_lives_through_is_no_failure() -> None:
    thrown = ["Traceback (most recent call last):", '  File "/x.py", line 1', "KeyError: 'optional'"]
    failure = read_boot_log([*TO_SIZING, *thrown]).failure
    assert failure is not None
    assert not failure.certain
    bar = "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.00s/it]"
    assert read_boot_log([*TO_SIZING, *thrown, bar]).failure is None
    assert read_boot_log([*TO_SIZING, *thrown, f"{DATE} Memory pool end. avail mem=3.00 GB"]).failure is None
    assert read_boot_log([*WHOLE_START, "ERROR:    Exception in ASGI application", *thrown]).ready


# What is never kept, and what is never raised


def test_the_api_key_is_not_kept() -> None:
    key = "sk-0123456789"
    lines = [
        f"{DATE} server_args={{'model_path': '/m', 'api_key': '{key}', 'admin_api_key': 'adm-{key}'}}",
        f"{DATE} Disable DFLASH draft cuda graph because {key}",
        f"sglang serve: error: unrecognized arguments: --api-key {key} --foo adm-{key}",
    ]
    record = read_boot_log(lines)
    assert record.failure is not None
    assert key not in repr(record)
    unseen = read_boot_log([f"sglang serve: error: unrecognized arguments: --x --api-key={key}"])
    assert key not in repr(unseen)


def test_a_long_line_costs_bounded_memory() -> None:
    log = BootLog()
    for _ in range(3):
        log.feed("Exception: Capture cuda graph failed: " + "x" * 3_000_000)
    assert len(repr(log.record())) < 5000
    assert len(log.progress.detail) < 200


PIECES = st.sampled_from(
    [
        *(
            "Load weight begin. ",
            "Load weight end. elapsed=",
            "avail mem=",
            "mem usage=",
            "-1.5 GB",
            "9" * 400,
            " GB",
        ),
        *(
            "Mamba Cache is allocated. max_mamba_cache_size: ",
            "conv_state size: ",
            "ssm_state size: ",
            "0.1GB",
        ),
        *(
            "KV Cache is allocated. ",
            "#tokens: ",
            "K size: ",
            "V size: ",
            "Memory pool end. ",
            "nan",
            "\r",
            "\n",
        ),
        *(
            "max_total_num_tokens=",
            "context_len=",
            "server_args={'api_key': '",
            "Traceback (most recent call last):",
        ),
        *(
            "Capture target verify CUDA graph begin. ",
            "bs=[1, 2",
            "]",
            "Capture draft CUDA graph end. elapsed=1 s",
        ),
        *(
            "Engine startup timings (s): a=1, cuda_graph={b=2",
            "}",
            "[2026-10-03 10:00:00 TP1] ",
            "\x1b[0m",
            "\x00",
        ),
        *(
            "The server is fired up and ready to roll!",
            "SomeError: x",
            "Scheduler hit an exception: ",
            "1/2 [",
        ),
        *(
            "Capturing batches (bs=",
            "Loading safetensors checkpoint shards: ",
            "sglang serve: error: ",
            "'",
            "²",
        ),
    ]
)


@given(st.lists(PIECES | st.text(max_size=30), max_size=30).map("".join))
@settings(max_examples=400)
def test_any_text_is_read_without_failing(text: str) -> None:
    log = BootLog()
    log.feed(text)
    for line in text.splitlines():
        log.feed(line)
    assert isinstance(log.record(), BootRecord)
    assert log.progress.detail


@given(st.data())
@settings(max_examples=60)
def test_a_start_cut_anywhere_is_read(data: st.DataObject) -> None:
    whole = "\n".join(WHOLE_START)
    cut = data.draw(st.integers(0, len(whole)))
    record = read_boot_log([whole[:cut]])
    assert record.failure is None
