"""A checkpoint's facts in rows for people."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.checkpoint.draft import Draft
from dflash_deploy.checkpoint.facts import Checkpoint
from dflash_deploy.checkpoint.safetensors import size_text
from dflash_deploy.checkpoint.weights import Group, Load, is_packed


@dataclass(frozen=True)
class Row:
    """One fact: what of, in words and figures, and where it is from."""

    section: str
    label: str
    value: str


def describe(checkpoint: Checkpoint) -> tuple[Row, ...]:
    """Rows in sections: checkpoint, shape, weights, draft, notes. Sizes are read from headers, so exact."""
    return (
        *_checkpoint(checkpoint),
        *_shape(checkpoint),
        *_weights(checkpoint),
        *(_draft(checkpoint.draft) if checkpoint.draft else ()),
        *(Row("notes", "note", note) for note in checkpoint.notes),
        *(Row("notes", "not known", unknown) for unknown in checkpoint.unknown),
    )


def _checkpoint(checkpoint: Checkpoint) -> list[Row]:
    count = len(checkpoint.files)
    kind = checkpoint.draft.variant + " draft" if checkpoint.draft else "model"
    return [
        Row("checkpoint", "name", checkpoint.name),
        Row("checkpoint", "read from", checkpoint.place),
        Row("checkpoint", "kind", f"{kind}, {checkpoint.shape.architecture}"),
        Row(
            "checkpoint", "on disk", f"{size_text(checkpoint.disk_bytes)} in {count} file{'s' * (count > 1)}"
        ),
        Row("checkpoint", "quantised", str(checkpoint.quantization or "no")),
    ]


def _shape(checkpoint: Checkpoint) -> list[Row]:
    shape = checkpoint.shape
    full = shape.attention_layers - shape.sliding_layers
    kinds = [(full, "full attention"), (shape.linear_layers, "linear attention")]
    if shape.sliding_layers:
        window = f" of {shape.sliding_window:,} tokens" if shape.sliding_window else ""
        kinds.append((shape.sliding_layers, f"sliding window{window}"))
    layers = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
    rows = [
        Row("shape", "layers", f"{shape.layers} ({layers})"),
        Row("shape", "hidden size", f"{shape.hidden_size:,}"),
        Row(
            "shape",
            "heads",
            f"{shape.attention_heads} query, {shape.kv_heads} key and value, of {shape.head_dim}",
        ),
    ]
    if shape.linear:
        linear = shape.linear
        rows.append(
            Row(
                "shape",
                "linear attention",
                f"{linear.value_heads} value heads of {linear.value_dim}, {linear.key_heads} key heads of "
                f"{linear.key_dim}, convolution over {linear.conv_kernel}, state in {shape.state_dtype}",
            )
        )
    if shape.experts:
        experts = shape.experts
        shared = f", {experts.shared} shared" if experts.shared else ""
        rows.append(Row("shape", "experts", f"{experts.per_token} of {experts.count} for a token{shared}"))
    rows += [
        Row("shape", "vocabulary", f"{shape.vocab_size:,} tokens"),
        Row("shape", "context", f"{shape.max_context_tokens:,} tokens at most"),
        Row("shape", "KV cache asked for", checkpoint.kv_cache_dtype or f"{shape.compute_dtype} (auto)"),
    ]
    return rows


def _weights(checkpoint: Checkpoint) -> list[Row]:
    rows = []
    for group in Group:
        parts = [row for row in checkpoint.weights if row.group is group]
        if not parts:
            continue
        formats: dict[str, int] = {}
        for part in parts:
            formats[part.number_format] = formats.get(part.number_format, 0) + part.stored_bytes
        stored = sum(part.stored_bytes for part in parts)
        loaded = sum(part.loaded_bytes for part in parts)
        text = f"{size_text(stored)} stored ({', '.join(sorted(formats, key=lambda name: -formats[name]))})"
        loads = {part.load for part in parts}
        if loaded != stored:
            text += f", {size_text(loaded)} loaded"
        elif len(loads) == 1 and Load.ALWAYS not in loads:
            text += f", loaded {next(iter(loads))}"
        rows.append(Row("weights", group, text))
    head = checkpoint.lm_head
    packed = ", packed: multiplied by a kernel of its own" if is_packed(head) else ""
    rows.append(Row("weights", "output head is", f"{head}{' (tied)' if checkpoint.tied else ''}{packed}"))
    rows.append(Row("weights", "loaded in all", size_text(checkpoint.loaded_bytes())))
    if checkpoint.loaded_bytes(text_only=True) != checkpoint.loaded_bytes():
        rows.append(Row("weights", "loaded, text only", size_text(checkpoint.loaded_bytes(text_only=True))))
    rows.append(Row("weights", "read per token", size_text(checkpoint.read_bytes_per_token())))
    return rows


def _draft(draft: Draft) -> list[Row]:
    block = f"{draft.block_size} tokens" + ("" if draft.block_stated else " (the engine's default)")
    rows = [Row("draft", "method", draft.variant), Row("draft", "block", block)]
    if draft.target_layer_ids:
        rows.append(Row("draft", "reads layers", ", ".join(map(str, draft.target_layer_ids[:32]))))
    if draft.selector_rank:
        rows.append(
            Row("draft", "selector", f"best {draft.selector_top_k} candidates, rank {draft.selector_rank}")
        )
    if draft.conv_kernel_size:
        rows.append(
            Row("draft", "convolution", f"{draft.conv_kernel_size} taps, groups of {draft.conv_group_size}")
        )
    if draft.markov_rank:
        rows.append(Row("draft", "Markov head", f"rank {draft.markov_rank}"))
    if draft.mask_token_id is not None:
        rows.append(Row("draft", "mask token", f"{draft.mask_token_id:,}"))
    return rows
