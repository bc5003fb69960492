"""All that is known of one checkpoint, read from its own files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dflash_deploy.checkpoint.cards import ModelCard, find_model_card, list_model_cards
from dflash_deploy.checkpoint.draft import Draft, mtp_head
from dflash_deploy.checkpoint.quantization import Quantization
from dflash_deploy.checkpoint.shape import Shape
from dflash_deploy.checkpoint.weights import Group, Load, Weights, head_format

_GIB = 1 << 30

LOADING_GIB = 0.13
"""What "Load weight end ... mem usage" shows beyond the tensors: 0.08 for 19.62 GiB of NVFP4 and 0.14 for a
3.58 GiB draft (RTX PRO 6000), 0.17 for 28.3 GiB of FP8 (H100). Allocator rounding and kernels; empirical."""

_CARD_AGREES = 0.015
"""Share by which a card's measured size may differ from the headers and still be of the same checkpoint:
0.3 GiB of 20. Revisions of one NVFP4 export lie between 19.70 and 20.14 GiB: where they differ more, the
person's own files are right."""

_CARD_FORMATS = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8 in blocks": "fp8"}


@dataclass(frozen=True)
class Checkpoint:
    """A target or a draft.

    Attributes:
        name: as asked for.
        place: where its files were read, in words.
        hub_name: ``OWNER/NAME`` where it came by that.
        commit: its revision on the hub.
        weights: sums of tensors.
        files: names of the files with weights.
        disk_bytes: of these files.
        tokenizer_tokens: tokens that its tokenizer knows, None without one.
        draft: what kind of draft it is, None for a target.
        notes: what a person should know: parts that are not loaded, declarations that are not followed.
        unknown: what this tool has no rule for; plans need a margin for each.
    """

    name: str
    place: str
    hub_name: str | None
    commit: str | None
    shape: Shape
    quantization: Quantization | None
    weights: tuple[Weights, ...]
    files: tuple[str, ...]
    disk_bytes: int
    tokenizer_tokens: int | None
    draft: Draft | None
    notes: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def role(self) -> Literal["target", "draft"]:
        """Whether it serves alone, or drafts for another."""
        return "target" if self.draft is None else "draft"

    @property
    def lm_head(self) -> str:
        """Number format of the output head; ``shared`` where a draft uses its target's."""
        if self.draft is not None and self.draft.draft_vocab_size is None:
            return "shared"
        own = head_format(self.weights)
        if own is not None:
            return own
        embedding = [row for row in self.weights if row.group is Group.EMBEDDING]
        return embedding[0].number_format if embedding else self.shape.compute_dtype

    @property
    def tied(self) -> bool:
        """The output head is the embedding."""
        return self.draft is None and head_format(self.weights) is None

    @property
    def mtp(self) -> Draft | None:
        """The head for multi-token prediction, None without one."""
        has_one = self.draft is None and any(row.group is Group.MTP for row in self.weights)
        return mtp_head() if has_one else None

    @property
    def kv_cache_dtype(self) -> str | None:
        """What the engine's ``auto`` comes to, None for the compute type."""
        return self.quantization.kv_cache_dtype if self.quantization else None

    def stored_bytes(self, group: Group | None = None) -> int:
        """Bytes of tensors in its files."""
        return sum(row.stored_bytes for row in self.weights if group in (None, row.group))

    def loaded_bytes(self, group: Group | None = None, *, text_only: bool = False) -> int:
        """Bytes of tensors on the card; of a target without its MTP head, which loads with the draft."""
        loads = {Load.ALWAYS} if text_only else {Load.ALWAYS, Load.WITH_VISION}
        return sum(
            row.loaded_bytes for row in self.weights if row.load in loads and group in (None, row.group)
        )

    def mtp_bytes(self) -> int:
        """Bytes that the MTP head adds once it is used."""
        return sum(row.loaded_bytes for row in self.weights if row.load is Load.AS_DRAFT)

    def read_bytes_per_token(self) -> int:
        """Bytes of weights read in one forward pass for one token."""
        return sum(row.read_bytes for row in self.weights if row.load is Load.ALWAYS)

    def model_card(self) -> ModelCard:
        """These facts as the planner takes them.

        A shipped card of the same checkpoint gives what a log has measured; the rest is from the files.
        """
        card = self._computed_card()
        known = find_model_card(self.hub_name or self.name)
        if known is None or known.role != card.role or _shape(known) != _shape(card):
            return card
        # Others publish exports under the same name; only the same bytes are the same checkpoint.
        published = (self.hub_name or "").casefold() in ("", (known.path or "").casefold())
        if not published and known.disk_bytes != self.disk_bytes:
            return card
        if abs(known.loaded_gib - card.loaded_gib) > _CARD_AGREES * card.loaded_gib:
            note = (
                f"loaded: computed; the card {known.id} says {known.loaded_gib:.2f} GiB, which does not fit "
                "these files"
            )
            return card.model_copy(update={"sources": [*card.sources, note]})
        measured = f"loaded: measured, from the card {known.id}; computed {card.loaded_gib:.2f} GiB"
        sources = [source for source in card.sources if not source.startswith("loaded:")]
        return card.model_copy(
            update={
                "id": known.id,
                "name": known.name,
                "loaded_gib": known.loaded_gib,
                "targets": known.targets or card.targets,
                "sources": [*sources, measured],
            }
        )

    def mtp_card(self) -> ModelCard | None:
        """The MTP head as a draft, None without one."""
        head = self.mtp
        if head is None:
            return None
        card = self.model_card()
        read = sum(row.read_bytes for row in self.weights if row.load is Load.AS_DRAFT)
        layers = max(self.shape.mtp_layers, 1)
        return _draft_fields(
            card.model_copy(
                update={
                    "id": f"{card.id}-mtp",
                    "name": f"MTP head of {card.name}",
                    "path": None,
                    "layers": layers,
                    "full_attention_layers": layers,
                    "linear_attention_layers": 0,
                    "linear": None,
                    "state_dtype": None,
                    "vision": False,
                    "lm_head": "shared",
                    "kv_cache_dtype": None,
                    "disk_bytes": None,
                    "loaded_gib": self.mtp_bytes() / _GIB,
                    "read_bytes_per_token": max(read, 1),
                    "sources": [f"all: computed from the files of {self.name}"],
                }
            ),
            head,
            [card.id],
        )

    def _computed_card(self) -> ModelCard:
        shape = self.shape
        vision = shape.vision and any(row.group is Group.VISION for row in self.weights)
        card = ModelCard(
            id=_slug(self.name),
            name=self.name,
            role="target",
            path=self.hub_name or self.name,
            architecture=shape.architecture,
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            full_attention_layers=shape.attention_layers,
            linear_attention_layers=shape.linear_layers,
            sliding_layers=shape.sliding_layers if shape.sliding_window else 0,
            sliding_window=shape.sliding_window,
            attention_heads=shape.attention_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            max_context_tokens=shape.max_context_tokens,
            linear=shape.linear,
            state_dtype=shape.state_dtype,
            vision=vision,
            lm_head=_CARD_FORMATS.get(self.lm_head, self.lm_head),
            kv_cache_dtype=self.kv_cache_dtype,
            disk_bytes=self.disk_bytes,
            loaded_gib=self.loaded_bytes() / _GIB + LOADING_GIB,
            read_bytes_per_token=max(self.read_bytes_per_token(), 1),
            sources=[
                f"shape: config.json of {self.place}",
                f"disk: {len(self.files)} file{'s' if len(self.files) > 1 else ''} of {self.place}",
                f"loaded: computed from the headers, and {LOADING_GIB} GiB that loading takes besides",
                "read per token: computed from the headers",
            ],
        )
        return (
            card
            if self.draft is None
            else _draft_fields(card, self.draft, _likely_targets(shape, self.draft))
        )


def _likely_targets(shape: Shape, draft: Draft) -> list[str]:
    """Ids of the known targets that a draft goes with."""
    return [
        card.id
        for card in list_model_cards()
        if card.role == "target"
        and (card.hidden_size, card.vocab_size) == (shape.hidden_size, shape.vocab_size)
        and card.layers > max(draft.target_layer_ids, default=0)
    ]


def _draft_fields(card: ModelCard, draft: Draft, targets: list[str]) -> ModelCard:
    # A copy is not checked again: unlike a card that a person writes, a draft may go with no known target.
    return card.model_copy(
        update={"role": "draft", "method": draft.method, "block_size": draft.block_size, "targets": targets}
    )


def _shape(card: ModelCard) -> tuple[object, ...]:
    return (
        card.hidden_size,
        card.layers,
        card.linear_attention_layers,
        card.kv_heads,
        card.head_dim,
        card.vocab_size,
        card.lm_head,
    )


def _slug(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]+", "-", last.casefold()).strip("-.") or "checkpoint"
