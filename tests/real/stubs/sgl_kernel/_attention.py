"""Attention over a paged cache, registered under the names of SGLang's CPU kernels."""
# ruff: noqa: PLR0917  # their arguments are SGLang's

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _operation(schema: str):
    _library.define(schema)

    def register(function):
        _library.impl(schema.partition("(")[0], function, "CPU")
        return function

    return register


@_operation(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor(b!) keys, Tensor(c!) values,"
    " float key_scale, float value_scale, Tensor table, Tensor requests, Tensor seq_lens, Tensor new_tokens,"
    " Tensor new_starts, int? most_new, float scale, float logit_cap, bool cross, int window,"
    " Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool causal) -> ()"
)
def extend_attention_cpu(
    q, _k, _v, out, keys, values, key_scale, value_scale, table, requests, seq_lens, new_tokens,
    new_starts, _most_new, scale, logit_cap, cross, window, _encoder_lens, sinks, tree_mask, causal,
):  # fmt: skip
    # The caller has put the new keys and values into the cache.
    _refuse(key_scale != 1, value_scale != 1, logit_cap, cross, window > 0, sinks is not None, not causal)
    rows = zip(requests.tolist(), seq_lens.tolist(), new_tokens.tolist(), new_starts.tolist(), strict=True)
    for number, (request, length, new, start) in enumerate(rows):
        slots = table[request, :length].long()
        if tree_mask is None:
            among_new = torch.ones(new, new, dtype=torch.bool).tril()
        else:
            among_new = tree_mask.view(-1, new, new)[number].bool()
        visible = torch.cat([torch.ones(new, length - new, dtype=torch.bool), among_new], dim=1)
        window_of_new = slice(start, start + new)
        out[window_of_new] = _attend(q[window_of_new], keys[slots], values[slots], visible, scale)


@_operation(
    "decode_attention_cpu(Tensor q, Tensor(a!) keys, Tensor(b!) values, float key_scale, float value_scale,"
    " Tensor(c!) out, Tensor? k, Tensor? v, Tensor slots, Tensor(d!) scratch, Tensor table, Tensor requests,"
    " Tensor seq_lens, float scale, float logit_cap, bool cross, int window, Tensor? encoder_lens,"
    " Tensor? sinks) -> ()"
)
def decode_attention_cpu(
    q, keys, values, key_scale, value_scale, out, k, v, slots, _scratch, table, requests,
    seq_lens, scale, logit_cap, cross, window, _encoder_lens, sinks,
):  # fmt: skip
    _refuse(key_scale != 1, value_scale != 1, logit_cap, cross, window > 0, sinks is not None)
    if k is not None and v is not None:
        keys[slots] = k.view(-1, *keys.shape[1:])
        values[slots] = v.view(-1, *values.shape[1:])
    for number, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        rows = table[request, :length].long()
        here = slice(number, number + 1)
        out[here] = _attend(q[here], keys[rows], values[rows], None, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention of tokens x heads x size; ``visible`` is tokens x keys."""
    by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, keys, values)]
    mixed = scaled_dot_product_attention(*by_head, attn_mask=visible, scale=scale, enable_gqa=True)
    return mixed.squeeze(0).transpose(0, 1)


def _refuse(*unsupported: object) -> None:
    if any(unsupported):
        raise NotImplementedError("the tiny model of the real lane uses plain causal attention only")
