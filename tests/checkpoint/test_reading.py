from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint import Checkpoint, describe, mismatches, read_checkpoint
from dflash_deploy.checkpoint.facts import LOADING_GIB
from dflash_deploy.checkpoint.weights import Group
from dflash_deploy.errors import DeployError, ExitCode
from tests.checkpoint.checkpoints import (
    Qwen,
    draft_config,
    draft_tensors,
    small_qwen,
    write_checkpoint,
    write_safetensors,
)
from tests.checkpoint.test_safetensors import json_values

GIB = 1 << 30


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """FP8 attention, NVFP4 MLP and output head: the layout of the published NVFP4 export."""
    model = Qwen()
    tensors = model.build(mlp="NVFP4", attention="FP8", head="NVFP4")
    quantization = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["mtp*", "model.visual*"],
            "quantized_layers": model.quantized,
        },
    }
    folder = tmp_path_factory.mktemp("nvfp4") / "Qwen3.8-27B-NVFP4"
    return read_checkpoint(
        write_checkpoint(folder, model.config(), tensors, shards=3, hf_quant_config=quantization)
    )


@pytest.fixture(scope="module")
def dflash2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config = draft_config(Qwen())
    return read_checkpoint(
        write_checkpoint(tmp_path_factory.mktemp("d") / "mine", config, draft_tensors(config))
    )


def test_the_bf16_checkpoint_has_its_published_size(tmp_path: Path) -> None:
    model = Qwen()
    read = read_checkpoint(write_checkpoint(tmp_path, model.config(), model.build(), shards=20))
    # Published: 55,563,006,776 bytes of files, headers with them.
    assert read.stored_bytes() == 55_562_855_904
    assert read.disk_bytes == pytest.approx(55_563_006_776, abs=20_000)
    assert read.loaded_bytes() == read.stored_bytes() - read.mtp_bytes()
    assert read.lm_head == "bfloat16"
    assert read.quantization is None
    # The shipped card, worked out by hand: without embedding, vision and MTP head.
    assert read.read_bytes_per_token() == pytest.approx(51_200_000_000, rel=0.005)


def test_the_fp8_checkpoint_has_its_published_size(tmp_path: Path) -> None:
    model = Qwen()
    blocks = "FP8 in blocks"
    tensors = model.build(mlp=blocks, attention=blocks, mtp=blocks)
    config = model.config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    read = read_checkpoint(write_checkpoint(tmp_path, config, tensors, shards=4))
    assert read.disk_bytes == pytest.approx(30_866_866_928, abs=20_000)
    # Logs say 28.47 (H100) and 28.49 GiB (MI355X).
    assert read.model_card().loaded_gib == pytest.approx(28.48, abs=0.1)
    assert str(read.quantization) == "fp8 8-bit in groups of 128x128"
    assert read.read_bytes_per_token() == pytest.approx(26_900_000_000, rel=0.005)


def test_the_35b_a3b_checkpoint_has_what_its_name_says(tmp_path: Path) -> None:
    """Published sizes of Qwen3.6-35B-A3B: 40 layers of 256 experts, eight of them for a token."""
    model = Qwen(
        layers=40, hidden=2048, inner=512, heads=16, kv_heads=2, value_heads=32, experts=256, mtp=False
    )
    read = read_checkpoint(write_checkpoint(tmp_path, model.config(), model.build(), shards=14))
    assert read.stored_bytes() / 2 == pytest.approx(35e9, rel=0.01)
    assert read.read_bytes_per_token() / 2 == pytest.approx(3e9, rel=0.05)
    assert read.stored_bytes(Group.EXPERTS) == 2 * 40 * 256 * 3 * 2048 * 512
    assert read.stored_bytes(Group.OTHER) == 0


def test_the_nvfp4_checkpoint_has_its_published_figures(nvfp4: Checkpoint) -> None:
    # Published: 21.9 to 22 GB on disk, 208 FP8 and 193 NVFP4 modules, 17,608,000,000 bytes read per token,
    # 19.70 GiB loaded (RTX PRO 6000).
    assert nvfp4.disk_bytes / 1e9 == pytest.approx(21.95, abs=0.05)
    assert str(nvfp4.quantization) == "modelopt MIXED_PRECISION (208 FP8, 193 NVFP4)"
    assert nvfp4.read_bytes_per_token() == pytest.approx(17_608_000_000, rel=1e-4)
    assert nvfp4.loaded_bytes() / GIB + LOADING_GIB == pytest.approx(19.70, abs=0.1)
    assert nvfp4.lm_head == "nvfp4"
    assert nvfp4.kv_cache_dtype == "fp8_e4m3"
    # A U8 head of [248320, 2560] and its scales: published as 0.64 GB packed.
    assert nvfp4.stored_bytes(Group.LM_HEAD) == 248_320 * (2560 + 320) + 8


def test_groups_add_up_and_text_only_leaves_the_vision_tower(nvfp4: Checkpoint) -> None:
    assert sum(nvfp4.stored_bytes(group) for group in Group) == nvfp4.stored_bytes()
    assert nvfp4.stored_bytes(Group.EMBEDDING) == 248_320 * 5120 * 2
    vision = nvfp4.stored_bytes(Group.VISION)
    assert vision / 2 == 460_730_096  # parameters, counted by hand from the published depth and widths
    assert nvfp4.loaded_bytes() - nvfp4.loaded_bytes(text_only=True) == vision
    assert nvfp4.stored_bytes(Group.OTHER) == 0
    assert nvfp4.unknown == ()


def test_the_card_of_a_known_checkpoint_gives_the_measured_size(dflash2: Checkpoint, tmp_path: Path) -> None:
    config = draft_config(Qwen())
    folder = write_checkpoint(tmp_path / "Qwen3.8-27B-DFlash2", config, draft_tensors(config))
    card = read_checkpoint(folder).model_card()
    assert (card.id, card.loaded_gib) == ("qwen3.8-27b-dflash2", 3.72)
    assert any("measured, from the card qwen3.8-27b-dflash2; computed 3.7" in text for text in card.sources)
    assert card.disk_bytes == dflash2.disk_bytes


def test_own_files_win_over_a_card_of_another_revision(nvfp4: Checkpoint) -> None:
    """Revisions of this export took 19.70 and 20.14 GiB: the card has one, the person's files are theirs."""
    card = nvfp4.model_card()
    assert card.loaded_gib == pytest.approx(19.75, abs=0.01)
    assert any("computed; the card qwen3.8-27b-nvfp4 says 20.14 GiB" in text for text in card.sources)
    assert card.disk_bytes == nvfp4.disk_bytes
    assert (card.full_attention_layers, card.linear_attention_layers) == (16, 48)
    assert (card.state_dtype, card.lm_head, card.kv_cache_dtype) == ("float32", "fp4", "fp8_e4m3")


def test_another_export_of_that_name_is_computed(tmp_path: Path) -> None:
    """The same with a dense output head: its log says 22.43 to 23.0 GiB on unified memory, not 20.14."""
    model = Qwen()
    tensors = model.build(mlp="NVFP4", attention="FP8")
    read = read_checkpoint(write_checkpoint(tmp_path / "Qwen3.8-27B-NVFP4", model.config(), tensors))
    card = read.model_card()
    assert card.lm_head == "bfloat16"
    assert card.loaded_gib == pytest.approx(read.loaded_bytes() / GIB + LOADING_GIB)
    assert card.loaded_gib - 19.75 == pytest.approx(1.7, abs=0.05)  # published: 1.7 GB more on disk


def test_a_card_that_does_not_fit_the_files_is_told(tmp_path: Path) -> None:
    model = Qwen()
    folder = write_checkpoint(tmp_path / "Qwen3.8-27B", model.config(), model.build(mlp="FP8"))
    card = read_checkpoint(folder).model_card()
    assert card.loaded_gib == pytest.approx(35.0, abs=0.5)
    assert any("qwen3.8-27b-bf16 says 50.90 GiB, which does not fit" in text for text in card.sources)


def test_the_mtp_head_is_a_draft(nvfp4: Checkpoint) -> None:
    card = nvfp4.mtp_card()
    assert card is not None
    assert nvfp4.mtp is not None
    # The shipped card, worked out by hand: 0.8 GiB, 850 MB read.
    assert card.loaded_gib == pytest.approx(0.8, abs=0.02)
    assert card.read_bytes_per_token == pytest.approx(850_000_000, rel=0.01)
    assert (card.method, card.layers, card.role, card.targets) == ("mtp", 1, "draft", ["qwen3.8-27b-nvfp4"])


def test_the_dflash2_draft_has_its_published_size(dflash2: Checkpoint) -> None:
    assert dflash2.disk_bytes == pytest.approx(3_848_817_896, abs=1000)
    assert dflash2.draft is not None
    assert (dflash2.draft.variant, dflash2.draft.block_size) == ("DFlash2", 8)
    assert (dflash2.draft.selector_rank, dflash2.draft.selector_top_k) == (256, 16)
    assert (dflash2.draft.conv_kernel_size, dflash2.draft.conv_group_size) == (2, 16)
    assert dflash2.draft.target_layer_ids == (5, 19, 33, 47, 61)
    assert dflash2.lm_head == "shared"
    card = dflash2.model_card()
    assert card.loaded_gib == pytest.approx(3.73, abs=0.03)  # published: 3.72 and 3.73 GiB
    assert card.read_bytes_per_token == pytest.approx(3_600_000_000, rel=0.01)
    assert (card.role, card.method, card.block_size) == ("draft", "dflash", 8)
    assert "qwen3.8-27b-nvfp4" in card.targets


def test_the_draft_goes_with_its_target(nvfp4: Checkpoint, dflash2: Checkpoint) -> None:
    assert mismatches(nvfp4, dflash2) == ()
    assert "is no draft" in mismatches(nvfp4, nvfp4)[0]
    assert "is itself a draft" in mismatches(dflash2, dflash2)[0]


def test_rows_for_people(nvfp4: Checkpoint, dflash2: Checkpoint) -> None:
    rows = {(row.section, row.label): row.value for row in describe(nvfp4)}
    assert rows["shape", "layers"] == "64 (16 full attention, 48 linear attention)"
    assert rows["weights", "MLP"] == "8.96 GiB stored (nvfp4)"
    assert rows["weights", "vision"] == "878.77 MiB stored (bfloat16), loaded unless text-only"
    assert rows["weights", "loaded in all"] == "19.62 GiB"
    assert rows["weights", "output head is"].startswith("nvfp4, packed")
    drafted = {row.label: row.value for row in describe(dflash2)}
    assert drafted["selector"] == "best 16 candidates, rank 256"
    assert drafted["output head is"] == "shared"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = small_qwen()
    return write_checkpoint(tmp_path / "small", model.config(), model.build(), shards=3)


def refused(path: Path, said: str) -> DeployError:
    with pytest.raises(DeployError, match=said) as caught:
        read_checkpoint(path)
    assert caught.value.exit_code in (ExitCode.INVALID_INPUT, ExitCode.MISSING, ExitCode.UNAVAILABLE)
    caught.value.message.encode()
    return caught.value


SHARD = "model-00002-of-00003.safetensors"


def test_a_shard_cut_short_is_named_with_what_is_missing(folder: Path) -> None:
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, size - 2048)
    refused(folder, rf"{SHARD}: is cut short: 2\.00 KiB of [\d.]+ KiB are missing")
    os.truncate(folder / SHARD, 30)
    refused(folder, rf"{SHARD}: is cut short: [\d,]+ bytes of its header are missing")
    os.truncate(folder / SHARD, 0)
    refused(folder, "0 bytes are too few")


def test_a_shard_that_is_missing(folder: Path) -> None:
    (folder / SHARD).unlink()
    assert refused(folder, f"{SHARD}: is missing").exit_code == ExitCode.MISSING


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    refused(folder, "expected a file, found something else")
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    refused(folder, "expected a file, found something else")
    (folder / SHARD).rmdir()
    (folder / SHARD).symlink_to("/dev/zero")
    refused(folder, "expected a file, found something else")
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(SHARD)
    refused(folder, "a link that leads to itself")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json: expected a file")


def test_a_folder_that_is_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "cannot be read: Too many levels")


ELSEWHERE = (
    *(
        "../small/model-00001-of-00003.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "x.bin",
        "",
        ".safetensors",
    ),
    *("..safetensors", "a\0.safetensors", "config.json", "x" * 500 + ".safetensors", 5, None, ["x"]),
)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_an_index_that_leads_elsewhere(folder: Path, file: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    refused(folder, "weight_map.lm_head.weight: expected the name of a safetensors file beside it")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "{", ""])
def test_an_index_that_is_none(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "index.json: ")


def test_an_index_that_names_a_tensor_too_many(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["more.weight"] = SHARD
    path.write_text(json.dumps(index))
    refused(folder, f"names 'more.weight' in {SHARD}, which does not hold it")


def test_files_beside_the_index_are_left_out(folder: Path) -> None:
    before = read_checkpoint(folder)
    write_safetensors(folder / "extra.safetensors", {"x": ("BF16", (8, 8))})
    read = read_checkpoint(folder)
    assert (read.weights, read.disk_bytes) == (before.weights, before.disk_bytes)
    assert "extra.safetensors is not in the index and is not loaded" in read.notes


def test_a_tensor_in_two_files_counts_once(tmp_path: Path) -> None:
    model = small_qwen()
    folder = write_checkpoint(tmp_path, model.config(), model.build())
    before = read_checkpoint(folder)
    write_safetensors(folder / "second.safetensors", {"lm_head.weight": ("BF16", (512, 64))})
    read = read_checkpoint(folder)
    assert read.stored_bytes() == before.stored_bytes()
    assert "tensors given by more than one file: 1" in read.notes


def test_what_is_not_a_safetensors_checkpoint(tmp_path: Path) -> None:
    error = refused(tmp_path, "it has no config.json")
    assert error.exit_code == ExitCode.MISSING
    (tmp_path / "config.json").write_text(json.dumps(small_qwen().config()))
    refused(tmp_path, "has no safetensors files")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(S'false'\ntR.")
    assert "convert it" in str(refused(tmp_path, "only as pickles").fix)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "holds GGUF files")
    refused(tmp_path / "model.gguf", "is a GGUF file")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(tmp_path / "model.safetensors", "a checkpoint is a folder")


def test_code_of_the_checkpoint_is_mentioned_and_not_run(tmp_path: Path) -> None:
    model = small_qwen()
    config = model.config(auto_map={"AutoConfig": "configuration_x.X"})
    folder = write_checkpoint(tmp_path, config, model.build())
    (folder / "configuration_x.py").write_text("raise SystemExit('ran')")
    assert any("auto_map" in note and "not run" in note for note in read_checkpoint(folder).notes)


@pytest.mark.parametrize("asked", ["", " ", "a\0b"])
def test_nothing_to_read(asked: str) -> None:
    with pytest.raises(DeployError, match="expected a folder or a hub name"):
        read_checkpoint(asked)


def test_the_id_of_a_known_model_stands_for_its_hub_name() -> None:
    with pytest.raises(DeployError, match=r"RadixArk/Qwen3\.8-27B-NVFP4 is neither"):
        read_checkpoint("qwen3.8-27b-nvfp4", offline=True)


def test_tokenizers_of_two_sizes(tmp_path: Path) -> None:
    model = small_qwen()
    config = draft_config(model, target_layer_ids=[0, 3], mask_token_id=500, conv_group_size=16)
    for name, written, tensors, last in (
        ("target", model.config(), model.build(), 499),
        ("draft", config, draft_tensors(config), 500),
    ):
        added = {"added_tokens_decoder": {"7": {"content": "a"}, str(last): {"content": "b"}}}
        write_checkpoint(tmp_path / name, written, tensors, tokenizer_config=added)
    target, draft = read_checkpoint(tmp_path / "target"), read_checkpoint(tmp_path / "draft")
    assert (target.tokenizer_tokens, draft.tokenizer_tokens) == (500, 501)
    assert mismatches(target, draft) == ("tokenizer: the draft's knows 501 tokens, the target's 500",)


KEYS = """
architectures model_type text_config hidden_size num_hidden_layers num_attention_heads head_dim
num_key_value_heads vocab_size layer_types full_attention_interval linear_num_value_heads linear_num_key_heads
linear_value_head_dim linear_key_head_dim linear_conv_kernel_dim mamba_ssm_dtype quantization_config
quant_method quant_algo quantized_layers kv_cache_scheme config_groups ignore dflash_config block_size
tie_word_embeddings num_experts num_experts_per_tok sliding_window vision_config torch_dtype auto_map
"""
json_objects = st.dictionaries(st.sampled_from(KEYS.split()), json_values, max_size=8)


@settings(max_examples=150)
@given(changes=json_objects, nested=json_objects, quantization=json_objects)
def test_any_configuration_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[str, Any],
    nested: dict[str, Any],
    quantization: dict[str, Any],
) -> None:
    model = small_qwen()
    config = model.config()
    config["text_config"] |= nested
    folder = tmp_path_factory.getbasetemp() / "any-configuration"
    write_checkpoint(folder, config | changes, model.build(), hf_quant_config={"quantization": quantization})
    try:
        read = read_checkpoint(folder)
        cards = [read.model_card(), read.mtp_card()]
    except DeployError as error:
        error.message.encode()
        return
    assert cards[0] is not None
    for row in describe(read):
        row.value.encode()


@settings(max_examples=100)
@given(data=st.binary(max_size=60), at=st.integers(0, 3000))
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int
) -> None:
    model = small_qwen()
    folder = write_checkpoint(tmp_path_factory.getbasetemp() / "damaged", model.config(), model.build())
    for name in ("config.json", "model.safetensors"):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(before[:at] + data + before[at + len(data) :])
        try:
            read_checkpoint(folder)
        except DeployError as error:
            error.message.encode()
        path.write_bytes(before)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=12), json_values, max_size=4))
def test_any_index_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, weight_map: Any) -> None:
    model = small_qwen()
    folder = tmp_path_factory.getbasetemp() / "any-index"
    write_checkpoint(folder, model.config(), model.build())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DeployError) as caught:
        read_checkpoint(folder)
    caught.value.message.encode()


def test_memory_is_bounded_where_a_header_is_a_bomb(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, small_qwen().config(), {"x": ("U8", (1,))})
    bomb = b"[" + b"0," * (40 << 20) + b"0]"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(bomb)) + bomb)
    refused(folder, "holds more than 3,200,000 values")
