"""Which cache slots the tokens of a request have.

``table[request]`` lists the slot of every token position; a window of a request is ``start`` up to ``end``.
"""

from __future__ import annotations

import ctypes

from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _width: int
) -> None:
    """Write ``slots``, request after request, into the windows of ``table``."""
    taken = 0
    for request, first, last in _windows(requests, start, end):
        table[request, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _width: int
) -> None:
    """Read the windows of ``table`` into ``slots``, request after request."""
    filled = 0
    for request, first, last in _windows(requests, start, end):
        slots[filled : filled + last - first] = table[request, first:last].to(slots.dtype)
        filled += last - first


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, accepted_slots: Tensor) -> None:
    """Put the slots of the accepted nodes first in ``accepted_slots``; a node of -1 stands for none."""
    kept = slots[accepted[accepted >= 0].long()]
    accepted_slots[: kept.numel()] = kept.to(accepted_slots.dtype)


def copy_all_layer_kv_cache_cpu(
    buffer_addresses: Tensor, row_bytes: Tensor, to_rows: Tensor, from_rows: Tensor
) -> None:
    """Move cache rows, in the buffers of all layers, given as memory addresses."""
    targets, sources = to_rows.tolist(), from_rows.tolist()
    for address, size in zip(buffer_addresses.tolist(), row_bytes.tolist(), strict=True):
        # A row may be the target of one move and the source of another: read all, then write.
        rows = [ctypes.string_at(address + source * size, size) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * size, row, size)


def _windows(requests: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(requests.tolist(), start.tolist(), end.tolist(), strict=True))
