"""What was measured, carried over to configurations that were not: a Gaussian process on what a prior leaves.

Values are logarithms of a figure over its prior: a level that all share, an effect of each flag by itself, and
a little for flags together. How large an effect may be is part of the prior; a handful of measurements would
never tell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_deploy.tune.space import Dimension

Array = NDArray[np.float64]

_LEVEL = 0.4
_NEAR = 0.35
"""How far along a numeric flag's range (1) two values are still much alike."""
_TOGETHER = 0.01
_ELSEWHERE = -1.0
"""Place of a value that is none of the dimension's: like nothing but itself."""


@dataclass(frozen=True)
class Effect:
    """One flag's part: how far it may move the logarithm, beyond what the prior says of it."""

    dimension: Dimension
    size: float


class Surrogate:
    """Posterior of one figure's logarithm over its prior."""

    def __init__(
        self, effects: Sequence[Effect], places: Sequence[Mapping[str, int]], logs: Sequence[float], noise: float
    ) -> None:
        """Condition on measurements.

        Args:
            effects: one for each flag that may matter.
            places: of the measured configurations, by flag (``Space.places``).
            logs: of their figures over the prior.
            noise: of one measurement, as a share.
        """
        self._effects = effects
        self._seen = self._features(places)
        self._mean = float(np.mean(logs)) if len(logs) else 0.0
        centred = np.asarray(logs, dtype=np.float64) - self._mean
        if not len(logs):
            self._lower, self._weights = np.zeros((0, 0)), centred
            return
        covariance = self._kernel(self._seen, self._seen) + noise**2 * np.eye(len(logs))
        self._lower = np.linalg.cholesky(covariance)
        self._weights = np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, centred))

    def predict(self, places: Sequence[Mapping[str, int]]) -> tuple[Array, Array]:
        """Mean and standard deviation for each configuration."""
        wanted = self._features(places)
        spread = _LEVEL**2 + sum(effect.size**2 for effect in self._effects) + _TOGETHER**2
        if not len(self._weights):
            return np.zeros(len(wanted)), np.full(len(wanted), spread**0.5)
        across = self._kernel(wanted, self._seen)
        mean = self._mean + across @ self._weights
        explained = np.linalg.solve(self._lower, across.T)
        variance = spread - np.sum(explained**2, axis=0)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def _features(self, places: Sequence[Mapping[str, int]]) -> Array:
        rows = [
            [_feature(effect.dimension, place.get(effect.dimension.flag)) for effect in self._effects]
            for place in places
        ]
        return np.asarray(rows, dtype=np.float64).reshape(len(places), len(self._effects))

    def _kernel(self, left: Array, right: Array) -> Array:
        total = np.full((len(left), len(right)), _LEVEL**2)
        product = np.ones_like(total)
        for column, effect in enumerate(self._effects):
            apart = left[:, column, None] - right[None, :, column]
            alike = np.exp(-0.5 * (apart / _NEAR) ** 2) if effect.dimension.numeric else (apart == 0) * 1.0
            total += effect.size**2 * alike
            product *= alike
        return np.asarray(total + _TOGETHER**2 * product)


def _feature(dimension: Dimension, place: int | None) -> float:
    if place is None:
        return _ELSEWHERE
    return place / max(len(dimension.values) - 1, 1) if dimension.numeric else float(place)
