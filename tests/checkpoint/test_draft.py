from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.checkpoint import Checkpoint, mismatches, read_checkpoint
from dflash_deploy.checkpoint.draft import Draft, read_draft
from dflash_deploy.checkpoint.json_text import Fields
from dflash_deploy.checkpoint.weights import Group
from dflash_deploy.errors import DeployError
from tests.checkpoint.checkpoints import Qwen, draft_config, draft_tensors, small_qwen, write_checkpoint


def draft_of(**config: Any) -> Draft | None:
    return read_draft(Fields(config, "config.json"))


DFLASH: dict[str, Any] = {"architectures": ["DFlashDraftModel"]}
LILICORR = {
    "architectures": ["LiLiCorrDraftModel"],
    "dflash_config": {"lilicorr_num_layers": 2},
    "block_size": 8,
}


@pytest.mark.parametrize(
    ("config", "method", "variant", "block"),
    [
        (DFLASH | {"block_size": 12, "dflash_config": {}}, "dflash", "DFlash", 12),
        (DFLASH | {"dflash_config": {"block_size": 10}}, "dflash", "DFlash", 10),
        (DFLASH, "dflash", "DFlash", 16),
        ({"architectures": ["DFlash2BeamDraftModel"], "block_size": 8}, "dflash", "DFlash2", 8),
        (DFLASH | {"dflash_config": {"projector_type": "domino"}}, "dflash", "DFlash (Domino)", 16),
        (LILICORR, "dflash", "DFlash (LiLiCorr)", 8),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 64}, "dspark", "DSpark", 7),
        ({"architectures": ["X"], "dspark_block_size": 5, "dspark_markov_rank": 8}, "dspark", "DSpark", 5),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle", "EAGLE", 4),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 320}, "eagle3", "EAGLE-3", 4),
        ({"architectures": ["Qwen3_5ForCausalLMMTP"]}, "mtp", "MTP", 4),
    ],
)
def test_kinds_of_draft(config: dict[str, Any], method: str, variant: str, block: int) -> None:
    draft = draft_of(**config)
    assert draft is not None
    assert (draft.method, draft.variant, draft.block_size) == (method, variant, block)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "LlamaForCausalLM", ""])
def test_a_model_of_its_own_is_no_draft(architecture: str) -> None:
    assert draft_of(architectures=[architecture]) is None
    assert draft_of() is None


def test_the_facts_of_a_dspark_draft() -> None:
    draft = draft_of(
        architectures=["DSparkDraftModel"],
        block_size=7,
        markov_rank=256,
        dflash_config={"target_layer_ids": [1, 2], "mask_token_id": 9, "num_target_layers": 64},
    )
    assert draft is not None
    assert (draft.markov_rank, draft.target_layer_ids, draft.target_layers) == (256, (1, 2), 64)


@pytest.mark.parametrize(
    "dflash",
    [
        {"target_layer_ids": [1, -2]},
        {"target_layer_ids": ["1"]},
        {"target_layer_ids": 5},
        {"mask_token_id": "x"},
        {"selector_rank": -1},
        {"block_size": 0},
        {"conv_kernel_size": True},
    ],
)
def test_a_wrong_draft_names_the_key(dflash: dict[str, Any]) -> None:
    with pytest.raises(DeployError, match=rf"config.json: dflash_config\.{next(iter(dflash))}: expected"):
        draft_of(architectures=["DFlash2DraftModel"], dflash_config=dflash)


MODEL = small_qwen(layers=8)


def target(folder: Path, **changes: Any) -> Checkpoint:
    model = small_qwen(**({"layers": 8} | changes))
    return read_checkpoint(write_checkpoint(folder / "target", model.config(), model.build()))


def draft(folder: Path, model: Qwen = MODEL, **dflash: Any) -> Checkpoint:
    config = draft_config(model, **({"target_layer_ids": [1, 7], "mask_token_id": 500} | dflash))
    return read_checkpoint(write_checkpoint(folder / "draft", config, draft_tensors(config)))


def test_a_draft_that_fits(tmp_path: Path) -> None:
    assert mismatches(target(tmp_path), draft(tmp_path)) == ()


@pytest.mark.parametrize(
    ("model", "dflash", "said"),
    [
        ({"vocab": 640}, {}, "vocabulary: the draft is for 640 tokens, the target has 512"),
        ({"hidden": 128}, {}, "hidden size: the draft reads vectors of 128 numbers, the target gives 64"),
        ({}, {"target_layer_ids": [1, 8, 9]}, "the draft reads layer 8, 9 of a target with 8 (0 to 7)"),
        ({}, {"num_target_layers": 64}, "the draft is made for a target with 64, this one has 8"),
        ({}, {"mask_token_id": 512}, "mask token: the draft uses 512, the target has 512 tokens"),
    ],
)
def test_a_draft_of_another_target(
    tmp_path: Path, model: dict[str, Any], dflash: dict[str, Any], said: str
) -> None:
    found = mismatches(target(tmp_path), draft(tmp_path, small_qwen(**model), **dflash))
    assert len(found) == 1
    assert said in found[0]


def test_embedding_and_head_of_a_draft_are_its_targets(tmp_path: Path) -> None:
    config = draft_config(MODEL, target_layer_ids=[1, 7])
    tensors = draft_tensors(config)
    before = read_checkpoint(write_checkpoint(tmp_path / "without", config, tensors))
    table = ("BF16", (MODEL.vocab, MODEL.hidden))
    more = tensors | {"embed_tokens.weight": table, "lm_head.weight": table}
    read = read_checkpoint(write_checkpoint(tmp_path / "with", config, more))
    assert read.stored_bytes() == before.stored_bytes() + 2 * 512 * 64 * 2
    assert read.loaded_bytes() == before.loaded_bytes()
    assert read.read_bytes_per_token() == before.read_bytes_per_token()
    assert any("the target's is used" in note for note in read.notes)
    own = read_checkpoint(write_checkpoint(tmp_path / "own", config | {"has_embed_tokens": True}, more))
    assert own.loaded_bytes() == before.loaded_bytes() + 512 * 64 * 2


def test_an_eagle3_draft_keeps_its_own_head(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "draft_vocab_size": 100,
        "torch_dtype": "bfloat16",
    }
    tensors = {
        "d2t": ("I64", (100,)),
        "t2d": ("U8", (512,)),
        "embed_tokens.weight": ("BF16", (512, 64)),
        "fc.weight": ("BF16", (64, 192)),
        "lm_head.weight": ("BF16", (100, 64)),
        "midlayer.self_attn.q_proj.weight": ("BF16", (64, 128)),
        "norm.weight": ("BF16", (64,)),
    }
    read = read_checkpoint(write_checkpoint(tmp_path, config, tensors))
    assert read.lm_head == "bfloat16"
    assert read.stored_bytes() - read.loaded_bytes() == 512 + 512 * 64 * 2
    assert read.stored_bytes(Group.DRAFT) == 800 + 512 + 64 * 192 * 2
    card = read.model_card()
    assert (card.method, card.block_size, card.role) == ("eagle3", 4, "draft")


def test_a_draft_without_a_known_target_still_has_a_card(tmp_path: Path) -> None:
    card = draft(tmp_path).model_card()
    assert (card.role, card.targets, card.lm_head) == ("draft", [], "shared")
