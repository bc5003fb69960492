"""What a checkpoint's tensors are for, how they are stored, and which of them the engine loads.

What is loaded follows ``load_weights`` of SGLang 0.5.23's models: MTP tensors are left to the draft, a tied
output head is the embedding, a draft takes embedding and head of its target.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dflash_deploy.checkpoint.draft import Draft
from dflash_deploy.checkpoint.quantization import Quantization
from dflash_deploy.checkpoint.safetensors import DTYPE_BITS, Tensor
from dflash_deploy.checkpoint.shape import Shape


class Group(StrEnum):
    """What a tensor is for."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear attention"
    MLP = "MLP"
    EXPERTS = "experts"
    LM_HEAD = "output head"
    NORMS = "norms"
    VISION = "vision"
    MTP = "MTP head"
    DRAFT = "draft parts"
    OTHER = "other"


class Load(StrEnum):
    """When a tensor takes memory on the card."""

    ALWAYS = "always"
    WITH_VISION = "unless text-only"
    AS_DRAFT = "with MTP speculation"
    NEVER = "never"


@dataclass(frozen=True)
class Weights:
    """Tensors of one purpose, stored and loaded alike.

    Attributes:
        dtype: as the header has it; ``number_format`` is what the numbers are (``nvfp4`` in ``U8``).
        loaded_dtype: as on the card.
        loaded_bytes: on the card once loaded, zero for tensors that never are.
        read_bytes: of these, read in one forward pass for one token.
    """

    group: Group
    dtype: str
    number_format: str
    load: Load
    loaded_dtype: str
    tensors: int
    stored_bytes: int
    loaded_bytes: int
    read_bytes: int


_DENSE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NAMED = {value: key for key, value in _DENSE.items()}
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_VISION = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|embed_vision|multi_modal_projector|mm_projector|image_newline|audio\w*|embed_audio)\."
)
_MTP = re.compile(r"(?:^|\.)mtp\w*\.")
_HEAD = re.compile(r"(?:^|\.)lm_head\.|^output\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens\w*|wte|tok_embeddings|word_embeddings|embed_in)\.")
_LINEAR = re.compile(r"\.(?:linear_attn|mamba|mixer|gdn|kda|delta_net)\.")
_ATTENTION = re.compile(r"\.(?:self_attn|attn|attention|self_attention|cross_attn)\.")
_EXPERTS = re.compile(r"\.experts\.")
_MLP = re.compile(r"\.(?:mlp|feed_forward|ffn|block_sparse_moe|shared_experts?|moe)\.")
_NORM = re.compile(r"(?:^|[._])(?:\w*norm\w*|ln_\w+)\.(?:weight|bias)$")
_DRAFT = re.compile(
    r"^(?:model\.)?(?:fc|encoder|hidden_norm|candidate_selector|markov_head|confidence_head|prefix_gru|embed_proj"
    r"|lilicorr\w*|aux_hidden_norms|fc_norm|d2t|t2d)(?:\.|$)|\.(?:attention_conv|mlp_conv)\."
)
_TABLE = re.compile(r"(?:_codebook|markov_w1\.weight|d2t)$")
"""Looked up by row: a few of them are read at a time."""

_KEPT_FLOAT32 = re.compile(r"\.(?:A_log|e_score_correction_bias)$")
_NOT_LOADED = re.compile(r"rotary_emb\.inv_freq$|(?:^|\.)t2d$")


def group_of(name: str, *, layers: int, draft: bool = False) -> Group:
    """What a tensor is for, by its name.

    Args:
        name: as in the file.
        layers: of the model; what lies behind them is its MTP head.
        draft: the checkpoint is a draft.
    """
    if draft and _DRAFT.search(name):
        return Group.DRAFT
    layer = _LAYER.search(name)
    if _VISION.search(name):
        return Group.VISION
    if _MTP.search(name) or (layer is not None and not draft and int(layer[1]) >= layers):
        return Group.MTP
    if _HEAD.search(name):
        return Group.LM_HEAD
    if _EMBEDDING.search(name):
        return Group.EMBEDDING
    if _NORM.search(name):
        return Group.NORMS
    if _LINEAR.search(name):
        return Group.LINEAR_ATTENTION
    if _ATTENTION.search(name):
        return Group.ATTENTION
    if _EXPERTS.search(name):
        return Group.EXPERTS
    if _MLP.search(name):
        return Group.MLP
    return Group.OTHER


def sum_weights(
    tensors: Iterable[Tensor], shape: Shape, draft: Draft | None, quantization: Quantization | None
) -> tuple[Weights, ...]:
    """All tensors by purpose and kind, largest group first.

    Args:
        tensors: of all files, each name once.
        shape: of the model.
        draft: what kind of draft the checkpoint is, None for a target.
        quantization: as declared; gives the bits of packed integers, which no header tells.
    """
    tensors = tuple(tensors)
    formats = _module_formats(tensors, quantization)
    tied = shape.tied if shape.tied is not None else not any(_HEAD.search(tensor.name) for tensor in tensors)
    share = shape.experts.per_token / shape.experts.count if shape.experts else 1.0
    sums: dict[tuple[Group, str, str, Load, str], list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for tensor in tensors:
        group = group_of(tensor.name, layers=shape.layers, draft=draft is not None)
        number_format = formats.get(_module(tensor.name)) or _DENSE.get(tensor.dtype, tensor.dtype.lower())
        load = _when(tensor.name, group, draft, tied=tied, vision=shape.vision)
        loaded_dtype = _loaded_dtype(tensor, number_format, shape.compute_dtype)
        loaded = 0
        if load is not Load.NEVER:
            loaded = tensor.stored_bytes * DTYPE_BITS[loaded_dtype] // DTYPE_BITS[tensor.dtype]
        total = sums[group, tensor.dtype, number_format, load, loaded_dtype]
        total[0] += 1
        total[1] += tensor.stored_bytes
        total[2] += loaded
        total[3] += loaded * _read_share(tensor.name, group, share, tied=tied and draft is None)
    order = list(Group)
    return tuple(
        Weights(*key, int(count), int(stored), int(loaded), int(read))
        for key, (count, stored, loaded, read) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), -item[1][1], item[0])
        )
    )


def head_format(weights: Iterable[Weights]) -> str | None:
    """What the numbers of the output head are, None where the checkpoint holds no head of its own."""
    heads = [row for row in weights if row.group is Group.LM_HEAD and row.load is not Load.NEVER]
    return max(heads, key=lambda row: row.stored_bytes).number_format if heads else None


def is_packed(number_format: str) -> bool:
    """Whether numbers share bytes, so that they need a kernel of their own to be multiplied."""
    return number_format.startswith(("nvfp4", "mxfp4", "int"))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _module_formats(tensors: tuple[Tensor, ...], quantization: Quantization | None) -> dict[str, str]:
    """Number format of every module that has a quantised weight."""
    leaves: dict[str, dict[str, str]] = defaultdict(dict)
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        leaves[module][leaf] = tensor.dtype
    bits = quantization.bits if quantization and quantization.bits else 4
    formats = {}
    for module, dtypes in leaves.items():
        found = _quantised_format(dtypes, bits)
        if found is not None:
            formats[module] = found
    return formats


def _quantised_format(dtypes: Mapping[str, str], bits: int) -> str | None:
    if "qweight" in dtypes:
        return f"int{bits}"
    packed = dtypes.get("weight_packed")
    if packed == "I32":
        return f"int{bits}"
    weight = packed or dtypes.get("weight")
    scale = dtypes.get("weight_scale") or dtypes.get("weight_scale_inv")
    if weight in ("U8", "F4") and scale is not None:
        return "mxfp4" if scale in ("U8", "F8_E8M0") else "nvfp4"
    if weight in _EIGHT_BITS:
        return "fp8 in blocks" if "weight_scale_inv" in dtypes else "fp8"
    if weight == "I8":
        return "int8"
    return None


def _when(name: str, group: Group, draft: Draft | None, *, tied: bool, vision: bool) -> Load:
    if _NOT_LOADED.search(name):
        return Load.NEVER
    if draft is not None:
        return _when_of_draft(group, draft)
    if (group is Group.LM_HEAD and tied) or (group is Group.VISION and not vision):
        return Load.NEVER
    return {Group.VISION: Load.WITH_VISION, Group.MTP: Load.AS_DRAFT}.get(group, Load.ALWAYS)


def _when_of_draft(group: Group, draft: Draft) -> Load:
    """A draft uses its target's embedding and head, unless it was given its own."""
    if group is Group.EMBEDDING and not draft.own_embedding:
        return Load.NEVER
    # EAGLE-3 gives fewer tokens than its target knows, from a head of its own.
    if group is Group.LM_HEAD and draft.draft_vocab_size is None:
        return Load.NEVER
    return Load.ALWAYS


def _loaded_dtype(tensor: Tensor, number_format: str, compute_dtype: str) -> str:
    """Dense weights take the compute type; what is quantised, and its scales, stay as they are."""
    dense = _DENSE.get(tensor.dtype) == number_format
    if not dense or _KEPT_FLOAT32.search(tensor.name):
        return tensor.dtype
    return _NAMED.get(compute_dtype, "BF16")


def _read_share(name: str, group: Group, experts_share: float, *, tied: bool) -> float:
    if group is Group.EMBEDDING:
        return 1.0 if tied else 0.0
    if group is Group.VISION or _TABLE.search(name):
        return 0.0
    if _EXPERTS.search(name):
        return experts_share
    return 1.0
