"""Triton, of which kernels can be declared but not launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absent import anything, fill

from triton import runtime as runtime

__version__ = "0.0.0"


def jit(function: Callable[..., Any] | None = None, **_options: object) -> Any:
    """Leave the kernel as the plain function it is."""
    return function if function is not None else _unchanged


def autotune(*_arguments: object, **_options: object) -> Any:
    """As ``jit``: nothing to tune."""
    return _unchanged


heuristics = autotune


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


fill(__name__, anything)
