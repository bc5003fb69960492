from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint_tools import nvfp4

from .checkpoints import bf16, e4m3, nearest_bf16, reference_row

_SCALE_BYTES = st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F)
_GLOBAL = st.floats(2.0**-40, 2.0**10, width=32)


def test_scales_are_those_of_the_format():
    known = {0x38: 1.0, 0x7E: 448.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x00: 0.0, 0xB8: -1.0, 0x40: 2.0}
    table = nvfp4.e4m3()
    for code, value in known.items():
        assert table[code] == value
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert math.isnan(table[code])
        else:
            assert Fraction(float(table[code])) == e4m3(code)


@settings(max_examples=150)
@given(data=st.data(), rows=st.integers(1, 3), blocks=st.integers(1, 3), scale=_GLOBAL)
@pytest.mark.parametrize("order", ["low-first", "high-first"])
def test_blocks_against_exact_arithmetic(order, data, rows, blocks, scale):
    packed = data.draw(st.binary(min_size=rows * blocks * 8, max_size=rows * blocks * 8))
    scales = bytes(data.draw(st.lists(_SCALE_BYTES, min_size=rows * blocks, max_size=rows * blocks)))
    found = nvfp4.decode(
        np.frombuffer(packed, np.uint8).reshape(rows, -1),
        np.frombuffer(scales, np.uint8).reshape(rows, -1),
        nvfp4.decoding_table(scale, order),
    )
    assert found.shape == (rows, blocks * 8)
    for row in range(rows):
        expected = reference_row(
            packed[row * blocks * 8 : (row + 1) * blocks * 8],
            scales[row * blocks : (row + 1) * blocks],
            Fraction(scale),
            low_first=order == "low-first",
        )
        assert bf16(found[row].tobytes()) == [nearest_bf16(value) for value in expected]


def test_the_two_orders_differ():
    packed = np.full((1, 8), 0x21, np.uint8)  # 1 in the low half, 2 in the high one
    scales = np.full((1, 1), 0x38, np.uint8)
    for order, pair in (("low-first", [0.5, 1.0]), ("high-first", [1.0, 0.5])):
        found = nvfp4.decode(packed, scales, nvfp4.decoding_table(1.0, order))
        assert bf16(found.tobytes()) == pair * 8


@given(st.floats(allow_nan=False, width=32))
def test_rounding_is_that_of_the_hardware(value):
    (bits,) = nvfp4.to_bf16(np.array([value]))
    (whole,) = struct.unpack("<I", struct.pack("<f", value))
    expected = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
    if math.isinf(value):
        return
    assert int(bits) == expected
