from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    Tensor,
    header_length,
    parse_header,
    size_text,
)
from dflash_deploy.errors import DeployError, ExitCode


def entry(dtype: str = "BF16", shape: object = (2, 3), offsets: object = (0, 12)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(header: object, data_bytes: int) -> tuple[Tensor, ...]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "x.safetensors")


def test_tensors_with_their_sizes() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F32", (), (12, 16)),
        "a": entry(),
        "empty": entry("U8", (0, 7), (16, 16)),
    }
    assert parse(header, 16) == (
        Tensor("a", "BF16", (2, 3), 12),
        Tensor("b", "F32", (), 4),
        Tensor("empty", "U8", (0, 7), 0),
    )


def test_numbers_of_less_than_a_byte() -> None:
    assert parse({"a": entry("F4", (2, 8), (0, 8))}, 8)[0].stored_bytes == 8
    with pytest.raises(DeployError, match="do not fill whole bytes"):
        parse({"a": entry("F4", (3,), (0, 1))}, 1)


@pytest.mark.parametrize(
    ("header", "data_bytes", "said"),
    [
        ({"a": entry("F7")}, 12, "dtype 'F7', which is not known; known are BOOL"),
        ({"a": entry("F\x1b[31m")}, 12, r"dtype 'F\?\[31m'"),
        ({"a": entry(offsets=(0, 11))}, 11, "11 bytes are set aside, 12 follow"),
        ({"a": entry(offsets=(12, 0))}, 12, "a begin and an end"),
        ({"a": entry(offsets=(-12, 0))}, 12, "none negative, found -12"),
        ({"a": entry(offsets=(0,))}, 12, "a begin and an end"),
        ({"a": entry(offsets=(0, 1, 2))}, 12, "at most 2"),
        ({"a": entry(offsets="01")}, 12, "data_offsets: expected a list"),
        ({"a": entry(shape=(2, -3))}, 12, "none negative, found -3"),
        ({"a": entry(shape=(2, 3.0))}, 12, r"found 3\.0"),
        ({"a": entry(shape=(True, 6))}, 12, "found true"),
        ({"a": entry(shape=[1] * 17)}, 12, "at most 16"),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, 12, "more numbers than any file holds"),
        ({"a": entry(), "b": entry(offsets=(6, 18))}, 18, "'b' overlaps the one before it"),
        ({"a": entry(), "b": entry()}, 12, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(14, 26))}, 26, "'b' leaves a gap"),
        ({"a": entry(offsets=(4, 16))}, 16, "leaves a gap before it"),
        ({"a": {"dtype": "BF16", "shape": [2, 3]}}, 12, "data_offsets: expected a list"),
        ({"a": entry() | {"code": "x"}}, 12, "unknown key 'code'"),
        ({"a": 5}, 12, "expected an object, found 5"),
        ({"a": entry() | {"dtype": 3}}, 12, "dtype: expected text, found 3"),
        ([], 0, "expected an object, found a list"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__: expected texts"),
        ({"__metadata__": []}, 0, "__metadata__: expected texts"),
        (b'{"a": 1, "a": 2}', 0, "the key 'a' twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', 0, "the key 'dtype' twice"),
        (b'{"a": NaN}', 0, "NaN, which is no number"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "a number is too long"),
        (b"[" * 100_000, 0, "nested too deeply"),
        (b"[" * 90 + b"]" * 90, 0, "nested deeper than 64 levels"),
        (b"{" + b"," * 4_000_000, 0, "more than 3,200,000 values"),
        (b"\xff\xfe", 0, "is not UTF-8"),
        (b"", 0, "is not JSON"),
        (b"import os", 0, "is not JSON"),
    ],
)
def test_what_the_format_forbids(header: object, data_bytes: int, said: str) -> None:
    with pytest.raises(DeployError, match=said) as caught:
        parse(header, data_bytes)
    assert caught.value.exit_code == ExitCode.INVALID_INPUT
    assert caught.value.message.startswith("x.safetensors: ")
    assert len(caught.value.message) < 400


def test_a_file_cut_short_says_by_how_much() -> None:
    header = {"a": entry("U8", (5 << 20,), (0, 5 << 20))}
    with pytest.raises(DeployError, match=r"is cut short: 2\.00 MiB of 5\.00 MiB are missing"):
        parse(header, 3 << 20)
    with pytest.raises(DeployError, match="7 bytes more than its header tells of"):
        parse(header, (5 << 20) + 7)


@pytest.mark.parametrize(
    ("first", "file_bytes", "said"),
    [
        (b"", 0, "0 bytes are too few"),
        (b"\1\2\3", 3, "3 bytes are too few"),
        (struct.pack("<Q", 100), 50, "58 bytes of its header are missing"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), 1 << 40, "100 MB at most"),
        (b"\xff" * 8, 1 << 40, "100 MB at most"),
        (b"version https://git-lfs", 130, "Git LFS pointer"),
        (b"PK\x03\x04\x14\0\x08\x08", 1 << 30, "is a pickle"),
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 1 << 30, "is a pickle"),
    ],
)
def test_a_length_that_cannot_be(first: bytes, file_bytes: int, said: str) -> None:
    with pytest.raises(DeployError, match=said):
        header_length(first, file_bytes, "x.safetensors")


@given(st.integers(0, MAX_HEADER_BYTES))
def test_every_length_up_to_the_limit_is_read(length: int) -> None:
    assert header_length(struct.pack("<Q", length), length + 8, "x") == length


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([*DTYPE_BITS, 1 << 63, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
tensor_like = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
        "more": json_values,
    },
)


@given(
    st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), tensor_like | json_values, max_size=4),
    st.integers(0, 1 << 16),
)
def test_any_header_is_read_or_refused(header: dict[str, Any], data_bytes: int) -> None:
    try:
        tensors = parse(header, data_bytes)
    except DeployError as error:
        error.message.encode()
        return
    assert sum(tensor.stored_bytes for tensor in tensors) == data_bytes


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        length = header_length(data[:8], len(data), "x")
        parse_header(data[8 : 8 + length], len(data), "x")
    except DeployError as error:
        error.message.encode()


shapes = st.lists(st.integers(0, 5), max_size=4)
near_tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ["U8", "BF16", "F32", "F4", "F6_E2M3", "F8_E8M0", "C64", "I64", "BOOL", "F7"]
        ),
        "shape": st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)),
    }
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from("abc"), near_tensors, max_size=3), st.integers(0, 40))
def test_the_format_s_own_library_agrees(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data_bytes: int
) -> None:
    safetensors = pytest.importorskip("safetensors")
    text = json.dumps(header).encode()
    path = tmp_path_factory.getbasetemp() / "near.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    try:
        with safetensors.safe_open(path, "np") as opened:
            theirs = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:
        theirs = None
    try:
        ours = {tensor.name: tensor.shape for tensor in parse(header, data_bytes)}
    except DeployError:
        ours = None
    assert ours == theirs


@given(st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F32", "I64"]), shapes), max_size=6))
def test_what_is_written_is_read(tensors: list[tuple[str, list[int]]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for number, (dtype, shape) in enumerate(tensors):
        size = DTYPE_BITS[dtype] // 8
        for length in shape:
            size *= length
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    read = {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in parse(header, at)}
    assert read == {f"t{number}": tensor for number, tensor in enumerate(tensors)}


def test_sizes_in_words(tmp_path: Path) -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 3 << 20, 1536 << 20)] == [
        "0 bytes",
        "1,023 bytes",
        "1.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]
