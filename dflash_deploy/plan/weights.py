"""What one card holds of a model's weights, and back from that to the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_deploy.plan.families import UNKNOWN, family_of

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.plan.settings import Settings

_REPLICATED_MIB = 512.0
"""Of a target on several cards: 28.49 GiB became 14.49 on each of two."""
_REPLICATED_DRAFT = 0.21
"""Share of a draft that each card holds whole: 3.72 GiB became 2.25 on each of two."""


def target_share_mib(whole_mib: float, settings: Settings, target: ModelCard) -> float:
    """Of a target that takes ``whole_mib`` on one card, vision tower included."""
    if target.vision and not settings.vision:
        whole_mib = max(whole_mib - _tower_mib(target), 0.1 * whole_mib)
    shared = min(_REPLICATED_MIB, whole_mib / 2) if settings.gpus > 1 else 0.0
    return shared + (whole_mib - shared) / settings.gpus


def whole_target_mib(share_mib: float, settings: Settings, target: ModelCard) -> float:
    """The whole that gives this share, within what a log rounds."""
    whole_mib = share_mib
    if settings.gpus > 1:
        whole_mib = max(share_mib - _REPLICATED_MIB, 0.0) * settings.gpus + _REPLICATED_MIB
    if target.vision and not settings.vision:
        whole_mib += _tower_mib(target)
    return whole_mib


def draft_share_mib(whole_mib: float, gpus: int) -> float:
    """Of a draft that takes ``whole_mib`` on one card."""
    shared = _REPLICATED_DRAFT * whole_mib if gpus > 1 else 0.0
    return shared + (whole_mib - shared) / gpus


def whole_draft_mib(share_mib: float, gpus: int) -> float:
    """The whole draft that gives this share."""
    return share_mib / draft_share_mib(1.0, gpus)


def _tower_mib(target: ModelCard) -> float:
    return (family_of(target.architecture) or UNKNOWN).tower_gib * 1024
