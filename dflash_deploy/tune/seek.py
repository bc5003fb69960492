"""What to try next: ask and tell, whether a server or a virtual clock answers.

A proposal follows from the profile, the seed and the records alone, so that a study that was killed goes on
as if nothing had been.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from dflash_deploy.profile.schema import FlagSetting, Goal, Limit, Limited
from dflash_deploy.tune.arrange import Arranged, arrangements, memory_dimensions
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.learned import Experience
from dflash_deploy.tune.limits import LESS_IS_BETTER, figures, limits_of
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.space import Dimension, Settings, Space, key_of
from dflash_deploy.tune.surrogate import Array, Effect, Surrogate

Rate = Callable[[Settings], float | None]
"""Expected tokens/s of one user with these flags, or None where nothing is known; only ratios count."""

Places = Mapping[str, int]

_WORTH = 0.004
"""A gain below this share is lost in what differs between two launches of the very same configuration."""
_NOISE = 0.004
_LEAST_CHANCE = 0.35
_DARING = 0.05
"""The chance that is taken while nothing has served yet."""
_MOST_COMBINATIONS = 1500
_MOST_LOOKS = 24
"""Combinations whose memory is worked out for one proposal."""
_NEARLY = 0.9
"""Of the most that a combination could be worth: good enough not to look at the next one."""

_EFFECTS: Mapping[str, float] = {
    "speculative-num-draft-tokens": 0.08,
    "speculative-dflash-block-size": 0.08,
    "speculative-num-steps": 0.08,
    "speculative-draft-window-size": 0.02,
    "attention-backend": 0.05,
    "cuda-graph-bs-decode": 0.015,
    "kv-cache-dtype": 0.015,
    "mamba-ssm-dtype": 0.03,
    "disable-prefill-cuda-graph": 0.02,
    "chunked-prefill-size": 0.006,
    "disable-radix-cache": 0.004,
    "mamba-radix-cache-strategy": 0.004,
    "max-running-requests": 0.006,
}
"""By how much the prior may be wrong about what a flag does to the speed (standard deviation of the
logarithm)."""
_ANY_EFFECT = 0.03
_UNKNOWN_EFFECT = 0.15
"""The same where there is no prior."""
_FIRST_TOKEN_EFFECTS: Mapping[str, float] = {"disable-prefill-cuda-graph": 0.6, "chunked-prefill-size": 0.3}
_CONTEXT_DOUBT = 0.004

_RATES: Mapping[Goal | Limited, float] = {
    "total_tokens_per_s": 1.0,
    "user_tokens_per_s": 1.0,
    "latency_s": -1.0,
}
"""Figures that follow the rate, and its power."""


@dataclass(frozen=True)
class Proposal:
    """What to launch next, and why."""

    settings: dict[str, FlagSetting]
    source: str
    why: str


@dataclass(frozen=True)
class Stop:
    """Nothing more is worth a launch: the gain is less than the noise, or all has been tried."""

    reason: Literal["gain", "exhausted"]
    why: str


class Search:
    """One study's search."""

    def __init__(
        self,
        space: Space,
        forecaster: Forecaster,
        *,
        goal: Goal,
        rate: Rate,
        shared: Settings,
        seed: int,
        known: Sequence[Proposal] = (),
    ) -> None:
        """Begin with nothing tried.

        Args:
            space: what may be varied.
            forecaster: for the plan; whoever tells results may put a corrected one in its place.
            goal: what is to be best.
            rate: the plan's idea of speed.
            shared: flags of the model, which are in records and not in proposals.
            seed: chooses the combinations that are looked at where there are too many.
            known: settings to try first.
        """
        self.forecaster = forecaster
        self.records: list[TrialRecord] = []
        self._space = space
        self._goal: Goal = goal
        self._rate = rate
        self._shared = dict(shared)
        self._known = list(known)
        self._limits = limits_of(forecaster.profile)
        settings = space.settings({dimension.flag: 0 for dimension in space.dimensions})
        self._planned = forecaster.prospect({**shared, **settings}) is not None
        memory = memory_dimensions(space) if self._planned else ()
        self._quick = tuple(one for one in space.dimensions if one not in memory)
        self._priors: dict[str, float | None] = {}
        self._sample = _combinations(self._quick, random.Random(seed))  # noqa: S311  (not for secrets)

    def tell(self, record: TrialRecord) -> None:
        """A trial has ended; one that was interrupted says nothing."""
        if record.outcome != "interrupted":
            self.records.append(record)

    def ask(self, pending: Sequence[Settings] = ()) -> Proposal | Stop:
        """What to launch next.

        Args:
            pending: configurations that others are trying at this moment.
        """
        tried = {self._key(record.flags) for record in self.records} | {self._key(one) for one in pending}
        for known in self._known:
            if self._key(known.settings) not in tried:
                return known
        return self._explore(tried)

    def _explore(self, tried: set[str]) -> Proposal | Stop:
        scores = [self._score(record) for record in self.records if record.feasible]
        best = max((score for score in scores if score is not None), default=None)
        combinations = self._all_combinations()
        means, spreads = self._expected(self._goal, combinations)
        kept = self._kept(combinations)
        hopes = _gains(means, spreads, best) * kept
        experience = self._experience()
        chosen: Arranged | None = None
        most, looked = 0.0, 0
        for index in np.argsort(-hopes):
            if looked >= _MOST_LOOKS or (chosen is not None and hopes[index] * _NEARLY <= most):
                break
            looked += 1
            for arranged in self._ways(combinations[index], _DARING if best is None else _LEAST_CHANCE):
                if self._key(arranged.settings) in tried:
                    continue
                worth = self._hope(arranged, hopes[index], kept[index], best)
                worth *= experience.chance(arranged.settings, arranged.prospect)
                worth *= arranged.prospect.chance if arranged.prospect else 1.0
                if worth > most:
                    chosen, most = arranged, worth
        if chosen is None:
            return Stop("exhausted", "every configuration that could serve has been tried")
        if best is not None and most < _WORTH:
            return Stop("gain", f"what is left would gain {most:.2%} at best, which is less than the noise")
        why = "the plan's favourite" if best is None else f"may gain {most:.1%} over the best so far"
        return Proposal(chosen.settings, "search", why)

    def _experience(self) -> Experience:
        return Experience.of(self.records, self.forecaster, self._space)

    def _all_combinations(self) -> list[Places]:
        """The sample, and the neighbours of what was measured: the best ones and their surroundings."""
        found: dict[tuple[int, ...], Places] = {}
        flags = [dimension.flag for dimension in self._quick]
        for record in self.records:
            known = self._space.places(record.flags)
            centre = {flag: known.get(flag, 0) for flag in flags}
            for dimension in self._quick:
                for place in range(len(dimension.values)):
                    near = {**centre, dimension.flag: place}
                    found[tuple(near[flag] for flag in flags)] = near
        for places in self._sample:
            found.setdefault(tuple(places[flag] for flag in flags), places)
        return list(found.values())

    def _ways(self, places: Places, least_chance: float) -> Iterator[Arranged]:
        if not self._planned:
            yield Arranged(self._space.settings(places), None)
            return
        ways = list(
            arrangements(self._space, self.forecaster, self._shared, places, least_chance=least_chance)
        )
        if self._goal == "context_tokens":
            yield from ways
        elif ways:
            # Speed is the same in all of them: the surest one, and of those the one that leaves most.
            yield max(ways, key=_roominess)

    def _hope(self, arranged: Arranged, hope: float, kept: float, best: float | None) -> float:
        if self._goal != "context_tokens" or arranged.prospect is None:
            return hope
        expected = np.asarray([math.log(max(arranged.prospect.context, 1))])
        return float(_gains(expected, np.asarray([_CONTEXT_DOUBT]), best)[0]) * kept

    def _expected(self, figure: Goal | Limited, combinations: Sequence[Places]) -> tuple[Array, Array]:
        """Logarithm of a figure for each combination, with its standard deviation, as far as is known.

        Of latency the negative, so that more is always better.
        """
        priors = self._prior_of(figure, combinations)
        observed = [
            (self._space.places(record.flags), value)
            for record in self.records
            if (value := self._value(record, figure)) is not None
        ]
        seen = self._prior_of(figure, [places for places, _ in observed])
        logs = [value - prior for (_, value), prior in zip(observed, seen, strict=True)]
        surrogate = Surrogate(self._effects(figure), [places for places, _ in observed], logs, _NOISE)
        means, spreads = surrogate.predict(combinations)
        return means + priors, spreads

    def _prior_of(self, figure: Goal | Limited, combinations: Sequence[Places]) -> Array:
        power = _RATES.get(figure)
        if power is None:
            return np.zeros(len(combinations))
        return np.asarray([self._log_rate(places) for places in combinations])

    def _log_rate(self, places: Places) -> float:
        first = {dimension.flag: 0 for dimension in self._space.dimensions}
        settings = self._space.settings({**first, **places})
        key = key_of({flag: value for flag, value in settings.items() if flag not in self._space_memory()})
        if key not in self._priors:
            self._priors[key] = self._rate({**self._shared, **settings})
        return math.log(self._priors[key] or 1.0)

    def _kept(self, combinations: Sequence[Places]) -> Array:
        """Chance that the limits on figures that were measured are kept."""
        chances = np.ones(len(combinations))
        for name, limit in self._limits.items():
            if self._planned and name in ("context_tokens", "free_vram_mib"):
                continue
            if not any(self._value(record, name) is not None for record in self.records):
                continue
            means, spreads = self._expected(name, combinations)
            chances *= _within(means, np.hypot(spreads, _NOISE), limit, less=name in LESS_IS_BETTER)
        return chances

    def _effects(self, figure: Goal | Limited) -> list[Effect]:
        sizes: list[Effect] = []
        for dimension in self._quick:
            if figure == "ttft_p95_s":
                size = _FIRST_TOKEN_EFFECTS.get(dimension.flag, 0.1)
            elif self._planned and figure in _RATES:
                size = _EFFECTS.get(dimension.flag, _ANY_EFFECT)
            else:
                size = _UNKNOWN_EFFECT
            sizes.append(Effect(dimension, size))
        return sizes

    def _score(self, record: TrialRecord) -> float | None:
        return self._value(record, self._goal, objective=True)

    def _value(self, record: TrialRecord, figure: Goal | Limited, *, objective: bool = False) -> float | None:
        """Logarithm of a measured figure, more being better; None where there is none."""
        value: float | None
        if figure == self._goal:
            value = record.objective
        elif record.measured is None or record.boot is None or record.measured.faults:
            value = None
        else:
            users = self.forecaster.profile.workload.users
            value = figures(record.measured, record.boot, users).get(figure)  # type: ignore[call-overload]
        if value is None or value <= 0:
            return None
        return -math.log(value) if figure in LESS_IS_BETTER else math.log(value)

    def _space_memory(self) -> frozenset[str]:
        return frozenset(one.flag for one in self._space.dimensions if one not in self._quick)

    def _key(self, flags: Settings) -> str:
        return key_of({name: value for name, value in flags.items() if name not in self._shared})


def _combinations(dimensions: Sequence[Dimension], rng: random.Random) -> list[Places]:
    """All, or an even sample where there are very many."""
    flags = [dimension.flag for dimension in dimensions]
    sizes = [len(dimension.values) for dimension in dimensions]
    if math.prod(sizes) <= _MOST_COMBINATIONS:
        return [dict(zip(flags, places, strict=True)) for places in product(*map(range, sizes))]
    return [
        {flag: rng.randrange(size) for flag, size in zip(flags, sizes, strict=True)}
        for _ in range(_MOST_COMBINATIONS)
    ]


def _roominess(arranged: Arranged) -> tuple[float, float]:
    assert arranged.prospect is not None  # noqa: S101  (only planned ones are arranged)
    return min(round(arranged.prospect.chance, 2), 0.97), arranged.prospect.headroom_mib


def _gains(means: Array, spreads: Array, best: float | None) -> Array:
    """Expected gain over the best so far, as a share; before there is one, how good it will be among all."""
    if best is None:
        return np.asarray(np.exp(means - means.max()))
    apart = (means - best) / spreads
    density = np.exp(-0.5 * apart**2) / math.sqrt(2 * math.pi)
    return np.asarray(spreads * (apart * _normal(apart) + density))


def _within(means: Array, spreads: Array, limit: Limit, *, less: bool) -> Array:
    chances = np.ones(len(means))
    for bound, sign in ((limit.min, 1), (limit.max, -1)):
        if bound is not None and bound > 0:
            level = -math.log(bound) if less else math.log(bound)
            chances *= _normal((means - level) / spreads * (-sign if less else sign))
    return chances


def _normal(values: Array) -> Array:
    return np.asarray([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in values])
