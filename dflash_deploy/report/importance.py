"""Which parameters made the difference, as far as so few trials can tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.space import Dimension, space_of

FEWEST_TRIALS = 8
"""Below that, any parameter seems to explain much."""

_SHUFFLES = 2000
_MOST_GROUPS = 3


@dataclass(frozen=True)
class Weight:
    """What one parameter alone explains of the differences between trials.

    Attributes:
        together: others that changed in the very same trials, so that nobody can tell which of them it was.
        share: variance between its values over all variance (eta squared), 0 to 1.
        by_chance: the share that shuffled results reach in one case of twenty: below it, nothing is told.
    """

    flag: str
    share: float
    by_chance: float
    together: tuple[str, ...] = ()

    @property
    def told(self) -> bool:
        """More than chance."""
        return self.share > self.by_chance


@dataclass(frozen=True)
class Importance:
    """Weights, largest first; ``problem`` says why there are none."""

    trials: int
    weights: tuple[Weight, ...] = ()
    problem: str | None = None


def importance_of(profile: Profile, trials: Sequence[TrialRecord]) -> Importance:
    """Weigh the searched parameters by the objective's values, infeasible trials with a figure among them."""
    # A proof is the same configuration once more, which would count it twice.
    measured = [trial for trial in trials if trial.objective is not None and trial.proves is None]
    if len(measured) < FEWEST_TRIALS:
        few = f"{len(measured)} trials have a figure; fewer than {FEWEST_TRIALS} tell nothing of a parameter"
        return Importance(len(measured), problem=few)
    values = np.array([trial.objective for trial in measured], dtype=float)
    if np.ptp(values) == 0:
        return Importance(len(measured), problem="all trials have the same figure")
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (_SHUFFLES, 1)), axis=1)
    weights: dict[tuple[int, ...], Weight] = {}
    for dimension in space_of(profile).dimensions:
        groups = _groups(dimension, measured)
        if len(set(groups.tolist())) < 2:
            continue
        split = _split(groups)
        if split in weights:
            first = weights[split]
            weights[split] = replace(first, together=(*first.together, dimension.flag))
            continue
        chance = np.quantile(_explained(groups, shuffled), 0.95)
        share = float(_explained(groups, values[np.newaxis])[0])
        weights[split] = Weight(dimension.flag, share, float(chance))
    if not weights:
        return Importance(len(measured), problem="no parameter had more than one value")
    return Importance(len(measured), tuple(sorted(weights.values(), key=lambda one: -one.share)))


def _groups(dimension: Dimension, trials: Sequence[TrialRecord]) -> NDArray[np.int_]:
    """By trial, a number for its value: one each where they are few, else low, middle and high."""
    settings = [trial.flags.get(dimension.flag) for trial in trials]
    numbers = [value for value in settings if isinstance(value, int | float) and not isinstance(value, bool)]
    different = sorted(set(numbers))
    if len(numbers) < len(settings) or len(different) <= _MOST_GROUPS:
        labels = [json.dumps(value) for value in settings]
        return np.array([sorted(set(labels)).index(label) for label in labels])
    bounds = np.quantile(numbers, [1 / _MOST_GROUPS * step for step in range(1, _MOST_GROUPS)])
    return np.searchsorted(np.unique(bounds), np.array(numbers), side="left")


def _split(groups: NDArray[np.int_]) -> tuple[int, ...]:
    """The groups numbered by their first trial: the same for parameters that changed together."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(int(group), len(numbers)) for group in groups)


def _explained(groups: NDArray[np.int_], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Eta squared of each row of ``values``."""
    centred = values - values.mean(axis=1, keepdims=True)
    between = sum(
        (groups == group).sum() * centred[:, groups == group].mean(axis=1) ** 2 for group in np.unique(groups)
    )
    return np.asarray(between / (centred**2).sum(axis=1))
