"""What to try next: ask and tell, whether a server or a virtual clock answers.

A proposal follows from the profile, the seed and the records alone, so that a study that was killed goes on
as if nothing had been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Literal

import numpy as np

from dflash_deploy.profile.schema import METHOD, VARIABLE, FlagSetting, Goal, Limit, Limited
from dflash_deploy.tune.arrange import Arranged, arrangements, least_states, memory_dimensions
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.gain import NOISE
from dflash_deploy.tune.learned import Experience
from dflash_deploy.tune.limits import LESS_IS_BETTER, figures, limits_of
from dflash_deploy.tune.reasons import WITHOUT, Judge, left_out
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.select import best_of, doubtful, proof_of
from dflash_deploy.tune.space import Dimension, Settings, Space, key_of
from dflash_deploy.tune.surrogate import NOWHERE, Array, Effect, Places, Surrogate

Rate = Callable[[Settings], float | None]
"""Expected tokens/s of one user with these flags, or None where nothing is known; only ratios count."""

WORTH = NOISE
"""A gain below this share is lost in what differs between two launches of the very same configuration."""
PROOF = "proof"
"""Source of a trial that starts the best configuration again."""
_MOST_SIMPLER = 3
"""Launches to find out which flags are of no use."""
_LEAST_CHANCE = 0.35
_SURE = 0.9
"""A chance with which no other way to divide the memory is looked for."""
_DARING = 0.05
"""The chance that is taken while nothing has served yet."""
_MOST_COMBINATIONS = 1500
_MOST_LOOKS, _MOST_FITTING = 600, 60
"""Combinations whose memory is worked out for one proposal, and those of them that fit."""
_EVEN = 0.5
"""Of a chance: below it a limit is more likely broken than kept."""
_NEARLY = 0.9
"""Of the most that a combination could be worth: good enough not to look at the next one."""

_EFFECTS: Mapping[str, float] = {
    METHOD: 0.15,
    "speculative-num-draft-tokens": 0.08,
    "speculative-dflash-block-size": 0.08,
    "speculative-num-steps": 0.08,
    "speculative-draft-window-size": 0.01,
    "speculative-draft-kv-cache-dtype": 0.012,
    "speculative-draft-attention-backend": 0.02,
    "attention-backend": 0.02,
    "cuda-graph-bs-decode": 0.006,
    "kv-cache-dtype": 0.012,
    "mamba-ssm-dtype": 0.01,
    "chunked-prefill-size": 0.003,
    "disable-radix-cache": 0.002,
    "mamba-radix-cache-strategy": 0.002,
    "max-running-requests": 0.003,
    # Memory alone, which the plan knows of.
    f"{VARIABLE}PYTORCH_CUDA_ALLOC_CONF": 0.003,
}
"""By how much the prior may be wrong about what a flag does to the speed (standard deviation of the
logarithm)."""
_ANY_EFFECT = 0.03
_PREFILL_GRAPHS, _PREFILL_GRAPHS_TOKENS = "disable-prefill-cuda-graph", 30.0
"""A flag that changes the time to the first token alone, by about as many tokens' worth: much of a short
answer. The prior knows nothing of it."""
_LITTLE_EFFECT = 0.003
_UNKNOWN_EFFECT = 0.15
"""The same where there is no prior."""
_FIRST_TOKEN_EFFECTS: Mapping[str, float] = {"disable-prefill-cuda-graph": 0.6, "chunked-prefill-size": 0.3}
_CONTEXT_EFFECT = 0.002
_CONTEXT_EFFECTS: Mapping[str, float] = {"speculative-draft-window-size": 0.15, METHOD: 0.02}
"""The plan gives a draft's window no memory of its own; a public report of the longest context had one."""

_RATES: Mapping[Goal | Limited, float] = {
    "total_tokens_per_s": 1.0,
    "user_tokens_per_s": 1.0,
    "latency_s": -1.0,
}
"""Figures that follow the rate, and its power."""


@dataclass(frozen=True)
class Proposal:
    """What to launch next, and why; ``proves`` is the trial that it starts again, to see whether it holds."""

    settings: dict[str, FlagSetting]
    source: str
    why: str
    proves: int | None = None


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
        worth: float = WORTH,
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
            worth: gain, as a share, below which nothing more is launched.
        """
        self.forecaster = forecaster
        self.records: list[TrialRecord] = []
        self._space = space
        self._goal: Goal = goal
        self._also = [other for other in forecaster.profile.objective.also if other != goal]
        self._rate = rate
        self._shared = dict(shared)
        self._known = list(known)
        self._worth = worth
        self._limits = limits_of(forecaster.profile)
        first = {dimension.flag: 0 for dimension in space.dimensions}
        each = [{METHOD: place} for place, _ in enumerate(space.methods)] or [{}]
        self._planned = all(
            forecaster.prospect({**shared, **space.settings({**first, **method})}) is not None
            for method in each
        )
        memory = memory_dimensions(space) if self._planned else ()
        self._quick = tuple(one for one in space.dimensions if one not in memory)
        self._rates: dict[bytes, float] = {}
        self._states: dict[bytes, dict[str, int] | None] = {}
        self._contexts: dict[bytes, float] = {}
        self._contexts_by = forecaster
        self._sample = self._settled(self._sampled(seed))

    def tell(self, record: TrialRecord) -> None:
        """A trial has ended; one that was interrupted says nothing."""
        if record.outcome != "interrupted":
            self.records.append(record)
            self.forecaster = self.forecaster.grown(record)

    def ask(self, pending: Sequence[Settings] = ()) -> Proposal | Stop:
        """What to launch next.

        Args:
            pending: configurations that others are trying at this moment.
        """
        tried = {self._key(record.flags) for record in self.records} | {self._key(one) for one in pending}
        for known in self._known:
            if self._key(known.settings) not in tried:
                return known
        step = self._explore(tried, self._goal)
        for goal in self._also:
            if isinstance(step, Proposal):
                return step
            # The first objective is as good as it gets: what the others can still gain.
            step = self._explore(tried, goal)
        return step if isinstance(step, Proposal) else self.finish(tried) or step

    def finish(self, tried: Collection[str] = ()) -> Proposal | None:
        """What is still to be launched of the best configuration: simpler forms of it, then its proof."""
        best = best_of(self.forecaster.profile, self.records)
        if best is None:
            return None
        return self._simpler(best, tried) or self.proof(best)

    def proof(self, best: TrialRecord | None = None) -> Proposal | None:
        """The proof of the best configuration; None where it has one, or there is none.

        Where the machine was not the same all along, others that may be better are started again besides.
        """
        profile = self.forecaster.profile
        best = best or best_of(profile, self.records)
        if best is None:
            return None
        if proof_of(best, self.records) is not None:
            other = doubtful(profile, self.records)
            if other is None:
                return None
            why = (
                f"the machine has changed since trial {other.number} was measured: how does it compare with "
                f"trial {best.number} now?"
            )
            return Proposal(self._judge.own(other.flags), PROOF, why, proves=other.number)
        why = f"does trial {best.number}, the best, hold when it is started again and used for long?"
        return Proposal(self._judge.own(best.flags), PROOF, why, proves=best.number)

    @property
    def _judge(self) -> Judge:
        # Without a plan nobody knows what the engine's own choice would come to.
        searched = [dimension.flag for dimension in self._space.dimensions] if self._planned else []
        return Judge(self.forecaster, self._rate, self._goal, self._shared, searched)

    def _simpler(self, best: TrialRecord, tried: Collection[str]) -> Proposal | None:
        """The best without the flags that the plan sees no reason for: all of them, then one each."""
        without = [record for record in self.records if record.source.startswith(WITHOUT)]
        if len(without) >= _MOST_SIMPLER:
            return None
        settings = self._judge.own(best.flags)
        flags = self._judge.droppable(best)
        while flags and self._judge.needed(settings, left_out(settings, flags)) is not None:
            # Together they are too much, though none is alone.
            flags = flags[:-1]
        for some in (flags, *([flag] for flag in flags)):
            simpler = left_out(settings, some)
            if some and self._key(simpler) not in tried:
                why = f"trial {best.number} without what may be of no use: {', '.join(some)}"
                return Proposal(simpler, f"{WITHOUT}{','.join(some)}", why)
        return None

    def waiting(self, running: Settings) -> Proposal | None:
        """What is launched after a configuration whatever comes of it; None where that is still open."""
        tried = {self._key(record.flags) for record in self.records} | {self._key(running)}
        return next((one for one in self._known if self._key(one.settings) not in tried), None)

    def _explore(self, tried: set[str], goal: Goal) -> Proposal | Stop:
        by_context = self._planned and goal == "context_tokens"
        scores = [self._value(record, goal) for record in self.records if record.feasible]
        best = max((score for score in scores if score is not None), default=None)
        places = self._candidates()
        means, spreads = self._expected(goal, places)
        beyond = means - self._prior(goal, places)
        kept = self._kept(places)
        hopes = _gains(means, spreads, best) * kept
        experience = self._experience()
        chosen: Arranged | None = None
        most, left = 0.0, 0.0
        fitting = 0

        def worth_of(index: np.intp, settings: Settings, context: float) -> float:
            if not by_context:
                return float(hopes[index])
            # Only now is it known how much the memory holds.
            limit = math.log(self._most_context(settings))
            expected = min(beyond[index] + math.log(max(context, 1)), limit)
            gains = _gains(np.asarray([expected]), spreads[index : index + 1], best)
            return float(gains[0] * kept[index])

        def promising(index: np.intp, more_than: float, settings: Settings) -> bool:
            return worth_of(index, settings, math.inf) > more_than

        for looked, index in enumerate(np.argsort(-hopes)):
            left = float(hopes[index])
            settled = chosen is not None and left * _NEARLY <= most
            spent = fitting >= _MOST_FITTING or looked >= _MOST_LOOKS
            if settled or spent or (best is not None and left < self._worth):
                break
            left = 0.0
            least_chance = _DARING if best is None else _LEAST_CHANCE
            wanted = partial(promising, index, most) if by_context else None
            fits = False
            for way in self._ways(places[index], least_chance, wanted):
                fits = True
                worth = worth_of(index, way.settings, way.prospect.context if way.prospect else math.inf)
                worth *= way.prospect.chance if way.prospect else 1.0
                if worth > most and self._key(way.settings) not in tried:
                    worth *= experience.chance(way.settings, way.prospect)
                    if worth > most:
                        chosen, most = way, worth
            fitting += fits
        if chosen is None and not left:
            return Stop("exhausted", "every configuration that could serve has been tried")
        if chosen is None or (best is not None and most < self._worth):
            return Stop(
                "gain", f"what is left would gain {max(most, left):.2%} at best, which is less than the noise"
            )
        why = "the plan's favourite" if best is None else f"may gain {most:.1%} over the best so far"
        return Proposal(chosen.settings, "search", why)

    def _experience(self) -> Experience:
        return Experience.of(self.records, self.forecaster, self._space)

    def _candidates(self) -> Places:
        """The sample, and all that differs in one flag from what was measured."""
        near: list[Places] = []
        for row in self._rows([record.flags for record in self.records]):
            for centre in self._by_method(np.where(row == NOWHERE, 0, row)):
                for column, dimension in enumerate(self._quick):
                    block = np.repeat(centre[None, :], len(dimension.values), axis=0)
                    block[:, column] = np.arange(len(dimension.values))
                    near.append(block)
        return np.unique(np.concatenate([*map(self._settled, near), self._sample]), axis=0)

    def _sampled(self, seed: int) -> Places:
        """As many combinations with each method as there would be without any other."""
        column = self._method_column
        if column is None:
            return _combinations(self._quick, seed)
        rest = _combinations([*self._quick[:column], *self._quick[column + 1 :]], seed)
        places = range(len(self._quick[column].values))
        return np.concatenate([np.insert(rest, column, place, axis=1) for place in places])

    def _by_method(self, row: Places) -> Iterator[Places]:
        """The same with each method: what is best for one is no measure for another."""
        column = self._method_column
        if column is None:
            yield row
            return
        for place, _ in enumerate(self._quick[column].values):
            yield np.where(np.arange(len(row)) == column, place, row)

    def _settled(self, rows: Places) -> Places:
        """Combinations with no place for what their method does not read, so that equal ones are equal."""
        if self._method_column is None:
            return rows
        settled = rows.copy()
        for place, method in enumerate(self._quick[self._method_column].values):
            idle = self._space.idle(method)
            columns = [column for column, one in enumerate(self._quick) if one.flag in idle]
            settled[np.ix_(rows[:, self._method_column] == place, columns)] = NOWHERE
        return settled

    @property
    def _method_column(self) -> int | None:
        return next((column for column, one in enumerate(self._quick) if one.flag == METHOD), None)

    def _rows(self, flags: Sequence[Settings]) -> Places:
        rows = [
            [NOWHERE if (place := one.place_of(settings)) is None else place for one in self._quick]
            for settings in flags
        ]
        return self._settled(np.asarray(rows, dtype=np.int64).reshape(len(flags), len(self._quick)))

    def _ways(
        self, row: Places, least_chance: float, wanted: Callable[[Settings], bool] | None
    ) -> Iterator[Arranged]:
        """Ways to divide the memory; the surest alone where all are worth the same, and nothing is wanted."""
        places = self._named(row)
        if not self._planned:
            settings = self._space.settings(places)
            if self.forecaster.forecast({**self._shared, **settings}).refusal is None:
                yield Arranged(settings, None)
            return
        states = self._least_states(row)
        if states is None:
            return
        divide = partial(
            arrangements,
            self._space,
            self.forecaster,
            self._shared,
            {**places, **states},
            least_chance=least_chance,
        )
        if wanted is not None:
            yield from divide(wanted=wanted)
            return
        ways = divide()
        # Speed is the same in all of them: the surest one, and of those the one that leaves most.
        surest: Arranged | None = None
        for _, alike in groupby(ways, key=lambda way: way.settings.get("max-total-tokens")):
            surest = max(([surest] if surest else []) + list(alike), key=_roominess)
            if surest.prospect is not None and surest.prospect.chance > _SURE:
                break
        if surest is not None:
            yield surest

    def _expected(self, figure: Goal | Limited, places: Places) -> tuple[Array, Array]:
        """Logarithm of a figure for each combination, with its standard deviation, as far as is known.

        Of latency the negative, so that more is always better.
        """
        values = [(record, self._value(record, figure)) for record in self.records]
        observed = [(record, value) for record, value in values if value is not None]
        seen = self._rows([record.flags for record, _ in observed])
        prior = self._prior(figure, seen)
        if figure == "context_tokens" and self._planned:
            prior = np.asarray([self._planned_context(record.flags) for record, _ in observed])
        logs = np.asarray([value for _, value in observed]) - prior
        means, spreads = Surrogate(self._effects(figure), seen, list(logs), NOISE).predict(places)
        return means + self._prior(figure, places), spreads

    def _prior(self, figure: Goal | Limited, places: Places) -> Array:
        if figure in _RATES:
            return np.asarray([self._log_rate(row) for row in places])
        if figure == "context_tokens" and self._planned:
            return np.asarray([self._log_context(row) for row in places])
        return np.zeros(len(places))

    def _log_rate(self, row: Places) -> float:
        key = row.tobytes()
        if key not in self._rates:
            self._rates[key] = math.log(self._rate(self._reference(row)) or 1.0)
        return self._rates[key]

    def _log_context(self, row: Places) -> float:
        """By the plan as it is now, with all the memory there is: more than any division of it would give."""
        if self._contexts_by is not self.forecaster:
            self._contexts, self._contexts_by = {}, self.forecaster
        key = row.tobytes()
        if key not in self._contexts:
            self._contexts[key] = self._planned_context(self._reference(row, least=True))
        return self._contexts[key]

    def _most_context(self, settings: Settings) -> float:
        limit = settings.get("max-total-tokens")
        return limit / self.forecaster.profile.workload.users if isinstance(limit, int) else math.inf

    def _planned_context(self, flags: Settings) -> float:
        budget = self.forecaster.budget(flags)
        return math.log(max(budget.context_per_user if budget else 1, 1))

    def _reference(self, row: Places, *, least: bool = False) -> dict[str, FlagSetting]:
        """The combination with all the memory that the space allows: for what hangs on it alone."""
        places = {one.flag: _largest(one) for one in self._space.dimensions if one not in self._quick}
        places |= self._named(row)
        if least:
            places |= self._least_states(row) or {}
        return {**self._shared, **self._space.settings(places)}

    def _least_states(self, row: Places) -> dict[str, int] | None:
        """What the engine's arithmetic says of the flags alone, whatever logs have taught."""
        key = row.tobytes()
        if key not in self._states:
            named = self._named(row)
            self._states[key] = least_states(self._space, self.forecaster, self._shared, named)
        return self._states[key]

    def _named(self, row: Places) -> dict[str, int]:
        return {one.flag: max(int(place), 0) for one, place in zip(self._quick, row, strict=True)}

    def _kept(self, places: Places) -> Array:
        """Chance that the limits on figures that were measured are kept."""
        chances = np.ones(len(places))
        for name, limit in self._limits.items():
            if self._planned and name in ("context_tokens", "free_vram_mib"):
                continue
            if not any(self._value(record, name) is not None for record in self.records):
                continue
            means, spreads = self._expected(name, places)
            kept = _within(means, np.hypot(spreads, NOISE), limit, less=name in LESS_IS_BETTER)
            # What is expected to miss hopes for luck, and each that missed by a hair had no more of it.
            chances *= np.where(kept < _EVEN, kept * 0.5 ** self._missed(name), kept)
        return chances

    def _missed(self, name: Limited) -> int:
        """How many broke a limit by no more than launches differ."""
        return sum(0 < record.violations.get(name, 0.0) <= NOISE for record in self.records)

    def _effects(self, figure: Goal | Limited) -> list[Effect]:
        sizes: list[Effect] = []
        for dimension in self._quick:
            if figure == "ttft_p95_s":
                size = _FIRST_TOKEN_EFFECTS.get(dimension.flag, 0.1)
            elif self._planned and figure == "context_tokens":
                size = _CONTEXT_EFFECTS.get(dimension.flag, _CONTEXT_EFFECT)
            elif self._planned and figure in _RATES:
                size = self._speed_effect(dimension.flag, figure)
            else:
                size = _UNKNOWN_EFFECT
            sizes.append(Effect(dimension, size))
        return sizes

    def _speed_effect(self, flag: str, figure: Goal | Limited) -> float:
        if flag != _PREFILL_GRAPHS:
            return _EFFECTS.get(flag, _ANY_EFFECT)
        if figure == "user_tokens_per_s":  # from the first token on
            return _LITTLE_EFFECT
        return min(_PREFILL_GRAPHS_TOKENS / self.forecaster.profile.workload.output_tokens, _UNKNOWN_EFFECT)

    def _value(self, record: TrialRecord, figure: Goal | Limited) -> float | None:
        """Logarithm of a measured figure, more being better; None where there is none."""
        value: float | None
        if figure == self._goal:
            value = record.objective
        elif record.measured is None or record.boot is None or record.measured.faults:
            value = None
        else:
            users = self.forecaster.profile.workload.users
            value = figures(record.measured, record.boot, users).get(figure)
        if value is None or value <= 0:
            return None
        return -math.log(value) if figure in LESS_IS_BETTER else math.log(value)

    def _key(self, flags: Settings) -> str:
        return key_of({name: value for name, value in flags.items() if name not in self._shared})


def _combinations(dimensions: Sequence[Dimension], seed: int) -> Places:
    """All, or an even sample where there are very many."""
    sizes = [len(dimension.values) for dimension in dimensions]
    if math.prod(sizes) <= _MOST_COMBINATIONS:
        every = list(product(*map(range, sizes)))
        return np.asarray(every, dtype=np.int64).reshape(len(every), len(sizes))
    return np.random.default_rng(seed).integers(0, sizes, size=(_MOST_COMBINATIONS, len(sizes)))


def _largest(dimension: Dimension) -> int:
    """Place of the value that leaves the most memory to pools: no limit, or the highest."""
    if None in dimension.values:
        return dimension.values.index(None)
    numbers = [value if isinstance(value, int | float) else 0 for value in dimension.values]
    return numbers.index(max(numbers))


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
