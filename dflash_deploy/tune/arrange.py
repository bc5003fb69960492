"""How a card's memory is best divided for a configuration whose speed is settled.

Flags that only divide memory change no speed: they are worked out with the plan, not searched by launching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from dflash_deploy.plan.candidates import MEMORY_FLAGS
from dflash_deploy.profile.schema import FlagSetting
from dflash_deploy.tune.feasible import SHORT, Forecaster, Prospect
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
    space: Space,
    forecaster: Forecaster,
    shared: Settings,
    places: Mapping[str, int],
    *,
    least_chance: float,
    wanted: Callable[[Settings], bool] | None = None,
) -> Iterator[Arranged]:
    """The ways to divide the memory that are worth a thought: every fraction, by token limits as they come.

    Args:
        space: of the search.
        forecaster: for the plan, which must know the card and the model.
        shared: flags of the model, for the plan alone.
        places: of all other flags, and of the state cache (``least_states``: what it takes beyond, contexts
            lack).
        least_chance: of serving.
        wanted: says no to what is not worth planning: it comes without a prospect.
    """
    # Few tokens first: they leave the most memory.
    others = sorted(
        (one for one in memory_dimensions(space) if one.flag not in places),
        key=lambda one: one.flag != _TOKENS,
    )
    if not _any_hope(space, forecaster, shared, places, least_chance):
        return
    chosen = dict(places)
    for combination in product(*(range(len(one.values)) for one in others)):
        chosen.update(zip((one.flag for one in others), combination, strict=True))
        settings = space.settings(chosen)
        if _too_few_tokens(settings, forecaster):
            continue
        if wanted is not None and not wanted(settings):
            yield Arranged(settings, None)
            continue
        prospect = forecaster.prospect({**shared, **settings})
        if prospect is not None and prospect.chance >= least_chance:
            yield Arranged(settings, prospect)


def _any_hope(
    space: Space, forecaster: Forecaster, shared: Settings, places: Mapping[str, int], least_chance: float
) -> bool:
    """One look that spares many: with the fewest tokens that do and all the memory, or in no other way.

    True where there is no limit on tokens to choose: then more memory is not always better.
    """
    tokens = next((one for one in memory_dimensions(space) if one.flag == _TOKENS), None)
    limits = [value for value in tokens.values if isinstance(value, int)] if tokens else []
    promised = forecaster.profile.workload.users * forecaster.profile.workload.context_tokens
    enough = [limit for limit in limits if limit >= promised]
    if tokens is None or not enough:
        return True
    fewest = min(enough)
    most = {one.flag: len(one.values) - 1 for one in memory_dimensions(space) if one.flag not in places}
    settings = space.settings({**most, **places, _TOKENS: tokens.values.index(fewest)})
    prospect = forecaster.prospect({**shared, **settings})
    if prospect is None or prospect.chance <= 0:
        return False
    # What takes less memory has fewer tokens than were promised, or a state cache that is not settled.
    best = fewest == promised and _STATES in settings and least_chance > SHORT
    return not best or prospect.chance >= least_chance


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
