"""How a card's memory is best divided for a configuration whose speed is settled.

Flags that only divide memory change no speed: they are worked out with the plan, not searched by launching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from dflash_deploy.plan.candidates import MEMORY_FLAGS
from dflash_deploy.profile.schema import FlagSetting
from dflash_deploy.tune.feasible import Forecaster, Prospect
from dflash_deploy.tune.space import Dimension, Settings, Space

_TOKENS, _STATES = "max-total-tokens", "max-mamba-cache-size"


@dataclass(frozen=True)
class Arranged:
    """A whole configuration, and what the plan thinks of it (None where it knows nothing)."""

    settings: dict[str, FlagSetting]
    prospect: Prospect | None


def memory_dimensions(space: Space) -> tuple[Dimension, ...]:
    """The searched flags that only divide memory."""
    return tuple(dimension for dimension in space.dimensions if dimension.flag in MEMORY_FLAGS)


def arrangements(
    space: Space, forecaster: Forecaster, shared: Settings, places: Mapping[str, int], *, least_chance: float
) -> Iterator[Arranged]:
    """The ways to divide the memory that are worth a thought.

    Of the state cache the least that serves everybody (what it takes beyond, contexts lack); of fractions and
    token limits every one, by token limits as the space has them.

    Args:
        space: of the search.
        forecaster: for the plan, which must know the card and the model.
        shared: flags of the model, for the plan alone.
        places: of all other flags.
        least_chance: of serving.
    """
    least = least_states(space, forecaster, shared, places)
    if least is None:
        return
    chosen = {**places, **least}
    # Few tokens first: they leave the most memory.
    others = sorted(
        (one for one in memory_dimensions(space) if one.flag not in least),
        key=lambda one: one.flag != _TOKENS,
    )
    if not _any_hope(space, forecaster, shared, chosen):
        return
    for combination in product(*(range(len(one.values)) for one in others)):
        chosen.update(zip((one.flag for one in others), combination, strict=True))
        settings = space.settings(chosen)
        if _too_few_tokens(settings, forecaster):
            continue
        prospect = forecaster.prospect({**shared, **settings})
        if prospect is not None and prospect.chance >= least_chance:
            yield Arranged(settings, prospect)


def _any_hope(space: Space, forecaster: Forecaster, shared: Settings, places: Mapping[str, int]) -> bool:
    """One look that spares many: with the fewest tokens that do and all the memory, or in no other way.

    True where there is no limit on tokens to choose: then more memory is not always better.
    """
    tokens = next((one for one in memory_dimensions(space) if one.flag == _TOKENS), None)
    limits = [value for value in tokens.values if isinstance(value, int)] if tokens else []
    workload = forecaster.profile.workload
    enough = [limit for limit in limits if limit >= workload.users * workload.context_tokens]
    if tokens is None or not enough:
        return True
    most = {one.flag: len(one.values) - 1 for one in memory_dimensions(space) if one.flag not in places}
    settings = space.settings({**most, **places, _TOKENS: tokens.values.index(min(enough))})
    prospect = forecaster.prospect({**shared, **settings})
    return prospect is not None and prospect.chance > 0


def least_states(
    space: Space, forecaster: Forecaster, shared: Settings, places: Mapping[str, int]
) -> dict[str, int] | None:
    """Place of the smallest searched state cache that serves all users; None where none does."""
    states = next((one for one in memory_dimensions(space) if one.flag == _STATES), None)
    if states is None:
        return {}
    users = forecaster.profile.workload.users

    def size(place: int) -> float:
        value = states.values[place]
        return value if isinstance(value, int | float) else float("inf")

    others = {dimension.flag: 0 for dimension in memory_dimensions(space)}
    for place in sorted(range(len(states.values)), key=size):
        settings = space.settings({**others, **places, states.flag: place})
        if forecaster.most_users({**shared, **settings}) >= users:
            return {states.flag: place}
    return None


def _too_few_tokens(settings: Settings, forecaster: Forecaster) -> bool:
    limit = settings.get(_TOKENS)
    workload = forecaster.profile.workload
    return isinstance(limit, int) and limit < workload.users * workload.context_tokens
