"""What was measured, carried over to configurations that were not: a Gaussian process beside a prior.

Values are logarithms of a figure over its prior: a level that all share, an effect of each flag by itself,
and a little for flags together. How large an effect may be is part of the prior; a handful of measurements
would never tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_deploy.tune.space import Dimension

Array = NDArray[np.float64]
Places = NDArray[np.int64]
"""A row for each configuration, a column for each flag: the place of its value, or ``NOWHERE``."""

NOWHERE = -1

_LEVEL = 0.4
_NEAR = 0.35
"""How far along a numeric flag's range (1) two values are still much alike."""
_TOGETHER = 0.005
_SCALES = (1.0, 2.0, 4.0)
"""Of all effects, where the prior is more wrong than was thought; few measurements do not show it less."""


@dataclass(frozen=True)
class Effect:
    """One flag's part: how far it may move the logarithm, beyond what the prior says of it."""

    dimension: Dimension
    size: float


class Surrogate:
    """Posterior of one figure's logarithm over its prior.

    How large the effects are is scaled to what explains the measurements best, so that a card on which the
    prior is wrong is searched as such.
    """

    def __init__(
        self, effects: Sequence[Effect], places: Places, logs: Sequence[float], noise: float
    ) -> None:
        """Condition on measurements.

        Args:
            effects: one for each column, the flags that may matter.
            places: of the measured configurations.
            logs: of their figures over the prior.
            noise: of one measurement, as a share.
        """
        self._numeric = np.asarray([effect.dimension.numeric for effect in effects], dtype=bool)
        lasts = [max(len(effect.dimension.values) - 1, 1) for effect in effects]
        self._steps = np.where(self._numeric, 1 / np.asarray(lasts, dtype=np.float64), 1.0)
        self._sizes = np.asarray([effect.size for effect in effects])
        self._seen = places
        self._mean = float(np.mean(logs)) if len(logs) else 0.0
        centred = np.asarray(logs, dtype=np.float64) - self._mean
        alike = self._alike(places, places)
        fits = [_Fit.of(alike, self._sizes * scale, centred, noise) for scale in _SCALES]
        self._fit = max(fits, key=lambda fit: fit.evidence)

    def predict(self, places: Places) -> tuple[Array, Array]:
        """Mean and standard deviation for each configuration."""
        across = _covariance(self._alike(places, self._seen), self._fit.sizes)
        spread = _LEVEL**2 + float(np.sum(self._fit.sizes**2)) + _TOGETHER**2
        mean = self._mean + across @ self._fit.weights
        explained = np.linalg.solve(self._fit.lower, across.T)
        return mean, np.sqrt(np.maximum(spread - np.sum(explained**2, axis=0), 1e-12))

    def _alike(self, left: Places, right: Places) -> Array:
        """How alike the values of each flag are, from 0 to 1: flags first, then ``left``, then ``right``."""
        apart = np.abs(left.T[:, :, None] - right.T[:, None, :]) * self._steps[:, None, None]
        near = np.exp(-0.5 * (apart / _NEAR) ** 2)
        return np.asarray(np.where(self._numeric[:, None, None], near, apart == 0), dtype=np.float64)


@dataclass(frozen=True)
class _Fit:
    sizes: Array
    lower: Array
    weights: Array
    evidence: float

    @classmethod
    def of(cls, alike: Array, sizes: Array, centred: Array, noise: float) -> _Fit:
        covariance = _covariance(alike, sizes) + noise**2 * np.eye(len(centred))
        lower = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        weights = np.linalg.solve(lower.T, np.linalg.solve(lower, centred))
        evidence = -0.5 * float(centred @ weights) - float(np.sum(np.log(np.diag(lower))))
        return cls(sizes, lower, weights, evidence)


def _covariance(alike: Array, sizes: Array) -> Array:
    return np.asarray(
        _LEVEL**2 + np.tensordot(sizes**2, alike, axes=1) + _TOGETHER**2 * np.prod(alike, axis=0)
    )
