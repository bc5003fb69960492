"""Why a card's clocks stand where they stand: NVML's bit mask in words."""

from __future__ import annotations

IDLE = "idle"

# Bits of nvmlClocksEventReasons, formerly nvmlClocksThrottleReasons (NVML API reference).
_REASONS = {
    0x001: IDLE,
    0x002: "application clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks setting",
    0x200: "board limit",
    0x400: "reliability limit",
}
HELD_BACK = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
"""Reasons that heat or the power supply gives; a software power cap is what a busy card lives with."""

_ALL_BITS = (1 << 64) - 1


def clock_reasons(mask: int) -> tuple[str, ...]:
    """Each reason that is set, lowest bit first; a bit that no one has named yet is shown as such."""
    bits = (1 << position for position in range(64) if mask & _ALL_BITS & (1 << position))
    return tuple(_REASONS.get(bit, f"unknown reason {bit:#x}") for bit in bits)
