"""The geometry of the page's charts, in units of their view boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Maps values from ``low`` to ``high`` onto a line from ``start`` to ``end``, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    step: float

    def place(self, value: float) -> float:
        """Where a value stands."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the round values within."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return [
            (self.place(count * self.step), f"{count * self.step:,.{digits}f}")
            for count in range(first, last + 1)
        ]


def axis(values: Iterable[float], start: float, end: float, *, ticks: int = 5, zero: bool = False) -> Axis:
    """An axis that shows all values with a little room around.

    Args:
        values: finite ones; without any, it goes from 0 to 1.
        start: where the least value goes, ``end`` where the greatest.
        end: as above.
        ticks: about how many.
        zero: begin at zero, for lengths that are compared.
    """
    shown = list(values) or [0.0, 1.0]
    low, high = min(shown), max(shown)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = (0.0 if zero else low - room), high + room
    return Axis(low, high, start, end, _round_step((high - low) / ticks))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


@dataclass(frozen=True)
class Mark:
    """One trial in a plot: its kind is ``best``, ``front``, ``plain`` or ``broken``."""

    x: float
    y: float
    kind: str
    label: str
    title: str


@dataclass(frozen=True)
class Plot:
    """Two axes, marks, a line through the front, and those that have no place: ``lost``."""

    x: Axis
    y: Axis
    x_name: str
    y_name: str
    marks: Sequence[Mark]
    front: str
    lost: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Segment:
    """A piece of a bar from ``x`` on, ``width`` wide; its kind picks the colour."""

    x: float
    width: float
    kind: str
    title: str


def stacked(lengths: Iterable[tuple[str, float, str]], full: float, width: float) -> list[Segment]:
    """Pieces beside each other: kind, length and title of each, where ``full`` is ``width`` wide."""
    segments, at = [], 0.0
    for kind, length, title in lengths:
        wide = width * length / full if full > 0 else 0.0
        if wide > 0:
            segments.append(Segment(round(at, 2), round(wide, 2), kind, title))
        at += wide
    return segments
