"""How many drafted tokens a verify step keeps."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from dflash_deploy.simulator import calibration as fitted

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Acceptance:
    """The law of one task with one method.

    Attributes:
        conditional: chance that the i-th drafted token is kept when all before it were.
    """

    conditional: tuple[float, ...]

    @property
    def mean_length(self) -> float:
        """Tokens a verify step yields on average, the target's own token included."""
        return 1.0 + sum(self.reach())

    def reach(self) -> tuple[float, ...]:
        """Chance that at least the i-th drafted token is kept."""
        chances: list[float] = []
        chance = 1.0
        for p in self.conditional:
            chance *= p
            chances.append(chance)
        return tuple(chances)

    def drawn(self, offset: float) -> Draws:
        """A sequence of accepted lengths whose mean settles quickly, as one greedy answer's does."""
        return Draws(tuple(1.0 - chance for chance in self.reach()), offset)


@dataclass
class Draws:
    """Lengths, one for each verify step. The same prompt gives the same sequence: decoding is greedy."""

    lost_by: tuple[float, ...]
    position: float

    def next(self) -> int:
        """Tokens that the next step yields, 1 to D."""
        self.position = (self.position + _GOLDEN) % 1.0
        return 1 + bisect.bisect_right(self.lost_by, self.position)


def acceptance(
    *,
    task: str,
    method: str,
    draft_tokens: int,
    block_size: int,
    factor: float = 1.0,
    difficulty: float = 0.0,
    quality: float = 1.0,
) -> Acceptance:
    """The law for a task.

    Args:
        task: ``instruction``, ``math``, ``code`` or ``prose``.
        method: ``dflash``, ``dspark``, ``mtp`` or ``ngram``.
        draft_tokens: rows that a verify step checks, the target's own token among them.
        block_size: rows that the draft was trained to fill.
        factor: hidden deviation of the accept length at the trained block.
        difficulty: this prompt's own deviation of the accept length, about 0.
        quality: what number formats leave of each chance.
    """
    base = fitted.ACCEPT_BY_TASK.get(task, fitted.ACCEPT_BY_TASK["instruction"])
    base = base * fitted.ACCEPT_BY_METHOD.get(method, 1.0) * quality
    base = _scaled(base, max(block_size, 2) - 1, factor * (1.0 + difficulty))
    chances = []
    for index in range(max(draft_tokens - 1, 0)):
        p = base
        if method == "mtp":
            p *= fitted.ACCEPT_DECAY_MTP**index
        p *= fitted.ACCEPT_BEYOND_BLOCK ** max(0, index + 2 - block_size)
        chances.append(min(max(p, 0.0), 0.995))
    return Acceptance(tuple(chances))


def _scaled(p: float, drafts: int, factor: float) -> float:
    """The chance that makes the accepted drafts of a trained block ``factor`` times as long as ``p`` does."""
    if factor == 1.0:
        return p
    wanted = factor * _drafts(p, drafts)
    low, high = 0.0, 0.999
    for _ in range(40):
        middle = (low + high) / 2
        if _drafts(middle, drafts) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _drafts(p: float, drafts: int) -> float:
    return drafts if p >= 1.0 else p * (1 - p**drafts) / (1 - p)
