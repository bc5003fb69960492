"""How far one server's answers agree with another's, such as a drafting server's with plain decoding.

Speculative decoding gives what plain decoding gives, but for arithmetic: more tokens in a batch are computed
in another order, and near ties may fall the other way; from there on the texts part. So how long they agree
is reported, and byte equality is not demanded. Only servers that part at once, again and again, serve
something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from dflash_deploy.bench.quality.text import excerpt

_LEAST_PROMPTS = 4
_LEAST_TOKENS = 3
_CONTEXT_CHARS = 40


@dataclass(frozen=True)
class Said:
    """One answer, as far as agreement goes.

    Attributes:
        token_ids: of the answer; None from a server that does not tell them.
        tokens: how many, None where that is not known.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    tokens: int | None = None

    @property
    def digest(self) -> str:
        """Stands for the text."""
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Agreement:
    """How two servers' answers to the same prompts agree.

    Attributes:
        prompts: compared.
        identical: of them, the same to the last byte (and token, where tokens are known).
        diverge_after: tokens until the two part, the median over those that do; None where none does.
        counted: in tokens that the server named; False where they are estimated from characters.
        example: where the first pair parts.
        fault: why this is more than arithmetic, or None.
    """

    prompts: int
    identical: int
    diverge_after: float | None
    counted: bool
    example: str | None
    fault: str | None


def agree(ours: Sequence[Said], theirs: Sequence[Said]) -> Agreement:
    """Compare answers, prompt by prompt."""
    partings: list[float] = []
    counted = True
    example: str | None = None
    pairs = list(zip(ours, theirs, strict=True))
    for one, other in pairs:
        parting = first_divergence(one, other)
        if parting is None:
            continue
        counted = counted and one.token_ids is not None and other.token_ids is not None
        partings.append(parting)
        example = example or _parting_words(one.text, other.text)
    after = median(partings) if partings else None
    fault = None
    if after is not None and after < _LEAST_TOKENS and _LEAST_PROMPTS <= len(partings) > len(pairs) / 2:
        fault = (
            f"agreement: {len(partings)} of {len(pairs)} answers part from plain decoding at once: {example}"
        )
    return Agreement(len(pairs), len(pairs) - len(partings), after, counted, example, fault)


def first_divergence(one: Said, other: Said) -> float | None:
    """Tokens that two answers have in common before they part; None where they are the same."""
    if one.token_ids is not None and other.token_ids is not None:
        if one.token_ids == other.token_ids:
            return None
        return _common(one.token_ids, other.token_ids)
    if one.text == other.text:
        return None
    chars = _common(one.text, other.text)
    told = [answer for answer in (one, other) if answer.tokens and answer.text]
    chars_per_token = median(len(answer.text) / (answer.tokens or 1) for answer in told) if told else 4.0
    return chars / chars_per_token


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _parting_words(one: str, other: str) -> str:
    at = _common(one, other)
    start = max(0, at - _CONTEXT_CHARS // 2)
    return (
        f"{excerpt(one[start : at + _CONTEXT_CHARS])} against {excerpt(other[start : at + _CONTEXT_CHARS])}"
    )
