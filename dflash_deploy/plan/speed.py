"""Speed, roughly: what memory bandwidth allows, and what speculation makes of it. Ranges, never one figure.

A step reads all weights once, and for each request its keys and values and its recurrent state. Published
servers reach a share of that roofline; with speculation a step costs more and gives several tokens:

    tokens/s = accept length x plain tokens/s / verify cost
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from dflash_deploy.plan.budget import Advice
from dflash_deploy.plan.cells import cells_of

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import FlagValue
    from dflash_deploy.machine.cards import Card
    from dflash_deploy.plan.vram import Question


@dataclass(frozen=True)
class Range:
    """From ``low`` to ``high``."""

    low: float
    high: float

    def scaled(self, low: float, high: float) -> Range:
        """Both ends times a factor of their own."""
        return Range(self.low * low, self.high * high)


_ANY_SHARE = Range(0.55, 0.80)
_SHARES: Mapping[str, Range] = MappingProxyType(
    {
        # Without speculation: 59.4 to 69.3 tokens/s of 102 that bandwidth allows.
        "rtx-5090": Range(0.58, 0.68),
        # 55 and 65.59 of 102.
        "rtx-pro-6000": Range(0.54, 0.67),
        # 45.75 of 62.
        "rtx-3090": Range(0.68, 0.78),
        # 12.56 of 15.5.
        "dgx-spark": Range(0.72, 0.84),
        # 68.8 to 69.1 of 94 in bfloat16.
        "h200": Range(0.70, 0.76),
        # 28.9 of 40 in bfloat16.
        "a100-80gb": Range(0.68, 0.76),
    }
)
_ANY_COST = Range(1.25, 2.0)
_COSTS: Mapping[str, Range] = MappingProxyType(
    {
        # 207.52 tokens/s at an accept length of 4 to 5, 203 at 4.29, plain 62.14.
        "rtx-5090": Range(1.2, 1.55),
        # 131.91 tokens/s at 2.70 and 225.17 at 4.65.
        "rtx-pro-6000": Range(1.25, 1.45),
        # 184 to 236 tokens/s at a mean of 4.80, plain 68.8.
        "h200": Range(1.35, 1.6),
    }
)
_MOST_STEPS_PER_S = 700.0
"""Launches and scheduling take more than a millisecond a step, however small the model."""
_EAGER_COST = 3.2
"""Factor where decode graphs are off: 63.85 instead of 207.52 tokens/s."""

TASKS: Mapping[str, Range] = MappingProxyType(
    {
        "instruction": Range(0.78, 0.86),
        "math": Range(0.83, 0.89),
        "code": Range(0.84, 0.90),
        "prose": Range(0.55, 0.70),
    }
)
"""Chance that a drafted token is accepted, given that those before it were (DFlash2 drafts of eight tokens:
accept lengths of 4 to 5 on instructions, about 5 on code and mathematics, 2.2 to 2.8 on prose)."""

_METHODS: Mapping[str, float] = MappingProxyType(
    {"DFLASH": 1.0, "DSPARK": 0.92, "EAGLE": 0.97, "EAGLE3": 0.97, "NEXTN": 0.97, "NGRAM": 0.5}
)

_MANY_REQUESTS = 32
_FEW_TOKENS = 50


@dataclass(frozen=True)
class Speed:
    """Predicted decode speed at the given number of users.

    Attributes:
        roofline_tokens_per_s: what the bandwidth allows one user without speculation.
        share: part of the roofline that published servers of this card reach.
        plain_tokens_per_s: for one user, without speculation.
        accept_length: tokens of one verify step, None without speculation.
        verify_cost: of a verify step, in plain steps.
        user_tokens_per_s: for one user, as configured; ``total_tokens_per_s`` for all together.
        users: at once.
        published: servers of this very card were published; else the ranges are those of other cards.
    """

    roofline_tokens_per_s: float
    share: Range
    plain_tokens_per_s: Range
    accept_length: Range | None
    verify_cost: Range | None
    user_tokens_per_s: Range
    total_tokens_per_s: Range
    users: int
    published: bool


def estimate(
    question: Question, card: Card, *, context_tokens: int = 2048, tasks: Mapping[str, float] | None = None
) -> Speed:
    """How fast a configuration decodes, within a range.

    Args:
        question: the configuration.
        card: for its bandwidth, and for what was published of it.
        context_tokens: of each request, on average.
        tasks: share of each kind of text (``TASKS``); None takes instructions only.

    Raises:
        DeployError: the configuration cannot be planned.
    """
    settings = question.settings()
    cells = cells_of(settings, question.target, question.draft)
    users = max(1, min(question.users, settings.running_requests or question.users))
    window = min(context_tokens, question.target.sliding_window or context_tokens)
    each = context_tokens * cells.target + window * cells.window + 2 * cells.slot
    read = question.target.read_bytes_per_token / settings.gpus + users * each
    roofline = card.bandwidth_gb_per_s * 1e9 / max(read, 1)
    share = _SHARES.get(card.id, _ANY_SHARE)
    reached = min(roofline, _MOST_STEPS_PER_S)
    plain = Range(reached, reached).scaled(share.low, share.high)
    eager = 1.0 if settings.graph_batches else 1 / _EAGER_COST
    if not settings.speculation:
        total = plain.scaled(users, users)
        return Speed(roofline, share, plain, None, None, plain, total, users, card.id in _SHARES)
    method = _METHODS.get((settings.algorithm or "").upper(), 0.9)
    accept = accept_length(settings.draft_tokens, tasks or {"instruction": 1.0}, method=method)
    cost = _COSTS.get(card.id, _ANY_COST)
    # More rows a step cost more: 192 instead of 208 tokens/s for each of four users.
    cost = cost.scaled(1.0, 1.0 + 0.03 * (users - 1) * settings.draft_tokens / 8)
    low = plain.low * accept.low / cost.high * eager
    high = plain.high * accept.high / cost.low * eager
    user = Range(low, high)
    total = user.scaled(users, users)
    return Speed(roofline, share, plain, accept, cost, user, total, users, card.id in _COSTS)


def accept_length(draft_tokens: int, tasks: Mapping[str, float], *, method: float = 1.0) -> Range:
    """Tokens that one verify step gives, its own one included.

    Args:
        draft_tokens: checked in a step, the target's own among them.
        tasks: share of each kind of text.
        method: how much less often than DFlash2's a draft is right.
    """
    whole = sum(share for share in tasks.values() if share > 0) or 1.0
    ends = []
    for end in ("low", "high"):
        mean = 0.0
        for task, share in tasks.items():
            chance = getattr(TASKS.get(task, TASKS["instruction"]), end) * method
            mean += max(share, 0.0) / whole * _run_length(chance, draft_tokens)
        ends.append(max(mean, 1.0))
    return Range(ends[0], ends[1])


def _run_length(chance: float, draft_tokens: int) -> float:
    return sum(chance**place for place in range(max(draft_tokens, 1)))


def starting_draft_tokens(tasks: Mapping[str, float]) -> int:
    """Where to begin a search: 8 for instructions, code and mathematics, 4 for free prose, 6 for a mix."""
    whole = sum(share for share in tasks.values() if share > 0) or 1.0
    prose = max(tasks.get("prose", 0.0), 0.0) / whole
    if prose >= 0.6:
        return 4
    return 8 if prose <= 0.25 else 6


def speculation_advice(
    question: Question, *, output_tokens: int | None = None, tasks: Mapping[str, float] | None = None
) -> tuple[Advice, ...]:
    """Whether speculation is worth it here, and how many draft tokens to begin with."""
    flags: dict[str, FlagValue | None] = {
        name: None for name in question.flags if name.startswith("speculative-")
    }
    found = []
    if flags:
        if question.users > _MANY_REQUESTS:
            found.append(
                Advice(
                    "speculation-many-requests",
                    f"with {question.users} requests at once the card computes all the time, and checking "
                    "drafts takes its place: measure without speculation",
                    flags,
                    "slower streams while few are connected",
                )
            )
        if output_tokens is not None and output_tokens < _FEW_TOKENS:
            found.append(
                Advice(
                    "speculation-short-answers",
                    f"answers of {output_tokens} tokens end before speculation pays: the draft takes memory "
                    "and start-up time for little",
                    flags,
                    "longer answers come slower",
                )
            )
        if question.draft is None and str(question.flags.get("speculative-algorithm", "")).upper() != "NGRAM":
            found.append(
                Advice(
                    "speculation-no-draft",
                    "no draft is known for this model: one of another model is hardly ever right",
                    flags,
                    "none",
                )
            )
    if tasks and question.flags.get("speculative-algorithm") in ("DFLASH", "dflash"):
        wanted = starting_draft_tokens(tasks)
        if question.flags.get("speculative-num-draft-tokens", 8) != wanted:
            text = {8: "instructions, code and mathematics", 6: "mixed text", 4: "free prose"}[wanted]
            found.append(
                Advice(
                    "draft-tokens-start",
                    f"{wanted} draft tokens are the place to begin for {text}",
                    {"speculative-num-draft-tokens": wanted},
                    "measure the neighbours too",
                )
            )
        whole = sum(share for share in tasks.values() if share > 0) or 1.0
        if max(tasks.get("prose", 0.0), 0.0) / whole >= 0.8:
            found.append(
                Advice(
                    "speculation-free-prose",
                    "free prose is hard to guess (accept length 2.2 to 2.8): speculation gains least here",
                    flags,
                    "other text comes slower",
                )
            )
    return tuple(found)
