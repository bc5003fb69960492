"""The search space: every combination planned, what cannot serve dropped, the rest in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import gcd, prod
from typing import TYPE_CHECKING

from dflash_deploy.errors import DeployError
from dflash_deploy.plan.vram import Planner, Question

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import FlagValue
    from dflash_deploy.plan.budget import Budget

Choices = Mapping[str, Sequence["FlagValue | None"]]
"""Values of each searched flag; None leaves it out."""

MEMORY_FLAGS = frozenset(
    {"mem-fraction-static", "max-total-tokens", "max-mamba-cache-size", "mamba-full-memory-ratio"}
)
"""Flags that divide the memory and do nothing else: while all run at once, none of them changes the speed."""

_BEST_DRAFT_TOKENS = 8


@dataclass(frozen=True)
class Margins:
    """Memory that a candidate must leave, in MiB.

    Attributes:
        desktop: for a desktop or other programs that come and go (0.8 to 1.5 GiB with one).
        long_requests: for prompts longer than any tried yet.
        doubt: how far below its need a candidate is kept all the same: the plan's own error.
    """

    desktop: float = 0.0
    long_requests: float = 256.0
    doubt: float = 512.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration worth a launch."""

    flags: Mapping[str, FlagValue]
    budget: Budget


@dataclass(frozen=True)
class SearchSpace:
    """What is left of a search space.

    Attributes:
        candidates: the most promising first.
        dropped: how many were dropped, by reason.
        examined: how many were planned.
        size: how many there are.
    """

    candidates: tuple[Candidate, ...]
    dropped: Mapping[str, int]
    examined: int
    size: int


def search_space(
    question: Question,
    choices: Choices,
    *,
    context_tokens: int,
    margins: Margins | None = None,
    most: int = 100_000,
) -> SearchSpace:
    """Plan the combinations of some flags' values.

    Args:
        question: what all candidates share; its flags are overridden by the choices.
        choices: values to try.
        context_tokens: that each user must have.
        margins: memory to leave; None takes the usual ones.
        most: combinations to look at; of a larger space an even sample is taken.
    """
    kept: list[Candidate] = []
    dropped: Counter[str] = Counter()
    examined = 0
    allowed = margins or Margins()
    planner = Planner(question)
    for flags in _combinations(question.flags, choices, most):
        examined += 1
        try:
            budget = planner.plan(flags)
        except DeployError as error:
            dropped[error.message] += 1
            continue
        reason = _reason(budget, question.users, context_tokens, allowed)
        if reason is None:
            kept.append(Candidate(flags, budget))
        else:
            dropped[reason] += 1
    kept.sort(key=lambda candidate: _rank(candidate, question.users, context_tokens, allowed))
    return SearchSpace(tuple(kept), dict(dropped), examined, prod(len(values) for values in choices.values()))


def _combinations(
    fixed: Mapping[str, FlagValue], choices: Choices, most: int
) -> Iterator[dict[str, FlagValue]]:
    size = prod(len(values) for values in choices.values())
    step = max(1, -(-size // max(most, 1)))
    # With a stride that shares a divisor with a number of values, some values would never come.
    while step > 1 and any(gcd(step, len(values)) > 1 for values in choices.values()):
        step += 1
    names = list(choices)
    for values in islice(product(*choices.values()), 0, None, step):
        merged = {**fixed, **dict(zip(names, values, strict=True))}
        yield {name: value for name, value in merged.items() if value is not None}


def _reason(budget: Budget, users: int, context_tokens: int, margins: Margins) -> str | None:
    if budget.certain:
        return f"refused at {budget.fails_at}"
    if budget.max_running_requests < users:
        return f"fewer than {users} at once"
    if budget.context_per_user < context_tokens:
        return "too little context"
    if budget.headroom_mib - margins.desktop - margins.long_requests < -margins.doubt:
        return f"out of memory at {budget.fails_at}" if budget.fails_at else "within the margins"
    return None


def _rank(
    candidate: Candidate, users: int, context_tokens: int, margins: Margins
) -> tuple[int, int, int, float, float]:
    """Sure ones first, then those with all their graphs, then by draft tokens, room and context."""
    budget, flags = candidate.budget, candidate.flags
    spare = budget.headroom_mib - margins.desktop - margins.long_requests
    tokens = flags.get("speculative-num-draft-tokens", _BEST_DRAFT_TOKENS)
    away = abs(tokens - _BEST_DRAFT_TOKENS) if isinstance(tokens, int) else _BEST_DRAFT_TOKENS
    degraded = len(budget.warnings) + (0 if budget.max_running_requests >= users else 1)
    enough = min(budget.context_per_user / max(context_tokens, 1), 2.0)
    return (0 if spare >= 0 else 1, degraded, away, -round(enough, 1), -min(spare, 1024.0))
