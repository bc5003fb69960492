"""What a server claims: numbers, texts, how it ended. What cannot be one is as if it had not been said."""

from __future__ import annotations

GIVEN_UP = frozenset({"abort", "error", "cancelled"})
"""Finish reasons of answers that an engine ended before their time."""

_MOST = 1 << 31
_MOST_PARTS = 64


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


def text_of(value: object) -> str | None:
    """Text as it stands, or in parts, as Mistral's models give their thoughts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts = [part for part in value[:_MOST_PARTS] if isinstance(part, dict)]
    texts = [part.get("text") or part.get("thinking") for part in parts]
    return "".join(text if isinstance(text, str) else text_of(text) or "" for text in texts)
