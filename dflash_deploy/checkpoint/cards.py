"""Known checkpoints: what ``profiles/models/<id>.yaml`` says of each target and draft."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_deploy import catalogue


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LinearAttention(_Part):
    """Shape of the recurrent (linear-attention) layers of a hybrid model."""

    value_heads: int = Field(gt=0)
    key_heads: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    key_dim: int = Field(gt=0)
    conv_kernel: int = Field(gt=1)


class ModelCard(_Part):
    """Facts about a checkpoint.

    Attributes:
        path: hub name or folder that the engine loads; None for a head inside its target's checkpoint, and
            for a model that everybody makes for themselves.
        path_confirmed: somebody has loaded it by that name; else a download by it may find nothing, or
            another export.
        linear: the recurrent layers, None for a model without any.
        state_dtype: type of the recurrent state that the checkpoint asks for.
        lm_head: type of the output head; ``shared`` where a draft uses its target's.
        kv_cache_dtype: what the engine's ``auto`` comes to, None for the compute type.
        disk_bytes: size on disk, None where it is not published.
        loaded_gib: what the engine's log says its loading took.
        read_bytes_per_token: bytes of weights read for one forward pass.
        method: speculation that a draft serves.
        block_size: draft tokens that it was trained to give.
        targets: ids of the targets that a draft works with.
        sliding_layers: those of the full-attention layers that keep only the last ``sliding_window`` tokens.
        sources: where the figures are from.
    """

    id: str
    name: str
    role: Literal["target", "draft"]
    path: str | None
    path_confirmed: bool = True
    architecture: str
    hidden_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    full_attention_layers: int = Field(ge=0)
    linear_attention_layers: int = Field(ge=0)
    attention_heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_context_tokens: int = Field(gt=0)
    linear: LinearAttention | None
    state_dtype: Literal["float32", "bfloat16", "float16"] | None
    vision: bool
    lm_head: str
    kv_cache_dtype: str | None
    disk_bytes: int | None = Field(gt=0)
    loaded_gib: float = Field(gt=0)
    read_bytes_per_token: int = Field(gt=0)
    method: Literal["dflash", "dspark", "mtp", "eagle", "eagle3"] | None = None
    block_size: int | None = Field(default=None, gt=0)
    targets: list[str] = []
    sliding_layers: int = Field(default=0, ge=0)
    sliding_window: int | None = Field(default=None, gt=0)
    sources: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _belongs_together(self) -> ModelCard:
        if self.full_attention_layers + self.linear_attention_layers != self.layers:
            raise ValueError("full_attention_layers and linear_attention_layers do not add up to layers")
        if (self.linear is None) != (self.linear_attention_layers == 0):
            raise ValueError("linear describes the linear-attention layers: give both or neither")
        if self.sliding_layers > self.full_attention_layers:
            raise ValueError("sliding_layers counts more layers than full_attention_layers has")
        if (self.sliding_window is None) != (self.sliding_layers == 0):
            raise ValueError("sliding_layers and sliding_window belong together: give both or neither")
        draft_facts = (self.method is not None, self.block_size is not None, bool(self.targets))
        if any(fact != (self.role == "draft") for fact in draft_facts):
            raise ValueError("method, block_size and targets belong to a draft, and a draft needs all three")
        return self


def model_ids() -> list[str]:
    """Ids of all known checkpoints."""
    return list(catalogue.files("models"))


def load_model_card(model_id: str) -> ModelCard:
    """One checkpoint's card.

    Raises:
        DeployError: unknown id, or a wrong file.
    """
    return catalogue.load("models", model_id, ModelCard)


def list_model_cards() -> list[ModelCard]:
    """All known checkpoints, by id.

    Raises:
        DeployError: a wrong file.
    """
    return [load_model_card(model_id) for model_id in model_ids()]


def home_made(card: ModelCard | None) -> bool:
    """Everybody makes this model for themselves, so that it is to be had nowhere."""
    return card is not None and card.role == "target" and card.path is None


def doubt_of(path: str) -> str:
    """What to say where a model is to be fetched by a name that nobody has confirmed; empty for any other."""
    card = next((one for one in list_model_cards() if one.path == path and not one.path_confirmed), None)
    if card is None:
        return ""
    setting = "model.path" if card.role == "target" else "speculation.draft_path"
    return (
        f"the name {path} is not confirmed: it follows from its publisher's other names; where the hub has "
        f"none such, or another export, give yours with --set {setting}=OWNER/NAME or a folder"
    )


def find_model_card(path_or_id: str) -> ModelCard | None:
    """The card of an id, a hub name, or a folder whose last part is that of a hub name; None if unknown."""
    if path_or_id in model_ids():
        return load_model_card(path_or_id)
    wanted = path_or_id.rstrip("/").casefold()
    cards = [card for card in list_model_cards() if card.path is not None]
    for card in cards:
        if card.path and card.path.casefold() == wanted:
            return card
    name = wanted.rpartition("/")[2]
    for card in cards:
        if name and card.path and card.path.casefold().rpartition("/")[2] == name:
            return card
    return None
