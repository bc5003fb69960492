"""NVFP4 numbers as BF16, exactly rounded.

A weight is E2M1 (sign, two bits of exponent, one of mantissa), two to a byte; 16 of them along a row share an
E4M3 scale, and all of them one FP32 scale. ModelOpt and compressed-tensors put the first of two numbers into
the low four bits (ModelOpt's ``NVFP4QTensor``, compressed-tensors' ``pack_fp4_to_uint8``). Nothing within a
tensor tells the order: only a comparison with the weights it was made from does.

numpy does the work, in the tool's own environment: it is there with Optuna, a table look-up needs no torch,
and so a checkpoint can be prepared on a machine that has no serving environment.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

BLOCK = 16
Order = Literal["low-first", "high-first"]
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Doubles = npt.NDArray[np.float64]
Table = npt.NDArray[np.uint32]

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BF16_LEAST_EXPONENT = -126
_BF16_FRACTION_BITS = 7


def e2m1() -> Doubles:
    """Value of each of the 16 numbers."""
    return np.concatenate([_E2M1, -_E2M1])


def e4m3() -> Doubles:
    """Value of each of the 256 scales (bias 7, no infinities, ``S.1111.111`` is no number)."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(
        exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, np.maximum(exponent, 1) - 7)
    )
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >= 128, -size, size)


def to_bf16(values: Doubles) -> Halves:
    """Bits of the nearest BF16, the even one where two are as near; in one rounding."""
    _, exponent = np.frexp(values)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, _BF16_LEAST_EXPONENT) - _BF16_FRACTION_BITS)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (np.rint(values / unit) * unit).astype(np.float32)
    halves: Halves = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return halves


def decoding_table(global_scale: float, order: Order) -> Table:
    """For a scale's byte (high) and a byte of two numbers (low): both as BF16, the first in the low half."""
    values = to_bf16(e4m3()[:, None] * global_scale * e2m1()[None, :]).astype(np.uint32)
    byte = np.arange(256)
    low, high = values[:, byte & 15], values[:, byte >> 4]
    first, second = (low, high) if order == "low-first" else (high, low)
    return (first | (second << 16)).reshape(-1).astype("<u4")


def decode(packed: Bytes, scales: Bytes, table: Table) -> npt.NDArray[np.uint32]:
    """Rows of BF16 pairs.

    Args:
        packed: rows of ``columns / 2`` bytes.
        scales: rows of ``columns / 16`` bytes.
        table: from ``decoding_table``.
    """
    rows, blocks = scales.shape
    index = scales.astype(np.uint16)[:, :, None] << 8 | packed.reshape(rows, blocks, BLOCK // 2)
    return table.take(index).reshape(rows, blocks * BLOCK // 2)


def has_no_number(scales: Bytes) -> bool:
    """Whether a scale is NaN."""
    return bool(((scales & 0x7F) == 0x7F).any())


def from_bf16(pairs: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Rows of BF16 pairs as numbers."""
    halves = pairs.view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)
