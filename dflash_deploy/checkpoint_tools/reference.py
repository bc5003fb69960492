"""Rows of a dense output head, to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_deploy.checkpoint.files import Folder
from dflash_deploy.checkpoint.json_text import invalid
from dflash_deploy.checkpoint_tools.head import Head, read_shards

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def read_rows(checkpoint: Path, head: Head, rows: list[int]) -> npt.NDArray[np.float64]:
    """Rows of the head of that name, or of any name, in a dense checkpoint.

    Raises:
        DeployError: it has none of that shape.
    """
    folder = Folder(checkpoint)
    for shard in read_shards(folder):
        for tensor in shard.tensors:
            fits = tensor.shape == (head.rows, head.columns) and tensor.dtype in _ITEM_BYTES
            if fits and tensor.name.endswith("lm_head.weight"):
                size = head.columns * _ITEM_BYTES[tensor.dtype]
                first = shard.offsets[tensor.name]
                data = b"".join(folder.read(shard.name, first + row * size, size) for row in rows)
                if tensor.dtype == "BF16":
                    halves = np.frombuffer(data, np.uint16).astype(np.uint32)
                    values = (halves << 16).view(np.float32).astype(np.float64)
                elif tensor.dtype == "F16":
                    values = np.frombuffer(data, np.float16).astype(np.float64)
                else:
                    values = np.frombuffer(data, np.float32).astype(np.float64)
                return values.reshape(len(rows), head.columns)
    raise invalid(folder.where, f"has no dense lm_head.weight of shape {[head.rows, head.columns]}")
