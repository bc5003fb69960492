"""The settings that decide the use of memory: read from flags, and completed as the engine completes them."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_deploy.engine.sglang.options import human_readable_int
from dflash_deploy.engine.sglang.versions import VersionFacts, facts, state_slots_per_request
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.plan import defaults

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.engine.launch import Flags

Method = Literal["none", "tree", "target-shaped", "own-shape"]
"""How draft tokens are made, as far as memory cares: not at all; from text alone, checked as a tree (NGRAM);
by a draft with the target's KV shape (EAGLE, NEXTN); by one with its own (DFLASH, DSPARK)."""

_METHODS: dict[str, Method] = {
    "NGRAM": "tree",
    "EAGLE": "target-shaped",
    "EAGLE3": "target-shaped",
    "NEXTN": "target-shaped",
    "STANDALONE": "target-shaped",
    "DFLASH": "own-shape",
    "DSPARK": "own-shape",
}

_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4_e2m1": 0.5 + 1 / 16,
    "fp4_mx_block16": 0.5 + 1 / 16,
}


@dataclass(frozen=True)
class Settings:
    """What the arithmetic needs of a command line.

    Attributes:
        fraction: share of the free memory for weights and pools (``mem-fraction-static``).
        multimodal_gib: kept free of pools for images.
        draft_tokens: tokens checked in one verify step, 0 without speculation.
        running_requests: limit given, or the one that speculation brings, or None.
        state_slots: size of the state cache where it is given.
        state_ratio: state cache to KV cache, where the engine chooses.
        slots_per_request: state slots that a running request may hold.
        replay_tokens: length of the rings that replace the verify states, 0 without them.
        state_bytes: of one number of the recurrent state.
        target_kv_bytes: of one number of the target's KV cache; ``draft_kv_bytes`` likewise.
        max_tokens: cap of the KV pool, where one is given.
        graph_batches: batch sizes of the decode graphs, before they are cut to the running requests.
        prefill_graphs: how many prefill graphs are captured.
        refusal: why the engine would refuse these settings at once, or None.
    """

    version: VersionFacts
    fraction: float
    multimodal_gib: float
    method: Method
    draft_tokens: int
    running_requests: int | None
    state_slots: int | None
    state_ratio: float
    slots_per_request: int
    radix_cache: bool
    replay_tokens: int
    state_bytes: float
    target_kv_bytes: float
    draft_kv_bytes: float
    page_tokens: int
    max_tokens: int | None
    context_tokens: int
    graph_batches: tuple[int, ...]
    prefill_graphs: int
    refusal: str | None

    @property
    def padding_slots(self) -> int:
        """Slots of the state cache that are charged beyond those that requests use."""
        return 1 if self.version.charges_padding_slots else 0

    @property
    def speculation(self) -> bool:
        """Draft tokens are made and checked."""
        return self.draft_tokens > 0


def read_settings(
    flags: Flags, *, version: str, card_memory_mib: int, target: ModelCard, draft: ModelCard | None
) -> Settings:
    """Read and complete a configuration.

    Raises:
        DeployError: a value that cannot be read, or a way of serving that is not planned for.
    """
    if (_whole(flags, "tp-size") or _whole(flags, "tensor-parallel-size") or 1) > 1:
        raise DeployError(
            "the plan knows one card only, and tp-size asks for more", exit_code=ExitCode.INVALID_INPUT
        )
    release = facts(version)
    card_defaults = release.defaults_for(card_memory_mib)
    method, draft_tokens, refusal = _speculation(flags, draft)
    given_requests = _whole(flags, "max-running-requests")
    requests = given_requests
    if requests is None and method != "none":
        requests = defaults.IMPLICIT_RUNNING_REQUESTS
    slots_per_request, strategy_refusal = _slots_per_request(
        flags, draft_tokens, hybrid=target.linear is not None
    )
    replay = bool(flags.get("enable-linear-replayssm-spec")) and target.linear is not None
    if replay and method == "own-shape" and refusal is None:
        refusal = (
            "--enable-linear-replayssm-spec with DSPARK/DFLASH requires a KDA (kimi_linear) model; "
            "got a non-KDA model"
        )
    replay = replay and method == "target-shaped"

    vision = target.vision and not flags.get("language-only") and not flags.get("language-model-only")
    max_tokens = _whole(flags, "max-total-tokens")
    chunk = _whole(flags, "chunked-prefill-size")
    chunk = card_defaults.chunk_tokens if chunk is None else chunk
    activation_tokens = chunk if chunk > 0 else _whole(flags, "max-prefill-tokens") or 16384
    largest = card_defaults.decode_bs
    if release.decode_bs_follows_requests and given_requests is not None:
        largest = min(largest, given_requests)
    batches = _graph_batches(flags, largest, speculation=draft_tokens > 0)
    prefill_graphs = _prefill_graphs(flags, activation_tokens, max_tokens)
    fraction = _number(flags, "mem-fraction-static")
    if fraction is None:
        fraction = defaults.memory_fraction(
            card_memory_mib,
            activation_tokens=activation_tokens,
            max_batch=max(batches, default=0),
            prefill_graphs=prefill_graphs,
            vision=vision,
        )
    transport = flags.get("mm-feature-transport")
    reserves = vision and release.reserves_for_images
    multimodal_gib = (
        (100 + (1024 if transport in ("cuda_ipc", "cuda_vmm") else 0)) / 1024 if reserves else 0.0
    )
    asked_dtype = _text(flags, "kv-cache-dtype")
    # The fa4 backend cannot read a quantised draft cache.
    inherited = "bfloat16" if flags.get("speculative-draft-attention-backend") == "fa4" else asked_dtype
    draft_dtype = _text(flags, "speculative-draft-kv-cache-dtype") or inherited
    state_dtype = _text(flags, "mamba-ssm-dtype") or (None if replay else target.state_dtype) or "float32"
    return Settings(
        version=release,
        fraction=fraction,
        multimodal_gib=multimodal_gib,
        method=method,
        draft_tokens=draft_tokens,
        running_requests=requests,
        state_slots=_whole(flags, "max-mamba-cache-size"),
        state_ratio=_number(flags, "mamba-full-memory-ratio") or 0.9,
        slots_per_request=slots_per_request,
        radix_cache=not flags.get("disable-radix-cache"),
        replay_tokens=(_whole(flags, "linear-replayssm-cache-len") or 16) if replay else 0,
        state_bytes=_dtype_bytes(state_dtype),
        target_kv_bytes=_dtype_bytes(asked_dtype or target.kv_cache_dtype or "bfloat16"),
        draft_kv_bytes=_dtype_bytes(draft_dtype or (draft and draft.kv_cache_dtype) or "bfloat16"),
        page_tokens=_whole(flags, "page-size") or 1,
        max_tokens=max_tokens,
        context_tokens=_whole(flags, "context-length") or target.max_context_tokens,
        graph_batches=batches,
        prefill_graphs=prefill_graphs,
        refusal=refusal or strategy_refusal,
    )


def _speculation(flags: Flags, draft: ModelCard | None) -> tuple[Method, int, str | None]:
    """Method, tokens checked in a verify step, and why the engine would refuse them."""
    name = _text(flags, "speculative-algorithm")
    if name is None:
        return "none", 0, None
    method = _METHODS.get(name.upper())
    if method is None:
        raise DeployError(
            f"the plan does not know speculative-algorithm {name}", exit_code=ExitCode.INVALID_INPUT
        )
    given = _whole(flags, "speculative-num-draft-tokens")
    block = draft.block_size if draft else None
    if name.upper() == "DSPARK":
        # One more than the block: the token that the target adds itself.
        gamma = _whole(flags, "speculative-dspark-block-size") or block
        if gamma is None:
            return method, given or 8, None
        wrong = given is not None and given != gamma + 1
        return method, gamma + 1, _dspark_refusal(gamma, given) if wrong else None
    if name.upper() == "DFLASH":
        return method, _whole(flags, "speculative-dflash-block-size") or given or block or 16, None
    if name.upper() == "NGRAM":
        return method, given or 12, None
    steps = _whole(flags, "speculative-num-steps")
    if steps is not None and (_whole(flags, "speculative-eagle-topk") or 1) == 1:
        return method, steps + 1, None
    return method, given or block or 4, None


def _dspark_refusal(gamma: int, given: int | None) -> str:
    return (
        f"DSpark speculative_num_draft_tokens must equal gamma + 1 (= {gamma + 1} for gamma={gamma}), "
        f"but got speculative_num_draft_tokens={given}."
    )


def _slots_per_request(flags: Flags, draft_tokens: int, *, hybrid: bool) -> tuple[int, str | None]:
    """State slots that a request may hold at once, and why the engine would refuse the strategy."""
    if not hybrid:
        return 0, None
    radix_cache = not flags.get("disable-radix-cache")
    overlap = not flags.get("disable-overlap-schedule")
    strategy = _text(flags, "mamba-radix-cache-strategy")
    if strategy is None:
        triton = flags.get("linear-attn-backend", "triton") == "triton"
        paged = (_whole(flags, "page-size") or 1) > 1
        strategy = "extra_buffer" if triton and (overlap or paged) else "no_buffer"
    slots = state_slots_per_request(strategy, radix_cache=radix_cache, overlap=overlap)
    if not radix_cache or strategy == "no_buffer":
        return slots, None
    interval = _whole(flags, "mamba-track-interval") or 256
    if draft_tokens > interval:
        return slots, (
            f"mamba_track_interval ({interval}) must be >= speculative_num_draft_tokens ({draft_tokens})"
        )
    if strategy == "extra_buffer_lazy" and not overlap:
        return slots, (
            "Lazy extra buffer requires overlap schedule (--disable-overlap-schedule is incompatible)"
        )
    return slots, None


def _graph_batches(flags: Flags, default_largest: int, *, speculation: bool) -> tuple[int, ...]:
    off = flags.get("disable-cuda-graph") or flags.get("disable-decode-cuda-graph")
    if off or flags.get("cuda-graph-backend-decode") == "disabled":
        return ()
    listed = flags.get("cuda-graph-bs-decode")
    if listed is not None:
        sizes = listed if isinstance(listed, tuple | list) else (listed,)
        return tuple(sorted(_read_whole("cuda-graph-bs-decode", size) for size in sizes))
    given = _whole(flags, "cuda-graph-max-bs-decode")
    largest = default_largest if given is None else given
    padding = not flags.get("disable-cuda-graph-padding")
    return defaults.decode_graph_batches(largest, speculation=speculation, padding=padding)


def _prefill_graphs(flags: Flags, activation_tokens: int, max_tokens: int | None) -> int:
    off = flags.get("disable-cuda-graph") or flags.get("disable-prefill-cuda-graph")
    if off or flags.get("cuda-graph-backend-prefill") == "disabled":
        return 0
    listed = flags.get("cuda-graph-bs-prefill")
    if listed is not None:
        return len(listed) if isinstance(listed, tuple | list) else 1
    largest = _whole(flags, "cuda-graph-max-bs-prefill")
    if largest is None:
        largest = activation_tokens if max_tokens is None else min(activation_tokens, max_tokens)
    return len(defaults.prefill_graph_tokens(largest))


def _dtype_bytes(name: str) -> float:
    if name not in _BYTES:
        raise DeployError(f"the plan does not know the number type {name}", exit_code=ExitCode.INVALID_INPUT)
    return _BYTES[name]


def _text(flags: Flags, name: str) -> str | None:
    """A flag's word; None where it is left out or says ``auto``."""
    value = flags.get(name)
    return None if value is None or value == "auto" else str(value)


def _whole(flags: Flags, name: str) -> int | None:
    value = flags.get(name)
    return None if value is None else _read_whole(name, value)


def _read_whole(name: str, value: object) -> int:
    try:
        return human_readable_int(str(value))
    except ArgumentTypeError as error:
        raise DeployError(f"{name}: {error}", exit_code=ExitCode.INVALID_INPUT) from error


def _number(flags: Flags, name: str) -> float | None:
    value = flags.get(name)
    if value is None:
        return None
    try:
        return float(str(value))
    except ValueError as error:
        raise DeployError(f"{name}: {value!r} is not a number", exit_code=ExitCode.INVALID_INPUT) from error
