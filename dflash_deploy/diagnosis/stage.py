"""Where a start stood when a line was logged."""

from __future__ import annotations

import re
from enum import StrEnum


class Stage(StrEnum):
    """The stages that the catalogue speaks of, in the order a server goes through them."""

    UNKNOWN = "unknown"
    ARGUMENTS = "arguments"
    ENVIRONMENT = "environment"
    LOAD = "load"
    SIZING = "sizing"
    STATE_POOL = "state-pool"
    POOLS = "pools"
    PREFILL_CAPTURE = "prefill-capture"
    DECODE_CAPTURE = "decode-capture"
    VERIFY_CAPTURE = "verify-capture"
    DRAFT_CAPTURE = "draft-capture"
    FIRST_REQUEST = "first-request"
    SERVING = "serving"
    SHUTDOWN = "shutdown"
    CLIENT = "client"


CAPTURES = frozenset({Stage.DECODE_CAPTURE, Stage.VERIFY_CAPTURE, Stage.DRAFT_CAPTURE})

# Words in small letters, and the stage that begins with them; the first that is found holds.
_BEGINS: tuple[tuple[str, Stage], ...] = (
    ("server_args=", Stage.ENVIRONMENT),
    ("the server is fired up", Stage.SERVING),
    ("application startup complete", Stage.SERVING),
    ("server is listening on", Stage.SERVING),
    ("max_total_num_tokens=", Stage.FIRST_REQUEST),
    ("uvicorn running on", Stage.FIRST_REQUEST),
    ("load weight begin", Stage.LOAD),
    ("starting to load model", Stage.LOAD),
    ("llama_model_loader: loaded meta data", Stage.LOAD),
    ("load weight end", Stage.SIZING),
    ("loading weights took", Stage.SIZING),
    ("mamba cache is allocated", Stage.POOLS),
    ("kv cache is allocated", Stage.POOLS),
    ("memory pool end", Stage.POOLS),
    ("gpu kv cache size", Stage.POOLS),
    ("graph capturing finished", Stage.FIRST_REQUEST),
    ("sigterm received", Stage.SHUTDOWN),
    ("gracefully exiting", Stage.SHUTDOWN),
)
_CAPTURE_BEGINS = re.compile(
    r"capture (?P<label>[\w ()-]{0,40}?) ?(?:cuda|cpu|npu) graph begin"
    r"|capturing cuda ?graphs?|capturing batches"
)
_FAILED_THERE: tuple[tuple[str, Stage], ...] = (
    ("for prefill runner", Stage.PREFILL_CAPTURE),
    ("breakable cuda graph failed", Stage.PREFILL_CAPTURE),
    ("piecewise cuda graph failed", Stage.PREFILL_CAPTURE),
    ("capture prefill cuda graph failed", Stage.PREFILL_CAPTURE),
    ("capture cuda graph failed", Stage.DECODE_CAPTURE),
    ("cuda graph capture failed", Stage.DECODE_CAPTURE),
)
# Words of file and function names in a traceback; those of the innermost purpose first.
_FRAMES: tuple[tuple[str, Stage], ...] = (
    ("prefill_cuda_graph_runner", Stage.PREFILL_CAPTURE),
    ("piecewise_cuda_graph", Stage.PREFILL_CAPTURE),
    ("breakable_cuda_graph", Stage.PREFILL_CAPTURE),
    ("draft_cuda_graph_runner", Stage.DRAFT_CAPTURE),
    ("draft_extend_cuda_graph_runner", Stage.DRAFT_CAPTURE),
    ("cuda_graph_runner", Stage.DECODE_CAPTURE),
    ("init_device_graphs", Stage.DECODE_CAPTURE),
    ("capture_model", Stage.DECODE_CAPTURE),
    ("kernel_warmup", Stage.POOLS),
    ("init_memory_pool", Stage.POOLS),
    ("memory_pool.py", Stage.POOLS),
    ("initialize_kv_cache", Stage.POOLS),
    ("kv_cache_configurator", Stage.SIZING),
    ("event_loop", Stage.SERVING),
    ("run_busy_loop", Stage.SERVING),
    ("model_loader", Stage.LOAD),
    ("load_model", Stage.LOAD),
    ("load_weights", Stage.LOAD),
    ("server_args.py", Stage.ARGUMENTS),
    ("arg_groups", Stage.ARGUMENTS),
)
MARKS: tuple[str, ...] = (
    *(words for words, _ in _BEGINS),
    "graph begin",
    "capturing cuda",
    "capturing batches",
)
"""Plain words, in small letters, of every line that tells a stage."""


def begins(line: str, standing: Stage = Stage.UNKNOWN) -> Stage | None:
    """The stage that a line says begins, where the start stood in another."""
    small = line.lower()
    for words, stage in _BEGINS:
        if words in small:
            return stage
    capture = _CAPTURE_BEGINS.search(small)
    if capture is None:
        return None
    label = capture["label"]
    if label is None:
        # A progress bar, of whatever is being captured.
        return standing if standing in CAPTURES else Stage.DECODE_CAPTURE
    if "draft" in label:
        return Stage.DRAFT_CAPTURE
    if "verify" in label:
        return Stage.VERIFY_CAPTURE
    if "prefill" in label or "piecewise" in label or "extend" in label:
        return Stage.PREFILL_CAPTURE
    return Stage.DECODE_CAPTURE


def told_by_message(line: str, standing: Stage) -> Stage:
    """The stage that an error message names, else the one where the start stood."""
    small = line.lower()
    for words, stage in _FAILED_THERE:
        if words in small:
            return standing if stage is Stage.DECODE_CAPTURE and standing in CAPTURES else stage
    return standing


def told_by_frames(frames: list[str]) -> Stage | None:
    """The stage that a traceback's frames tell."""
    text = "\n".join(frames).lower()
    return next((stage for words, stage in _FRAMES if words in text), None)
