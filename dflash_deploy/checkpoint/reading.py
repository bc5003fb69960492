"""Reading a checkpoint: which files, in what order, and what is said of them."""

from __future__ import annotations

import errno
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint import hub_cache, json_text, safetensors
from dflash_deploy.checkpoint.cards import find_model_card, load_model_card, model_ids
from dflash_deploy.checkpoint.draft import Draft, read_draft
from dflash_deploy.checkpoint.facts import Checkpoint
from dflash_deploy.checkpoint.files import Files, Folder, is_plain, read_whole
from dflash_deploy.checkpoint.json_text import Fields, invalid, shown
from dflash_deploy.checkpoint.quantization import Quantization, read_quantization
from dflash_deploy.checkpoint.safetensors import Tensor, size_text
from dflash_deploy.checkpoint.shape import Shape, read_shape
from dflash_deploy.checkpoint.weights import Group, Load, Weights, sum_weights
from dflash_deploy.errors import DeployError, ExitCode

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_MODELOPT = "hf_quant_config.json"
_TOKENIZER = "tokenizer_config.json"
_MAX_JSON_BYTES = 16 << 20
_MAX_JSON_VALUES = 1_000_000
_MAX_INDEX_BYTES = 128 << 20
_MAX_SHARDS = 2000
_MAX_TENSORS = 1_000_000
_NOT_LOADED = {
    Group.LM_HEAD: "it is tied to the embedding",
    Group.EMBEDDING: "the target's is used",
    Group.VISION: "the configuration is of a text model",
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_PICKLES = re.compile(r"\.(?:bin|pt|pth|ckpt|pkl)$")


def read_checkpoint(
    path_or_name: str | Path, *, revision: str | None = None, offline: bool | None = None
) -> Checkpoint:
    """Facts of a checkpoint, from its configuration and the headers of its weights.

    A folder is read in place. A hub name (or the id of a known model) is looked for in the Hugging Face
    cache, then on the hub. Nothing is written, no weight is read, nothing of the checkpoint is run.

    Args:
        path_or_name: folder, hub name, or id of a known model.
        revision: branch, tag or commit on the hub; None for its main branch.
        offline: never ask the hub; None follows ``HF_HUB_OFFLINE``.

    Raises:
        DeployError: not there (MISSING), not to be had now (UNAVAILABLE), or wrong (INVALID_INPUT).
    """
    asked = str(path_or_name)
    if "\0" in asked or not asked.strip():
        raise DeployError("expected a folder or a hub name of a checkpoint", exit_code=ExitCode.USAGE)
    place = Path(os.path.expanduser(asked))  # noqa: PTH111 - Path.expanduser fails for users it does not know
    mode = _mode(place)
    if mode is not None and stat.S_ISDIR(mode):
        return _read(Folder(place), asked, hub_name=None, commit=None)
    if mode is not None:
        raise _not_a_folder(place)
    name = asked
    if asked in model_ids():
        name = load_model_card(asked).path or asked
    if not hub_cache.is_hub_name(name) or isinstance(path_or_name, Path):
        raise DeployError(f"{shown(asked)}: no such folder", exit_code=ExitCode.MISSING)
    if revision is not None and not hub_cache.is_revision(revision):
        raise DeployError(f"{shown(revision)!r} is no branch, tag or commit", exit_code=ExitCode.USAGE)
    return _read_named(name, revision, offline=_is_offline() if offline is None else offline)


def _read_named(name: str, revision: str | None, *, offline: bool) -> Checkpoint:
    snapshot = hub_cache.find_snapshot(name, revision)
    in_cache: DeployError | None = None
    if snapshot is not None:
        try:
            folder = Folder(snapshot.path, repair=hub_cache.how_to_get(name))
            return _read(folder, name, hub_name=name, commit=snapshot.commit)
        except DeployError as error:
            # A download that was broken off leaves a snapshot without some of its files.
            if offline or error.exit_code is not ExitCode.MISSING:
                raise
            in_cache = error
    if offline:
        raise _not_here(name, revision)
    from dflash_deploy.checkpoint import hub  # noqa: PLC0415 - its HTTP client takes long to import, cards need none

    with ExitStack() as opened:
        try:
            files = opened.enter_context(hub.open_repository(name, revision))
        except DeployError as error:
            raise in_cache or _with_card(error, name) from error
        return _read(files, name, hub_name=name, commit=files.commit)


def _not_here(name: str, revision: str | None) -> DeployError:
    of = f" (revision {shown(revision)})" if revision else ""
    error = DeployError(
        f"{name}{of} is neither a folder nor in the Hugging Face cache {hub_cache.cache_dir()}, and "
        "offline the hub is not asked",
        fix=hub_cache.how_to_get(name),
        exit_code=ExitCode.MISSING,
    )
    return _with_card(error, name)


def _with_card(error: DeployError, name: str) -> DeployError:
    """The error, with the known model that could be planned with instead."""
    card = find_model_card(name)
    if card is None:
        return error
    fix = (
        f"plan with the shipped card {card.id}, or {error.fix}"
        if error.fix
        else f"use the shipped card {card.id}"
    )
    return DeployError(error.message, fix=fix, exit_code=error.exit_code)


def _not_a_folder(path: Path) -> DeployError:
    if path.suffix.casefold() == ".gguf":
        what, fix = "a GGUF file; only safetensors checkpoints are read", "use the safetensors checkpoint"
    else:
        what, fix = "a file; a checkpoint is a folder", f"give {path.parent}"
    return DeployError(f"{path}: is {what}", fix=fix, exit_code=ExitCode.INVALID_INPUT)


def _mode(path: Path) -> int | None:
    """Kind of what lies at a path, None for nothing."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP):
            raise DeployError(
                f"{path}: cannot be read: {error.strerror}", exit_code=ExitCode.UNAVAILABLE
            ) from error
        return None


def _is_offline() -> bool:
    return any(
        os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _read(files: Files, name: str, *, hub_name: str | None, commit: str | None) -> Checkpoint:
    names = files.names()
    if CONFIG not in names:
        raise _no_config(files, names)
    config = _json_file(files, CONFIG)
    modelopt = _json_file(files, _MODELOPT) if _MODELOPT in names else None
    draft = read_draft(config)
    shape = read_shape(config)
    quantization = read_quantization(config, modelopt)
    index = None
    if INDEX in names:
        index = _json_file(files, INDEX, most_bytes=_MAX_INDEX_BYTES, most_values=4 * _MAX_TENSORS)
    shards, left_out = _shards(files, names, index)
    tensors, disk_bytes, doubled = _read_headers(files, shards)
    if index is not None:
        _check_index(files, index, tensors)
    weights = sum_weights([tensor for tensor, _ in tensors.values()], shape, draft, quantization)
    notes = (
        *(f"{shown(file)} is not in the index and is not loaded" for file in left_out),
        *(f"tensors given by more than one file: {count:,}" for count in (doubled,) if count),
        *_notes(config, weights, draft, quantization),
    )
    return Checkpoint(
        name=name,
        place=f"{files.where}"
        if commit is None or hub_name is None
        else f"{hub_name}@{commit[:8]} ({_kind(files)})",
        hub_name=hub_name,
        commit=commit,
        shape=shape,
        quantization=quantization,
        weights=weights,
        files=shards,
        disk_bytes=disk_bytes,
        tokenizer_tokens=_tokenizer_tokens(files) if _TOKENIZER in names else None,
        draft=draft,
        notes=notes,
        unknown=tuple(_unknown(shape, weights, tensors)),
    )


def _kind(files: Files) -> str:
    return "cache" if isinstance(files, Folder) else "hub"


def _json_file(
    files: Files, name: str, *, most_bytes: int = _MAX_JSON_BYTES, most_values: int = _MAX_JSON_VALUES
) -> Fields:
    source = f"{files.where}/{name}"
    data = read_whole(files, name, most=most_bytes)
    return Fields(json_text.parse_object(data, source, max_values=most_values), source)


def _no_config(files: Files, names: tuple[str, ...]) -> DeployError:
    if any(name.endswith(".gguf") for name in names):
        what = "holds GGUF files; only safetensors checkpoints are read"
        return DeployError(
            f"{files.where}: {what}", fix="use the safetensors checkpoint", exit_code=ExitCode.INVALID_INPUT
        )
    fix = files.repair if isinstance(files, Folder) else None
    return DeployError(
        f"{files.where}: is no checkpoint: it has no {CONFIG}",
        fix=fix or "give the folder with config.json and the safetensors files",
        exit_code=ExitCode.MISSING,
    )


def _shards(
    files: Files, names: tuple[str, ...], index: Fields | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files with weights that the engine loads, and those that it leaves out."""
    present = tuple(name for name in names if name.endswith(".safetensors"))
    if index is not None:
        weight_map = index.inner("weight_map")
        if weight_map is None or not weight_map.values:
            raise invalid(index.source, "weight_map: expected a file for each tensor, found none")
        named: set[str] = set()
        for tensor, file in weight_map.values.items():
            if not isinstance(file, str) or not is_plain(file) or not file.endswith(".safetensors"):
                raise weight_map.wrong(
                    shown(tensor), "expected the name of a safetensors file beside it", file
                )
            named.add(file)
        chosen = tuple(sorted(named))
    else:
        whole = tuple(name for name in present if not name.startswith("consolidated"))
        chosen = whole or present
    if not chosen:
        raise _no_weights(files, names)
    if len(chosen) > _MAX_SHARDS:
        raise invalid(files.where, f"has more than {_MAX_SHARDS:,} files with weights")
    return chosen, tuple(name for name in present if name not in chosen)


def _no_weights(files: Files, names: tuple[str, ...]) -> DeployError:
    if any(_PICKLES.search(name) for name in names):
        return DeployError(
            f"{files.where}: has its weights only as pickles (.bin, .pt), which can run code: not opened",
            fix="convert it to safetensors, or use a safetensors export",
            exit_code=ExitCode.INVALID_INPUT,
        )
    fix = files.repair if isinstance(files, Folder) else None
    return DeployError(f"{files.where}: has no safetensors files", fix=fix, exit_code=ExitCode.MISSING)


@dataclass(frozen=True)
class _Shard:
    file: str
    file_bytes: int
    tensors: tuple[Tensor, ...]


def _read_headers(files: Files, shards: tuple[str, ...]) -> tuple[dict[str, tuple[Tensor, str]], int, int]:
    """Tensors by name with their file, bytes of all files, and how many names were given twice."""
    found: dict[str, tuple[Tensor, str]] = {}
    disk_bytes = given = 0
    at_once = files.parallel_reads
    with ThreadPoolExecutor(at_once) as pool:
        # A few files at a time: so the limit on tensors holds before all of them are in memory.
        for first in range(0, len(shards), at_once):
            for shard in pool.map(lambda file: _read_shard(files, file), shards[first : first + at_once]):
                disk_bytes += shard.file_bytes
                given += len(shard.tensors)
                if given > _MAX_TENSORS:
                    raise invalid(files.where, f"has more than {_MAX_TENSORS:,} tensors")
                found |= {tensor.name: (tensor, shard.file) for tensor in shard.tensors}
    return found, disk_bytes, given - len(found)


def _read_shard(files: Files, file: str) -> _Shard:
    source = f"{files.where}/{file}"
    size = files.size(file)
    length = safetensors.header_length(files.read(file, 0, safetensors.LENGTH_BYTES), size, source)
    header = files.read(file, safetensors.LENGTH_BYTES, length)
    if len(header) < length:
        raise invalid(source, "became shorter while it was read")
    return _Shard(file, size, safetensors.parse_header(header, size, source))


def _check_index(files: Files, index: Fields, tensors: dict[str, tuple[Tensor, str]]) -> None:
    weight_map = index.inner("weight_map")
    for tensor, file in weight_map.values.items() if weight_map else ():
        if tensor not in tensors:
            raise invalid(
                index.source,
                f"names {shown(tensor)!r} in {shown(str(file))}, which does not hold it",
                fix=files.repair
                if isinstance(files, Folder) and files.repair
                else "download the checkpoint again",
            )


def _tokenizer_tokens(files: Files) -> int | None:
    """Tokens up to the last that was added; added tokens stand behind the vocabulary."""
    added = _json_file(files, _TOKENIZER).inner("added_tokens_decoder")
    ids = [int(key) for key in added.values if re.fullmatch(r"[0-9]{1,9}", key)] if added else []
    return max(ids) + 1 if ids else None


def _notes(
    config: Fields,
    weights: tuple[Weights, ...],
    draft: Draft | None,
    quantization: Quantization | None,
) -> list[str]:
    notes = []
    groups = {row.group for row in weights}
    if config.values.get("auto_map") is not None:
        notes.append(
            "auto_map names code of its own; it is not run here, and the engine runs it only if trusted"
        )
    seen = sum(row.loaded_bytes for row in weights if row.group is Group.VISION)
    if seen:
        size = size_text(seen)
        notes.append(f"the vision tower is {size}; serving text only leaves it out")
    if Group.MTP in groups and draft is None:
        size = size_text(sum(row.loaded_bytes for row in weights if row.group is Group.MTP))
        notes.append(f"the MTP head is {size}; it loads as the draft, and not without MTP speculation")
    for row in weights:
        if row.load is Load.NEVER and row.group in _NOT_LOADED:
            why = "the target's is used" if draft else _NOT_LOADED[row.group]
            notes.append(f"the {row.group} in the files ({size_text(row.stored_bytes)}) is not loaded: {why}")
    if draft is None and Group.LM_HEAD not in groups and Group.EMBEDDING in groups:
        notes.append("the output head is the embedding (tied)")
    if quantization and quantization.ignored_kv_cache_dtype:
        notes.append(
            f"asks for a {quantization.ignored_kv_cache_dtype} KV cache, which the engine's auto does not "
            "follow here: give kv-cache-dtype"
        )
    if draft is not None and not draft.block_stated and draft.method in ("dflash", "dspark"):
        notes.append(f"does not tell its block size; {draft.block_size} is the engine's default")
    return notes


def _unknown(shape: Shape, weights: tuple[Weights, ...], tensors: dict[str, tuple[Tensor, str]]) -> list[str]:
    unknown = list(shape.unknown)
    other = sum(row.loaded_bytes for row in weights if row.group is Group.OTHER)
    if other:
        unknown.append(f"what {size_text(other)} of tensors are for: counted as loaded and read")
    for name, (tensor, _) in tensors.items():
        if name.endswith("embed_tokens.weight") and ".mtp" not in name and not name.startswith("mtp"):
            rows = tensor.shape[0] if tensor.shape else 0
            if rows != shape.vocab_size:
                unknown.append(
                    f"which is right: config.json has {shape.vocab_size:,} tokens, {shown(name)} has {rows:,}"
                )
            break
    return unknown
