"""Values of flags, read as the engine's own parser reads them; what cannot be one is said."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from dflash_deploy.engine.sglang.options import human_readable_int
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.engine.launch import Flags

MOST_TOKENS = 1 << 36
"""More than any pool holds: beyond it a number is a mistake."""

_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4_e2m1": 0.5 + 1 / 16,
    "fp4_mx_block16": 0.5 + 1 / 16,
}


def wrong(message: str) -> DeployError:
    """The error of a value that cannot be planned with."""
    return DeployError(message, exit_code=ExitCode.INVALID_INPUT)


def dtype_bytes(name: str) -> float:
    """Bytes of one number of a cache type."""
    if name not in _BYTES:
        raise wrong(f"the plan does not know the number type {name}")
    return _BYTES[name]


def text(flags: Flags, name: str) -> str | None:
    """A flag's word; None where it is left out or says ``auto``."""
    value = flags.get(name)
    return None if value is None or value == "auto" else str(value)


def switch(flags: Flags, name: str) -> bool:
    """A switch is set."""
    return bool(flags.get(name))


def whole(flags: Flags, name: str, *, least: int | None = None) -> int | None:
    """A whole number, None where it is left out."""
    value = flags.get(name)
    return None if value is None else read_whole(name, value, least=least)


def read_whole(name: str, value: object, *, least: int | None = None) -> int:
    """A whole number within what can be meant."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        try:
            number = human_readable_int(str(value))
        except ArgumentTypeError as error:
            raise wrong(f"{name}: {error}") from error
    if abs(number) > MOST_TOKENS:
        raise wrong(f"{name}: {str(value)[:40]} is beyond anything that fits a card")
    if least is not None and number < least:
        raise wrong(f"{name}: {number} is less than {least}")
    return number


def number(flags: Flags, name: str) -> float | None:
    """A number, None where it is left out."""
    value = flags.get(name)
    if value is None:
        return None
    try:
        found = float(str(value))
    except ValueError as error:
        raise wrong(f"{name}: {str(value)[:40]!r} is not a number") from error
    if not math.isfinite(found):
        raise wrong(f"{name}: {found} is not a number")
    return found


def sizes(name: str, value: object, *, most: int) -> tuple[int, ...]:
    """A list of batch sizes, in order and each once."""
    listed = value if isinstance(value, tuple | list) else str(value).replace(",", " ").split()
    found = sorted({read_whole(name, size, least=1) for size in listed})
    if not found:
        raise wrong(f"{name}: no size is given")
    if found[-1] > most or len(found) > 10_000:
        raise wrong(f"{name}: sizes above {most} are not planned for")
    return tuple(found)


def graph_config(flags: Flags, phase: str) -> Mapping[str, object]:
    """One phase of ``--cuda-graph-config``, empty where it says nothing."""
    given = flags.get("cuda-graph-config")
    if given is None:
        return {}
    try:
        read = json.loads(str(given)[:20_000])
    except (ValueError, RecursionError) as error:
        raise wrong(f"cuda-graph-config: not JSON ({error})") from error
    part = read.get(phase) if isinstance(read, dict) else None
    return part if isinstance(part, dict) else {}
