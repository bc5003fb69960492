"""Numbers that a server claims: what cannot be one is as if it had not been said."""

from __future__ import annotations

_MOST = 1 << 31


def count(value: object) -> int | None:
    """A number of tokens, requests or steps."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST else None


def figure(value: object) -> float | None:
    """A length, rate or time: no NaN, nothing below zero, nothing that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e12 else None
