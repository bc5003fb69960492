"""What makes a checkpoint a draft, and of which kind.

Keys as the engine reads them: ``speculative/dflash_utils.py``, ``dspark_components/dspark_config.py`` and
``lilicorr_utils.py`` of SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_deploy.checkpoint.json_text import Fields

Method = Literal["dflash", "dspark", "eagle", "eagle3", "mtp"]

_DFLASH_BLOCK = 16
_DSPARK_BLOCK = 7
# An EAGLE or MTP draft is trained for single steps; this is the engine's usual chain of three and one.
_CHAIN = 4


@dataclass(frozen=True)
class Draft:
    """A draft model, or a head inside its target.

    Attributes:
        method: what the engine is asked for.
        variant: the kind in full, such as ``DFlash2``.
        block_size: tokens that it was trained to give at once.
        block_stated: whether the file tells so, or it is the engine's default.
        target_layer_ids: layers of the target whose output it reads; empty where the engine chooses them.
        target_layers: layers that it takes its target to have, None where not told.
        mask_token_id: None where the engine looks the token up.
        selector_rank: of DFlash2's candidate selector, with ``selector_top_k`` candidates; 0 without one.
        conv_kernel_size: of DFlash2's convolutions over groups of ``conv_group_size``; 0 without them.
        markov_rank: of DSpark's head; 0 without one.
        draft_vocab_size: tokens that it can give where fewer than its target's.
        own_embedding: it brings its own embedding instead of its target's.
    """

    method: Method
    variant: str
    block_size: int
    block_stated: bool = True
    target_layer_ids: tuple[int, ...] = ()
    target_layers: int | None = None
    mask_token_id: int | None = None
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    markov_rank: int = 0
    draft_vocab_size: int | None = None
    own_embedding: bool = False


def read_draft(config: Fields) -> Draft | None:
    """The draft that a ``config.json`` describes, None for a model of its own."""
    architecture = next(iter(config.texts("architectures") or ()), "").casefold()
    nested = config.inner("dflash_config")
    if "dspark" in architecture or config.inner("dspark_config") or config.whole("dspark_block_size"):
        return _dspark(config, nested)
    if nested is not None or "dflash" in architecture:
        return _dflash(config, nested or Fields({}, config.source), architecture)
    if architecture.endswith("mtp") or "nextn" in architecture:
        return Draft("mtp", "MTP", _CHAIN, block_stated=False)
    if "eagle" in architecture:
        third = "eagle3" in architecture or config.whole("draft_vocab_size") is not None
        eagle = config.inner("eagle_config")
        layers = eagle.wholes("eagle_aux_hidden_state_layer_ids") if eagle else None
        return Draft(
            "eagle3" if third else "eagle",
            "EAGLE-3" if third else "EAGLE",
            _CHAIN,
            block_stated=False,
            target_layer_ids=layers or (),
            draft_vocab_size=config.whole("draft_vocab_size"),
        )
    return None


def mtp_head() -> Draft:
    """The head for multi-token prediction inside a target."""
    return Draft("mtp", "MTP", _CHAIN, block_stated=False)


def _dflash(config: Fields, nested: Fields, architecture: str) -> Draft:
    selector = nested.whole("selector_rank", least=0) or 0
    if "dflash2" in architecture or selector:
        variant = "DFlash2"
    elif nested.text("projector_type") == "domino" or config.text("projector_type") == "domino":
        variant = "DFlash (Domino)"
    elif "lilicorr" in architecture or any(key.startswith("lilicorr_") for key in nested.values):
        variant = "DFlash (LiLiCorr)"
    else:
        variant = "DFlash"
    block = nested.whole("block_size") or config.whole("block_size")
    return Draft(
        "dflash",
        variant,
        block or _DFLASH_BLOCK,
        block_stated=block is not None,
        target_layer_ids=_target_layer_ids(config, nested),
        target_layers=nested.whole("num_target_layers") or config.whole("num_target_layers"),
        mask_token_id=_first(nested, config, "mask_token_id"),
        selector_rank=selector,
        selector_top_k=nested.whole("selector_top_k", least=0) or 0,
        conv_kernel_size=nested.whole("conv_kernel_size", least=0) or 0,
        conv_group_size=nested.whole("conv_group_size", least=0) or 0,
        own_embedding=config.flag("has_embed_tokens"),
    )


def _dspark(config: Fields, nested: Fields | None) -> Draft:
    own = config.inner("dspark_config") or Fields({}, config.source)
    nested = nested or own
    block = config.whole("dspark_block_size") or _first(own, nested, "block_size", least=1)
    block = block or config.whole("block_size")
    rank = config.whole("dspark_markov_rank", least=0)
    rank = _first(own, config, "markov_rank") if rank is None else rank
    layers = config.wholes("dspark_target_layer_ids") or own.wholes("target_layer_ids")
    mask = config.whole("dspark_noise_token_id", least=0)
    return Draft(
        "dspark",
        "DSpark",
        block or _DSPARK_BLOCK,
        block_stated=block is not None,
        target_layer_ids=layers or _target_layer_ids(config, nested),
        target_layers=_first(nested, config, "num_target_layers", least=1),
        mask_token_id=_first(own, config, "mask_token_id") if mask is None else mask,
        markov_rank=rank or 0,
        own_embedding=config.flag("has_embed_tokens"),
    )


def _target_layer_ids(config: Fields, nested: Fields) -> tuple[int, ...]:
    found = nested.wholes("target_layer_ids")
    return (config.wholes("target_layer_ids") if found is None else found) or ()


def _first(first: Fields, second: Fields, key: str, *, least: int = 0) -> int | None:
    found = first.whole(key, least=least)
    return second.whole(key, least=least) if found is None else found
