"""The quantised output head of a checkpoint: where its parts lie, by headers that nobody vouches for."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint import json_text, safetensors
from dflash_deploy.checkpoint.files import Folder, read_whole
from dflash_deploy.checkpoint.json_text import Fields, invalid, shown
from dflash_deploy.checkpoint.safetensors import Tensor
from dflash_deploy.checkpoint_tools.nvfp4 import BLOCK
from dflash_deploy.errors import DeployError, ExitCode

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 128 << 20
_MAX_VALUES = 4_000_000
_MAX_SHARDS = 2000
_MAX_COLUMNS = 1 << 17
_WEIGHT = re.compile(r"(?P<module>(?:[\w.]+\.)?lm_head)\.(?:weight|weight_packed)")
_DENSE = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Shard:
    """One file of tensors.

    Attributes:
        offsets: where in the file each tensor begins.
        metadata: the header's own texts.
    """

    name: str
    file_bytes: int
    header: bytes
    tensors: tuple[Tensor, ...]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Head:
    """An output head in NVFP4.

    Attributes:
        module: its name, without ``.weight``.
        parts: names of all its tensors, which a dense one has no use for.
        global_scale: what block scales are multiplied with (compressed-tensors keeps its inverse).
    """

    module: str
    rows: int
    columns: int
    weight: Tensor
    scale: Tensor
    parts: frozenset[str]
    global_scale: float

    @property
    def dense_bytes(self) -> int:
        """Of the head in BF16."""
        return self.rows * self.columns * 2

    @property
    def packed_bytes(self) -> int:
        """Of the head as it is."""
        return self.weight.stored_bytes + self.scale.stored_bytes


@dataclass(frozen=True)
class Source:
    """A checkpoint whose head is quantised."""

    folder: Folder
    shards: tuple[Shard, ...]
    head: Head
    config: Fields
    modelopt: Fields | None
    index: Fields | None

    def shard_of(self, tensor: str) -> Shard:
        """The file that holds a tensor."""
        return next(shard for shard in self.shards if tensor in shard.offsets)

    @property
    def touched(self) -> tuple[Shard, ...]:
        """Files that hold parts of the head."""
        return tuple(shard for shard in self.shards if self.head.parts & shard.offsets.keys())


def read_source(path: Path) -> Source:
    """Read a checkpoint's headers and configuration.

    Raises:
        DeployError: it is not there, damaged, or its head is not in NVFP4.
    """
    folder = Folder(path)
    names = folder.names()
    config = _json(folder, CONFIG)
    shards = read_shards(folder)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    if sum(len(shard.tensors) for shard in shards) != len(tensors):
        raise invalid(folder.where, "holds a tensor twice, in two files; which one counts is not known")
    return Source(
        folder=folder,
        shards=shards,
        head=_find_head(folder, shards, tensors),
        config=config,
        modelopt=_json(folder, MODELOPT) if MODELOPT in names else None,
        index=_json(folder, INDEX) if INDEX in names else None,
    )


def read_shards(folder: Folder) -> tuple[Shard, ...]:
    """Headers of all files that the index names, or of all that are there.

    Raises:
        DeployError: there is none, or one is damaged.
    """
    names = folder.names()
    index = _json(folder, INDEX) if INDEX in names else None
    return tuple(_read_shard(folder, name) for name in _shard_names(folder, names, index))


def _json(folder: Folder, name: str) -> Fields:
    source = f"{folder.where}/{name}"
    data = read_whole(folder, name, most=_MAX_JSON_BYTES)
    return Fields(json_text.parse_object(data, source, max_values=_MAX_VALUES), source)


def _shard_names(folder: Folder, names: tuple[str, ...], index: Fields | None) -> list[str]:
    chosen = {name for name in names if name.endswith(".safetensors")}
    if index is not None:
        mapped = index.inner("weight_map")
        files = set(mapped.values.values()) if mapped else set()
        chosen = {name for name in files if isinstance(name, str)}
        if len(chosen) != len(files):
            raise invalid(index.source, "weight_map: expected names of files")
    if not chosen:
        raise DeployError(
            f"{folder.where} holds no .safetensors file",
            fix="give the folder of a checkpoint",
            exit_code=ExitCode.MISSING,
        )
    if len(chosen) > _MAX_SHARDS:
        raise invalid(folder.where, f"has more than {_MAX_SHARDS:,} files with weights")
    return sorted(chosen)


def _read_shard(folder: Folder, name: str) -> Shard:
    source = f"{folder.where}/{name}"
    size = folder.size(name)
    length = safetensors.header_length(folder.read(name, 0, safetensors.LENGTH_BYTES), size, source)
    header = folder.read(name, safetensors.LENGTH_BYTES, length)
    tensors = safetensors.parse_header(header, size, source)
    offsets, at = {}, safetensors.LENGTH_BYTES + length
    for tensor in tensors:
        offsets[tensor.name] = at
        at += tensor.stored_bytes
    metadata = json_text.parse_object(header, source, max_values=_MAX_VALUES).get("__metadata__")
    texts = {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    return Shard(name, size, header, tensors, offsets, texts)


def _find_head(folder: Folder, shards: tuple[Shard, ...], tensors: Mapping[str, Tensor]) -> Head:
    found = [match for name in tensors if (match := _WEIGHT.fullmatch(name)) and "mtp" not in name]
    if not found:
        raise invalid(folder.where, "has no output head of its own (lm_head.weight); it may be tied")
    if len(found) > 1:
        raise invalid(folder.where, f"has several output heads: {', '.join(m[0] for m in found[:5])}")
    name, module = found[0][0], found[0]["module"]
    weight = tensors[name]
    if weight.dtype in _DENSE:
        raise DeployError(
            f"{folder.where}: {shown(name)} is dense already ({weight.dtype})",
            fix="use the checkpoint as it is",
            exit_code=ExitCode.INVALID_INPUT,
        )
    scale = tensors.get(f"{module}.weight_scale")
    if weight.dtype != "U8" or scale is None or scale.dtype != "F8_E4M3":
        kind = f"{weight.dtype} with scales in {scale.dtype if scale else 'no tensor of that name'}"
        raise invalid(folder.where, f"{shown(name)} is not NVFP4 (U8 with scales in F8_E4M3), but {kind}")
    if len(weight.shape) != 2 or not 0 < weight.shape[1] * 2 <= _MAX_COLUMNS or not weight.shape[0]:
        raise invalid(folder.where, f"{shown(name)}: a head of shape {list(weight.shape)} is none")
    rows, columns = weight.shape[0], weight.shape[1] * 2
    if columns % BLOCK or scale.shape != (rows, columns // BLOCK):
        raise invalid(
            folder.where,
            f"{shown(scale.name)}: expected a scale for each {BLOCK} numbers, shape "
            f"{[rows, columns // BLOCK]}, found {list(scale.shape)}",
        )
    return Head(
        module=module,
        rows=rows,
        columns=columns,
        weight=weight,
        scale=scale,
        parts=frozenset(one for one in tensors if one.startswith(f"{module}.") and one != f"{module}.bias"),
        global_scale=_global_scale(folder, shards, tensors, module),
    )


def _global_scale(
    folder: Folder, shards: tuple[Shard, ...], tensors: Mapping[str, Tensor], module: str
) -> float:
    for leaf, inverse in (("weight_scale_2", False), ("weight_global_scale", True)):
        tensor = tensors.get(f"{module}.{leaf}")
        if tensor is None:
            continue
        if tensor.dtype != "F32" or tensor.stored_bytes != 4:
            raise invalid(folder.where, f"{shown(tensor.name)}: expected one number in F32")
        shard = next(one for one in shards if tensor.name in one.offsets)
        (value,) = struct.unpack("<f", folder.read(shard.name, shard.offsets[tensor.name], 4))
        if not math.isfinite(value) or value <= 0:
            raise invalid(folder.where, f"{shown(tensor.name)}: {value} is no scale")
        return 1 / value if inverse else float(value)
    raise invalid(
        folder.where,
        f"{shown(module)} has neither weight_scale_2 nor weight_global_scale, so it is not NVFP4",
    )
