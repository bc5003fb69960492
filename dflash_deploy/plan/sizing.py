"""The engine's own sizing of its pools: exact for exact inputs.

Follows ``mem_cache/kv_cache_configurator.py`` and ``model_executor/pool_configurator.py`` of SGLang 0.5.16 to
0.5.23; what differs between releases stands in ``engine/sglang/versions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from dflash_deploy.engine.boot import Stage

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.plan.cells import Cells
    from dflash_deploy.plan.settings import Settings

_MIB = 1 << 20
_GIB = 1 << 30
_EVICTION_INTERVAL = 128


@dataclass(frozen=True, slots=True)
class Sizing:
    """The pools that the engine makes.

    Attributes:
        kv_tokens: tokens of the KV pool; ``window_tokens`` of the window layers' pool, 0 without one.
        profiled_tokens: what memory would have held without ``max-total-tokens``.
        limited_by: what cut the running requests below the limit asked for, or None.
    """

    kv_tokens: int
    state_slots: int
    running_requests: int
    window_tokens: int = 0
    profiled_tokens: int = 0
    limited_by: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine ends its start here, with this message.

    Attributes:
        pool: the pool that there was no room for.
    """

    stage: Stage
    message: str
    pool: str


def size_pools(
    settings: Settings,
    cells: Cells,
    *,
    free_before_load_gib: float,
    free_after_load_gib: float,
    target: ModelCard | None = None,
) -> Sizing | Refused:
    """Size the state cache and the KV pools.

    Args:
        settings: of the command line.
        cells: sizes of a token and a state slot.
        free_before_load_gib: free memory before any weights ("Load weight begin. avail mem").
        free_after_load_gib: free memory when the pools are sized, target and draft loaded.
        target: the model; needed only where it has window layers.
    """
    slack_gib = free_before_load_gib * (1 - settings.fraction)
    if cells.slot:
        slack_gib = max(slack_gib, settings.activation_reserve_gib)
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
                "state ssm",
            )
        by_slot = 0 if settings.version.replay_rings_by_request else cells.replay
        rest_gib -= ((slots + settings.padding_slots) * (cells.slot + by_slot)) / _GIB
        rest_gib -= _replay_bytes(settings, cells) / _GIB
    if rest_gib <= 0:
        least = 1 - free_after_load_gib / free_before_load_gib if free_before_load_gib > 0 else 1.0
        taker = (
            "the recurrent state" if cells.slot else "what is kept for images" if settings.vision else None
        )
        if taker is not None and settings.fraction >= least:
            # The engine says the same as below, and so advises a share that is less than the one given.
            return Refused(
                Stage.SIZING,
                f"no GPU memory is left for the KV cache under --mem-fraction-static={settings.fraction}: "
                f"weights take {least:.3f} of the card, and {taker} all that is allowed beyond",
                "target KV",
            )
        return Refused(
            Stage.SIZING,
            "Loaded weights leave no GPU memory for the KV cache under "
            f"--mem-fraction-static={settings.fraction}. Raise --mem-fraction-static above "
            f"{ceil(least * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {least:.4f}). If using "
            "speculative decoding, draft weights are now counted.",
            "target KV",
        )
    return tokens_in(settings, cells, int(rest_gib * _GIB), slots=slots, target=target)


def tokens_in(
    settings: Settings,
    cells: Cells,
    budget_bytes: int,
    *,
    slots: int,
    target: ModelCard | None = None,
    cap: int | None = None,
) -> Sizing | Refused:
    """Split what is left into tokens, and find how many requests they serve."""
    page = settings.page_tokens
    fixed_window = _window_for_requests(settings, target) if cells.window and cells.target else None
    if fixed_window is not None:
        window_bytes = fixed_window * cells.window
        profiled = int((budget_bytes - window_bytes) // cells.capped) // page * page
        if profiled <= 0:
            return Refused(
                Stage.SIZING,
                f"SWA pool cap ({fixed_window} tokens, {window_bytes / _GIB:.2f} GiB) leaves no room for the "
                f"full KV pool within the available {budget_bytes / _GIB:.2f} GiB. Reduce "
                "--max-running-requests, lower SGLANG_SWA_EVICTION_INTERVAL, or increase "
                "--mem-fraction-static.",
                "window KV",
            )
    else:
        profiled = int(budget_bytes // cells.charged) // page * page if cells.charged else 0
    if not cells.charged:
        profiled = (settings.max_tokens or settings.context_tokens) // page * page
    asked = profiled if settings.max_tokens is None else min(profiled, settings.max_tokens)
    asked = min(asked, cap) if cap is not None else asked
    tokens = asked // page * page
    window = 0
    if cells.window and not cells.target:
        window = tokens
    elif cells.window and fixed_window is not None:
        window = fixed_window if asked == profiled else min(fixed_window, asked)
    elif cells.window:
        # What memory would have held is looked at first, then what a limit leaves of it.
        for held in (profiled, tokens):
            window = int(held * settings.sliding_ratio) // page * page
            refused = _window_too_small(window, page, target)
            if refused is not None:
                return refused
    if tokens <= 0:
        return Refused(
            Stage.SIZING,
            # The class behind it can name the fraction, but is not told it in time.
            "Not enough memory. Please try to increase --mem-fraction-static.",
            "target KV",
        )
    return _requests(settings, cells, Sizing(tokens, slots, 0, window, profiled))


def _window_too_small(window: int, page: int, target: ModelCard | None) -> Refused | None:
    width = target.sliding_window if target is not None else None
    if width is None or width + page < window:
        return None
    return Refused(
        Stage.SIZING,
        f"SWA pool ({window} tokens) cannot hold even one request: the prefill admission floor is "
        f"sliding_window_size ({width}) + page_size ({page}). Increase --swa-full-tokens-ratio or "
        "the total KV budget.",
        "window KV",
    )


def _requests(settings: Settings, cells: Cells, sized: Sizing) -> Sizing | Refused:
    wanted = settings.running_requests
    if wanted is None:
        wanted = max(min(int(sized.kv_tokens / settings.context_tokens * 512), 4096), 2048)
    wanted = max(1, wanted)
    requests = min(wanted, sized.kv_tokens // 2)
    limited_by = "target KV" if requests < wanted else None
    if cells.slot:
        most = sized.state_slots // settings.slots_per_request
        if most < requests:
            requests, limited_by = most, "state ssm"
        if requests <= 0:
            return Refused(
                Stage.SIZING,
                "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                f"max_mamba_cache_size={sized.state_slots}, mamba_ratio={settings.slots_per_request}, "
                f"resulting max_num_reqs={requests}. Try: (1) reduce --max-running-requests, "
                "(2) increase --mem-fraction-static, or (3) use GPUs with more memory.",
                "state ssm",
            )
    return Sizing(
        sized.kv_tokens,
        sized.state_slots,
        requests,
        sized.window_tokens,
        sized.profiled_tokens,
        limited_by,
    )


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
        by_slot = 0 if settings.version.replay_rings_by_request else cells.replay
        share = settings.state_ratio / (1 + settings.state_ratio)
        budget = rest_gib * share * _GIB - padding * (cells.slot * (1 + verified) + by_slot)
        budget -= _replay_bytes(settings, cells)
        slots = int(budget // (cells.slot * (1 + verified / per_request) + by_slot))
    if verified:
        # The limit is always known here: speculation brings one along.
        requests = min(max(1, limit or 1), slots // per_request)
        rest_gib -= cells.slot * (requests + padding) * verified / _GIB
    return slots, rest_gib


def _replay_bytes(settings: Settings, cells: Cells) -> int:
    """Rings of ``enable-linear-replayssm-spec`` where each running request, and one more, has its own."""
    if not settings.version.replay_rings_by_request:
        return 0
    return cells.replay * (max(1, settings.running_requests or 1) + 1)


def verify_bytes(settings: Settings, cells: Cells, requests: int, slots: int) -> tuple[int, int, int]:
    """States, conv windows and replay rings kept until it is known which draft tokens are taken."""
    if not settings.speculation or not cells.slot:
        return 0, 0, 0
    rows = requests + 1
    window = cells.conv // cells.conv_column if cells.conv_column else 0
    # A chain shares its windows; the branches of a tree each need their own.
    tokens = settings.draft_tokens
    columns = tokens * window if settings.branching else tokens + window - 1
    conv = rows * columns * cells.conv_column
    if settings.replay_tokens:
        rings = rows if settings.version.replay_rings_by_request else slots + 1
        return 0, conv, rings * cells.replay
    return rows * tokens * cells.ssm, conv, 0


def _window_for_requests(settings: Settings, target: ModelCard | None) -> int | None:
    """Tokens of the window pool where they follow from the request limit: without a prefix cache."""
    limit = settings.running_requests
    if target is None or target.sliding_window is None or limit is None or settings.radix_cache:
        return None
    if not settings.chunked and settings.version.capped_window_needs_chunks:
        return None
    page = settings.page_tokens
    tokens = settings.draft_tokens or 1
    trailing = target.sliding_window + _EVICTION_INTERVAL * tokens + page
    ahead = page if not settings.speculation else _allocated_ahead(settings)
    chunks = 2 if settings.overlap else 1
    # Prompts that are not cut have the size -1, and earlier releases reckon with it.
    chunk = settings.chunk_tokens if settings.chunked else -1
    needed = (trailing + ahead) * max(1, limit) + chunks * chunk + page
    return -(-needed // page) * page


def _allocated_ahead(settings: Settings) -> int:
    """Tokens that a verify step takes hold of: two steps' with the overlap schedule, else whole pages."""
    page = settings.page_tokens
    if settings.overlap:
        return 2 * settings.draft_tokens
    return -(-settings.draft_tokens // page) * page
