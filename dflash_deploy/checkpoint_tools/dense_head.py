"""A checkpoint like another one, but with its output head in BF16: the way round a selector that wants that.

Files without a part of the head are linked. Files with one are written anew without it (an engine loads every
tensor of a file, also one that the index does not name), and the dense head takes its weight's place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_deploy import __version__
from dflash_deploy.checkpoint import safetensors
from dflash_deploy.checkpoint.files import is_plain
from dflash_deploy.checkpoint.json_text import Fields, Json, invalid, shown
from dflash_deploy.checkpoint_tools import nvfp4
from dflash_deploy.checkpoint_tools.head import CONFIG, INDEX, MODELOPT, Head, Shard, Source, read_source
from dflash_deploy.checkpoint_tools.nvfp4 import Order
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.lock import exclusive

RECORD = "dflash-deploy.json"
_PROGRESS = ".progress.json"
_FORM = 1
"""Grows when the same source would give other bytes, so that no half-written file is gone on with."""

_CHUNK_BYTES = 8 << 20
_SPARE_BYTES = 64 << 20
_SAMPLED_ROWS = 64
_SAME = 0.9
"""Cosine from which two heads are the same up to FP4's error (about 0.995); a wrong order gives about 0.5."""

_IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert")

Say = Callable[[str], None]


@dataclass(frozen=True)
class DenseHead:
    """What is to be made, known before anything is written.

    Attributes:
        order: of two numbers in a byte.
        cosine: with the dense head that it was compared with, None where there was none.
        written: bytes of each file that is written anew.
    """

    source: Source
    order: Order
    cosine: float | None
    written: tuple[tuple[str, int], ...]

    @property
    def written_bytes(self) -> int:
        """Of all files that are written."""
        return sum(size for _, size in self.written)

    @property
    def more_vram_bytes(self) -> int:
        """What the head takes more on the card, exactly."""
        return self.source.head.dense_bytes - self.source.head.packed_bytes

    def as_json(self) -> dict[str, object]:
        """The keys that docs/json.md describes."""
        head = self.source.head
        return {
            "source": self.source.folder.where,
            "module": head.module,
            "shape": [head.rows, head.columns],
            "nibble_order": self.order,
            "cosine": self.cosine,
            "written": [{"file": name, "bytes": size} for name, size in self.written],
            "linked": sum(1 for shard in self.source.shards if shard not in self.source.touched),
            "more_vram_mib": round(self.more_vram_bytes / (1 << 20), 1),
            "kind": "predicted",
        }


def look(source: Path, *, order: Order | None = None, reference: Path | None = None) -> DenseHead:
    """Read a checkpoint, and say what would be made of it.

    Args:
        source: its folder.
        order: of two numbers in a byte; None for what the packers do, or what the reference tells.
        reference: folder of a checkpoint with the same head, dense, to compare with.

    Raises:
        DeployError: its head is not in NVFP4, or is not the reference's.
    """
    found = read_source(source)
    cosine = None
    if reference is not None:
        orders: tuple[Order, ...] = (order,) if order else ("low-first", "high-first")
        likeness = _compare(found, reference, orders)
        cosine, order = max((likeness[one], one) for one in orders)
        if not cosine >= _SAME:
            raise invalid(
                found.folder.where,
                f"its head is not the one of {reference}: cosine {cosine:.3f} in the order {order}",
                fix="give the checkpoint that it was quantised from, and its vocabulary",
            )
    written = tuple(
        (shard.name, len(_header(found, shard)) + _data_bytes(found, shard)) for shard in found.touched
    )
    return DenseHead(found, order or "low-first", cosine, written)


def make(plan: DenseHead, destination: Path, *, say: Say, save_every_bytes: int = 256 << 20) -> None:
    """Write the new checkpoint; one that was cut short is gone on with.

    Args:
        plan: from ``look``.
        destination: folder that is not there yet.
        say: told each step.
        save_every_bytes: how much is written anew at most after being cut short.

    Raises:
        DeployError: something stands there, the disk is full, or the source is damaged.
    """
    destination = destination.absolute()
    if os.path.lexists(destination):
        raise DeployError(
            f"{destination} is there already",
            fix="give another folder, or delete it first",
            exit_code=ExitCode.UNAVAILABLE,
        )
    half = destination.with_name(f".{destination.name}.making")
    try:
        _begin_folder(half)
        with _alone(half):
            done = _begin(plan, half)
            free, needed = shutil.disk_usage(half).free, plan.written_bytes - sum(done.values())
            if free < needed + _SPARE_BYTES:
                raise DeployError(
                    f"{half.parent} has {safetensors.size_text(free)} free (measured), and "
                    f"{safetensors.size_text(needed)} are needed",
                    fix="give a folder on a larger disk",
                    exit_code=ExitCode.UNAVAILABLE,
                )
            work = _Work(plan, half, done, say, save_every_bytes)
            for shard in plan.source.touched:
                work.write(shard)
            _write_json(plan, half)
            linked = _link(plan.source, half, say)
            _check(plan, half)
            half.rename(destination)
            (destination / _PROGRESS).unlink()
    except OSError as error:
        raise _told(error, half) from error
    say(
        f"made {destination}: {len(plan.written)} file(s) written, {linked} linked; the head takes "
        f"{plan.more_vram_bytes / (1 << 30):.2f} GiB more VRAM (predicted)"
    )


def _compare(source: Source, reference: Path, orders: tuple[Order, ...]) -> dict[Order, float]:
    """Cosine of sampled rows with those of a dense head, by order."""
    from dflash_deploy.checkpoint_tools.reference import read_rows  # noqa: PLC0415 - seldom wanted

    head = source.head
    rows = np.unique(np.linspace(0, head.rows - 1, _SAMPLED_ROWS).astype(int))
    dense = read_rows(reference, head, [int(row) for row in rows])
    likeness: dict[Order, float] = {}
    for order in orders:
        table = nvfp4.decoding_table(head.global_scale, order)
        ours = np.concatenate([_rows(source, int(row), 1, table) for row in rows]).astype(np.float64)
        norm = float(np.linalg.norm(ours) * np.linalg.norm(dense))
        likeness[order] = float((ours * dense).sum()) / norm if norm else 0.0
    return likeness


def _rows(source: Source, first: int, count: int, table: nvfp4.Table) -> np.typing.NDArray[np.float32]:
    return nvfp4.from_bf16(_decoded(source, first, count, table))


def _decoded(source: Source, first: int, count: int, table: nvfp4.Table) -> np.typing.NDArray[np.uint32]:
    head = source.head
    packed = _read_rows(source, head.weight.name, first, count, head.columns // 2)
    scales = _read_rows(source, head.scale.name, first, count, head.columns // nvfp4.BLOCK)
    if nvfp4.has_no_number(scales):
        raise invalid(
            source.folder.where,
            f"{shown(head.scale.name)}: a scale in rows {first:,} to {first + count:,} is not a number",
            fix="download the checkpoint again",
        )
    return nvfp4.decode(packed, scales, table)


def _read_rows(source: Source, name: str, first: int, count: int, row_bytes: int) -> nvfp4.Bytes:
    shard = source.shard_of(name)
    data = source.folder.read(shard.name, shard.offsets[name] + first * row_bytes, count * row_bytes)
    if len(data) != count * row_bytes:
        raise invalid(f"{source.folder.where}/{shard.name}", "became shorter while it was read")
    return np.frombuffer(data, np.uint8).reshape(count, row_bytes)


def _pieces(source: Source, shard: Shard) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Tensors of a file as it will be: name, dtype, shape, bytes."""
    head = source.head
    pieces: list[tuple[str, str, tuple[int, ...], int]] = []
    for tensor in shard.tensors:
        if tensor.name == head.weight.name:
            pieces.append((f"{head.module}.weight", "BF16", (head.rows, head.columns), head.dense_bytes))
        elif tensor.name not in head.parts:
            pieces.append((tensor.name, tensor.dtype, tensor.shape, tensor.stored_bytes))
    return pieces


def _data_bytes(source: Source, shard: Shard) -> int:
    return sum(size for _, _, _, size in _pieces(source, shard))


def _header(source: Source, shard: Shard) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(shard.metadata)} if shard.metadata else {}
    at = 0
    for name, dtype, shape, size in _pieces(source, shard):
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _content(plan: DenseHead, shard: Shard, start: int) -> Iterator[bytes]:
    """Bytes of a file as it will be, from ``start`` on, in pieces of a few MiB."""
    source, head = plan.source, plan.source.head
    header = _header(source, shard)
    if start < len(header):
        yield header[start:]
    at = len(header)
    for name, _, _, size in _pieces(source, shard):
        skip = min(max(start - at, 0), size)
        at += size
        if skip == size:
            continue
        if name == f"{head.module}.weight":
            yield from _dense(plan, skip)
            continue
        offset = shard.offsets[name] + skip
        left = size - skip
        while left:
            chunk = source.folder.read(shard.name, offset, min(left, _CHUNK_BYTES))
            if not chunk:
                raise invalid(f"{source.folder.where}/{shard.name}", "became shorter while it was read")
            yield chunk
            offset += len(chunk)
            left -= len(chunk)


def _dense(plan: DenseHead, skip: int) -> Iterator[bytes]:
    head = plan.source.head
    table = nvfp4.decoding_table(head.global_scale, plan.order)
    row_bytes = head.columns * 2
    row, within = divmod(skip, row_bytes)
    at_once = max(1, _CHUNK_BYTES // row_bytes)
    while row < head.rows:
        count = min(at_once, head.rows - row)
        yield _decoded(plan.source, row, count, table).tobytes()[within:]
        row, within = row + count, 0


@dataclass(frozen=True)
class _Work:
    """Files being written, and how much of each is safely on the disk."""

    plan: DenseHead
    folder: Path
    done: dict[str, int]
    say: Say
    save_every_bytes: int

    def write(self, shard: Shard) -> None:
        size = dict(self.plan.written)[shard.name]
        written = self.done.get(shard.name, 0)
        if written == size:
            return
        again = f", going on at {safetensors.size_text(written)}" if written else ""
        self.say(f"writing {shard.name}, {safetensors.size_text(size)}{again}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(self.folder / shard.name, flags, 0o644), "r+b", buffering=0) as file:
            file.truncate(written)
            file.seek(written)
            saved = written
            for chunk in _content(self.plan, shard, written):
                _write_all(file.fileno(), chunk)
                written += len(chunk)
                if written - saved >= self.save_every_bytes:
                    self._save(file.fileno(), shard.name, written)
                    saved = written
                    self.say(f"  {safetensors.size_text(written)} of {safetensors.size_text(size)}")
            self._save(file.fileno(), shard.name, written)

    def _save(self, descriptor: int, name: str, written: int) -> None:
        # The bytes are on the disk before it is written down that they are.
        os.fsync(descriptor)
        self.done[name] = written
        _save_progress(self.plan, self.folder, self.done)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _begin_folder(half: Path) -> None:
    """A folder of ours for what is half-made: new, or left by a making that was cut short.

    Raises:
        DeployError: something else has that name, or somebody else put it there.
    """
    half.parent.mkdir(parents=True, exist_ok=True)
    try:
        half.mkdir()
    except FileExistsError:
        about = half.lstat()
        ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        names = [path.name for path in half.iterdir()] if ours else []
        if ours and (_PROGRESS in names or all(name.startswith(f".{_PROGRESS}.") for name in names)):
            return
        raise DeployError(
            f"{half} is there and was not made by this tool; it is left alone",
            fix="move it away, or give another folder",
            exit_code=ExitCode.UNAVAILABLE,
        ) from None


def _begin(plan: DenseHead, half: Path) -> dict[str, int]:
    """How much of each file was written of exactly this plan; everything else goes."""
    done = _progress(plan, half)
    for leftover in half.iterdir():
        # The note of progress says that the folder is ours, also when this is cut short.
        if leftover.name not in done and leftover.name != _PROGRESS:
            leftover.unlink()
    _save_progress(plan, half, done)
    return done


def _progress(plan: DenseHead, half: Path) -> dict[str, int]:
    try:
        told = json.loads(read_regular(half / _PROGRESS, most_bytes=1 << 20))
        if told["key"] == _key(plan):
            sizes = dict(plan.written)
            return {
                name: int(size)
                for name, size in told["done"].items()
                if name in sizes and 0 <= int(size) <= min(sizes[name], (half / name).stat().st_size)
            }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return {}


def _save_progress(plan: DenseHead, half: Path, done: dict[str, int]) -> None:
    write_atomic(half / _PROGRESS, json.dumps({"key": _key(plan), "done": done}))


def _key(plan: DenseHead) -> str:
    source = plan.source
    about = [
        _FORM,
        str(source.folder.path.resolve()),
        plan.order,
        [
            (shard.name, shard.file_bytes, (source.folder.path / shard.name).stat().st_mtime_ns)
            for shard in source.touched
        ],
        [hashlib.sha256(shard.header).hexdigest() for shard in source.touched],
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _write_json(plan: DenseHead, half: Path) -> None:
    source, head = plan.source, plan.source.head
    write_atomic(half / CONFIG, _dumped(_without_head(source.config, head)))
    if source.modelopt is not None:
        write_atomic(half / MODELOPT, _dumped(_without_head(source.modelopt, head)))
    if source.index is not None:
        write_atomic(half / INDEX, _dumped(_new_index(plan, source.index)))
    write_atomic(half / RECORD, _dumped({"made_by": __version__, "dense_head": plan.as_json()}))  # type: ignore[dict-item]


def _dumped(document: dict[str, Json]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def _new_index(plan: DenseHead, index: Fields) -> dict[str, Json]:
    head = plan.source.head
    document = dict(index.values)
    mapped = index.inner("weight_map")
    weights = {
        name: file for name, file in (mapped.values if mapped else {}).items() if name not in head.parts
    }
    weights[f"{head.module}.weight"] = plan.source.shard_of(head.weight.name).name
    document["weight_map"] = weights
    metadata = index.inner("metadata")
    total = metadata.whole("total_size", least=0, most=1 << 50) if metadata else None
    if metadata is not None and total is not None:
        tensors = (tensor for shard in plan.source.shards for tensor in shard.tensors)
        gone = sum(tensor.stored_bytes for tensor in tensors if tensor.name in head.parts)
        document["metadata"] = {**metadata.values, "total_size": total - gone + head.dense_bytes}
    return document


def _without_head(config: Fields, head: Head) -> dict[str, Json]:
    """The same configuration, with the head left out of what is quantised."""
    document = dict(config.values)
    for key in ("quantization_config", "compression_config", "quantization"):
        declared = config.inner(key)
        if declared is not None:
            document[key] = _excluded(
                declared, head, default="exclude_modules" if key == "quantization" else "ignore"
            )
    text = config.inner("text_config")
    if text is not None:
        document["text_config"] = _without_head(text, head)
    return document


def _excluded(declared: Fields, head: Head, *, default: str) -> dict[str, Json]:
    section = dict(declared.values)
    key = next((one for one in _IGNORED if isinstance(section.get(one), list)), default)
    names = list(declared.texts(key) or ())
    # An engine may call the head of a model with vision by its last name alone.
    own = dict.fromkeys((head.module, head.module.rpartition(".")[2]))
    names += [name for name in own if name not in names]
    section[key] = list[Json](names)
    layers = declared.inner("quantized_layers")
    if layers is not None:
        section["quantized_layers"] = {
            name: value for name, value in layers.values.items() if name not in own
        }
    return section


def _link(source: Source, half: Path, say: Say) -> int:
    """The other files: hard links where that can be, so that the new folder stands when the old one goes."""
    made = 0
    ours = {shard.name for shard in source.touched} | {CONFIG, MODELOPT, INDEX, RECORD, _PROGRESS}
    for name in source.folder.names():
        real = (source.folder.path / name).resolve()
        if name in ours or not is_plain(name) or not real.is_file():
            if name not in ours:
                say(f"left out: {shown(name)}")
            continue
        place = half / name
        place.unlink(missing_ok=True)
        try:
            place.hardlink_to(real)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.ENOTSUP):
                raise
            place.symlink_to(real)
        made += 1
    return made


def _check(plan: DenseHead, half: Path) -> None:
    """What was written reads as it should: headers, and rows of the head decoded once more."""
    for name, size in plan.written:
        with (half / name).open("rb") as file:
            length = safetensors.header_length(file.read(8), size, str(half / name))
            tensors = safetensors.parse_header(
                file.read(length), os.fstat(file.fileno()).st_size, str(half / name)
            )
            at = 8 + length
            for tensor in tensors:
                if tensor.name == f"{plan.source.head.module}.weight":
                    _check_rows(plan, file.fileno(), at, half / name)
                at += tensor.stored_bytes


def _check_rows(plan: DenseHead, descriptor: int, at: int, path: Path) -> None:
    head = plan.source.head
    table = nvfp4.decoding_table(head.global_scale, plan.order)
    for row in (0, head.rows // 2, head.rows - 1):
        found = os.pread(descriptor, head.columns * 2, at + row * head.columns * 2)
        if found != _decoded(plan.source, row, 1, table).tobytes():
            raise DeployError(
                f"{path}: row {row:,} of the head is not what was written",
                fix=f"rm -r {shlex.quote(str(path.parent))}, then run it again",
            )


@contextmanager
def _alone(half: Path) -> Iterator[None]:
    descriptor = os.open(half, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    busy = DeployError(
        f"{half} is being written by another process",
        fix="wait until that has ended",
        exit_code=ExitCode.UNAVAILABLE,
    )
    with exclusive(descriptor, busy=busy):
        yield


def _told(error: OSError, half: Path) -> DeployError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DeployError(
        f"{error.filename or half}: {'the disk is full' if full else error.strerror or error}",
        fix="free some space and run it again: it goes on where it was" if full else None,
        exit_code=ExitCode.UNAVAILABLE,
    )
