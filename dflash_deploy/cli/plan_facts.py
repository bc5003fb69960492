"""The card and the model that ``plan`` is about."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint.cards import ModelCard, doubt_of, find_model_card, list_model_cards
from dflash_deploy.engine.launch import Flags
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.cards import Card, card_ids, list_cards, load_card, match_card

_MOST_MIB = 1 << 22


@dataclass(frozen=True)
class PlannedCard:
    """The card that is planned for.

    Attributes:
        card: what is known of it, None for a bare number of MiB.
        memory_mib: its total memory.
        used_mib: memory in use now, where it is the card in this machine.
        how: where it comes from, in words.
    """

    card: Card | None
    memory_mib: int
    used_mib: float
    how: str

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.card.name if self.card else f"a card of {self.memory_mib} MiB"


def planned_card(
    asked: str | None, *, own: str | None, env: Mapping[str, str], on_cpu: bool = False
) -> PlannedCard:
    """The card asked for, else the one that is here, else a profile's own.

    Args:
        asked: a card's name or id, or its memory in MiB.
        own: id of the card that a profile is for.
        env: environment of the server: it may choose among several cards.
        on_cpu: the server needs no card.

    Raises:
        DeployError: the card is not known, or there is none.
    """
    if asked is not None:
        return asked_card(asked)
    here = _card_here(env)
    if here is not None:
        return here
    if own is not None:
        card = load_card(own)
        return PlannedCard(card, card.memory_mib, 0.0, "the profile's card")
    raise DeployError(
        "it runs on the processor (device: cpu): there is no VRAM to plan"
        if on_cpu
        else "there is no GPU here to plan for",
        fix=f"say which card is meant: --gpu {' | '.join(card_ids())} | its memory in MiB",
        exit_code=ExitCode.MISSING,
    )


def asked_card(asked: str) -> PlannedCard:
    """A card by its name, id or memory.

    Raises:
        DeployError: it is not known.
    """
    text = asked.strip()
    card = _by_number(text)
    if card is not None:
        return PlannedCard(card, card.memory_mib, 0.0, "asked for")
    number = re.fullmatch(r"([0-9]{1,30})(?:\s?MiB)?", text, re.IGNORECASE)
    if number:
        memory_mib = int(number[1])
        if not 1024 <= memory_mib <= _MOST_MIB:
            raise DeployError(
                f"--gpu {text[:40]}: a card has between 1,024 and {_MOST_MIB:,} MiB",
                fix="give its memory in MiB, such as --gpu 32607",
                exit_code=ExitCode.INVALID_INPUT,
            )
        card = next((one for one in list_cards() if one.memory_mib == memory_mib), None)
        return PlannedCard(card, memory_mib, 0.0, "by its memory")
    if not text or re.fullmatch(r"[+-]?[0-9.]+\s*[a-z]{0,3}", text, re.IGNORECASE):
        raise DeployError(
            f"--gpu {text[:40]!r}: expected a card's name, or its memory in MiB as a whole number",
            fix="nvidia-smi --query-gpu=memory.total --format=csv tells it; an RTX 5090 has 32607",
            exit_code=ExitCode.INVALID_INPUT,
        )
    card = match_card(asked, None) or load_card(asked.strip().casefold().replace(" ", "-"))
    return PlannedCard(card, card.memory_mib, 0.0, "asked for")


def _by_number(text: str) -> Card | None:
    """The card that people call by a bare number, such as 5090: nobody has one with 5,090 MiB."""
    if not re.fullmatch(r"[0-9]{4}", text):
        return None
    found = [card_id for card_id in card_ids() if text in card_id.split("-")]
    return load_card(found[0]) if len(found) == 1 else None


def _card_here(env: Mapping[str, str]) -> PlannedCard | None:
    from dflash_deploy.machine.gpu import read_gpus

    visible = {name: env[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in env}
    reading = read_gpus({**os.environ, **visible})
    indices = reading.visible if reading.visible is not None else tuple(gpu.index for gpu in reading.gpus)
    by_index = {gpu.index: gpu for gpu in reading.readable}
    gpu = next((by_index[index] for index in indices if index in by_index), None)
    if gpu is None:
        return None
    card = match_card(gpu.name, gpu.memory_total_mib) if gpu.name else None
    memory_mib = gpu.memory_total_mib or (card.memory_mib if card else None)
    if memory_mib is None:
        return None
    return PlannedCard(card, memory_mib, float(gpu.memory_used_mib or 0), f"GPU {gpu.index} of this machine")


def planned_models(flags: Flags) -> tuple[ModelCard, ModelCard | None, tuple[str, ...]]:
    """Target, draft, and what should be said about how they were found.

    Raises:
        DeployError: there is no model, or nothing is known of it.
    """
    place = flags.get("model-path")
    if not isinstance(place, str) or not place:
        raise DeployError(
            "the command names no model (--model-path)",
            fix="add --model-path with a folder or a hub name",
            exit_code=ExitCode.INVALID_INPUT,
        )
    target, notes = _model(place, flags.get("revision"))
    algorithm = str(flags.get("speculative-algorithm", "")).upper()
    if not algorithm or algorithm == "NGRAM":
        return target, None, notes
    draft_place = flags.get("speculative-draft-model-path")
    if isinstance(draft_place, str) and draft_place:
        draft, more = _model(draft_place, flags.get("speculative-draft-model-revision"))
        return target, draft, (*notes, *more)
    wanted = "dspark" if algorithm == "DSPARK" else "mtp"
    if algorithm == "DFLASH":
        return target, None, notes
    draft_card = next(
        (card for card in list_model_cards() if card.method == wanted and target.id in card.targets), None
    )
    return target, draft_card, notes


def _model(place: str, revision: object) -> tuple[ModelCard, tuple[str, ...]]:
    """Facts of a folder or hub name: a folder is read, a known name has its card, others are looked for."""
    from dflash_deploy.checkpoint import read_checkpoint

    path = place.replace("${HOME}", "~").replace("$HOME", "~")
    folder = Path(path).expanduser() if path.startswith(("/", "./", "../", "~/")) else Path(path)
    known = find_model_card(path)
    is_folder = folder.is_dir()
    if known is not None and not is_folder:
        where = "" if path in (known.id, known.path) else f"{place} is taken for {known.path or known.id}"
        return known, tuple(note for note in (where, doubt_of(known.path or "")) if note)
    try:
        checkpoint = read_checkpoint(
            str(folder) if is_folder else path, revision=revision if isinstance(revision, str) else None
        )
    except DeployError as error:
        if known is not None:
            return known, (f"{place} cannot be read ({error.message}); taken for {known.path or known.id}",)
        raise DeployError(
            f"the model {place[:200]!r} is not known: {error.message}",
            fix=error.fix or "give a folder that has it, or one of: dflash-deploy profile list",
            exit_code=error.exit_code if error.exit_code is not ExitCode.USAGE else ExitCode.INVALID_INPUT,
        ) from error
    return checkpoint.model_card(), (*checkpoint.notes, *checkpoint.unknown)
