"""A command line as SGLang resolves it: defaults filled in, contradictions refused in its own words."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_deploy.simulator.shipped import CardFacts, ModelFacts, find_model, model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_METHODS = {
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "EAGLE": "mtp",
    "NEXTN": "mtp",
    "NGRAM": "ngram",
}
_SECOND_MODEL = ("EAGLE3", "STANDALONE", "FROZEN_KV_MTP", "UNO")
_FP8 = ("fp8_e4m3", "fp8_e5m2")


class ArgumentsRefusedError(Exception):
    """SGLang refuses the arguments and exits with 1.

    Attributes:
        kind: the Python exception it dies of.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Speculation:
    """How drafts are made.

    Attributes:
        method: ``dflash``, ``dspark``, ``mtp`` or ``ngram``.
        algorithm: SGLang's name.
        draft: the draft checkpoint; None for n-grams.
        steps: drafting passes for one verify step.
        draft_tokens: rows that a verify step checks for each request.
        block_size: rows that the draft was trained for.
        window: tokens that the draft's own cache keeps, or None for all.
        draft_kv_bytes: bytes of one number in the draft's cache.
    """

    method: str
    algorithm: str
    draft: ModelFacts | None
    steps: int
    draft_tokens: int
    block_size: int
    window: int | None
    draft_kv_bytes: float


@dataclass(frozen=True)
class Settings:
    """Everything that memory and speed depend on. Names are those of SGLang's flags."""

    version: str
    release: tuple[int, ...]
    card: CardFacts
    target: ModelFacts
    model_path: str
    draft_path: str | None
    served_model_name: str
    speculation: Speculation | None
    mem_fraction_static: float
    max_total_tokens: int | None
    max_running_requests: int | None
    running_given: bool
    max_queued_requests: int | None
    max_mamba_cache_size: int | None
    mamba_full_memory_ratio: float
    ssm_bytes: int
    state_slots_per_request: int
    mamba_strategy: str
    mamba_track_interval: int
    replay_state: bool
    radix_cache: bool
    kv_cache_dtype: str
    kv_bytes: float
    chunked_prefill_size: int
    max_prefill_tokens: int
    context_length: int
    page_size: int
    decode_graphs: bool
    decode_sizes: tuple[int, ...]
    prefill_graphs: bool
    prefill_sizes: tuple[int, ...]
    attention_backend: str
    torch_compile: bool
    vision_loaded: bool
    warm_up: bool
    decode_log_interval: int
    stream_interval: int
    enable_metrics: bool
    usage_by_default: bool
    cache_report: bool
    expandable_segments: bool
    api_key: str | None
    host: str
    port: int


def resolve(
    args: argparse.Namespace, *, card: CardFacts, version: str, env: Mapping[str, str] = os.environ
) -> Settings:
    """Fill in what SGLang would.

    Raises:
        ArgumentsRefusedError: what SGLang refuses before it loads anything.
    """
    release = _release(version)
    path = str(args.model_path or "")
    target = _target(path)
    speculation = _speculation(args, target, release)
    _refuse(args, target, speculation)

    overlap = not args.disable_overlap_schedule
    strategy = _strategy(args, overlap, speculation)
    chunk, max_bs = _chunk_and_batch(args, card, release)
    decode_graphs, prefill_graphs = _graph_backends(args)
    decode_sizes = _decode_sizes(args, max_bs, speculation is not None)
    prefill_sizes = _prefill_sizes(args, chunk)
    text_only = bool(getattr(args, "language_model_only", False) or getattr(args, "language_only", False))
    vision = target.vision and not text_only
    context = int(args.context_length or target.max_context_tokens)
    if context > target.max_context_tokens and env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
        raise ArgumentsRefusedError(
            "ValueError",
            f"User-specified context_length ({context}) is greater than the derived context_length "
            f"({target.max_context_tokens}). This may lead to incorrect model outputs or CUDA errors. Note "
            "that "
            "the derived context_length may differ from max_position_embeddings in the model's config. To "
            "allow "
            "overriding this maximum, set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
        )
    running = args.max_running_requests
    if running is None and speculation is not None:
        running = 48
    fraction = args.mem_fraction_static
    if fraction is None:
        fraction = default_fraction(
            card_mib=card.memory_mib,
            chunk=chunk if chunk > 0 else int(args.max_prefill_tokens),
            decode_max=max(decode_sizes) if decode_graphs else 0,
            prefill_sizes=len(prefill_sizes) if prefill_graphs else 0,
            vision=vision,
        )
    replay = bool(getattr(args, "enable_linear_replayssm_spec", False))
    kv_dtype = _kv_dtype(str(args.kv_cache_dtype), target)
    return Settings(
        version=version,
        release=release,
        card=card,
        target=target,
        model_path=path,
        draft_path=args.speculative_draft_model_path,
        served_model_name=str(args.served_model_name or path),
        speculation=speculation,
        mem_fraction_static=float(fraction),
        max_total_tokens=args.max_total_tokens,
        max_running_requests=running,
        running_given=args.max_running_requests is not None,
        max_queued_requests=args.max_queued_requests,
        max_mamba_cache_size=args.max_mamba_cache_size,
        mamba_full_memory_ratio=0.9
        if args.mamba_full_memory_ratio is None
        else float(args.mamba_full_memory_ratio),
        ssm_bytes=_state_bytes(args, target, env, replay),
        state_slots_per_request=_slots(args, strategy, overlap),
        mamba_strategy=strategy,
        mamba_track_interval=int(args.mamba_track_interval),
        replay_state=replay,
        radix_cache=not args.disable_radix_cache,
        kv_cache_dtype=kv_dtype,
        kv_bytes=_kv_bytes(kv_dtype),
        chunked_prefill_size=chunk,
        max_prefill_tokens=int(args.max_prefill_tokens),
        context_length=context,
        page_size=int(args.page_size or 1),
        decode_graphs=decode_graphs,
        decode_sizes=decode_sizes,
        prefill_graphs=prefill_graphs,
        prefill_sizes=prefill_sizes,
        attention_backend=str(args.attention_backend or "flashinfer"),
        torch_compile=bool(args.enable_torch_compile),
        vision_loaded=vision,
        warm_up=not args.skip_server_warmup,
        decode_log_interval=max(1, int(args.decode_log_interval)),
        stream_interval=max(1, int(args.stream_interval)),
        enable_metrics=bool(args.enable_metrics),
        usage_by_default=bool(getattr(args, "stream_response_default_include_usage", False)),
        cache_report=bool(args.enable_cache_report),
        expandable_segments="expandable_segments:True" in env.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        api_key=args.api_key,
        host=str(args.host),
        port=int(args.port),
    )


def default_fraction(
    *, card_mib: int, chunk: int, decode_max: int, prefill_sizes: int, vision: bool
) -> float:
    """SGLang's ``--mem-fraction-static`` where none is given."""
    reserved = 512 + 1.5 * max(chunk, 2048) + 128 + 2 * decode_max + 8 * prefill_sizes
    if card_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((card_mib - reserved) / card_mib, 3)
    return fraction * 0.925 if vision else fraction


def _release(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(ch for ch in part if ch.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def _target(path: str) -> ModelFacts:
    target = find_model(path, "target")
    if target is not None:
        return target
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ArgumentsRefusedError(
            "OSError",
            f"{path} does not appear to have a file named config.json. Checkout "
            f"'https://huggingface.co/{path}/tree/main' for available files.",
        )
    raise _not_found(path)


def _not_found(path: str) -> ArgumentsRefusedError:
    return ArgumentsRefusedError(
        "OSError",
        f"{path} is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token having "
        "permission to this repo either by logging in with `hf auth login` or by passing "
        "`token=<your_token>`",
    )


def _speculation(
    args: argparse.Namespace, target: ModelFacts, release: tuple[int, ...]
) -> Speculation | None:
    if args.speculative_algorithm is None:
        return None
    algorithm = str(args.speculative_algorithm).upper()
    known = {*_METHODS, *_SECOND_MODEL} - ({"DSPARK"} if release < (0, 5, 16) else set())
    if algorithm not in known:
        raise ArgumentsRefusedError("ValueError", f"Unknown speculative algorithm name: {algorithm}")
    path = args.speculative_draft_model_path
    if algorithm in ("DFLASH", "STANDALONE") and path is None:
        raise ArgumentsRefusedError(
            "ValueError",
            f"{algorithm} speculative decoding requires setting --speculative-draft-model-path.",
        )
    if algorithm in _SECOND_MODEL:
        raise ArgumentsRefusedError(
            "ValueError", f"{algorithm} speculative decoding is not available for {target.path or target.id}."
        )
    method = _METHODS[algorithm]
    draft = _draft(path, method, target)
    steps, draft_tokens, block = _draft_shape(args, method, draft)
    window = args.speculative_draft_window_size
    if window is not None and int(window) <= 0:
        raise ArgumentsRefusedError(
            "ValueError", f"--speculative-draft-window-size must be positive, got {window}."
        )
    if window is not None and int(window) < draft_tokens:
        raise ArgumentsRefusedError(
            "ValueError",
            "--speculative-draft-window-size must be >= --speculative-num-draft-tokens (block_size). "
            f"window_size={window}, block_size={draft_tokens}.",
        )
    dtype = getattr(args, "speculative_draft_kv_cache_dtype", None) or "auto"
    if dtype == "auto":
        dtype = str(args.kv_cache_dtype)
    if args.speculative_draft_attention_backend == "fa4":
        dtype = "bf16"
    return Speculation(
        method=method,
        algorithm="EAGLE" if algorithm == "NEXTN" else algorithm,
        draft=draft,
        steps=steps,
        draft_tokens=draft_tokens,
        block_size=block,
        window=None if window is None else int(window),
        draft_kv_bytes=_kv_bytes(dtype),
    )


def _draft(path: str | None, method: str, target: ModelFacts) -> ModelFacts | None:
    if method == "ngram":
        return None
    if method == "mtp" and (path is None or find_model(path, "target") is target):
        return model("qwen3.8-27b-mtp")
    if method == "dspark" and path is None:
        raise ArgumentsRefusedError(
            "ValueError", "DSPARK speculative decoding requires setting --speculative-draft-model-path."
        )
    draft = find_model(str(path), "draft")
    if draft is None:
        raise _not_found(str(path))
    if draft.method != method:
        raise ArgumentsRefusedError(
            "ValueError", f"{draft.architecture} is not a draft for --speculative-algorithm {method.upper()}."
        )
    return draft


def _draft_shape(args: argparse.Namespace, method: str, draft: ModelFacts | None) -> tuple[int, int, int]:
    """Drafting passes, verify rows, and rows the draft was trained for."""
    given = args.speculative_num_draft_tokens
    if given is not None and int(given) < 1:
        raise ArgumentsRefusedError(
            "ValueError", f"--speculative-num-draft-tokens must be positive, got {given}."
        )
    if method == "ngram":
        return 1, int(given or 12), 12
    block = draft.block_size if draft is not None and draft.block_size else 8
    if method == "mtp":
        steps = args.speculative_num_steps
        if steps is None:
            return 3, 4, block
        if int(steps) < 1:
            raise ArgumentsRefusedError(
                "ValueError", f"--speculative-num-steps must be positive, got {steps}."
            )
        if int(args.speculative_eagle_topk or 1) == 1:
            return int(steps), int(steps) + 1, block
        return int(steps), int(given or steps + 1), block
    if method == "dspark":
        gamma = args.speculative_dspark_block_size or block
        if given is not None and int(given) != int(gamma) + 1:
            raise ArgumentsRefusedError(
                "ValueError",
                f"DSPARK requires speculative_num_draft_tokens == gamma + 1 ({int(gamma) + 1}), got {given}.",
            )
        return 1, int(gamma) + 1, block + 1
    own = args.speculative_dflash_block_size
    if own is not None and int(own) <= 0:
        raise ArgumentsRefusedError(
            "ValueError", f"DFLASH requires --speculative-dflash-block-size to be positive, got {own}."
        )
    if own is not None and given is not None and int(own) != int(given):
        raise ArgumentsRefusedError(
            "ValueError",
            "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they "
            "differ. "
            f"For DFLASH they must match. speculative_num_draft_tokens={given}, "
            f"speculative_dflash_block_size={own}.",
        )
    return 1, int(given or own or block), block


def _refuse(args: argparse.Namespace, target: ModelFacts, speculation: Speculation | None) -> None:
    for name in ("tp_size", "pp_size", "dp_size"):
        if int(getattr(args, name, 1) or 1) != 1:
            raise ArgumentsRefusedError(
                "ValueError", f"The simulated machine has one GPU: --{name.replace('_', '-')} must be 1."
            )
    if args.mem_fraction_static is not None and not 0 < args.mem_fraction_static < 1:
        raise ArgumentsRefusedError(
            "ValueError", f"mem_fraction_static must be between 0 and 1, got {args.mem_fraction_static}."
        )
    for name in ("max_running_requests", "max_total_tokens", "max_mamba_cache_size", "context_length"):
        value = getattr(args, name)
        if value is not None and int(value) <= 0:
            raise ArgumentsRefusedError("ValueError", f"{name} must be positive, got {value}.")
    ratio = args.mamba_full_memory_ratio
    if ratio is not None and not 0 < ratio < math.inf:
        raise ArgumentsRefusedError("ValueError", f"mamba_full_memory_ratio must be positive, got {ratio}.")
    if (
        speculation is not None
        and not args.disable_radix_cache
        and target.linear is not None
        and int(args.mamba_track_interval) < speculation.draft_tokens
    ):
        raise ArgumentsRefusedError(
            "AssertionError",
            f"mamba_track_interval={args.mamba_track_interval} must be >= "
            f"speculative_num_draft_tokens={speculation.draft_tokens}",
        )
    if (
        getattr(args, "linear_attn_decode_backend", None) == "flashinfer"
        and args.mamba_ssm_dtype != "bfloat16"
    ):
        raise ArgumentsRefusedError(
            "ValueError",
            "--linear-attn-decode-backend flashinfer on SM100+ requires --mamba-ssm-dtype bfloat16, got "
            f"{args.mamba_ssm_dtype or 'float32'!r}",
        )


def _strategy(args: argparse.Namespace, overlap: bool, speculation: Speculation | None) -> str:
    strategy = str(args.mamba_radix_cache_strategy)
    if strategy == "auto":
        return "extra_buffer" if overlap and args.linear_attn_backend == "triton" else "no_buffer"
    if args.disable_radix_cache:
        return strategy
    if strategy == "no_buffer" and overlap and speculation is None:
        raise ArgumentsRefusedError(
            "AssertionError",
            "no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True.",
        )
    if strategy == "extra_buffer_lazy" and not overlap:
        raise ArgumentsRefusedError(
            "AssertionError",
            "Lazy extra buffer requires overlap schedule (--disable-overlap-schedule is incompatible)",
        )
    return strategy


def _slots(args: argparse.Namespace, strategy: str, overlap: bool) -> int:
    if args.disable_radix_cache:
        return 1
    if strategy == "no_buffer":
        return 3
    return 5 if strategy == "extra_buffer" and overlap else 4


def _chunk_and_batch(args: argparse.Namespace, card: CardFacts, release: tuple[int, ...]) -> tuple[int, int]:
    """Chunk size (-1: not chunked) and largest decode batch that is captured."""
    newer = release >= (0, 5, 20)
    gib = card.memory_mib / 1024
    if gib < 20:
        chunk, batch = 2048, 8
    elif gib < 35:
        chunk, batch = (4096, 48) if newer else (2048, 24)
    elif gib < 60:
        chunk, batch = 4096, 32
    elif gib < 160:
        chunk, batch = 8192, 256
    else:
        chunk, batch = 16384, 512
    if args.chunked_prefill_size is not None:
        chunk = int(args.chunked_prefill_size) if int(args.chunked_prefill_size) > 0 else -1
    given = args.cuda_graph_max_bs_decode
    if given is not None:
        batch = max(1, int(given))
    elif release >= (0, 5, 22) and args.max_running_requests is not None:
        batch = min(batch, max(1, int(args.max_running_requests)))
    return chunk, batch


def _graph_backends(args: argparse.Namespace) -> tuple[bool, bool]:
    off = bool(getattr(args, "disable_cuda_graph", False))
    config = args.cuda_graph_config
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ArgumentsRefusedError("ValueError", f"--cuda-graph-config is not JSON: {error}") from error
    config = config if isinstance(config, dict) else {}

    def on(phase: str, switch: str) -> bool:
        own = config.get(phase)
        backend = getattr(args, f"cuda_graph_backend_{phase}", None)
        if isinstance(own, dict) and own.get("backend") is not None:
            backend = own["backend"]
        return not off and not getattr(args, switch, False) and backend != "disabled"

    return on("decode", "disable_decode_cuda_graph"), on("prefill", "disable_prefill_cuda_graph")


def decode_size_list(max_bs: int, speculative: bool, padded: bool = True) -> tuple[int, ...]:
    """Batch sizes that SGLang captures up to ``max_bs``."""
    if not padded:
        return tuple(range(1, max_bs + 1))
    if speculative:
        sizes = [
            *range(1, 9),
            *range(10, 33, 2),
            *range(40, 65, 4),
            *range(72, 257, 8),
            *range(272, 1025, 16),
        ]
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, 4097, 32)]
    return tuple(sorted({size for size in sizes if size <= max_bs} | {max_bs}))


def _decode_sizes(args: argparse.Namespace, max_bs: int, speculative: bool) -> tuple[int, ...]:
    given = args.cuda_graph_bs_decode
    if given:
        sizes = tuple(sorted({int(size) for size in given}))
        if sizes[0] < 1:
            raise ArgumentsRefusedError("ValueError", f"cuda_graph_bs must be positive, got {list(sizes)}.")
        return sizes
    return decode_size_list(max_bs, speculative, not args.disable_cuda_graph_padding)


def _prefill_sizes(args: argparse.Namespace, chunk: int) -> tuple[int, ...]:
    given = args.cuda_graph_bs_prefill
    if given:
        return tuple(sorted({int(size) for size in given if int(size) > 0}))
    largest = int(args.cuda_graph_max_bs_prefill or (chunk if chunk > 0 else args.max_prefill_tokens))
    if args.max_total_tokens is not None:
        largest = min(largest, int(args.max_total_tokens))
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, 65537, 512),
    ]
    return tuple(size for size in sizes if size <= largest) or (largest,)


def _kv_dtype(given: str, target: ModelFacts) -> str:
    if given != "auto":
        return "bfloat16" if given == "bf16" else given
    return target.kv_cache_dtype or "bfloat16"


def _kv_bytes(dtype: str) -> float:
    if dtype in _FP8:
        return 1.0
    if dtype == "mxfp8":
        return 1.0 + 1 / 32
    if dtype in ("nvfp4", "fp4_e2m1", "fp4_mx_block16"):
        return 0.5625
    return 2.0


def _state_bytes(args: argparse.Namespace, target: ModelFacts, env: Mapping[str, str], replay: bool) -> int:
    dtype = args.mamba_ssm_dtype or env.get("SGLANG_MAMBA_SSM_DTYPE")
    if dtype is None:
        dtype = "float32" if replay else target.state_dtype or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ArgumentsRefusedError(
            "ValueError", f"mamba_ssm_dtype must be float32, bfloat16 or float16, got {dtype!r}."
        )
    return 4 if dtype == "float32" else 2
