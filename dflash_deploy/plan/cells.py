"""Bytes that one token takes in the KV pools, and one slot in the state cache, on one card.

Follows ``model_executor/pool_configurator.py``, ``configs/mamba_utils.py`` and
``mem_cache/memory_pool.py`` of SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from dflash_deploy.plan.flagvalues import wrong

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import LinearAttention, ModelCard
    from dflash_deploy.plan.settings import Settings


@dataclass(frozen=True, slots=True)
class Cells:
    """Sizes in bytes.

    Attributes:
        charged: what the engine divides the free memory by to get tokens; a fraction of a byte for a model
            with window layers.
        target: one token in the target's pool; ``draft`` in the draft's.
        window: one token in the pool of the window layers, 0 without such layers.
        conv: conv windows of one state slot; ``ssm`` is its recurrent state.
        conv_column: one column of a slot's conv windows.
        replay: rings that replace the verify states, of one request or slot, 0 without them.
    """

    charged: float
    capped: int
    target: int
    draft: int
    window: int = 0
    conv: int = 0
    ssm: int = 0
    conv_column: int = 0
    replay: int = 0

    @property
    def slot(self) -> int:
        """One state slot."""
        return self.conv + self.ssm


def cells_of(settings: Settings, target: ModelCard, draft: ModelCard | None) -> Cells:
    """Sizes of a token and of a state slot.

    Raises:
        DeployError: the model cannot be split over so many cards.
    """
    gpus = settings.gpus
    layers = target.full_attention_layers - target.sliding_layers
    layer_cell = _layer_cell(target, _target_bytes(settings, target), gpus)
    target_cell = int(layers * layer_cell)
    window_cell = int(target.sliding_layers * layer_cell)
    if settings.target_kv_bytes < 1 and target_cell and not window_cell:
        # One layer at a time is unpacked to eight bits, into a buffer as long as the pool.
        target_cell += 2 * _heads(target, gpus) * target.head_dim
    draft_cell = 0
    if draft is not None and target.full_attention_layers:
        if settings.method == "target-shaped":
            of_layers = layers or target.sliding_layers
            draft_cell = int((target_cell or window_cell) * draft.layers / of_layers)
        elif settings.method == "own-shape":
            draft_cell = int(draft.full_attention_layers * _layer_cell(draft, settings.draft_kv_bytes, gpus))
    charged = _charged(settings, draft, layers, (target_cell, draft_cell, window_cell))
    if target.linear is None:
        return Cells(*charged, target_cell, draft_cell, window_cell)
    column, ssm, ring_token = _state_numbers(target.linear, target.linear_attention_layers, gpus)
    conv_column = int(column * settings.conv_bytes)
    heads = target.linear.value_heads // gpus * target.linear_attention_layers
    # Rings by request hold low halves beside them (where the type has two bytes) and one gate for each head;
    # those by slot held two numbers for each head.
    by_request = settings.version.replay_rings_by_request
    halves = 2 if by_request and settings.conv_bytes < 4 else 1
    gates = heads * (4 if by_request else 8)
    replay = settings.replay_tokens * int(ring_token * settings.conv_bytes * halves + gates)
    return Cells(
        *charged,
        target_cell,
        draft_cell,
        window_cell,
        conv=conv_column * (target.linear.conv_kernel - 1),
        ssm=int(ssm * settings.state_bytes),
        conv_column=conv_column,
        replay=replay,
    )


def _charged(
    settings: Settings, draft: ModelCard | None, layers: int, cells: tuple[int, int, int]
) -> tuple[float, int]:
    """What a token is charged, and what it is where the window pool has a size of its own."""
    target, own, window = cells
    counted = own
    if settings.method == "own-shape" and draft is not None and own:
        if window:
            counted = own if settings.version.window_models_count_draft else 0
        elif not settings.version.exact_draft_cell and layers:
            counted = ceil(target * (layers + draft.layers) / layers) - target
    elif draft is not None and own and target and not window and not settings.version.adds_draft_share:
        # As the engine multiplies it, a byte less than the sum where the factor is no round number.
        counted = int(target * (1 + draft.layers / layers)) - target
    capped = target + counted
    if settings.method == "own-shape" and not settings.version.capped_window_counts_draft:
        capped = target
    return target + counted + window * (settings.sliding_ratio if target else 1), capped


def projection_bytes(draft: ModelCard, gpus: int) -> int:
    """The key and value projections of all draft layers, which a DFlash worker stacks into one of its own."""
    heads = _heads(draft, gpus)
    return draft.layers * 2 * heads * draft.head_dim * draft.hidden_size * 2


def _target_bytes(settings: Settings, target: ModelCard) -> float:
    # With window layers a number of four bits is taken for a whole byte.
    return max(settings.target_kv_bytes, 1.0) if target.sliding_layers else settings.target_kv_bytes


def _layer_cell(model: ModelCard, number_bytes: float, gpus: int) -> float:
    return _heads(model, gpus) * 2 * model.head_dim * number_bytes


def _heads(model: ModelCard, gpus: int) -> int:
    # Where there are more cards than heads, each keeps one.
    return max(1, model.kv_heads // gpus)


def _state_numbers(linear: LinearAttention, layers: int, gpus: int) -> tuple[int, int, int]:
    """Numbers, in all layers: of a conv column, of the recurrent state, of one token in the rings."""
    if linear.value_heads % gpus:
        raise wrong(f"{linear.value_heads} linear-attention heads cannot be split over {gpus} cards")
    key_heads = (
        linear.key_heads if linear.key_heads % gpus == 0 else linear.key_heads + gpus - linear.key_heads
    )
    column = linear.value_heads * linear.value_dim + 2 * key_heads * linear.key_dim
    state = linear.value_heads // gpus * linear.value_dim * linear.key_dim
    ring = linear.value_heads // gpus * linear.value_dim + -(-linear.key_heads // gpus) * linear.key_dim
    return column // gpus * layers, state * layers, ring * layers
