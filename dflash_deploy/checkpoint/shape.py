"""A model's shape as its ``config.json`` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from dflash_deploy.checkpoint.cards import LinearAttention
from dflash_deploy.checkpoint.json_text import Fields, invalid, shown

MAX_LAYERS = 4096
StateDtype = Literal["float32", "bfloat16", "float16"]

_LINEAR_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "gdn", "kda"})
_SLIDING_KINDS = frozenset({"sliding_attention", "local_attention", "chunked_attention"})
_UNREAD = {
    "kv_lora_rank": "a compressed KV cache (MLA): planned as if keys and values were kept whole",
    "global_head_dim": "other heads in its full-attention layers",
    "num_global_key_value_heads": "other numbers of heads in its full-attention layers",
    "swa_head_dim": "other heads in its sliding layers",
    "swa_num_key_value_heads": "other numbers of heads in its sliding layers",
    "hybrid_override_pattern": "which layers have no attention: all are planned with it",
    "ssm_state_size": "the state of its recurrent layers",
    "num_kv_shared_layers": "layers that use the keys and values of others",
}
_FULL_KINDS = frozenset({"full_attention", "attention", "global_attention", "self_attention"})


@dataclass(frozen=True)
class Experts:
    """Layers of a mixture of experts.

    Attributes:
        count: experts of a layer; ``per_token`` of them work on one token.
        width: inner size of one expert, None where the file does not tell.
        shared: experts that work on every token.
    """

    count: int
    per_token: int
    width: int | None
    shared: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        layer_kinds: kind of each layer, in the words of the file (``full_attention``, ``linear_attention``).
        sliding_window: tokens that a sliding layer keeps, None without such layers.
        linear: the recurrent layers, None without any, or where their sizes are given in ways not known here.
        state_dtype: of the recurrent state, as the file asks.
        tied: the output head is the embedding; None where the file leaves that to its class.
        compute_dtype: of weights that are not quantised, once loaded.
        vision: there is a vision tower.
        mtp_layers: of the head for multi-token prediction.
        unread: keys of sizes that this tool has no rule for.
    """

    architecture: str
    model_type: str
    hidden_size: int
    layer_kinds: tuple[str, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    sliding_window: int | None
    linear: LinearAttention | None
    state_dtype: StateDtype | None
    experts: Experts | None
    tied: bool | None
    compute_dtype: str
    vision: bool
    mtp_layers: int
    unread: tuple[str, ...]

    @property
    def layers(self) -> int:
        """All layers."""
        return len(self.layer_kinds)

    @property
    def linear_layers(self) -> int:
        """Layers with a recurrent state, of known size, instead of keys and values."""
        return sum(kind in _LINEAR_KINDS for kind in self.layer_kinds) if self.linear else 0

    @property
    def unsized_layers(self) -> int:
        """Layers with a recurrent state whose size is not known; they count as attention."""
        return 0 if self.linear else sum(kind in _LINEAR_KINDS for kind in self.layer_kinds)

    @property
    def sliding_layers(self) -> int:
        """Layers that keep a window of keys and values."""
        return sum(kind in _SLIDING_KINDS for kind in self.layer_kinds)

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values, of all tokens or a window."""
        return self.layers - self.linear_layers

    @property
    def unknown_kinds(self) -> tuple[str, ...]:
        """Kinds of layer that this tool has no rule for."""
        known = _LINEAR_KINDS | _SLIDING_KINDS | _FULL_KINDS
        return tuple(sorted({kind for kind in self.layer_kinds if kind not in known}))

    @property
    def unknown(self) -> tuple[str, ...]:
        """What cannot be planned from this shape, in words."""
        kinds = (f"layers of the kind {kind!r}" for kind in self.unknown_kinds)
        state = ("the state of its linear-attention layers: planned as full attention",)
        return (*kinds, *(_UNREAD[key] for key in self.unread), *(state if self.unsized_layers else ()))


def read_shape(config: Fields) -> Shape:
    """The shape in a ``config.json``, of the language model where it holds several.

    Raises:
        DeployError: a size that is needed is missing or impossible.
    """
    text = config.inner("text_config") or config.inner("llm_config") or config
    architectures = config.texts("architectures") or text.texts("architectures") or ()
    hidden = text.need("hidden_size", "n_embd", "d_model", why="nothing can be planned without it")
    layers = text.need("num_hidden_layers", "n_layer", "n_layers", why="nothing can be planned without it")
    if layers > MAX_LAYERS:
        raise invalid(config.source, f"num_hidden_layers: {layers:,} layers are more than any model has")
    heads = text.need(
        "num_attention_heads", "n_head", "n_heads", why="the KV cache cannot be sized without it"
    )
    kinds = _layer_kinds(text, layers)
    model_type = shown(text.text("model_type") or config.text("model_type") or "unnamed")
    tying = config if config.values.get("tie_word_embeddings") is not None else text
    stated = tying.values.get("tie_word_embeddings") is not None
    recurrent = any(kind in _LINEAR_KINDS for kind in kinds)
    linear = _linear(text) if recurrent and text.whole("linear_num_value_heads") is not None else None
    return Shape(
        architecture=shown(architectures[0]) if architectures else model_type,
        model_type=model_type,
        hidden_size=hidden,
        layer_kinds=kinds,
        attention_heads=heads,
        kv_heads=text.whole("num_key_value_heads") or heads,
        head_dim=text.whole("head_dim") or max(hidden // heads, 1),
        vocab_size=text.need("vocab_size", why="neither embedding nor logits can be sized without it"),
        max_context_tokens=text.whole("max_position_embeddings") or text.whole("n_positions") or 2048,
        sliding_window=_window(text) if any(kind in _SLIDING_KINDS for kind in kinds) else None,
        linear=linear,
        state_dtype=_state_dtype(text) if linear else None,
        experts=_experts(text),
        tied=tying.flag("tie_word_embeddings") if stated else None,
        compute_dtype=_compute_dtype(config, text, model_type),
        vision=_vision(config),
        mtp_layers=text.whole("mtp_num_hidden_layers", least=0)
        or text.whole("num_nextn_predict_layers", least=0)
        or 0,
        unread=tuple(key for key in _UNREAD if text.values.get(key)),
    )


def _layer_kinds(text: Fields, layers: int) -> tuple[str, ...]:
    kinds = text.texts("layer_types", most=MAX_LAYERS) or text.texts("layers_block_type", most=MAX_LAYERS)
    if kinds is not None:
        if len(kinds) < layers:
            raise invalid(text.source, f"{text.prefix}layer_types names {len(kinds)} of {layers} layers")
        return tuple(shown(kind) for kind in kinds[:layers])
    if text.whole("linear_num_value_heads") is not None:
        interval = text.whole("full_attention_interval") or 4
        return tuple(
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        )
    pattern = text.whole("sliding_window_pattern", most=MAX_LAYERS)
    if pattern is not None and _window(text) is not None:
        return tuple(
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
        )
    return ("full_attention",) * layers


def _linear(text: Fields) -> LinearAttention:
    why = "the state of its linear-attention layers cannot be sized without it"
    kernel = text.need("linear_conv_kernel_dim", why=why)
    if kernel < 2:
        raise text.wrong("linear_conv_kernel_dim", "expected a number of at least 2", kernel)
    return LinearAttention(
        value_heads=text.need("linear_num_value_heads", why=why),
        key_heads=text.need("linear_num_key_heads", why=why),
        value_dim=text.need("linear_value_head_dim", why=why),
        key_dim=text.need("linear_key_head_dim", why=why),
        conv_kernel=kernel,
    )


def _state_dtype(text: Fields) -> StateDtype:
    asked = text.text("mamba_ssm_dtype")
    # The engine warns of a type that it does not know, and takes float32.
    return cast("StateDtype", asked) if asked in get_args(StateDtype) else "float32"


def _experts(text: Fields) -> Experts | None:
    count = text.whole("num_experts", least=0) or text.whole("n_routed_experts", least=0)
    count = count or text.whole("num_local_experts", least=0)
    if not count or count < 2:
        return None
    shared = text.whole("n_shared_experts", least=0)
    if shared is None:
        shared = 1 if text.whole("shared_expert_intermediate_size", least=0) else 0
    return Experts(
        count=count,
        per_token=min(
            text.need("num_experts_per_tok", "top_k_experts", why="the bytes read per token cannot be told"),
            count,
        ),
        width=text.whole("moe_intermediate_size"),
        shared=shared,
    )


def _window(text: Fields) -> int | None:
    for key in ("sliding_window_size", "sliding_window", "window_size"):
        window = text.whole(key, least=0)
        if window:
            return window
    return None


def _compute_dtype(config: Fields, text: Fields, model_type: str) -> str:
    for fields in (config, text):
        for key in ("dtype", "torch_dtype"):
            named = fields.text(key)
            if named and named != "float32":
                return shown(named.removeprefix("torch."))
    # What the engine makes of a checkpoint in float32, or one that does not tell.
    return "bfloat16" if model_type.startswith("gemma") else "float16"


def _vision(config: Fields) -> bool:
    return config.inner("vision_config") is not None and not config.flag("language_model_only")
