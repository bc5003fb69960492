"""VRAM: what the plan said before the launch against what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.machine.cards import Card
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.records import StudyRecord, TrialRecord

_MIB_PER_GIB = 1024.0

PARTS = ("weights", "draft weights", "state cache", "KV cache", "CUDA graphs", "the rest")
"""What memory is shown as. The rest: driver context, workspaces, compiled kernels, activations."""

_PART_OF_POOL = {
    "weights": "weights",
    "draft weights": "draft weights",
    "draft projections": "draft weights",
    "state conv": "state cache",
    "state ssm": "state cache",
    "verify conv": "state cache",
    "verify ssm": "state cache",
    "target KV": "KV cache",
    "draft KV": "KV cache",
    "window KV": "KV cache",
}


@dataclass(frozen=True)
class Peak:
    """One launched trial: the peak that its plan predicted beside the one that was seen, None if unknown."""

    number: int
    predicted_mib: float | None
    observed_mib: int | None


@dataclass(frozen=True)
class Comparison:
    """Predicted against observed.

    Attributes:
        total_mib: the card's memory, None where nobody knows.
        peaks: of every launched trial with either figure.
        predicted: MiB of each of ``PARTS`` in the best trial by the plan, corrected by the ``lessons`` of
            this study's earlier logs; empty where nothing is planned, or where by the plan it would not
            serve: ``refusal`` says why.
        observed: the same by its server's log and the highest use seen; empty where one is missing.
    """

    total_mib: int | None
    peaks: tuple[Peak, ...]
    predicted: Mapping[str, float]
    observed: Mapping[str, float]
    lessons: int = 0
    refusal: str | None = None

    @property
    def error(self) -> float | None:
        """Median of how far a predicted peak lay from the observed one, as a share."""
        shares = sorted(
            abs(peak.predicted_mib / peak.observed_mib - 1)
            for peak in self.peaks
            if peak.predicted_mib is not None and peak.observed_mib
        )
        return shares[len(shares) // 2] if shares else None


def compare(
    study: StudyRecord, card: Card | None, trials: Sequence[TrialRecord], best: TrialRecord | None
) -> Comparison:
    """Hold the plan against what was seen."""
    peaks = tuple(peak for trial in trials if trial.launched for peak in (_peak(trial),) if peak is not None)
    seen = [trial.measured.vram_total_mib for trial in trials if trial.measured]
    total_mib = next((total for total in seen if total), card.memory_mib if card else None)
    if best is None:
        return Comparison(total_mib, peaks, {}, {})
    forecaster = Forecaster(study.profile, study.engine_version, total_mib)
    for trial in trials:
        forecaster = forecaster.after(trial) if trial.number < best.number else forecaster
    budget = forecaster.budget(best.flags)
    refusal = budget.failure if budget else None
    predicted = _gathered(budget.sizes) if budget and refusal is None else {}
    return Comparison(total_mib, peaks, predicted, _observed(best), forecaster.boots, refusal)


def _peak(trial: TrialRecord) -> Peak | None:
    predicted = trial.predicted.peak_mib if trial.predicted else None
    observed = trial.measured.vram_used_mib if trial.measured else None
    return None if predicted is None and observed is None else Peak(trial.number, predicted, observed)


def _gathered(sizes: Mapping[str, float]) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    for name, mib in sizes.items():
        part = "CUDA graphs" if name.endswith("graphs") else _PART_OF_POOL.get(name, "the rest")
        parts[part] += mib
    return parts


def _observed(best: TrialRecord) -> dict[str, float]:
    boot, used_mib = best.boot, best.measured.vram_used_mib if best.measured else None
    if boot is None or used_mib is None or not boot.weights:
        return {}
    parts = {name: gib * _MIB_PER_GIB for name, gib in _logged_gib(boot).items()}
    return {**parts, "the rest": max(0.0, used_mib - sum(parts.values()))}


def _logged_gib(boot: BootRecord) -> dict[str, float]:
    return {
        "weights": max(0.0, boot.weights[0].memory_gib),
        "draft weights": sum(max(0.0, weights.memory_gib) for weights in boot.weights[1:]),
        "state cache": boot.state_cache.total_gib if boot.state_cache else 0.0,
        "KV cache": sum(pool.memory_gib for pool in boot.kv_pools),
        "CUDA graphs": sum(max(0.0, graph.memory_gib) for graph in boot.graphs),
    }
