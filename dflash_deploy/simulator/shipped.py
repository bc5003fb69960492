"""Public facts of cards and checkpoints, read from the shipped YAML files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

import yaml

from dflash_deploy.resources import resource_dir

_MAX_FILE_BYTES = 1 << 20


class UnknownNameError(Exception):
    """No shipped file has this name."""


@dataclass(frozen=True)
class CardFacts:
    """A graphics card as its maker describes it."""

    id: str
    name: str
    compute_capability: tuple[int, int]
    memory_mib: int
    bandwidth_gb_per_s: float
    sms: int
    unified_memory: bool


@dataclass(frozen=True)
class LinearFacts:
    """Shape of the linear-attention layers of a hybrid model."""

    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    conv_kernel: int

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution."""
        return self.value_heads * self.value_dim + 2 * self.key_heads * self.key_dim


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint, target or draft."""

    id: str
    role: str
    path: str | None
    architecture: str
    hidden_size: int
    full_attention_layers: int
    linear_attention_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    linear: LinearFacts | None
    state_dtype: str | None
    vision: bool
    lm_head: str
    kv_cache_dtype: str | None
    loaded_gib: float
    read_bytes_per_token: float
    method: str | None = None
    block_size: int | None = None

    @property
    def quantization(self) -> str:
        """How the weights are held, as far as speed and support depend on it."""
        for mark in ("nvfp4", "fp8", "awq", "w4a16", "bf16"):
            if mark in self.id:
                return mark
        return "bf16"

    @property
    def lm_head_bytes(self) -> float:
        """Bytes that one pass through the output head reads."""
        return self.vocab_size * self.hidden_size * (0.5 if self.lm_head == "fp4" else 2.0)

    def kv_elements_per_token(self) -> int:
        """Key and value numbers that one token keeps in the attention layers."""
        return self.full_attention_layers * self.kv_heads * self.head_dim * 2


@cache
def load_card(card_id: str) -> CardFacts:
    """The facts of a card.

    Raises:
        UnknownNameError: no such card; the message lists those there are.
    """
    for data in _records("cards"):
        if data.get("id") == card_id:
            major, _, minor = str(data["compute_capability"]).partition(".")
            return CardFacts(
                id=card_id,
                name=str(data["name"]),
                compute_capability=(int(major), int(minor or 0)),
                memory_mib=int(_number(data, "memory_mib")),
                bandwidth_gb_per_s=_number(data, "bandwidth_gb_per_s"),
                sms=int(_number(data, "sms")),
                unified_memory=bool(data["unified_memory"]),
            )
    raise UnknownNameError(f"no card {card_id!r}; there are: {', '.join(card_ids())}")


def card_ids() -> tuple[str, ...]:
    """Every shipped card."""
    return tuple(str(data["id"]) for data in _records("cards"))


def find_model(path_or_id: str, role: str) -> ModelFacts | None:
    """The model that a path means: its id, its hub name, or a folder of the same name."""
    wanted = path_or_id.rstrip("/").lower()
    last = PurePosixPath(wanted).name
    for exact in (True, False):
        for model in models():
            if model.role != role:
                continue
            own = (model.path or model.id).lower()
            names = {model.id, own} if exact else {model.id, PurePosixPath(own).name}
            if (wanted if exact else last) in names:
                return model
    return None


def model(model_id: str) -> ModelFacts:
    """A shipped model by id.

    Raises:
        UnknownNameError: no such model.
    """
    for one in models():
        if one.id == model_id:
            return one
    raise UnknownNameError(f"no model {model_id!r}")


@cache
def models() -> tuple[ModelFacts, ...]:
    """Every shipped checkpoint."""
    return tuple(_model(data) for data in _records("models"))


def _model(data: Mapping[str, object]) -> ModelFacts:
    linear = data.get("linear")
    return ModelFacts(
        id=str(data["id"]),
        role=str(data["role"]),
        path=_text(data.get("path")),
        architecture=str(data["architecture"]),
        hidden_size=int(_number(data, "hidden_size")),
        full_attention_layers=int(_number(data, "full_attention_layers")),
        linear_attention_layers=int(_number(data, "linear_attention_layers")),
        kv_heads=int(_number(data, "kv_heads")),
        head_dim=int(_number(data, "head_dim")),
        vocab_size=int(_number(data, "vocab_size")),
        max_context_tokens=int(_number(data, "max_context_tokens")),
        linear=LinearFacts(**{key: int(value) for key, value in linear.items()})
        if isinstance(linear, dict)
        else None,
        state_dtype=_text(data.get("state_dtype")),
        vision=bool(data.get("vision")),
        lm_head=str(data.get("lm_head")),
        kv_cache_dtype=_text(data.get("kv_cache_dtype")),
        loaded_gib=_number(data, "loaded_gib"),
        read_bytes_per_token=_number(data, "read_bytes_per_token"),
        method=_text(data.get("method")),
        block_size=int(_number(data, "block_size")) if data.get("block_size") is not None else None,
    )


def _records(kind: str) -> Iterator[Mapping[str, object]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in sorted((resource_dir("profiles") / kind).glob("*.yaml")):
        if file.stat().st_size <= _MAX_FILE_BYTES:
            data = yaml.load(file.read_text("utf-8"), Loader=loader)  # noqa: S506 - a safe loader either way
            if isinstance(data, dict):
                yield data


def _number(data: Mapping[str, object], key: str) -> float:
    value = data[key]
    if not isinstance(value, int | float):
        raise TypeError(f"{data.get('id')}: {key} is no number")
    return float(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
