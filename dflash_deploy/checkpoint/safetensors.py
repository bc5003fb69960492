"""What a safetensors header says, checked as its format demands. No tensor is ever read.

Format: eight bytes of header length (little endian), a JSON header, then the tensors without gaps.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dflash_deploy.checkpoint import json_text
from dflash_deploy.checkpoint.json_text import Json, invalid, shown
from dflash_deploy.yaml_file import describe

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_TENSORS = 200_000
"""Of one file. A mixture of experts of a thousand billion weights has as many in all its files."""

_VALUES_OF_A_TENSOR = 16
_MAX_RANK = 16
_MAX_NUMBER = 1 << 50
_METADATA = "__metadata__"

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as a header tells of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int


def header_length(first: bytes, file_bytes: int, source: str) -> int:
    """Length of the JSON header, from a file's first eight bytes.

    Raises:
        DeployError: the file is too short, or the length cannot be one.
    """
    if len(first) < LENGTH_BYTES:
        raise invalid(
            source,
            f"is cut short: {file_bytes:,} bytes are too few for a safetensors file",
            fix="download the file again",
        )
    (length,) = struct.unpack("<Q", first[:LENGTH_BYTES])
    if length > MAX_HEADER_BYTES and first.startswith(b"version "):
        raise invalid(
            source,
            "is a Git LFS pointer, not the file itself",
            fix="run `git lfs pull` in the checkpoint's folder",
        )
    if length > MAX_HEADER_BYTES and first.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise invalid(source, "is a pickle under another name; it is not opened")
    if length > MAX_HEADER_BYTES:
        raise invalid(
            source,
            f"is not a safetensors file: its header would have {length:,} bytes, 100 MB at most are allowed",
        )
    if LENGTH_BYTES + length > file_bytes:
        missing = LENGTH_BYTES + length - file_bytes
        raise invalid(
            source,
            f"is cut short: {missing:,} bytes of its header are missing",
            fix="download the file again",
        )
    return int(length)


def parse_header(header: bytes, file_bytes: int, source: str) -> tuple[Tensor, ...]:
    """The tensors of a file.

    Args:
        header: its JSON header.
        file_bytes: size of the whole file.
        source: what it is called in messages.

    Raises:
        DeployError: anything that the format forbids: an unknown dtype, sizes that do not fit their shape,
            gaps, overlaps, a key given twice, bytes missing at the end or left over.
    """
    document = json_text.parse_object(header, source, max_values=MAX_TENSORS * _VALUES_OF_A_TENSOR)
    _check_metadata(document.pop(_METADATA, None), source)
    if len(document) > MAX_TENSORS:
        raise invalid(source, f"holds more than {MAX_TENSORS:,} tensors")
    spans: list[tuple[int, int, Tensor]] = []
    for name, entry in document.items():
        if not isinstance(entry, dict):
            raise invalid(
                source, f"tensor {shown(name)!r}: expected an object, found {shown(describe(entry))}"
            )
        spans.append(_tensor(name, entry, source))
    spans.sort(key=lambda span: span[:2])
    data_bytes = _check_spans(spans, source)
    _check_size(LENGTH_BYTES + len(header) + data_bytes, file_bytes, source)
    return tuple(tensor for _, _, tensor in spans)


def _tensor(name: str, entry: dict[str, Json], source: str) -> tuple[int, int, Tensor]:
    what = f"tensor {shown(name)!r}"
    unknown = set(entry) - {"dtype", "shape", "data_offsets"}
    if unknown:
        raise invalid(source, f"{what}: unknown key {shown(min(unknown))!r}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str):
        raise invalid(source, f"{what}: dtype: expected text, found {shown(describe(dtype))}")
    if dtype not in DTYPE_BITS:
        raise invalid(
            source,
            f"{what} has the dtype {shown(dtype)!r}, which is not known; known are {', '.join(DTYPE_BITS)}",
        )
    shape = _numbers(entry.get("shape"), f"{what}: shape", source, most=_MAX_RANK)
    offsets = _numbers(entry.get("data_offsets"), f"{what}: data_offsets", source, most=2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(source, f"{what}: data_offsets: expected a begin and an end after it")
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MAX_NUMBER:
            raise invalid(source, f"{what}: shape: more numbers than any file holds")
    bits = elements * DTYPE_BITS[dtype]
    if bits % 8:
        raise invalid(
            source, f"{what}: {elements} numbers of {DTYPE_BITS[dtype]} bits do not fill whole bytes"
        )
    begin, end = offsets
    if end - begin != bits // 8:
        raise invalid(
            source,
            f"{what}: {end - begin:,} bytes are set aside, {bits // 8:,} follow from its shape and dtype",
        )
    return begin, end, Tensor(name, dtype, shape, end - begin)


def _numbers(value: Json, what: str, source: str, *, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise invalid(source, f"{what}: expected a list of at most {most} numbers, found {describe(value)}")
    numbers: list[int] = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_NUMBER:
            raise invalid(
                source, f"{what}: expected whole numbers, none negative, found {shown(describe(item))}"
            )
        numbers.append(item)
    return tuple(numbers)


def _check_spans(spans: list[tuple[int, int, Tensor]], source: str) -> int:
    """Tensors lie one after another; returns where the last one ends."""
    at = 0
    for begin, end, tensor in spans:
        if begin != at:
            what = "overlaps the one before it" if begin < at else "leaves a gap before it"
            raise invalid(source, f"tensor {shown(tensor.name)!r} {what} (byte {begin:,} of the data)")
        at = end
    return at


def _check_size(expected: int, found: int, source: str) -> None:
    if found < expected:
        short = expected - found
        raise invalid(
            source,
            f"is cut short: {size_text(short)} of {size_text(expected)} are missing",
            fix="download the file again",
        )
    if found > expected:
        raise invalid(source, f"has {found - expected:,} bytes more than its header tells of")


def _check_metadata(metadata: Json, source: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise invalid(source, f"{_METADATA}: expected texts by name")


def size_text(size_bytes: int) -> str:
    """``22.10 GiB``, or a smaller unit where that says more."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes:,} bytes"
