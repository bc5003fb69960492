"""Small checkpoints with a real NVFP4 head, and a decoder of our own in plain arithmetic."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def write_tensors(path: Path, tensors: Tensors) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def read_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return {
        name: (one["dtype"], tuple(one["shape"]), data[8 + length :][slice(*one["data_offsets"])])
        for name, one in header.items()
        if name != "__metadata__"
    }


def random_head(rows: int, columns: int, *, seed: int = 0, inverse: bool = False) -> dict[str, Any]:
    """Tensors of a head, by the leaf of their names."""
    draw = random.Random(seed)  # noqa: S311 - data of a test
    packed = draw.randbytes(rows * columns // 2)
    # Any scale but the two that are no number.
    scales = draw.randbytes(rows * columns // 16).translate(bytes.maketrans(b"\x7f\xff", b"\x7e\xfe"))
    return {
        "weight_packed" if inverse else "weight": ("U8", (rows, columns // 2), packed),
        "weight_scale": ("F8_E4M3", (rows, columns // 16), scales),
        "weight_global_scale" if inverse else "weight_scale_2": (
            "F32",
            (1,) if inverse else (),
            struct.pack("<f", 448.0 * 6 / 3.7 if inverse else 0.000213),
        ),
        **({} if inverse else {"input_scale": ("F32", (), struct.pack("<f", 1.0))}),
    }


def write_checkpoint(
    folder: Path, *, rows: int = 96, columns: int = 64, shards: int = 2, **more: Any
) -> Path:
    """A checkpoint as ModelOpt writes it; with ``inverse`` as compressed-tensors does."""
    inverse = bool(more.get("inverse"))
    module = more.get("module", "lm_head")
    folder.mkdir(parents=True)
    head = random_head(rows, columns, inverse=inverse, seed=more.get("seed", 0))
    draw = random.Random(1)  # noqa: S311 - data of a test
    body = {
        "model.embed_tokens.weight": ("BF16", (rows, columns), draw.randbytes(rows * columns * 2)),
        "model.norm.weight": ("BF16", (columns,), draw.randbytes(columns * 2)),
    }
    last = {f"{module}.{leaf}": tensor for leaf, tensor in head.items()}
    tail = {"zz.weight": ("BF16", (columns,), draw.randbytes(columns * 2))}
    if shards == 1:
        write_tensors(folder / "model.safetensors", {**body, **last, **tail})
    else:
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        write_tensors(folder / names[0], body)
        write_tensors(folder / names[1], {**last, **tail})
        total = sum(len(data) for _, _, data in {**body, **last, **tail}.values())
        weight_map = dict.fromkeys(body, names[0]) | dict.fromkeys({**last, **tail}, names[1])
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if inverse:
        quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear", "re:.*lm_head"]}},
            "ignore": ["model.visual"],
        }
    else:
        quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]}
        layers = {module: {"quant_algo": "NVFP4"}, "model.layers.0.mlp": {"quant_algo": "NVFP4"}}
        quantization["quantized_layers"] = layers
        beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["mtp*"]}}
        beside["quantization"]["quantized_layers"] = layers  # type: ignore[assignment]
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    config = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def memory_mib_of_making_dense(folder: Path, rows: int) -> int:
    """Make a head of so many rows of Qwen3.8-27B's dense; its packed numbers are a hole in the file."""
    columns = 5120
    source, dense = folder / "source", folder / "dense"
    source.mkdir()
    sizes: dict[str, tuple[str, list[int], int]] = {
        "lm_head.weight": ("U8", [rows, columns // 2], rows * columns // 2),
        "lm_head.weight_scale": ("F8_E4M3", [rows, columns // 16], rows * columns // 16),
        "lm_head.weight_scale_2": ("F32", [], 4),
    }
    header, at = {}, 0
    for name, (dtype, shape, size) in sizes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 0.5))
    (source / "config.json").write_text("{}")
    # Not ru_maxrss, which a program inherits from the process that starts it.
    code = (
        "import re; from pathlib import Path; from dflash_deploy.cli import main\n"
        "try: main()\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    command = [sys.executable, "-c", code, "checkpoint", "dense-head", str(source), str(dense)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    more_gib = rows * columns * (2 - 1 / 2 - 1 / 16) / (1 << 30)
    assert f"{more_gib:.2f} GiB more VRAM" in done.stderr
    assert (dense / "model.safetensors").stat().st_size > rows * columns * 2
    (dense / "model.safetensors").unlink()
    return int(done.stdout.split()[-1]) >> 10


_E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3(code: int) -> Fraction:
    exponent, fraction = (code >> 3) & 15, code & 7
    size = (
        Fraction(fraction, 8) / 64
        if exponent == 0
        else Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)
    )
    return -size if code & 128 else size


def reference_row(packed: bytes, scales: bytes, global_scale: Fraction, *, low_first: bool) -> list[Fraction]:
    """A row in exact arithmetic."""
    values = []
    for place, byte in enumerate(packed):
        pair = (byte & 15, byte >> 4) if low_first else (byte >> 4, byte & 15)
        for nibble in pair:
            size = _E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
            values.append(size * e4m3(scales[place // 8]) * global_scale)
    return values


def bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


def nearest_bf16(value: Fraction) -> float:
    """The nearest number with eight significant bits, the even one of two."""
    if value == 0:
        return 0.0
    exponent = math.frexp(float(abs(value)))[1] - 1
    unit = Fraction(2) ** (max(exponent, -126) - 7)
    return float(round(value / unit) * unit)
