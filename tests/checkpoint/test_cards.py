from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.checkpoint.cards import doubt_of, find_model_card, list_model_cards, load_model_card
from dflash_deploy.checkpoint.hub_cache import how_to_get
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.resources import resource_dir
from dflash_deploy.yaml_file import InvalidDocument


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "dflash-deploy" / "models"
    folder.mkdir(parents=True)
    return folder


def test_every_shipped_card_loads_and_drafts_name_targets_that_exist() -> None:
    cards = {card.id: card for card in list_model_cards()}
    assert len(cards) >= 10
    for card in cards.values():
        assert all(cards[target].role == "target" for target in card.targets)


def test_sizes_follow_from_the_shapes() -> None:
    target, draft = load_model_card("qwen3.8-27b-nvfp4"), load_model_card("qwen3.8-27b-dflash2")
    # Published: 32,768 and 10,240 bytes a token of 8-bit KV, 74.81 MiB a state slot in bfloat16.
    assert 2 * target.full_attention_layers * target.kv_heads * target.head_dim == 32_768
    assert 2 * draft.layers * draft.kv_heads * draft.head_dim == 10_240
    linear = target.linear
    assert linear is not None
    conv = (linear.value_heads * linear.value_dim + 2 * linear.key_heads * linear.key_dim) * (
        linear.conv_kernel - 1
    )
    state = linear.value_heads * linear.value_dim * linear.key_dim
    assert (conv + state) * 2 * target.linear_attention_layers / 2**20 == pytest.approx(74.81, abs=0.01)


@pytest.mark.parametrize(
    ("asked", "card_id"),
    [
        ("qwen3.8-27b-fp8", "qwen3.8-27b-fp8"),
        ("RadixArk/Qwen3.8-27B-NVFP4", "qwen3.8-27b-nvfp4"),
        ("/models/Qwen3.8-27B-NVFP4/", "qwen3.8-27b-nvfp4"),
        ("z-lab/Qwen3.8-27B-DFlash2", "qwen3.8-27b-dflash2"),
        ("Qwen/Qwen3.8-27B", "qwen3.8-27b-bf16"),
        ("/models/else", None),
        ("", None),
        ("/", None),
        ("../../etc/passwd", None),
    ],
)
def test_found_by_id_hub_name_or_folder(asked: str, card_id: str | None) -> None:
    card = find_model_card(asked)
    assert (card.id if card else None) == card_id


@pytest.mark.parametrize("asked", ["qwen3.8-27b-nvfp5", "../cards/h200", "", "\0"])
def test_an_unknown_id(asked: str) -> None:
    with pytest.raises(DeployError, match="unknown model") as caught:
        load_model_card(asked)
    assert caught.value.exit_code == ExitCode.MISSING


def test_an_own_card_takes_the_place_of_a_shipped_one(own_models: Path) -> None:
    shipped = (resource_dir("profiles") / "models" / "qwen3.8-27b-fp8.yaml").read_text()
    (own_models / "qwen3.8-27b-fp8.yaml").write_text(shipped.replace("loaded_gib: 28.47", "loaded_gib: 30.0"))
    assert load_model_card("qwen3.8-27b-fp8").loaded_gib == 30.0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("id: qwen3.8-27b-fp8", "id: other", "expected the file's own name"),
        ("layers: 64", "layers: 65", "do not add up to layers"),
        ("role: target", "role: draft", "a draft needs all three"),
        ("vision: true", "vision: perhaps", "vision: expected true or false, found 'perhaps'"),
        ("hidden_size: 5120", "hiden_size: 5120", "did you mean 'hidden_size'"),
        ("linear:\n", "linear: null\nliner:\n", "did you mean 'linear'"),
    ],
)
def test_a_wrong_card_is_told_with_its_place(own_models: Path, old: str, new: str, said: str) -> None:
    shipped = (resource_dir("profiles") / "models" / "qwen3.8-27b-fp8.yaml").read_text()
    path = own_models / "qwen3.8-27b-fp8.yaml"
    path.write_text(shipped.replace(old, new))
    with pytest.raises(InvalidDocument, match=said) as caught:
        load_model_card("qwen3.8-27b-fp8")
    assert str(path) in caught.value.message


def test_a_name_that_nobody_has_confirmed_is_told_where_it_is_used() -> None:
    doubtful = {card.id for card in list_model_cards() if not card.path_confirmed}
    assert doubtful == {"qwen3.8-27b-w4a16", "qwen3.8-27b-dflash2-w4a16"}
    for card in list_model_cards():
        assert bool(doubt_of(card.path or "")) == (card.id in doubtful)
    target = load_model_card("qwen3.8-27b-w4a16").path
    assert target is not None
    assert "--set model.path=" in doubt_of(target)
    assert "is not confirmed" in how_to_get(target)
    assert "is not confirmed" not in how_to_get("RadixArk/Qwen3.8-27B-NVFP4")
