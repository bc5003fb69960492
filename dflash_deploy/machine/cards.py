"""Known cards: what ``profiles/cards/<id>.yaml`` says of each."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dflash_deploy import catalogue
from dflash_deploy.yaml_file import like

_MEMORY_TOLERANCE = 0.05
"""Drivers, ECC and boards differ by a few hundred MiB; a MIG slice or another size of the card by more."""


class Card(BaseModel):
    """Facts about a card.

    Attributes:
        nvml_names: names that the driver gives it.
        compute_capability: such as ``12.0``.
        memory_mib: total as the driver reports it (unified memory: as the operating system shows it).
        bandwidth_gb_per_s: peak memory bandwidth, in 10^9 bytes a second.
        sms: streaming multiprocessors.
        power_w: default power limit.
        unified_memory: the memory is the host's too, and NVML reports none.
        default_profile: service profile to begin with.
        sources: where the figures are from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    name: str
    nvml_names: list[str] = Field(min_length=1)
    architecture: str
    compute_capability: Annotated[str, like(r"[0-9]{1,2}\.[0-9]", "a compute capability such as 12.0")]
    memory_mib: int = Field(gt=0)
    bandwidth_gb_per_s: float = Field(gt=0)
    sms: int = Field(gt=0)
    power_w: float = Field(gt=0)
    unified_memory: bool
    default_profile: str | None
    sources: list[str] = Field(min_length=1)


def card_ids() -> list[str]:
    """Ids of all known cards."""
    return list(catalogue.files("cards"))


def load_card(card_id: str) -> Card:
    """One card, by its id or by what people call it: ``5090``, ``RTX 5090``, ``rtx5090``.

    Raises:
        DeployError: unknown id, or a wrong file.
    """
    known = card_ids()
    if card_id not in known:
        meant = [one for one in known if _called(card_id) and _called(one) == _called(card_id)]
        card_id = meant[0] if len(meant) == 1 else card_id
    return catalogue.load("cards", card_id, Card)


def _called(name: str) -> str:
    """A card's name without its makers, families and punctuation."""
    words = re.sub(r"nvidia|geforce|rtx", "", name.casefold())
    return "".join(letter for letter in words if letter.isalnum())


def list_cards() -> list[Card]:
    """All known cards, by id.

    Raises:
        DeployError: a wrong file.
    """
    return [load_card(card_id) for card_id in card_ids()]


def match_card(nvml_name: str, memory_mib: int | None) -> Card | None:
    """The known card that the driver names so.

    Args:
        nvml_name: the driver's name of the card.
        memory_mib: its total memory, or None where the driver reports none (unified memory).
    """
    name = " ".join(nvml_name.split()).casefold()
    for card in list_cards():
        if name not in (known.casefold() for known in card.nvml_names):
            continue
        if memory_mib is None or card.unified_memory:
            return card
        if abs(memory_mib - card.memory_mib) <= _MEMORY_TOLERANCE * card.memory_mib:
            return card
    return None
