"""Checks of a profile's checkpoints: are they here, are they whole, do they belong together."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from dflash_deploy.checkpoint import Checkpoint, mismatches
from dflash_deploy.checkpoint.cards import ModelCard, doubt_of
from dflash_deploy.checkpoint.hub_cache import find_snapshot, how_to_get, is_hub_name
from dflash_deploy.doctor import hashes
from dflash_deploy.doctor.finding import Answer, NotCheckedError, failed, passed, unknown, warned
from dflash_deploy.doctor.subject import Model, Subject
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 128 << 20
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_NAMED = 6
_BEGINNING_BYTES = 256


def target(subject: Subject) -> Answer | None:
    """The target's checkpoint is on this machine and can be read."""
    wanted = subject.target()
    if wanted is not None and wanted.is_nowhere:
        return failed(
            f"{wanted.place} is a model that everyone makes for themselves: it is not said where yours is",
            f"{subject.request.command} --set model.path=/path/to/model   (and in the profile)",
        )
    return _here(wanted)


def draft(subject: Subject) -> Answer | None:
    """The draft's checkpoint is on this machine and can be read."""
    if subject.profile is not None and subject.profile.speculation.method in ("dflash", "dspark"):
        found = subject.draft()
        if found is None:
            return failed(
                f"the profile drafts with {subject.profile.speculation.method}, and names no draft",
                f"{subject.request.command} --set speculation.draft=…   (and in the profile)",
            )
        return _here(found)
    return None


def whole(subject: Subject) -> Answer | None:
    """Every file that the index names is there in its full size, and so is a tokenizer."""
    models = _read(subject)
    if not models:
        return None
    unread = [
        one for one in (subject.target(), subject.draft()) if one is not None and one.problem is not None
    ]
    if any(not _absent(one) for one in unread):
        raise NotCheckedError("draft" if unread[0] is subject.draft() else "target")
    for model, checkpoint in models:
        folder = folder_of(model, checkpoint)
        wrong = _short(folder, checkpoint)
        if wrong is not None:
            return failed(f"{folder}: {wrong}", _again(model), str(folder))
        if checkpoint.draft is None and (bad := _tokenizer_problem(folder)) is not None:
            return failed(f"{folder}: {bad}", _again(model), str(folder))
    unfinished = [place for model, _ in models for place in _unfinished(model)]
    if unfinished:
        return warned(
            f"a download was broken off: {', '.join(unfinished[:_NAMED])}",
            "; ".join(how_to_get(model.place) for model, _ in models if not model.is_folder),
        )
    told = ", ".join(
        f"{model.place}: {len(found.files)} file{'s' if len(found.files) > 1 else ''}, "
        f"{found.disk_bytes:,} bytes"
        for model, found in models
    )
    return passed(told, "config.json, the index, and the header and size of every file")


def content(subject: Subject) -> Answer | None:
    """Every byte is as it was published. It reads the whole checkpoint, so only when asked."""
    if not subject.request.hashes:
        return None
    models = _read(subject)
    if not models:
        return unknown("no checkpoint of the profile is on this machine")
    wrong: list[str] = []
    bare: list[str] = []
    checked = 0
    for model, checkpoint in models:
        folder = folder_of(model, checkpoint)
        for one in hashes.verify(folder, (*checkpoint.files, "config.json", *_TOKENIZERS)):
            if one.same is None:
                bare.append(f"{folder / one.name}")
            elif one.same:
                checked += 1
            else:
                wrong.append(f"{folder / one.name}")
    if wrong:
        again = "; ".join(f"rm {shlex.quote(path)}" for path in wrong[:_NAMED])
        downloads = "; ".join(dict.fromkeys(_again(model) for model, _ in models))
        return failed(
            f"damaged, other bytes than were published: {', '.join(wrong[:_NAMED])}", f"{again}; {downloads}"
        )
    if bare:
        return unknown(
            f"{checked} files are as published; no digest is recorded here for {', '.join(bare[:_NAMED])}",
            "hf download OWNER/NAME --local-dir FOLDER   (it records one for each file)",
        )
    return passed(f"{checked} files are as published", "SHA-256 that the hub named when they were downloaded")


def belong_together(subject: Subject) -> Answer | None:
    """The draft is made for this target: vocabulary, hidden size, layers that it reads."""
    one, other = subject.target(), subject.draft()
    if one is None or other is None:
        return None
    if any(model.problem is not None and not _absent(model) for model in (one, other)):
        raise NotCheckedError("draft" if one.checkpoint is not None else "target")
    fix = "choose a draft of this target: dflash-deploy profile show NAME, speculation.draft"
    if one.checkpoint is not None and other.checkpoint is not None:
        found = mismatches(one.checkpoint, other.checkpoint)
        if found:
            return failed("; ".join(found), fix, other.place)
        return passed(f"{other.place} is for {one.place}", "both configurations")
    if one.card is None or other.card is None:
        return unknown("not checked: a checkpoint is not here, and is none of the known ones")
    differ = _cards_differ(one.card, other.card)
    if differ:
        return failed("; ".join(differ), fix, f"cards {one.card.id}, {other.card.id}")
    return passed(f"{other.card.id} is for {one.card.id}", "their cards; the files are not on this machine")


def folder_of(model: Model, checkpoint: Checkpoint) -> Path:
    """Where a checkpoint's files lie."""
    if model.is_folder or checkpoint.hub_name is None:
        return Path(model.place).expanduser().absolute()
    snapshot = find_snapshot(checkpoint.hub_name, checkpoint.commit)
    if snapshot is None:
        raise DeployError(f"{checkpoint.hub_name} is not in the cache any more", exit_code=ExitCode.MISSING)
    return snapshot.path


def _here(model: Model | None) -> Answer | None:
    if model is None:
        return None
    if model.checkpoint is not None:
        notes = tuple(model.checkpoint.unknown)
        return passed(f"{model.checkpoint.name}: {model.checkpoint.place}", *notes)
    problem = model.problem
    text = problem.message if problem else "it cannot be read"
    if problem is not None and problem.exit_code is ExitCode.MISSING and _absent(model):
        size = f" ({model.card.disk_bytes / 1e9:.1f} GB)" if model.card and model.card.disk_bytes else ""
        doubt = doubt_of(model.place)
        return warned(
            f"{model.place} is not on this machine yet{size}: the first start would download it"
            + (f"; {doubt}" if doubt else ""),
            f"hf download {model.place}",
        )
    if (refusal := _refusal(problem)) is not None:
        # To download it again would not help whoever may not read it.
        place = refusal.filename or model.place
        return failed(
            text, f"ls -ldL {shlex.quote(str(place))}; run this as its owner, or open it: chmod a+rX"
        )
    return failed(text, _anew(model, problem))


def _anew(model: Model, problem: DeployError | None) -> str:
    """The file that is damaged, where it is one: the hub's client takes it for whole, and would leave it."""
    fix = problem.fix if problem else None
    damaged = Path(problem.message.partition(": ")[0]).name if problem else ""
    if fix is None or "again" not in fix:
        return fix or _again(model)
    if not damaged.endswith((".safetensors", ".json")):
        return f"{fix}; {_again(model)}"
    return f"{_again(model)} --include {shlex.quote(damaged)} --force-download"


def _refusal(error: BaseException | None) -> PermissionError | None:
    """The refusal that an error goes back to."""
    while error is not None and not isinstance(error, PermissionError):
        error = error.__cause__
    return error


def _absent(model: Model) -> bool:
    """Nothing of it is in the cache; what is there in part is another thing."""
    return not model.is_folder and find_snapshot(model.place, None) is None


def _read(subject: Subject) -> list[tuple[Model, Checkpoint]]:
    models = (subject.target(), subject.draft())
    return [(one, one.checkpoint) for one in models if one is not None and one.checkpoint is not None]


def _short(folder: Path, checkpoint: Checkpoint) -> str | None:
    """How the index disagrees with the files; that each file is as long as its header says was checked."""
    index = folder / _INDEX
    try:
        with index.open("rb") as file:
            document = json.loads(file.read(_MAX_INDEX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{_INDEX} cannot be read: {printable(str(error), longest=200)}"
    metadata = document.get("metadata") if isinstance(document, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = checkpoint.stored_bytes()
    if isinstance(total, int) and total != stored:
        return f"the index tells of {total:,} bytes of tensors, the files hold {stored:,}"
    return None


def _tokenizer_problem(folder: Path) -> str | None:
    """None where there is a tokenizer that looks like one; its words are not read."""
    there = [folder / name for name in _TOKENIZERS if (folder / name).is_file()]
    if not there:
        return f"has no tokenizer ({', '.join(_TOKENIZERS)})"
    for file in there:
        with file.open("rb") as opened:
            begins = opened.read(_BEGINNING_BYTES).lstrip()
            opened.seek(-min(file.stat().st_size, _BEGINNING_BYTES), os.SEEK_END)
            ends = opened.read().rstrip()
        if not begins:
            return f"{file.name} is empty"
        if begins.startswith(b"version https://git-lfs"):
            return f"{file.name} is a Git LFS pointer, not the file itself"
        if file.suffix == ".json" and not (begins.startswith(b"{") and ends.endswith(b"}")):
            return f"{file.name} is cut short, or no JSON"
    return None


def _unfinished(model: Model) -> list[str]:
    """Downloads of the hub's client that did not end."""
    if model.is_folder:
        folder = Path(model.place).expanduser() / ".cache" / "huggingface" / "download"
    else:
        from_snapshot = find_snapshot(model.place, None)
        if from_snapshot is None:
            return []
        folder = from_snapshot.path.parents[1] / "blobs"
    return [printable(path.name) for path in sorted(folder.glob("*.incomplete"))]


def _again(model: Model) -> str:
    if model.is_folder:
        known = model.card.path if model.card and model.card.path and is_hub_name(model.card.path) else None
        return f"hf download {known or 'OWNER/NAME'} --local-dir {shlex.quote(model.place)}"
    return f"hf download {model.place}"


def _cards_differ(one: ModelCard, other: ModelCard) -> list[str]:
    found = []
    if one.vocab_size != other.vocab_size:
        found.append(f"vocabulary: the draft has {other.vocab_size:,} tokens, the target {one.vocab_size:,}")
    if other.method in ("dflash", "dspark", "mtp") and one.hidden_size != other.hidden_size:
        found.append(
            f"hidden size: the draft reads {other.hidden_size:,}, the target gives {one.hidden_size:,}"
        )
    return found
