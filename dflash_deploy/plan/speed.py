"""Speed, roughly: what memory bandwidth allows, and what speculation makes of it. Ranges, never one figure.

A step reads all weights once, and for each request its keys and values and its recurrent state. Published
servers reach a share of that roofline; with speculation a step costs more and gives several tokens:

    tokens/s = accept length x plain tokens/s / verify cost
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from dflash_deploy.plan.budget import Advice
from dflash_deploy.plan.cells import cells_of
from dflash_deploy.plan.terms import captured_batches

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

_BANDWIDTH_SHARE = 0.85
"""Of the data sheet's, as large reads reach it."""
_PASS_S = 0.0042
"""Launches, sampling and scheduling of one pass: what a plain step on an RTX 5090 takes beside reading."""
_ROW_S, _ROW_SMS = 0.03e-3, 170
"""Arithmetic of one more checked row, on so many multiprocessors: four users of an RTX 5090 lose 15 of 208
tokens/s each, of which the state takes about half."""
_BEYOND_BLOCK = 0.87
"""Sixteen draft tokens instead of eight gained 3 % on an RTX 3090."""
_TRITON = 1.03
_EAGER_PLAIN_S = 0.028
"""A plain pass that is launched piece by piece; with speculation ``_EAGER_COST`` counts."""

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


def relative_rate(
    question: Question, card: Card, *, context_tokens: int = 2048, tasks: Mapping[str, float] | None = None
) -> float:
    """Expected tokens/s of one user, to compare configurations of one card with each other by.

    ``estimate`` says how fast a card is and is wide for it; this is one figure, and only ratios of it count.
    To the plain step come what each checked row costs (the recurrent state that a verify step writes for it,
    and its arithmetic), rows that pad a batch to a captured size, and drafts beyond the trained block.

    Raises:
        DeployError: the configuration cannot be planned.
    """
    settings = question.settings()
    cells = cells_of(settings, question.target, question.draft)
    users = max(1, min(question.users, settings.running_requests or question.users))
    batches = captured_batches(settings, settings.running_requests or users)
    batch = next((size for size in batches if size >= users), None)
    per_s = card.bandwidth_gb_per_s * 1e9 * _BANDWIDTH_SHARE
    window = question.flags.get("speculative-draft-window-size")
    drafted = min(context_tokens, window) if isinstance(window, int) else context_tokens
    each = context_tokens * cells.target + 2 * cells.slot
    plain_s = question.target.read_bytes_per_token / settings.gpus / per_s + _PASS_S + users * each / per_s
    if question.flags.get("attention-backend") == "triton":
        plain_s *= _TRITON
    row_s = _ROW_S * _ROW_SMS / card.sms
    if not settings.speculation:
        plain_s += ((batch or users) - 1) * row_s
        return 1 / (plain_s if batch else max(plain_s, _EAGER_PLAIN_S))
    rows = (batch or users) * settings.draft_tokens
    method = _METHODS.get((settings.algorithm or "").upper(), 0.9)
    block = question.draft.block_size if question.draft else None
    accept = accept_length(settings.draft_tokens, tasks or {"instruction": 1.0}, method=method, block=block)
    verify_s = users * (settings.draft_tokens * cells.ssm + drafted * cells.draft) / per_s + rows * row_s
    draft_s = _PASS_S / 2
    if question.draft is not None:
        draft_s += question.draft.read_bytes_per_token / per_s
    if settings.method == "target-shaped":
        # Such a draft goes through once for every token.
        draft_s *= max(settings.draft_tokens - 1, 1)
    step_s = plain_s + verify_s + draft_s
    return math.sqrt(accept.low * accept.high) / (step_s if batch else max(step_s, step_s * _EAGER_COST))


def accept_length(
    draft_tokens: int, tasks: Mapping[str, float], *, method: float = 1.0, block: int | None = None
) -> Range:
    """Tokens that one verify step gives, its own one included.

    Args:
        draft_tokens: checked in a step, the target's own among them.
        tasks: share of each kind of text.
        method: how much less often than DFlash2's a draft is right.
        block: tokens that the draft was trained to give, where that is to count; it guesses badly beyond.
    """
    whole = sum(share for share in tasks.values() if share > 0) or 1.0
    ends = []
    for end in ("low", "high"):
        mean = 0.0
        for task, share in tasks.items():
            chance = getattr(TASKS.get(task, TASKS["instruction"]), end) * method
            mean += max(share, 0.0) / whole * _run_length(chance, draft_tokens, block)
        ends.append(max(mean, 1.0))
    return Range(ends[0], ends[1])


def _run_length(chance: float, draft_tokens: int, block: int | None) -> float:
    length, reached = 0.0, 1.0
    for place in range(1, max(draft_tokens, 1) + 1):
        length += reached
        beyond = max(0, place + 1 - block) if block else 0
        reached *= chance * _BEYOND_BLOCK**beyond
    return length


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
