"""What the engine works out by itself when a flag is left out.

The memory fraction follows ``arg_groups/memory_hook.py`` of SGLang 0.5.23, the graph sizes
``arg_groups/cuda_graph_hook.py`` (in releases before 0.5.19 both stand in ``server_args.py``).
"""

from __future__ import annotations

IMPLICIT_RUNNING_REQUESTS = 48
"""Limit of running requests that speculation brings with it when none is given."""

LARGE_CARD_MIB = 60 << 10
_LARGE_CARD_RESERVE_MIB = 10 << 10

SLIDING_TOKENS_RATIO = 0.8
"""Tokens of the window pool to those of the full one (``--swa-full-tokens-ratio``)."""


def decode_graph_batches(max_batch: int, *, speculation: bool, padding: bool = True) -> tuple[int, ...]:
    """Batch sizes that decode graphs are captured for."""
    if not padding:
        return tuple(range(1, max_batch + 1))
    if speculation:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
        sizes += range(272, max_batch + 1, 16)
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_batch + 1, 32)]
    return tuple(sorted({*(size for size in sizes if size <= max_batch), max_batch}))


def prefill_graph_tokens(max_tokens: int) -> tuple[int, ...]:
    """Token counts that prefill graphs are captured for."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, max_tokens + 1, 512)]
    return tuple(size for size in sizes if size <= max_tokens)


def activation_reserve_mib(card_memory_mib: int, *, activation_tokens: int, gpus: int) -> float:
    """What stays free for activations before graphs are captured (post-capture sizing)."""
    reserve = 512 + 1.5 * max(activation_tokens, 2048) + 128 * gpus
    return max(reserve, _LARGE_CARD_RESERVE_MIB) if card_memory_mib > LARGE_CARD_MIB else reserve


def memory_fraction(
    card_memory_mib: int,
    *,
    activation_tokens: int,
    max_batch: int,
    prefill_graphs: int,
    vision_factor: float = 1.0,
    gpus: int = 1,
    post_capture: bool = False,
) -> float:
    """Default share of the card's memory for weights and pools.

    Args:
        card_memory_mib: size of the card.
        activation_tokens: chunked prefill size, or the prefill limit where chunking is off.
        max_batch: largest batch of the decode graphs, 0 where they are off.
        prefill_graphs: how many prefill graphs are captured.
        vision_factor: what a vision tower leaves of the fraction, 1 without one.
        gpus: cards that share the model.
        post_capture: the KV pool gets its size after the graphs are captured.
    """
    if post_capture:
        fraction = round((card_memory_mib - 1536 - 128 * gpus) / card_memory_mib, 3)
        return fraction - (8192 / card_memory_mib if vision_factor != 1.0 else 0.0)
    reserved_mib = 512 + 1.5 * max(activation_tokens, 2048) + 128 * gpus + 2 * max_batch + 8 * prefill_graphs
    if card_memory_mib > LARGE_CARD_MIB:
        reserved_mib = max(reserved_mib, _LARGE_CARD_RESERVE_MIB)
    return round((card_memory_mib - reserved_mib) / card_memory_mib, 3) * vision_factor
