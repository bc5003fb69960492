"""What makes one machine differ from another of the same kind, drawn from the seed and told to nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Residuals:
    """Factors on the physics (1 = the published machine) and extra memory in MiB."""

    bandwidth: float = 1.0
    graph_memory: float = 1.0
    workspace: float = 1.0
    context_mib: float = 0.0
    acceptance: float = 1.0
    verify: float = 1.0
    launch: float = 1.0
    prefill: float = 1.0


def draw_residuals(card_id: str, seed: int) -> Residuals:
    """The deviations of one machine; seed 0 has none."""
    if seed == 0:
        return Residuals()
    rng = random.Random(f"residuals/{card_id}/{seed}")  # noqa: S311 - not for secrets

    def about(spread: float) -> float:
        return 1.0 + rng.uniform(-spread, spread)

    return Residuals(
        bandwidth=about(0.03),
        graph_memory=about(0.15),
        workspace=about(0.15),
        context_mib=rng.uniform(-120, 260),
        acceptance=about(0.05),
        verify=about(0.05),
        launch=about(0.05),
        prefill=about(0.05),
    )
