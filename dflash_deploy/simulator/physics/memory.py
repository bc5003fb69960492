"""Where the card's memory goes: what SGLang computes before it allocates, and what it then really takes.

All amounts are GiB unless a name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_deploy.simulator import calibration as fitted

if TYPE_CHECKING:
    from dflash_deploy.simulator.calibration import CardCalibration
    from dflash_deploy.simulator.physics.residuals import Residuals
    from dflash_deploy.simulator.settings import Settings

_GIB = 1 << 30
_MM_RESERVE_GIB = 100 / 1024


class SizingError(Exception):
    """SGLang refuses to size its pools.

    Attributes:
        kind: the Python exception it dies of.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Pools:
    """What is allocated for state and keys/values.

    Attributes:
        slots: recurrent-state slots, padding not counted.
        running: requests that may run at once.
        tokens: rows of the KV pool.
        warnings: log lines that say what was clamped.
    """

    slots: int
    running: int
    tokens: int
    draft_tokens: int
    conv: float
    ssm: float
    verify_ssm: float
    verify_conv: float
    replay: float
    kv: float
    draft_kv: float
    warnings: tuple[str, ...]

    @property
    def state(self) -> float:
        """All that the recurrent layers keep."""
        return self.conv + self.ssm + self.verify_ssm + self.verify_conv + self.replay


@dataclass(frozen=True)
class GraphMemory:
    """What one set of captured graphs takes."""

    sizes: tuple[int, ...]
    gib: float


def mm_reserve(settings: Settings) -> float:
    """What SGLang sets aside for pictures."""
    return _MM_RESERVE_GIB if settings.vision_loaded else 0.0


def free_before_load(settings: Settings, card: CardCalibration, residuals: Residuals) -> float:
    """Free memory once the CUDA context stands."""
    return settings.card.memory_mib / 1024 - card.context_gib - residuals.context_mib / 1024


def weights(settings: Settings) -> float:
    """The target in memory; without its vision tower where that is left out."""
    tower = 0.86 if settings.target.vision and not settings.vision_loaded else 0.0
    return settings.target.loaded_gib - tower


def draft_weights(settings: Settings) -> float:
    """The draft in memory."""
    speculation = settings.speculation
    return speculation.draft.loaded_gib if speculation and speculation.draft else 0.0


def slot_bytes(settings: Settings) -> tuple[int, int]:
    """Convolution and recurrent state of one slot."""
    linear = settings.target.linear
    if linear is None:
        return 0, 0
    layers = settings.target.linear_attention_layers
    conv = layers * linear.conv_dim * (linear.conv_kernel - 1) * 2
    ssm = layers * linear.value_heads * linear.value_dim * linear.key_dim * settings.ssm_bytes
    return conv, ssm


def cell_bytes(settings: Settings) -> tuple[float, float]:
    """Bytes that one token keeps in the target's and the draft's pool."""
    target = settings.target.kv_elements_per_token() * settings.kv_bytes
    speculation = settings.speculation
    if speculation is None or speculation.draft is None:
        return target, 0.0
    if speculation.method == "mtp":
        layers = settings.target.full_attention_layers
        return target, float(int(target * (1 + 1 / layers)) - int(target))
    return target, speculation.draft.kv_elements_per_token() * speculation.draft_kv_bytes


def size_pools(settings: Settings, *, free_at_start: float, free: float) -> Pools:
    """Size the pools by SGLang's own rules.

    Args:
        settings: the resolved command line.
        free_at_start: free memory before the weights.
        free: free memory after them.

    Raises:
        SizingError: with SGLang's message.
    """
    warnings: list[str] = []
    speculation = settings.speculation
    verify = speculation.draft_tokens if speculation else 0
    if settings.replay_state and speculation and speculation.method in ("dflash", "dspark"):
        raise SizingError(
            "ValueError",
            "--enable-linear-replayssm-spec with DSPARK/DFLASH requires a KDA model; got a non-KDA model.",
        )
    conv, ssm = slot_bytes(settings)
    rest = free - free_at_start * (1 - settings.mem_fraction_static) - mm_reserve(settings)
    slots = 0
    replay = 0.0
    if conv:
        if settings.replay_state and speculation:
            replay = _replay_gib(settings)
        slots, rest = _charge_state(
            settings, rest, conv + ssm, 0 if settings.replay_state else verify, replay
        )
    if rest <= 0:
        minimum = 1 - free / free_at_start
        raise SizingError(
            "ValueError",
            f"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static="
            f"{settings.mem_fraction_static}. Raise --mem-fraction-static above "
            f"{math.ceil(minimum * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {minimum:.4f}). "
            "If using speculative decoding, draft weights are now counted.",
        )
    target_cell, draft_cell = cell_bytes(settings)
    compact = speculation.window if speculation and speculation.method == "dflash" else None
    tokens = int(rest * _GIB // (target_cell + (0 if compact else draft_cell)))
    limit = settings.max_total_tokens
    if limit is not None:
        if limit > tokens:
            warnings.append(
                f"max_total_tokens={limit} is larger than the profiled value {tokens}. "
                "Use the profiled value instead."
            )
        tokens = min(tokens, limit)
    tokens -= tokens % settings.page_size
    if tokens <= 0:
        raise SizingError(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            f"mem_fraction_static={settings.mem_fraction_static}",
        )
    running = _running(settings, tokens, slots, warnings)
    draft_rows = min(tokens, compact * running) if compact else tokens
    page = settings.page_size
    rows = (running + 1) * verify if not settings.replay_state else 0
    windows = 0.0
    linear = settings.target.linear
    if linear is not None and rows:
        windows = (
            settings.target.linear_attention_layers
            * (running + 1)
            * linear.conv_dim
            * (verify + linear.conv_kernel - 2)
            * 2
        )
    return Pools(
        slots=slots,
        running=running,
        tokens=tokens,
        draft_tokens=draft_rows,
        conv=(slots + 1) * conv / _GIB if conv else 0.0,
        ssm=(slots + 1) * ssm / _GIB if ssm else 0.0,
        verify_ssm=rows * ssm / _GIB,
        verify_conv=windows / _GIB,
        replay=replay,
        kv=(tokens + page) * target_cell / _GIB,
        draft_kv=(draft_rows + page) * draft_cell / _GIB,
        warnings=tuple(warnings),
    )


def _charge_state(
    settings: Settings, rest: float, slot: int, verify: int, replay: float
) -> tuple[int, float]:
    """Slots of the state cache, and what is left after it."""
    per_request = settings.state_slots_per_request
    running = settings.max_running_requests
    budget = rest
    if settings.max_mamba_cache_size is not None:
        slots = settings.max_mamba_cache_size
        if verify:
            rest -= slot * (min(max(1, running or 1), slots // per_request) + 1) * verify / _GIB
    elif not settings.radix_cache and running is not None:
        slots = max(1, running)
        if verify:
            rest -= slot * (slots + 1) * verify / _GIB
    else:
        ratio = settings.mamba_full_memory_ratio
        share = budget * ratio / (1 + ratio) * _GIB
        if verify:
            slots = int((share - slot * (1 + verify)) // (slot * (1 + verify / per_request)))
            rest -= slot * (min(max(1, running or 1), slots // per_request) + 1) * verify / _GIB
        else:
            slots = int((share - replay * _GIB - slot) // slot)
    if slots <= 0:
        raise SizingError(
            "RuntimeError",
            "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
            f"max_mamba_cache_size={slots} (total_rest_memory={rest:.2f} GB, "
            f"mamba_cache_per_req={slot / (1 << 20):.2f} MB). Try: (1) reduce --max-running-requests, "
            "(2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, or "
            "(4) use GPUs with more memory.",
        )
    return slots, rest - (slots + 1) * slot / _GIB - replay


def _replay_gib(settings: Settings) -> float:
    linear = settings.target.linear
    if linear is None:
        return 0.0
    ring = 16
    numbers = (
        linear.value_heads * ring * linear.value_dim * 4
        + linear.key_heads * ring * linear.key_dim * 4
        + linear.value_heads * ring * 4
    )
    requests = (settings.max_running_requests or 1) + 1
    return requests * settings.target.linear_attention_layers * numbers / _GIB


def _running(settings: Settings, tokens: int, slots: int, warnings: list[str]) -> int:
    wanted = settings.max_running_requests
    if wanted is None:
        running = min(max(min(int(tokens / settings.context_length * 512), 4096), 2048), tokens // 2)
    else:
        running = min(wanted, tokens // 2)
    capped = False
    if settings.target.linear is not None:
        per_request = settings.state_slots_per_request
        most = slots // per_request
        if most < running:
            capped = True
            warnings.append(
                f"max_running_requests is capped to {most} by the mamba state cache "
                f"(max_mamba_cache_size={slots}, "
                f"{per_request} state slots per request). To raise it: increase --mamba-full-memory-ratio or "
                "--max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16."
            )
        running = min(running, most)
        if running <= 0:
            raise SizingError(
                "RuntimeError",
                "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                f"max_mamba_cache_size={slots}, mamba_ratio={per_request}, resulting max_num_reqs={running}. "
                "Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static, or "
                "(3) use GPUs with more memory.",
            )
    if running <= 0:
        raise SizingError(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            f"mem_fraction_static={settings.mem_fraction_static}",
        )
    if wanted is not None and running < wanted and not capped:
        warnings.append(
            f"max_running_requests was reduced from the requested {wanted} to {running} (per dp worker) "
            "due to "
            "the available KV cache capacity."
        )
    return running


def workspace(pools: Pools, residuals: Residuals) -> float:
    """Attention workspaces, autotuning, static buffers."""
    # Static buffers grow with the batch, but slower once kernels share them.
    requests = min(pools.running, 4) + math.sqrt(max(0, pools.running - 4))
    return (fitted.WORKSPACE_GIB + fitted.WORKSPACE_PER_REQUEST_GIB * requests) * residuals.workspace


def captured_sizes(settings: Settings, pools: Pools) -> tuple[int, ...]:
    """Decode batch sizes that are captured: none above the request pool, whose size is always among them."""
    if not settings.decode_graphs:
        return ()
    largest = max(settings.decode_sizes)
    sizes = {size for size in settings.decode_sizes if size <= pools.running}
    if largest >= pools.running:
        sizes.add(pools.running)
    return tuple(sorted(sizes))


def verify_graphs(settings: Settings, pools: Pools, residuals: Residuals) -> GraphMemory:
    """The target's decode or verify graphs."""
    sizes = captured_sizes(settings, pools)
    if not sizes:
        return GraphMemory((), 0.0)
    rows = max(sizes) * (settings.speculation.draft_tokens if settings.speculation else 1)
    gib = (
        fitted.GRAPH_BASE_GIB + fitted.GRAPH_PER_SIZE_GIB * len(sizes) + fitted.GRAPH_PER_ROW_GIB * rows
    ) * residuals.graph_memory
    return GraphMemory(sizes, gib + (fitted.COMPILE_SPIKE_GIB if settings.torch_compile else 0.0))


def draft_graphs(target: GraphMemory) -> GraphMemory:
    """The draft's graphs, captured for the same batch sizes."""
    return GraphMemory(target.sizes, target.gib * fitted.DRAFT_GRAPH_SHARE if target.sizes else 0.0)


def prefill_graphs(settings: Settings, residuals: Residuals) -> GraphMemory:
    """The target's prefill graphs; the largest takes nearly all."""
    if not settings.prefill_graphs or not settings.prefill_sizes:
        return GraphMemory((), 0.0)
    largest = max(settings.prefill_sizes)
    gib = fitted.PREFILL_GRAPH_BASE_GIB + fitted.PREFILL_GRAPH_2048_GIB * (largest / 2048) ** 0.6
    return GraphMemory(settings.prefill_sizes, gib * residuals.graph_memory)


def first_request(settings: Settings, residuals: Residuals) -> float:
    """Kernels compiled and buffers made when the first tokens go through."""
    draft = settings.speculation is not None and settings.speculation.method in ("dflash", "dspark")
    return (fitted.JIT_GIB + (fitted.JIT_DRAFT_GIB if draft else 0.0)) * residuals.workspace


def logits(settings: Settings, requests: int) -> float:
    """Float32 logits of one step and their probabilities."""
    rows = requests * (settings.speculation.draft_tokens if settings.speculation else 1)
    return 2 * rows * settings.target.vocab_size * 4 / _GIB


def prefill_activation(settings: Settings, tokens: int) -> float:
    """Activations of a prompt pass; captured sizes have theirs in the graph's own pool."""
    if settings.prefill_graphs and settings.prefill_sizes and tokens <= max(settings.prefill_sizes):
        return 0.0
    return tokens * fitted.ACTIVATION_GIB_PER_TOKEN


def fragmentation(settings: Settings, *, served: int, concurrent: int) -> float:
    """What the allocator holds and cannot use: grows with requests served, and with how many ran at once."""
    gib = fitted.FRAGMENTATION_GIB * (1 - math.exp(-served / 40))
    gib += fitted.FRAGMENTATION_PER_REQUEST_GIB * math.sqrt(concurrent) * 2
    return gib * (0.3 if settings.expandable_segments else 1.0)
