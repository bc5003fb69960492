from __future__ import annotations

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.cards import list_cards, load_card, match_card
from dflash_deploy.resources import resource_dir


def test_every_shipped_card_loads_and_begins_with_a_profile_that_exists() -> None:
    cards = {card.id: card for card in list_cards()}
    assert {"rtx-5090", "rtx-4090", "rtx-3090", "rtx-pro-6000", "dgx-spark", "h200", "a100-80gb"} <= set(
        cards
    )
    services = resource_dir("profiles") / "services"
    for card in cards.values():
        assert card.default_profile is None or (services / f"{card.default_profile}.yaml").is_file()


def test_names_that_the_driver_gives_belong_to_one_card() -> None:
    names = [name for card in list_cards() for name in card.nvml_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "memory_mib", "card_id"),
    [
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        (" nvidia geforce  rtx 5090", 32768, "rtx-5090"),
        ("NVIDIA GeForce RTX 5090", 24463, None),
        ("NVIDIA GeForce RTX 5090 D", 32607, None),
        ("NVIDIA GB10", None, "dgx-spark"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H200", 17920, None),
        ("", 0, None),
    ],
)
def test_matching_what_the_driver_says(name: str, memory_mib: int | None, card_id: str | None) -> None:
    card = match_card(name, memory_mib)
    assert (card.id if card else None) == card_id


@pytest.mark.parametrize("card_id", ["rtx5091", "../models/tiny-random", "", "h200.yaml"])
def test_an_unknown_card(card_id: str) -> None:
    with pytest.raises(DeployError, match="unknown card") as caught:
        load_card(card_id)
    assert caught.value.exit_code == ExitCode.MISSING
    assert "rtx-5090" in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["5090", "rtx5090", "RTX 5090", "NVIDIA GeForce RTX 5090", "rtx_5090"])
def test_a_card_by_what_people_call_it(name: str) -> None:
    assert load_card(name).id == "rtx-5090"


@pytest.mark.parametrize("name", ["", "rtx", "50", "rtx-5090-ti", "6000"])
def test_what_is_no_known_card_is_not_guessed(name: str) -> None:
    with pytest.raises(DeployError):
        load_card(name)
