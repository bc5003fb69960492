"""Flags that tune how draft tokens are made: which method reads which, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dflash_deploy.engine.sglang.command import Method

PREFIX = "speculative-"
"""How every flag of drafting begins."""
TOKENS, STEPS, TREE = "speculative-num-draft-tokens", "speculative-num-steps", "speculative-eagle-topk"

_Value = TypeVar("_Value")

_READERS: Mapping[str, tuple[Method, ...]] = MappingProxyType(
    {
        "speculative-dflash-": ("dflash",),
        "speculative-dspark-": ("dspark",),
        "speculative-ngram-": ("ngram",),
        STEPS: ("mtp",),
        TREE: ("mtp",),
        "speculative-adaptive": ("mtp",),
        "speculative-token-map": ("mtp",),
        # DSpark checks one token more than its own block size; another number is refused.
        TOKENS: ("ngram", "mtp", "dflash"),
        "speculative-draft-window-size": ("mtp", "dflash"),
        "speculative-draft-sink-size": ("mtp", "dflash"),
        "speculative-draft-model-path": ("dspark", "dflash"),
        "speculative-draft-": ("mtp", "dspark", "dflash"),
    }
)
"""Methods that read a flag, by how its name begins; the first that fits counts, all but plain decoding read
what is not here."""

_MTP_TOKENS = 4
"""Three steps and the target's own token: the setting that people publish figures of."""
_NGRAM_TOKENS = 8


def reads(method: Method, flag: str) -> bool:
    """Whether the flag means anything with this method."""
    if not flag.startswith(PREFIX):
        return True
    if method == "none":
        return False
    return next((method in readers for start, readers in _READERS.items() if flag.startswith(start)), True)


def drafting(method: Method, flags: Mapping[str, _Value]) -> dict[str, _Value | int]:
    """The flags as this method takes them: others' left out, and what is needed besides filled in.

    MTP goes through its layer once for each token, so their numbers follow from one another; where both are
    given the steps count, as for the engine.
    """
    kept: dict[str, _Value | int] = {name: value for name, value in flags.items() if reads(method, name)}
    if method == "ngram":
        return {TOKENS: _NGRAM_TOKENS} | kept
    if method == "mtp" and kept.get(TREE, 1) == 1:
        steps, tokens = kept.get(STEPS), kept.get(TOKENS, _MTP_TOKENS)
        if not isinstance(steps, int):
            steps = max(tokens - 1, 1) if isinstance(tokens, int) else _MTP_TOKENS - 1
        kept |= {STEPS: steps, TREE: 1, TOKENS: steps + 1}
    return kept
