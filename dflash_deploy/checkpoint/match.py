"""Whether a draft belongs to a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.facts import Checkpoint


def mismatches(target: Checkpoint, draft: Checkpoint) -> tuple[str, ...]:
    """What keeps a draft from working with a target, in words; empty where nothing does.

    Args:
        target: the model that is served.
        draft: its draft.
    """
    return tuple(_mismatches(target, draft))


def _mismatches(target: Checkpoint, draft: Checkpoint) -> list[str]:
    if draft.draft is None:
        return [f"{draft.name} is no draft: {draft.shape.architecture} is a model of its own"]
    if target.draft is not None:
        return [f"{target.name} is itself a draft"]
    facts, found = draft.draft, []
    own, theirs = draft.shape, target.shape
    if own.vocab_size != theirs.vocab_size:
        found.append(
            f"vocabulary: the draft is for {own.vocab_size:,} tokens, the target has {theirs.vocab_size:,}"
        )
    # EAGLE drafts may be narrower: a layer of their own widens what they read.
    if facts.method in ("dflash", "dspark", "mtp") and own.hidden_size != theirs.hidden_size:
        found.append(
            f"hidden size: the draft reads vectors of {own.hidden_size:,} numbers, the target gives "
            f"{theirs.hidden_size:,}"
        )
    beyond = [layer for layer in facts.target_layer_ids if layer >= theirs.layers]
    if beyond:
        found.append(
            f"layers: the draft reads layer {', '.join(map(str, beyond[:8]))} of a target with "
            f"{theirs.layers} (0 to {theirs.layers - 1})"
        )
    if facts.target_layers is not None and facts.target_layers != theirs.layers:
        found.append(
            f"layers: the draft is made for a target with {facts.target_layers}, this one has {theirs.layers}"
        )
    if facts.mask_token_id is not None and facts.mask_token_id >= theirs.vocab_size:
        found.append(
            f"mask token: the draft uses {facts.mask_token_id:,}, the target has {theirs.vocab_size:,} tokens"
        )
    sizes = draft.tokenizer_tokens, target.tokenizer_tokens
    if None not in sizes and sizes[0] != sizes[1]:
        found.append(
            f"tokenizer: the draft's knows {draft.tokenizer_tokens:,} tokens, the target's "
            f"{target.tokenizer_tokens:,}"
        )
    return found
