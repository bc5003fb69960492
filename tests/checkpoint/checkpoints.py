"""Checkpoints that the tests write: real headers, and as many zeros behind them as the header tells of.

The zeros are a hole in a sparse file, so that a checkpoint of full size takes a few blocks of the disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BITS = {"BF16": 16, "F16": 16, "F32": 32, "U8": 8, "F8_E4M3": 8, "I32": 32, "I8": 8, "I64": 64}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def span(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BITS[dtype] // 8


def header(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + span(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return entries


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> int:
    """Write a file of the full size; returns it."""
    text = json.dumps(header(tensors, metadata), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size = 8 + len(text) + sum(span(*tensor) for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(size)
    return size


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int = 1, **beside: Mapping[str, Any]
) -> Path:
    """A folder with ``config.json``, the weights in ``shards`` files, and more JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(span(*t) for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@dataclass
class Qwen:
    """The shape of Qwen3.8-27B, or a smaller one of the same family, and its tensors by their names."""

    layers: int = 64
    hidden: int = 5120
    inner: int = 17408
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    value_heads: int = 48
    key_heads: int = 16
    linear_dim: int = 128
    vocab: int = 248320
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_inner: int = 4304
    tied: bool = False
    mtp: bool = True
    experts: int = 0
    experts_per_token: int = 8
    quantized: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    def config(self, **more: Any) -> dict[str, Any]:
        text = {
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "full_attention_interval": 4,
            "layer_types": [
                "full_attention" if (n + 1) % 4 == 0 else "linear_attention" for n in range(self.layers)
            ],
            "linear_num_value_heads": self.value_heads,
            "linear_num_key_heads": self.key_heads,
            "linear_value_head_dim": self.linear_dim,
            "linear_key_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "vocab_size": self.vocab,
            "mtp_num_hidden_layers": int(self.mtp),
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.inner,
            "shared_expert_intermediate_size": self.inner,
            "dtype": "bfloat16",
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": self.vision_depth, "hidden_size": self.vision_hidden},
            "tie_word_embeddings": self.tied,
        } | more

    def build(
        self, *, mlp: str = "BF16", attention: str = "BF16", head: str = "BF16", mtp: str = "BF16"
    ) -> Tensors:
        """All tensors; each argument is the number format of that part's weights."""
        self.tensors = {}
        self._dense("model.language_model.embed_tokens.weight", self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.language_model.layers.{layer}"
            self._norms(prefix)
            if (layer + 1) % 4 == 0:
                self._attention(f"{prefix}.self_attn", attention)
            else:
                self._linear(f"{prefix}.linear_attn", attention)
            self._mlp(f"{prefix}.mlp", mlp)
        self._dense("model.language_model.norm.weight", self.hidden)
        if not self.tied:
            self._weight("lm_head", self.vocab, self.hidden, head)
        if self.mtp:
            self._mtp(mtp)
        if self.vision_depth:
            self._vision()
        return self.tensors

    def _dense(self, name: str, *shape: int, dtype: str = "BF16") -> None:
        self.tensors[name] = (dtype, shape)

    def _weight(self, module: str, rows: int, columns: int, form: str) -> None:
        match form:
            case "BF16" | "F16" | "F32":
                self._dense(f"{module}.weight", rows, columns, dtype=form)
            case "FP8":
                self._dense(f"{module}.weight", rows, columns, dtype="F8_E4M3")
                self._dense(f"{module}.weight_scale", dtype="F32")
                self._dense(f"{module}.input_scale", dtype="F32")
                self.quantized[module] = {"quant_algo": "FP8"}
            case "FP8 in blocks":
                self._dense(f"{module}.weight", rows, columns, dtype="F8_E4M3")
                blocks = math.ceil(rows / 128), math.ceil(columns / 128)
                self._dense(f"{module}.weight_scale_inv", *blocks)
            case "NVFP4":
                self._dense(f"{module}.weight", rows, columns // 2, dtype="U8")
                self._dense(f"{module}.weight_scale", rows, columns // 16, dtype="F8_E4M3")
                self._dense(f"{module}.weight_scale_2", dtype="F32")
                self._dense(f"{module}.input_scale", dtype="F32")
                self.quantized[module] = {"quant_algo": "NVFP4", "group_size": 16}
            case "AWQ":
                self._dense(f"{module}.qweight", columns, rows // 8, dtype="I32")
                self._dense(f"{module}.qzeros", columns // 128, rows // 8, dtype="I32")
                self._dense(f"{module}.scales", columns // 128, rows, dtype="F16")
            case "W4A16":
                self._dense(f"{module}.weight_packed", rows, columns // 8, dtype="I32")
                self._dense(f"{module}.weight_scale", rows, columns // 32)
                self._dense(f"{module}.weight_shape", 2, dtype="I64")
            case _:
                raise AssertionError(form)

    def _norms(self, prefix: str) -> None:
        self._dense(f"{prefix}.input_layernorm.weight", self.hidden)
        self._dense(f"{prefix}.post_attention_layernorm.weight", self.hidden)

    def _attention(self, prefix: str, form: str) -> None:
        self._weight(f"{prefix}.q_proj", self.heads * self.head_dim * 2, self.hidden, form)
        self._weight(f"{prefix}.k_proj", self.kv_heads * self.head_dim, self.hidden, form)
        self._weight(f"{prefix}.v_proj", self.kv_heads * self.head_dim, self.hidden, form)
        self._weight(f"{prefix}.o_proj", self.hidden, self.heads * self.head_dim, form)
        self._dense(f"{prefix}.q_norm.weight", self.head_dim)
        self._dense(f"{prefix}.k_norm.weight", self.head_dim)

    def _linear(self, prefix: str, form: str) -> None:
        value, key = self.value_heads * self.linear_dim, self.key_heads * self.linear_dim
        self._weight(f"{prefix}.in_proj_qkv", value + 2 * key, self.hidden, form)
        self._weight(f"{prefix}.in_proj_z", value, self.hidden, form)
        self._dense(f"{prefix}.in_proj_b.weight", self.value_heads, self.hidden)
        self._dense(f"{prefix}.in_proj_a.weight", self.value_heads, self.hidden)
        self._dense(f"{prefix}.conv1d.weight", value + 2 * key, 1, 4)
        self._dense(f"{prefix}.A_log", self.value_heads)
        self._dense(f"{prefix}.dt_bias", self.value_heads)
        self._dense(f"{prefix}.norm.weight", self.linear_dim)
        self._weight(f"{prefix}.out_proj", self.hidden, value, form)

    def _mlp(self, prefix: str, form: str) -> None:
        if self.experts:
            self._dense(f"{prefix}.gate.weight", self.experts, self.hidden)
            self._dense(f"{prefix}.experts.gate_up_proj", self.experts, 2 * self.inner, self.hidden)
            self._dense(f"{prefix}.experts.down_proj", self.experts, self.hidden, self.inner)
            self._dense(f"{prefix}.shared_expert_gate.weight", 1, self.hidden)
            prefix += ".shared_expert"
        self._weight(f"{prefix}.gate_proj", self.inner, self.hidden, form)
        self._weight(f"{prefix}.up_proj", self.inner, self.hidden, form)
        self._weight(f"{prefix}.down_proj", self.hidden, self.inner, form)

    def _mtp(self, form: str) -> None:
        self._dense("mtp.fc.weight", self.hidden, 2 * self.hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._dense(f"mtp.{name}.weight", self.hidden)
        self._norms("mtp.layers.0")
        self._attention("mtp.layers.0.self_attn", form)
        self._mlp("mtp.layers.0.mlp", form)

    def _vision(self) -> None:
        hidden, inner = self.vision_hidden, self.vision_inner

        def linear(name: str, rows: int, columns: int) -> None:
            self._dense(f"model.visual.{name}.weight", rows, columns)
            self._dense(f"model.visual.{name}.bias", rows)

        def norm(name: str) -> None:
            self._dense(f"model.visual.{name}.weight", hidden)
            self._dense(f"model.visual.{name}.bias", hidden)

        for block in range(self.vision_depth):
            norm(f"blocks.{block}.norm1")
            norm(f"blocks.{block}.norm2")
            linear(f"blocks.{block}.attn.qkv", 3 * hidden, hidden)
            linear(f"blocks.{block}.attn.proj", hidden, hidden)
            linear(f"blocks.{block}.mlp.linear_fc1", inner, hidden)
            linear(f"blocks.{block}.mlp.linear_fc2", hidden, inner)
        self._dense("model.visual.patch_embed.proj.weight", hidden, 3, 2, 16, 16)
        self._dense("model.visual.patch_embed.proj.bias", hidden)
        self._dense("model.visual.pos_embed.weight", 2304, hidden)
        norm("merger.norm")
        linear("merger.linear_fc1", 4 * hidden, 4 * hidden)
        linear("merger.linear_fc2", self.hidden, 4 * hidden)


def small_qwen(**changes: Any) -> Qwen:
    """The same model with everything small."""
    sizes: dict[str, Any] = {
        "layers": 4,
        "hidden": 64,
        "inner": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "value_heads": 4,
        "key_heads": 2,
        "linear_dim": 16,
        "vocab": 512,
        "vision_depth": 1,
        "vision_hidden": 32,
        "vision_inner": 64,
    }
    return Qwen(**(sizes | changes))


def draft_config(model: Qwen, **dflash: Any) -> dict[str, Any]:
    """A DFlash2 draft for a model, with the published sizes unless told otherwise."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": model.vocab,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "block_size": 8,
        "dflash_config": {
            "target_layer_ids": [5, 19, 33, 47, 61],
            "mask_token_id": 248070,
            "selector_rank": 256,
            "selector_top_k": 16,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
        }
        | dflash,
    }


def draft_tensors(config: Mapping[str, Any]) -> Tensors:
    """Tensors of such a draft."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    dflash = config["dflash_config"]
    tensors: Tensors = {"fc.weight": ("BF16", (hidden, len(dflash["target_layer_ids"]) * hidden))}
    tensors |= {"hidden_norm.weight": ("BF16", (hidden,)), "norm.weight": ("BF16", (hidden,))}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "self_attn.q_norm.weight": (config["head_dim"],),
            "self_attn.k_norm.weight": (config["head_dim"],),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if taps := dflash.get("conv_kernel_size"):
            groups = hidden // dflash["conv_group_size"]
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{conv}.base_kernel"] = (2, taps, hidden)
                shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        tensors |= {f"{prefix}.{name}": ("BF16", shape) for name, shape in shapes.items()}
    if rank := dflash.get("selector_rank"):
        tensors["candidate_selector.predecessor_codebook"] = ("BF16", (vocab, rank))
        tensors["candidate_selector.successor_codebook"] = ("BF16", (vocab, rank))
        tensors["candidate_selector.hidden_projection.weight"] = ("BF16", (rank, hidden))
    return tensors
