"""The settings that decide the use of memory: read from flags, and completed as the engine completes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from dflash_deploy.engine.sglang.versions import (
    CardDefaults,
    VersionFacts,
    facts,
    order,
    state_slots_per_request,
)
from dflash_deploy.plan import defaults
from dflash_deploy.plan import flagvalues as values
from dflash_deploy.plan.families import UNKNOWN, Family, family_of

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.engine.launch import Flags

Method = Literal["none", "tree", "target-shaped", "own-shape"]
"""How draft tokens are made, as far as memory cares: not at all; from text alone, checked as a tree (NGRAM);
by a draft with the target's KV shape (EAGLE, NEXTN); by one with its own (DFLASH, DSPARK)."""

_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "NGRAM": "tree",
        "EAGLE": "target-shaped",
        "EAGLE3": "target-shaped",
        "NEXTN": "target-shaped",
        "STANDALONE": "target-shaped",
        "DFLASH": "own-shape",
        "DSPARK": "own-shape",
    }
)

FRACTION = "mem-fraction-static"

_MOST_BATCH = 1 << 14
_MOST_CHUNK = 1 << 20
_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
_TRUE = frozenset({"1", "true", "yes", "y"})
_facts = lru_cache(maxsize=64)(facts)
"""A search asks for the same release thousands of times."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the arithmetic needs of a command line.

    Attributes:
        fraction: share of the free memory for weights and pools (``mem-fraction-static``).
        fraction_kept: what is left of a fraction when the attention backend has taken its share of it.
        multimodal_gib: kept free of pools for images.
        vision: the vision tower is loaded.
        draft_tokens: tokens checked in one verify step, 0 without speculation.
        running_requests: limit given, or the one that speculation brings, or None.
        state_slots: size of the state cache where it is given.
        state_ratio: state cache to KV cache, where the engine chooses.
        slots_per_request: state slots that a running request may hold.
        replay_tokens: length of the rings that replace the verify states, 0 without them.
        state_bytes: of one number of the recurrent state; ``conv_bytes`` of its convolution windows.
        target_kv_bytes: of one number of the target's KV cache; ``draft_kv_bytes`` likewise.
        max_tokens: cap of the KV pool, where one is given.
        sliding_ratio: tokens of the window pool to those of the full one.
        gpus: cards that share the model (tensor parallelism); figures are for one of them.
        chunk_tokens: most prompt tokens in one pass; ``chunked`` where long prompts are cut to it.
        graph_batches: batch sizes of the decode graphs, before they are cut to the running requests.
        prefill_sizes: token counts of the prefill graphs.
        activation_reserve_gib: least slack while state is made before graphs, 0 where the rule is not on.
        post_capture: the KV pool gets its size after the graphs are captured.
        expandable: the allocator grows its segments instead of making new ones.
        branching: draft tokens form a tree, not a chain.
        refusal: why the engine would refuse these settings at once, or None.
    """

    version: VersionFacts
    fraction: float
    fraction_kept: float
    multimodal_gib: float
    vision: bool
    method: Method
    algorithm: str | None
    draft_tokens: int
    running_requests: int | None
    state_slots: int | None
    state_ratio: float
    slots_per_request: int
    radix_cache: bool
    replay_tokens: int
    state_bytes: float
    conv_bytes: float
    target_kv_bytes: float
    draft_kv_bytes: float
    page_tokens: int
    max_tokens: int | None
    sliding_ratio: float
    context_tokens: int
    gpus: int
    overlap: bool
    chunk_tokens: int
    chunked: bool
    graph_batches: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    activation_reserve_gib: float
    post_capture: bool
    expandable: bool
    branching: bool
    refusal: str | None

    @property
    def padding_slots(self) -> int:
        """Slots of the state cache that are charged beyond those that requests use."""
        return 1 if self.version.charges_padding_slots else 0

    @property
    def speculation(self) -> bool:
        """Draft tokens are made and checked."""
        return self.draft_tokens > 0

    def with_fraction(self, flags: Flags) -> Settings:
        """The same with the fraction that these flags give: no other setting follows from it.

        Raises:
            DeployError: no fraction that can be read.
        """
        fraction = values.number(flags, FRACTION)
        if fraction is None:
            raise values.wrong(f"{FRACTION}: no fraction is given")
        return replace(self, fraction=fraction * self.fraction_kept)


def read_settings(
    flags: Flags,
    *,
    version: str,
    card_memory_mib: int,
    target: ModelCard,
    draft: ModelCard | None,
    env: Mapping[str, str] = _NO_ENVIRONMENT,
) -> Settings:
    """Read and complete a configuration.

    Raises:
        DeployError: a value that cannot be read, or a way of serving that is not planned for.
    """
    gpus = _gpus(flags)
    release = _facts(version)
    family = family_of(target.architecture) or UNKNOWN
    card_defaults = release.defaults_for(card_memory_mib)
    method, draft_tokens, refusal = _speculation(flags, draft)
    given_requests = values.whole(flags, "max-running-requests")
    requests = given_requests
    if requests is None and method != "none":
        requests = defaults.IMPLICIT_RUNNING_REQUESTS
    strategy = _state_strategy(flags, draft_tokens, family, env, hybrid=target.linear is not None)
    replay = values.switch(flags, "enable-linear-replayssm-spec") and target.linear is not None
    if replay and method == "own-shape":
        refusal = refusal or (
            "--enable-linear-replayssm-spec with DSPARK/DFLASH requires a KDA (kimi_linear) model; "
            "got a non-KDA model"
        )
    replay = replay and method == "target-shaped"
    replay_tokens = 0
    if replay and release.replay_rings_by_request:
        replay_tokens = values.whole(flags, "linear-replayssm-cache-len", least=1) or 16
    elif replay:
        replay_tokens = draft_tokens

    text_only = values.switch(flags, "language-only") or values.switch(flags, "language-model-only")
    vision = target.vision and not text_only
    max_tokens = values.whole(flags, "max-total-tokens")
    chunk = values.whole(flags, "chunked-prefill-size")
    chunk = card_defaults.chunk_tokens if chunk is None else chunk
    activation_tokens = chunk if chunk > 0 else values.whole(flags, "max-prefill-tokens", least=1) or 16384
    if activation_tokens > _MOST_CHUNK:
        raise values.wrong(
            f"chunked-prefill-size: {activation_tokens} tokens in one pass are not planned for"
        )
    largest = _default_batch(card_defaults, release, gpus, given_requests)
    batches = _graph_batches(flags, largest, speculation=draft_tokens > 0)
    may_capture_prefill = (
        not vision
        or text_only
        or (family.prefill_graphs_from is not None and _since(release.release, family.prefill_graphs_from))
    )
    prefill_sizes = (
        _prefill_sizes(flags, release, activation_tokens, max_tokens) if may_capture_prefill else ()
    )
    post_capture = (
        env.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "").strip().lower() in _TRUE
        and bool(batches)
        and chunk > 0
        and max(prefill_sizes, default=0) >= chunk
        and not values.switch(flags, "enable-memory-saver")
        and not values.switch(flags, "enable-unified-memory")
    )
    fraction = values.number(flags, FRACTION)
    if fraction is None:
        fraction = defaults.memory_fraction(
            card_memory_mib,
            activation_tokens=activation_tokens,
            max_batch=max(batches, default=0),
            prefill_graphs=len(prefill_sizes),
            vision_factor=family.vision_factor if vision else 1.0,
            gpus=gpus,
            post_capture=post_capture,
        )
    context_tokens = values.whole(flags, "context-length", least=1) or target.max_context_tokens
    # AMD's backend keeps a share for its own workspace, even of a fraction that was given.
    fraction_kept = 0.85 if flags.get("attention-backend") == "aiter" and context_tokens > 8192 else 1.0
    asked_dtype = values.text(flags, "kv-cache-dtype")
    draft_kv_bytes = _draft_kv_bytes(flags, method, draft, asked_dtype)
    asked_state = values.text(flags, "mamba-ssm-dtype") or env.get("SGLANG_MAMBA_SSM_DTYPE") or None
    state_dtype = asked_state or (None if replay else target.state_dtype) or "float32"
    ratio = values.number(flags, "mamba-full-memory-ratio")
    sliding = values.number(flags, "swa-full-tokens-ratio")
    if (ratio is not None and ratio <= 0) or (sliding is not None and not 0 < sliding <= 1):
        raise values.wrong("mamba-full-memory-ratio must be positive, swa-full-tokens-ratio within (0, 1]")
    reserve_mib = defaults.activation_reserve_mib(
        card_memory_mib, activation_tokens=activation_tokens, gpus=gpus
    )
    return Settings(
        version=release,
        fraction=fraction * fraction_kept,
        fraction_kept=fraction_kept,
        multimodal_gib=_multimodal_gib(flags, env) if vision and release.reserves_for_images else 0.0,
        vision=vision,
        method=method,
        algorithm=values.text(flags, "speculative-algorithm"),
        draft_tokens=draft_tokens,
        running_requests=requests,
        state_slots=values.whole(flags, "max-mamba-cache-size"),
        state_ratio=0.9 if ratio is None else ratio,
        slots_per_request=strategy.slots,
        radix_cache=not values.switch(flags, "disable-radix-cache"),
        replay_tokens=replay_tokens,
        state_bytes=values.dtype_bytes(state_dtype),
        conv_bytes=values.dtype_bytes(env.get("SGLANG_MAMBA_CONV_DTYPE") or "bfloat16"),
        target_kv_bytes=values.dtype_bytes(asked_dtype or target.kv_cache_dtype or "bfloat16"),
        draft_kv_bytes=draft_kv_bytes,
        page_tokens=values.whole(flags, "page-size", least=1) or 1,
        max_tokens=max_tokens,
        sliding_ratio=defaults.SLIDING_TOKENS_RATIO if sliding is None else sliding,
        context_tokens=context_tokens,
        gpus=gpus,
        overlap=strategy.overlap,
        chunk_tokens=activation_tokens,
        chunked=chunk > 0,
        graph_batches=batches,
        prefill_sizes=prefill_sizes,
        activation_reserve_gib=reserve_mib / 1024 if post_capture else 0.0,
        post_capture=post_capture,
        expandable="expandable_segments:true" in _allocator(env),
        branching=method == "tree" or (values.whole(flags, "speculative-eagle-topk") or 1) > 1,
        refusal=refusal or strategy.refusal or _window_refusal(flags, method, draft_tokens),
    )


@lru_cache(maxsize=64)
def _since(release: str, first: str) -> bool:
    return order(release) >= order(first)


def _gpus(flags: Flags) -> int:
    for name in ("pp-size", "pipeline-parallel-size"):
        if (values.whole(flags, name) or 1) > 1:
            raise values.wrong(f"pipeline parallelism is not planned for ({name})")
    if values.switch(flags, "enable-dp-attention"):
        raise values.wrong("attention split by data (enable-dp-attention) is not planned for")
    gpus = values.whole(flags, "tp-size", least=1)
    if gpus is None:
        gpus = values.whole(flags, "tensor-parallel-size", least=1) or 1
    if gpus > 64:
        raise values.wrong(f"tensor parallelism over {gpus} cards is not planned for")
    return gpus


def _draft_kv_bytes(flags: Flags, method: Method, draft: ModelCard | None, inherited: str | None) -> float:
    """Of one number of the draft's KV cache, as it is charged."""
    own = draft.kv_cache_dtype if draft is not None else None
    if method == "own-shape" and flags.get("speculative-draft-attention-backend") == "fa4":
        # It cannot read a quantised cache.
        return values.dtype_bytes("bfloat16")
    given = flags.get("speculative-draft-kv-cache-dtype")
    name = inherited if given is None else values.text(flags, "speculative-draft-kv-cache-dtype")
    number_bytes = values.dtype_bytes(name or own or "bfloat16")
    # Scales beside a draft's numbers are not counted, and numbers of four bits are counted as bytes.
    return number_bytes if method != "own-shape" or number_bytes >= 2 else 1.0


def _default_batch(card: CardDefaults, release: VersionFacts, gpus: int, given_requests: int | None) -> int:
    largest = card.decode_bs if gpus < 4 else card.decode_bs_wide
    if release.decode_bs_follows_requests and given_requests is not None:
        return max(1, min(largest, given_requests))
    return largest


def _multimodal_gib(flags: Flags, env: Mapping[str, str]) -> float:
    mib = _env_whole(env, "SGLANG_VLM_CACHE_SIZE_MB", 100)
    if flags.get("mm-feature-transport") in ("cuda_ipc", "cuda_vmm"):
        mib += _env_whole(env, "SGLANG_MM_FEATURE_CACHE_MB", 1024)
    return max(mib, 0) / 1024


def _env_whole(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name)
    return default if value is None else values.read_whole(name, value)


def _allocator(env: Mapping[str, str]) -> str:
    given = env.get("PYTORCH_CUDA_ALLOC_CONF") or env.get("PYTORCH_ALLOC_CONF") or ""
    return given.replace(" ", "").lower()


def _speculation(flags: Flags, draft: ModelCard | None) -> tuple[Method, int, str | None]:
    """Method, tokens checked in a verify step, and why the engine would refuse them."""
    name = values.text(flags, "speculative-algorithm")
    if name is None:
        return "none", 0, None
    method = _METHODS.get(name.upper())
    if method is None:
        raise values.wrong(f"the plan does not know speculative-algorithm {name[:40]}")
    given = values.whole(flags, "speculative-num-draft-tokens", least=1)
    if given is not None and given > 1024:
        raise values.wrong(f"speculative-num-draft-tokens: {given} are more than any method checks at once")
    block = draft.block_size if draft else None
    if name.upper() == "DSPARK":
        # One more than the block: the token that the target adds itself.
        gamma = values.whole(flags, "speculative-dspark-block-size", least=1) or block
        if gamma is None:
            return method, given or 8, None
        wrong = given is not None and given != gamma + 1
        return method, gamma + 1, _dspark_refusal(gamma, given) if wrong else None
    if name.upper() == "DFLASH":
        own = values.whole(flags, "speculative-dflash-block-size", least=1)
        if own is not None and given is not None and own != given:
            return (
                method,
                own,
                (
                    "--speculative-dflash-block-size and --speculative-num-draft-tokens must be equal for "
                    f"DFLASH, but got {own} and {given}"
                ),
            )
        return method, own or given or block or 16, None
    if name.upper() == "NGRAM":
        return method, given or 12, None
    steps = values.whole(flags, "speculative-num-steps", least=1)
    if steps is not None and (values.whole(flags, "speculative-eagle-topk") or 1) == 1:
        return method, steps + 1, None
    return method, given or block or 4, None


def _dspark_refusal(gamma: int, given: int | None) -> str:
    return (
        f"DSpark speculative_num_draft_tokens must equal gamma + 1 (= {gamma + 1} for gamma={gamma}), "
        f"but got speculative_num_draft_tokens={given}."
    )


def _window_refusal(flags: Flags, method: Method, draft_tokens: int) -> str | None:
    window = values.whole(flags, "speculative-draft-window-size")
    if window is None or method == "none":
        return None
    if window <= 0:
        return f"--speculative-draft-window-size must be positive, got {window}."
    if flags.get("speculative-algorithm") == "DFLASH" and window < draft_tokens:
        return (
            "--speculative-draft-window-size must be >= --speculative-num-draft-tokens (block_size). "
            f"window_size={window}, block_size={draft_tokens}."
        )
    return None


@dataclass(frozen=True, slots=True)
class _Strategy:
    slots: int
    overlap: bool
    refusal: str | None = None


def _state_strategy(
    flags: Flags, draft_tokens: int, family: Family, env: Mapping[str, str], *, hybrid: bool
) -> _Strategy:
    """State slots that a request may hold at once, and why the engine would refuse the strategy."""
    overlap = not values.switch(flags, "disable-overlap-schedule")
    if not hybrid:
        return _Strategy(0, overlap)
    radix_cache = not values.switch(flags, "disable-radix-cache")
    strategy = values.text(flags, "mamba-radix-cache-strategy")
    chosen = strategy is None
    if strategy is None:
        triton = flags.get("linear-attn-backend", "triton") == "triton" and family.extra_buffers
        paged = (values.whole(flags, "page-size") or 1) > 1
        strategy = "extra_buffer" if triton and (overlap or paged) else "no_buffer"
    if strategy not in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        raise values.wrong(f"mamba-radix-cache-strategy: {strategy[:40]} is none that the engine knows")
    slots = state_slots_per_request(strategy, radix_cache=radix_cache, overlap=overlap)
    if env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").strip().lower() in _TRUE:
        slots -= 1 if radix_cache and strategy != "no_buffer" else 0
    if not radix_cache:
        return _Strategy(slots, overlap)
    if strategy == "no_buffer":
        return _Strategy(slots, overlap and not chosen)
    interval = values.whole(flags, "mamba-track-interval", least=1) or 256
    if draft_tokens > interval:
        return _Strategy(
            slots,
            overlap,
            f"mamba_track_interval ({interval}) must be >= speculative_num_draft_tokens ({draft_tokens})",
        )
    if strategy == "extra_buffer_lazy" and not overlap:
        return _Strategy(
            slots,
            overlap,
            "Lazy extra buffer requires overlap schedule (--disable-overlap-schedule is incompatible)",
        )
    return _Strategy(slots, overlap)


def _graph_batches(flags: Flags, default_largest: int, *, speculation: bool) -> tuple[int, ...]:
    config = values.graph_config(flags, "decode")
    off = values.switch(flags, "disable-cuda-graph") or values.switch(flags, "disable-decode-cuda-graph")
    if off or "disabled" in (flags.get("cuda-graph-backend-decode"), config.get("backend")):
        return ()
    listed = flags.get("cuda-graph-bs-decode", config.get("bs"))
    if listed is not None:
        return values.sizes("cuda-graph-bs-decode", listed, most=_MOST_BATCH)
    given = values.whole(flags, "cuda-graph-max-bs-decode", least=1)
    if given is None and config.get("max_bs") is not None:
        given = values.read_whole("cuda-graph-config", config["max_bs"], least=1)
    largest = default_largest if given is None else given
    if largest > _MOST_BATCH:
        raise values.wrong(f"cuda-graph-max-bs-decode: a batch of {largest} is not planned for")
    padding = not values.switch(flags, "disable-cuda-graph-padding")
    return defaults.decode_graph_batches(largest, speculation=speculation, padding=padding)


def _prefill_sizes(
    flags: Flags, release: VersionFacts, activation_tokens: int, max_tokens: int | None
) -> tuple[int, ...]:
    config = values.graph_config(flags, "prefill")
    off = values.switch(flags, "disable-cuda-graph") or values.switch(flags, "disable-prefill-cuda-graph")
    if off or "disabled" in (flags.get("cuda-graph-backend-prefill"), config.get("backend")):
        return ()
    listed = flags.get("cuda-graph-bs-prefill", config.get("bs"))
    if listed is not None:
        return values.sizes("cuda-graph-bs-prefill", listed, most=_MOST_CHUNK)
    largest = values.whole(flags, "cuda-graph-max-bs-prefill", least=1)
    if largest is None and config.get("max_bs") is not None:
        largest = values.read_whole("cuda-graph-config", config["max_bs"], least=1)
    if largest is None:
        largest = activation_tokens if max_tokens is None else min(activation_tokens, max_tokens)
    context_tokens = values.whole(flags, "context-length", least=1)
    if release.prefill_graphs_within_context and context_tokens is not None:
        largest = min(largest, context_tokens)
    if largest > _MOST_CHUNK:
        raise values.wrong(f"cuda-graph-max-bs-prefill: {largest} tokens are not planned for")
    return defaults.prefill_graph_tokens(largest)
