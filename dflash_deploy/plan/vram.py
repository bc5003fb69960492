"""The VRAM budget of a configuration: the engine's own sizing, and what is known of the rest.

Pools and their limits follow ``mem_cache/kv_cache_configurator.py`` of SGLang 0.5.23. What is taken outside
the pools (CUDA context, graphs, workspaces) the engine does not compute; the figures for it are empirical.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from dflash_deploy.engine.boot import Stage
from dflash_deploy.plan.budget import Budget, Pool
from dflash_deploy.plan.settings import Settings, read_settings

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.engine.launch import Flags

_MIB = 1 << 20
_GIB = 1 << 30

CONTEXT_MIB = 700.0
"""CUDA context and libraries of the server: 500 to 900 MiB are seen on an RTX 5090."""

_WORKSPACE_GIB = 1.0
_VERIFY_GRAPH_GIB = 0.35
# Fitted to two published runs on an RTX 5090 with DFlash2, of one and of four graph sizes; a prior, no more.

_DECODE_GRAPH_GIB = 0.02
# Without speculation a graph holds one row a request: 0.26 GiB for 24 GB cards' list, 0.34 GiB for 36 sizes.

_PREFILL_GRAPHS_GIB = 1.0
_PREFILL_GRAPH_GIB = 0.01
# 1.42 GiB for 42 sizes and 1.71 GiB for 58 are published; the largest size alone takes most of it.


@dataclass(frozen=True)
class Cells:
    """Bytes that one token takes in the KV pools, and that one slot takes in the state cache.

    Attributes:
        charged: what the engine divides the free memory by.
        target: in the target's pool; ``draft`` in the draft's.
        conv: conv windows of one state slot; ``ssm`` is its recurrent state.
        replay: rings that replace one request's verify states, 0 without them.
    """

    charged: int
    target: int
    draft: int
    conv: int = 0
    ssm: int = 0
    replay: int = 0

    @property
    def slot(self) -> int:
        """One state slot."""
        return self.conv + self.ssm


@dataclass(frozen=True)
class Sizing:
    """The pools that the engine makes."""

    kv_tokens: int
    state_slots: int
    running_requests: int


@dataclass(frozen=True)
class Refused:
    """The engine ends its start here, with this message."""

    stage: Stage
    message: str


def plan_budget(
    *,
    card_memory_mib: int,
    target: ModelCard,
    draft: ModelCard | None,
    flags: Flags,
    version: str,
    users: int,
    other_mib: float = 0.0,
) -> Budget:
    """Predict what a configuration takes of one card, and whether it starts.

    ``fails_at`` names only what follows from the engine's own arithmetic; a configuration whose empirical
    parts do not fit has a negative headroom.

    Args:
        card_memory_mib: total memory, as the driver reports it.
        target: facts of the model.
        draft: facts of its draft model or head, None without one.
        flags: the engine's flags, by their newest names.
        version: the engine's.
        users: people at once.
        other_mib: memory that other processes hold.

    Raises:
        DeployError: a flag's value that cannot be read, or a way of serving that is not planned for.
    """
    settings = read_settings(
        flags, version=version, card_memory_mib=card_memory_mib, target=target, draft=draft
    )
    cells = cells_of(settings, target, draft)
    pools = [
        Pool("context", CONTEXT_MIB, "empirical"),
        Pool("weights", target.loaded_gib * 1024, "empirical"),
    ]
    if other_mib:
        pools.insert(0, Pool("other processes", other_mib, "exact"))
    if draft is not None and settings.method != "none":
        pools.append(Pool("draft weights", draft.loaded_gib * 1024, "empirical"))
    before_gib = (card_memory_mib - other_mib - CONTEXT_MIB) / 1024
    after_gib = (card_memory_mib - sum(pool.mib for pool in pools)) / 1024

    sized: Sizing | Refused
    if settings.refusal is not None:
        sized = Refused(Stage.ARGUMENTS, settings.refusal)
    elif before_gib < target.loaded_gib:
        sized = Refused(Stage.LOAD, _out_of_memory(target.loaded_gib, before_gib))
    elif after_gib < 0:
        sized = Refused(
            Stage.DRAFT_LOAD, _out_of_memory(0.0 if draft is None else draft.loaded_gib, after_gib)
        )
    else:
        sized = size_pools(settings, cells, free_before_load_gib=before_gib, free_after_load_gib=after_gib)
    if isinstance(sized, Refused):
        return Budget(
            pools=tuple(pools),
            kv_tokens=0,
            state_slots=0,
            slots_per_request=settings.slots_per_request,
            max_running_requests=0,
            context_per_user=0,
            predicted_peak_mib=sum(pool.mib for pool in pools),
            total_mib=card_memory_mib,
            fails_at=sized.stage,
            failure=sized.message,
        )
    pools += _pools(settings, cells, sized, target)
    return Budget(
        pools=tuple(pools),
        kv_tokens=sized.kv_tokens,
        state_slots=sized.state_slots,
        slots_per_request=settings.slots_per_request,
        max_running_requests=sized.running_requests,
        context_per_user=min(sized.kv_tokens // users, settings.context_tokens),
        predicted_peak_mib=sum(pool.mib for pool in pools),
        total_mib=card_memory_mib,
    )


def cells_of(settings: Settings, target: ModelCard, draft: ModelCard | None) -> Cells:
    """Sizes of a token and of a state slot."""
    target_cell = _kv_cell(target, settings.target_kv_bytes)
    draft_cell = 0
    charged = target_cell
    if draft is not None and target.full_attention_layers:
        if settings.method == "target-shaped":
            draft_cell = int(target_cell * draft.layers / target.full_attention_layers)
            charged = target_cell + draft_cell
        elif settings.method == "own-shape":
            draft_cell = _kv_cell(draft, settings.draft_kv_bytes)
            layers = target.full_attention_layers + draft.layers
            charged = target_cell + draft_cell
            if not settings.version.exact_draft_cell:
                charged = ceil(target_cell * layers / target.full_attention_layers)
    conv = ssm = replay = 0
    if target.linear is not None:
        linear = target.linear
        conv_rows = linear.value_heads * linear.value_dim + 2 * linear.key_heads * linear.key_dim
        # Conv windows are always of two bytes, whatever the type of the state.
        conv = conv_rows * (linear.conv_kernel - 1) * 2 * target.linear_attention_layers
        state = linear.value_heads * linear.value_dim * linear.key_dim * target.linear_attention_layers
        ssm = int(state * settings.state_bytes)
        ring = 2 * linear.value_heads * linear.value_dim + 2 * linear.key_heads * linear.key_dim
        ring = (2 * ring + 4 * linear.value_heads) * target.linear_attention_layers
        replay = ring * settings.replay_tokens
    return Cells(charged, target_cell, draft_cell, conv, ssm, replay)


def size_pools(
    settings: Settings, cells: Cells, *, free_before_load_gib: float, free_after_load_gib: float
) -> Sizing | Refused:
    """The engine's own sizing, exact for exact inputs.

    Args:
        settings: of the command line.
        cells: sizes of a token and a state slot.
        free_before_load_gib: free memory before any weights ("Load weight begin. avail mem").
        free_after_load_gib: free memory when the pools are sized, target and draft loaded.
    """
    slack_gib = free_before_load_gib * (1 - settings.fraction)
    rest_gib = free_after_load_gib - slack_gib - settings.multimodal_gib
    slots = 0
    if cells.slot:
        slots, rest_gib = _size_state(settings, cells, rest_gib)
        if slots <= 0:
            return Refused(
                Stage.SIZING,
                "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
                f"max_mamba_cache_size={slots} (total_rest_memory={rest_gib:.2f} GB, "
                f"mamba_cache_per_req={cells.slot / _MIB:.2f} MB). Try: (1) reduce --max-running-requests, "
                "(2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, or "
                "(4) use GPUs with more memory.",
            )
        rest_gib -= ((slots + settings.padding_slots) * cells.slot) / _GIB
        rest_gib -= _replay_bytes(settings, cells) / _GIB
    if rest_gib <= 0:
        least = 1 - free_after_load_gib / free_before_load_gib
        return Refused(
            Stage.SIZING,
            "Loaded weights leave no GPU memory for the KV cache under "
            f"--mem-fraction-static={settings.fraction}. Raise --mem-fraction-static above "
            f"{ceil(least * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {least:.4f}). If using "
            "speculative decoding, draft weights are now counted.",
        )
    tokens = int(rest_gib * _GIB) // cells.charged
    if settings.max_tokens is not None:
        tokens = min(tokens, settings.max_tokens)
    tokens = tokens // settings.page_tokens * settings.page_tokens
    if tokens <= 0:
        return Refused(
            Stage.SIZING,
            "Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            f"mem_fraction_static={settings.fraction}",
        )
    requests = settings.running_requests
    if requests is None:
        requests = max(min(int(tokens / settings.context_tokens * 512), 4096), 2048)
    requests = min(requests, tokens // 2)
    if cells.slot:
        requests = min(requests, slots // settings.slots_per_request)
        if requests <= 0:
            return Refused(
                Stage.SIZING,
                "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                f"max_mamba_cache_size={slots}, mamba_ratio={settings.slots_per_request}, resulting "
                f"max_num_reqs={requests}. Try: (1) reduce --max-running-requests, "
                "(2) increase --mem-fraction-static, or (3) use GPUs with more memory.",
            )
    return Sizing(tokens, slots, requests)


def _size_state(settings: Settings, cells: Cells, rest_gib: float) -> tuple[int, float]:
    """Slots of the state cache, and what is left once the verify states are charged."""
    padding = settings.padding_slots
    limit = settings.running_requests
    per_request = settings.slots_per_request
    verified = 0 if settings.replay_tokens else settings.draft_tokens
    if settings.state_slots is not None:
        slots = settings.state_slots
    elif not settings.radix_cache and limit is not None:
        slots = max(1, limit)
    else:
        share = settings.state_ratio / (1 + settings.state_ratio)
        budget = rest_gib * share * _GIB - padding * cells.slot * (1 + verified)
        budget -= _replay_bytes(settings, cells)
        slots = int(budget // (cells.slot * (1 + verified / per_request)))
    if verified:
        requests = slots // per_request if limit is None else min(max(1, limit), slots // per_request)
        rest_gib -= cells.slot * (requests + padding) * verified / _GIB
    return slots, rest_gib


def _replay_bytes(settings: Settings, cells: Cells) -> int:
    """Rings of ``enable-linear-replayssm-spec``, for each running request and one more."""
    return cells.replay * ((settings.running_requests or 0) + 1)


def _pools(settings: Settings, cells: Cells, sized: Sizing, target: ModelCard) -> list[Pool]:
    """What stands in memory beside the weights once the server takes requests."""
    pools = []
    if cells.slot:
        # One slot of padding is made whether the release charges it or not.
        pools.append(Pool("state cache", (sized.state_slots + 1) * cells.slot / _MIB, "exact"))
        verify = _verify_bytes(settings, cells, sized.running_requests, target)
        if verify:
            pools.append(Pool("verify states", verify / _MIB, "exact"))
    rows = sized.kv_tokens + settings.page_tokens
    pools.append(Pool("KV cache", rows * cells.target / _MIB, "exact"))
    if cells.draft:
        pools.append(Pool("draft KV cache", rows * cells.draft / _MIB, "exact"))
    batches = {batch for batch in settings.graph_batches if batch <= sized.running_requests}
    if settings.graph_batches and max(settings.graph_batches) > sized.running_requests:
        batches.add(sized.running_requests)
    graph_gib = _VERIFY_GRAPH_GIB if settings.speculation else _DECODE_GRAPH_GIB
    rest_gib = _WORKSPACE_GIB + graph_gib * len(batches)
    pools.append(Pool("graphs and workspaces", rest_gib * 1024, "empirical"))
    if settings.prefill_graphs:
        prefill_gib = _PREFILL_GRAPHS_GIB + _PREFILL_GRAPH_GIB * settings.prefill_graphs
        pools.append(Pool("prefill graphs", prefill_gib * 1024, "empirical"))
    return pools


def _verify_bytes(settings: Settings, cells: Cells, requests: int, target: ModelCard) -> int:
    """States and conv windows kept for each draft token until it is known which are taken."""
    if not settings.speculation or target.linear is None:
        return 0
    if settings.replay_tokens:
        return _replay_bytes(settings, cells)
    window = target.linear.conv_kernel - 1
    # A chain shares its windows; the branches of a tree each need their own.
    columns = (
        settings.draft_tokens * window if settings.method == "tree" else settings.draft_tokens + window - 1
    )
    return (requests + 1) * (cells.ssm * settings.draft_tokens + cells.conv * columns // window)


def _kv_cell(model: ModelCard, number_bytes: float) -> int:
    return int(model.full_attention_layers * model.kv_heads * 2 * model.head_dim * number_bytes)


def _out_of_memory(wanted_gib: float, free_gib: float) -> str:
    return f"CUDA out of memory: the weights take {wanted_gib:.2f} GiB, {max(free_gib, 0):.2f} GiB are free"
