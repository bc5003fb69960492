from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.checkpoint import Checkpoint, describe, read_checkpoint
from dflash_deploy.checkpoint.json_text import Fields
from dflash_deploy.checkpoint.shape import Shape, read_shape
from dflash_deploy.checkpoint.weights import Group, group_of
from dflash_deploy.errors import DeployError
from tests.checkpoint.checkpoints import Tensors, small_qwen, span, write_checkpoint

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def shape_of(**changes: Any) -> Shape:
    return read_shape(Fields(DENSE | changes, "config.json"))


def dense_tensors(config: dict[str, Any], *, prefix: str = "model.", dtype: str = "BF16") -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors: Tensors = {f"{prefix}embed_tokens.weight": (dtype, (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}layers.{layer}.self_attn.{name}.weight"] = (dtype, (hidden, hidden))
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}layers.{layer}.mlp.{name}.weight"] = (dtype, (inner, hidden))
        tensors[f"{prefix}layers.{layer}.input_layernorm.weight"] = (dtype, (hidden,))
    tensors[f"{prefix}norm.weight"] = (dtype, (hidden,))
    return tensors


def read(folder: Path, config: dict[str, Any], tensors: Tensors, **beside: Any) -> Checkpoint:
    return read_checkpoint(write_checkpoint(folder, config, tensors, **beside))


def test_a_dense_model() -> None:
    shape = shape_of()
    assert (shape.layers, shape.attention_layers, shape.linear_layers, shape.sliding_layers) == (6, 6, 0, 0)
    assert (shape.head_dim, shape.kv_heads, shape.linear, shape.unknown) == (16, 2, None, ())
    assert shape_of(num_key_value_heads=None).kv_heads == 4
    assert shape_of(head_dim=128).head_dim == 128


def test_a_hybrid_by_list_or_by_interval() -> None:
    text = small_qwen(layers=8).config()["text_config"]
    by_list = read_shape(Fields(text, "config.json"))
    by_interval = read_shape(Fields(text | {"layer_types": None}, "config.json"))
    assert by_list.layer_kinds == by_interval.layer_kinds
    assert (by_list.attention_layers, by_list.linear_layers) == (2, 6)
    assert by_list.linear is not None
    assert (by_list.linear.value_heads, by_list.linear.conv_kernel, by_list.state_dtype) == (4, 4, "float32")
    asked = read_shape(Fields(text | {"mamba_ssm_dtype": "bfloat16"}, "config.json"))
    assert asked.state_dtype == "bfloat16"
    # The engine takes float32 for a type that it does not know.
    assert read_shape(Fields(text | {"mamba_ssm_dtype": "fp8"}, "config.json")).state_dtype == "float32"


def test_sliding_windows() -> None:
    # Three local layers, then a global one.
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    shape = shape_of(layer_types=kinds, sliding_window=1024)
    assert (shape.sliding_layers, shape.attention_layers, shape.sliding_window) == (5, 6, 1024)
    pattern = shape_of(sliding_window_pattern=6, sliding_window=512)
    assert (pattern.sliding_layers, pattern.sliding_window) == (5, 512)
    # A window that no layer uses, as many Qwen files have it.
    assert shape_of(sliding_window=4096, use_sliding_window=False).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 512}, "compressed KV cache"),
        ({"layer_types": ["odd"] * 6}, "layers of the kind 'odd'"),
        ({"layer_types": ["mamba"] * 6}, "state of its linear-attention layers: planned as full attention"),
        ({"hybrid_override_pattern": "M-M*M-"}, "which layers have no attention"),
        ({"global_head_dim": 512}, "other heads in its full-attention layers"),
    ],
)
def test_what_is_not_known_is_said_and_the_rest_planned(changes: dict[str, Any], said: str) -> None:
    shape = shape_of(**changes)
    assert any(said in text for text in shape.unknown)
    assert shape.attention_layers == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 10**6}, "more than any model has"),
        ({"num_attention_heads": None}, "num_attention_heads is missing: the KV cache"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number of at least 1, found 0"),
        ({"vocab_size": True}, "found true"),
        ({"vocab_size": 1.5}, r"found 1\.5"),
        ({"hidden_size": "64"}, "found '64'"),
        ({"hidden_size": 1 << 60}, "hidden_size: expected"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 of 6 layers"),
        ({"layer_types": "full"}, "layer_types: expected a list"),
        ({"layer_types": [1] * 6}, "layer_types: expected a list of texts"),
        ({"architectures": "x"}, "architectures: expected a list"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"text_config": [1]}, "text_config: expected an object"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"linear_num_value_heads": 4}, "linear_conv_kernel_dim is missing"),
    ],
)
def test_a_wrong_configuration_names_the_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DeployError, match=said):
        shape_of(**changes)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.language_model.embed_tokens.weight", Group.EMBEDDING),
        ("transformer.wte.weight", Group.EMBEDDING),
        ("lm_head.weight", Group.LM_HEAD),
        ("language_model.lm_head.weight_scale", Group.LM_HEAD),
        ("model.layers.3.self_attn.q_proj.weight", Group.ATTENTION),
        ("model.layers.3.self_attn.k_proj.k_scale", Group.ATTENTION),
        ("model.layers.3.self_attn.q_norm.weight", Group.NORMS),
        ("model.layers.3.linear_attn.in_proj_qkv.weight", Group.LINEAR_ATTENTION),
        ("model.layers.3.linear_attn.A_log", Group.LINEAR_ATTENTION),
        ("model.layers.3.mlp.gate_proj.weight_scale_2", Group.MLP),
        ("model.layers.3.mlp.gate.weight", Group.MLP),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", Group.MLP),
        ("model.layers.3.mlp.experts.17.up_proj.weight", Group.EXPERTS),
        ("model.layers.3.mlp.experts.gate_up_proj", Group.EXPERTS),
        ("model.layers.61.mlp.experts.17.up_proj.weight", Group.EXPERTS),
        ("model.layers.64.mlp.up_proj.weight", Group.MTP),
        ("mtp.layers.0.self_attn.q_proj.weight", Group.MTP),
        ("model.mtp_layers.0.mlp.up_proj.weight", Group.MTP),
        ("model.visual.blocks.70.attn.qkv.weight", Group.VISION),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", Group.VISION),
        ("multi_modal_projector.linear_1.weight", Group.VISION),
        ("model.norm.weight", Group.NORMS),
        ("something.else", Group.OTHER),
    ],
)
def test_what_a_tensor_is_for(name: str, group: Group) -> None:
    assert group_of(name, layers=64) is group


def test_a_tied_head_is_loaded_once(tmp_path: Path) -> None:
    tensors = dense_tensors(DENSE)
    embedding = 512 * 64 * 2
    tied = read(tmp_path / "tied", DENSE | {"tie_word_embeddings": True}, tensors)
    assert (tied.tied, tied.lm_head) == (True, "bfloat16")
    # The embedding is read whole, as the head.
    assert tied.read_bytes_per_token() == tied.loaded_bytes() == tied.stored_bytes()
    twice = read(
        tmp_path / "twice",
        DENSE | {"tie_word_embeddings": True},
        tensors | {"lm_head.weight": ("BF16", (512, 64))},
    )
    assert twice.loaded_bytes() == tied.loaded_bytes() == twice.stored_bytes() - embedding
    assert any("tied to the embedding" in note for note in twice.notes)
    own = read(tmp_path / "own", DENSE, tensors | {"lm_head.weight": ("BF16", (512, 64))})
    assert not own.tied
    assert own.read_bytes_per_token() == own.loaded_bytes() - embedding
    # Where the file does not tell, the tensors do.
    assert read(tmp_path / "untold", DENSE, tensors).tied


def test_a_text_model_leaves_a_vision_tower_in_its_files_alone(tmp_path: Path) -> None:
    model = small_qwen()
    both = read(tmp_path / "both", model.config(), model.build())
    text = read(tmp_path / "text", model.config(vision_config=None), model.build())
    assert text.loaded_bytes() == both.loaded_bytes(text_only=True) < both.loaded_bytes()
    assert (both.model_card().vision, text.model_card().vision) == (True, False)
    assert any("not loaded: the configuration is of a text model" in note for note in text.notes)


def test_float32_on_disk_takes_half_once_loaded(tmp_path: Path) -> None:
    tensors = dense_tensors(DENSE, dtype="F32")
    checkpoint = read(tmp_path, DENSE | {"torch_dtype": "float32"}, tensors)
    assert checkpoint.shape.compute_dtype == "float16"
    assert checkpoint.loaded_bytes() * 2 == checkpoint.stored_bytes()
    assert {row.loaded_dtype for row in checkpoint.weights} == {"F16"}
    rows = {row.label: row.value for row in describe(checkpoint)}
    assert rows["MLP"] == "576.00 KiB stored (float32), 288.00 KiB loaded"


def test_experts_are_read_by_their_share(tmp_path: Path) -> None:
    config = DENSE | {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    tensors = {name: tensor for name, tensor in dense_tensors(DENSE).items() if ".mlp." not in name}
    tensors["lm_head.weight"] = ("BF16", (512, 64))
    before = read(tmp_path / "without", DENSE, tensors).read_bytes_per_token()
    experts: Tensors = {}
    for layer in range(6):
        experts[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = ("BF16", (16, 64, 64))
        experts[f"model.layers.{layer}.mlp.experts.down_proj"] = ("BF16", (16, 64, 32))
    always: Tensors = {}
    for layer in range(6):
        always[f"model.layers.{layer}.mlp.gate.weight"] = ("BF16", (16, 64))
        always[f"model.layers.{layer}.mlp.shared_expert.up_proj.weight"] = ("BF16", (32, 64))
    checkpoint = read(tmp_path / "with", config, tensors | experts | always)
    expert_bytes = sum(span(*tensor) for tensor in experts.values())
    assert checkpoint.stored_bytes(Group.EXPERTS) == expert_bytes
    shared_bytes = sum(span(*tensor) for tensor in always.values())
    assert checkpoint.read_bytes_per_token() == before + expert_bytes * 2 // 16 + shared_bytes
    rows = {row.label: row.value for row in describe(checkpoint) if row.section == "shape"}
    assert rows["experts"] == "2 of 16 for a token, 1 shared"


@pytest.mark.parametrize(
    ("form", "head", "lm_head"),
    [
        ("NVFP4", "BF16", "bfloat16"),
        ("NVFP4", "NVFP4", "nvfp4"),
        ("FP8", "FP8", "fp8"),
        ("FP8 in blocks", "BF16", "bfloat16"),
        ("AWQ", "BF16", "bfloat16"),
        ("W4A16", "W4A16", "int4"),
    ],
)
def test_formats_are_told_by_the_tensors(tmp_path: Path, form: str, head: str, lm_head: str) -> None:
    model = small_qwen(hidden=128, inner=256)
    checkpoint = read(tmp_path, model.config(), model.build(mlp=form, attention=form, head=head))
    assert checkpoint.lm_head == lm_head
    expected = {"AWQ": "int4", "W4A16": "int4"}.get(form, form.lower())
    assert {row.number_format for row in checkpoint.weights if row.group is Group.MLP} == {expected}
    assert checkpoint.loaded_bytes(Group.MLP) == checkpoint.stored_bytes(Group.MLP)
    # A scale belongs to the weight that it scales.
    linear = {row.number_format for row in checkpoint.weights if row.group is Group.LINEAR_ATTENTION}
    assert linear == {expected, "bfloat16"}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
EIGHT_BITS = {"type": "float", "num_bits": 8}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
    "kv_cache_scheme": EIGHT_BITS,
}
NVFP4_BESIDE = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
LAYERS_BESIDE = {"quantized_layers": {"a": {"quant_algo": "FP8"}}, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("config", "beside", "text", "cache"),
    [
        ({}, NVFP4_BESIDE, "modelopt NVFP4 in groups of 16", "fp8_e4m3"),
        (MODELOPT | {"ignore": ["lm_head"]}, None, "modelopt FP8", None),
        (MODELOPT | {"kv_cache_scheme": EIGHT_BITS}, None, "modelopt FP8", "fp8_e4m3"),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION"},
            LAYERS_BESIDE,
            "modelopt MIXED_PRECISION (1 FP8)",
            "fp8_e4m3",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, "awq 4-bit in groups of 128", None),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, None, "gptq 8-bit", None),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            None,
            "fp8 8-bit in groups of 128x64",
            None,
        ),
        (PACKED, None, "compressed-tensors pack-quantized 4-bit in groups of 32", None),
    ],
)
def test_declared_quantisation(
    tmp_path: Path, config: dict[str, Any], beside: dict[str, Any] | None, text: str, cache: str | None
) -> None:
    declared = {"quantization_config": config} if config else {}
    more = {"hf_quant_config": {"quantization": beside}} if beside else {}
    checkpoint = read(tmp_path, DENSE | declared, dense_tensors(DENSE), **more)
    assert str(checkpoint.quantization) == text
    assert checkpoint.kv_cache_dtype == cache
    # Compressed-tensors' wish for an 8-bit cache is not what the engine's auto follows.
    asked = any("8-bit KV cache" in note for note in checkpoint.notes)
    assert asked == (config.get("quant_method") == "compressed-tensors")


def test_eight_bit_integers_by_declaration(tmp_path: Path) -> None:
    model = small_qwen(hidden=128, inner=256)
    config = model.config(quantization_config={"quant_method": "gptq", "bits": 8})
    checkpoint = read(tmp_path, config, model.build(mlp="AWQ"))
    assert {row.number_format for row in checkpoint.weights if row.group is Group.MLP} == {"int8"}


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}},
            "quantized_layers.a: expected an object",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a\x1b": {}}},
            r"quantized_layers.a\?: expected",
        ),
        ({"quant_algo": 4}, "quant_algo: expected text"),
        ({"quant_algo": "NVFP4", "group_size": -3}, "group_size: expected"),
    ],
)
def test_a_wrong_declaration(tmp_path: Path, quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(DeployError, match=said):
        read(tmp_path, DENSE, dense_tensors(DENSE), hf_quant_config={"quantization": quantization})


def test_a_card_of_a_window_model(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = DENSE | {"layer_types": kinds, "sliding_window": 1024}
    card = read(tmp_path, config, dense_tensors(DENSE)).model_card()
    assert (card.full_attention_layers, card.sliding_layers, card.sliding_window) == (6, 5, 1024)


def test_an_embedding_that_contradicts_the_configuration(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, DENSE | {"vocab_size": 600}, dense_tensors(DENSE))
    assert any("600 tokens" in text and "has 512" in text for text in checkpoint.unknown)
