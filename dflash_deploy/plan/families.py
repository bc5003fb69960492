"""What the engine does differently for a family of models, by the architecture that its config names.

Read from ``configs/model_config.py`` and ``arg_groups/`` of SGLang 0.5.16 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_REFERENCE_TOWER = 24 * 1024**2


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        tower_layers: layers of the vision tower as the engine counts them (24 where the config calls them
            otherwise than ``num_hidden_layers``), and ``tower_hidden`` its width; zero without a tower.
        tower_gib: memory of the tower, for serving without it.
        prefill_graphs_from: first release that captures prefill graphs while the tower is loaded; None: none.
        extra_buffers: the prefix cache of its recurrent state may use extra buffers.
    """

    tower_layers: int = 0
    tower_hidden: int = 0
    tower_gib: float = 0.0
    prefill_graphs_from: str | None = None
    extra_buffers: bool = False

    @property
    def vision_factor(self) -> float:
        """Share of the default memory fraction that is left while the tower is loaded."""
        if not self.tower_layers:
            return 1.0
        size = self.tower_layers * self.tower_hidden**2 / _REFERENCE_TOWER
        return 0.95 * min(max(1 - 0.1 * (size - 1), 0.8), 1.05)


_QWEN_HYBRID = Family(24, 1152, 0.86, "0.5.16", extra_buffers=True)
_DENSE = Family()

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3_5ForConditionalGeneration": _QWEN_HYBRID,
        "Qwen3_5MoeForConditionalGeneration": _QWEN_HYBRID,
        "Qwen3_5ForCausalLM": Family(extra_buffers=True),
        "Qwen3_5MoeForCausalLM": Family(extra_buffers=True),
        "Qwen3NextForCausalLM": Family(extra_buffers=True),
        "MuseGlimmerForConditionalGeneration": Family(50, 1536, 3.4, "0.5.18"),
        "MuseGlimmerForCausalLM": _DENSE,
        "Qwen2ForCausalLM": _DENSE,
        "Qwen3ForCausalLM": _DENSE,
        "Qwen3MoeForCausalLM": _DENSE,
        "LlamaForCausalLM": _DENSE,
        "MistralForCausalLM": _DENSE,
    }
)
"""Families that the plan has been checked for."""

UNKNOWN = Family(24, 1024, 0.0, None, extra_buffers=True)
"""What is taken of an architecture that nobody checked: the engine's own reference tower, no prefill graphs
beside it, and the state cache of the Qwen family."""


def family_of(architecture: str) -> Family | None:
    """The family of an architecture, None where it is not known."""
    return FAMILIES.get(architecture)
