"""What may be varied: a profile's ``search``, as values to choose from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.engine.sglang.drafting import drafting, reads
from dflash_deploy.profile.schema import METHOD, Bounds, Choices, FlagSetting, Profile
from dflash_deploy.tune.launching import METHODS, draft_flags, searched_methods

Settings = Mapping[str, FlagSetting]
"""Engine flags with their values as a profile writes them; ``env.NAME`` is a variable of the server, and
``method``, where it is searched, stands for the flags of one."""

_OF_METHOD = ("speculative-algorithm", "speculative-draft-model-path")
"""What a method's name says already."""


@dataclass(frozen=True)
class Dimension:
    """One flag and the values it may take, in the profile's order; None leaves the flag out.

    ``numeric`` values have equal steps between them, so that a neighbour is near.
    """

    flag: str
    values: tuple[FlagSetting | None, ...]
    numeric: bool

    def place_of(self, settings: Settings) -> int | None:
        """Index of the value that ``settings`` gives the flag, None where it is none of ours.

        A flag left out is the value None, or, for a switch, False.
        """
        value = settings.get(self.flag)
        for wanted in (value,) if value is not None else (None, False):
            for place, own in enumerate(self.values):
                if _same(own, wanted):
                    return place
        return None


@dataclass(frozen=True)
class Space:
    """All flags that are searched, and those that every configuration shares.

    Attributes:
        methods: flags of every method, where methods are searched; the profile's own is then among ``fixed``.
    """

    dimensions: tuple[Dimension, ...]
    fixed: Settings
    methods: Mapping[Method, Settings] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many combinations there are; some are one configuration, where a method reads not all flags."""
        return prod(len(dimension.values) for dimension in self.dimensions)

    def settings(self, places: Mapping[str, int]) -> dict[str, FlagSetting]:
        """The flags of one configuration, given the place of every searched flag's value."""
        values = {one.flag: one.values[places[one.flag]] for one in self.dimensions}
        return self.whole({flag: value for flag, value in values.items() if value is not None})

    def whole(self, settings: Settings) -> dict[str, FlagSetting]:
        """A configuration with what it does not say itself: what all share, and the flags of its method."""
        chosen = {**self.fixed, **settings}
        method = _method(chosen)
        return tidy({**(self.methods.get(method, {}) if method else {}), **chosen})

    def idle(self, method: FlagSetting | None) -> frozenset[str]:
        """Searched flags that a method does not read."""
        named = _method({} if method is None else {METHOD: method})
        if named is None:
            return frozenset()
        return frozenset(one.flag for one in self.dimensions if not reads(named, one.flag))

    def places(self, settings: Settings) -> dict[str, int]:
        """Where a configuration stands in the space; a flag with a value of its own is missing."""
        found = {dimension.flag: dimension.place_of(settings) for dimension in self.dimensions}
        return {flag: place for flag, place in found.items() if place is not None}

    def grid(self) -> Iterator[dict[str, int]]:
        """Every configuration's places, one after the other."""
        names = [dimension.flag for dimension in self.dimensions]
        for places in product(*(range(len(dimension.values)) for dimension in self.dimensions)):
            yield dict(zip(names, places, strict=True))


def space_of(profile: Profile, *, simulated: bool = True) -> Space:
    """The space that a profile opens.

    Args:
        profile: the service.
        simulated: models need no place on this machine, where methods are searched.

    Raises:
        DeployError: a method is searched whose draft nobody can find.
    """
    dimensions = tuple(_dimension(flag, bounds) for flag, bounds in profile.search.items())
    methods = {one: draft_flags(profile, one, simulated=simulated) for one in searched_methods(profile)}
    own: Settings = {METHOD: profile.speculation.method} if methods else {}
    return Space(dimensions, {**profile.flags, **own}, methods)


def tidy(settings: Settings) -> dict[str, FlagSetting]:
    """The same configuration in the fewest words, so that equal ones are seen to be equal.

    A switch that is off is left out, and what its method does not read. Decode graphs for more requests than
    can run would not be captured.
    """
    method = _method(settings)
    kept = {
        flag: value
        for flag, value in settings.items()
        if value is not False and (method is None or reads(method, flag))
    }
    sizes, running = kept.get("cuda-graph-bs-decode"), kept.get("max-running-requests")
    if isinstance(sizes, list) and isinstance(running, int):
        usable = [size for size in sizes if isinstance(size, int) and size <= running]
        if usable:
            kept["cuda-graph-bs-decode"] = usable
    return kept


def key_of(settings: Settings) -> str:
    """One text for one configuration, whatever the order of its flags."""
    kept = tidy(settings)
    method = _method(kept)
    if method is not None:
        kept = {flag: value for flag, value in drafting(method, kept).items() if flag not in _OF_METHOD}
    return json.dumps(kept, sort_keys=True)


def _method(settings: Settings) -> Method | None:
    """The method that a configuration names."""
    named = settings.get(METHOD)
    return None if named is None else next((method for method in METHODS if method == named), None)


def _dimension(flag: str, bounds: Bounds) -> Dimension:
    if isinstance(bounds, Choices):
        different = {json.dumps(value): value for value in bounds.choices}
        return Dimension(flag, tuple(different.values()), numeric=False)
    # One more than fits by a hair, for steps like 0.01 that binary fractions miss.
    steps = int((bounds.high - bounds.low) / bounds.step + 1e-6)
    whole = all(float(number).is_integer() for number in (bounds.low, bounds.step))
    values: list[FlagSetting | None] = [
        int(value) if whole else round(value, 10)
        for value in (bounds.low + bounds.step * place for place in range(steps + 1))
    ]
    return Dimension(flag, tuple(values), numeric=True)


def _same(own: FlagSetting | None, other: FlagSetting | None) -> bool:
    # True equals 1 in Python, and they are different settings.
    return own == other and isinstance(own, bool) == isinstance(other, bool)
