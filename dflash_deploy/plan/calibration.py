"""Empirical terms corrected by what a server logged while it started."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from dflash_deploy.plan.cells import cells_of, projection_bytes
from dflash_deploy.plan.sizing import verify_bytes
from dflash_deploy.plan.terms import Terms, kernel_share, terms_for
from dflash_deploy.plan.vram import Question, plan
from dflash_deploy.plan.weights import whole_draft_mib, whole_target_mib

if TYPE_CHECKING:
    from dflash_deploy.engine.boot import BootRecord
    from dflash_deploy.plan.budget import Budget

_MIB = 1 << 20
_FACTOR_TERMS = frozenset({"graphs", "prefill_graphs"})
_AFTER_READY = ("compiled kernels", "activations", "logits", "fragments")
_FACTORS = (0.1, 10.0)
"""A factor beyond these is a log of something else."""


@dataclass(frozen=True)
class Calibrated:
    """Terms of one machine, and how far the plan was from its log.

    Attributes:
        terms: to plan with from now on (``Question.terms``).
        before_mib: predicted free memory when ready less what was logged, with the terms as they were; None
            where the log does not tell it.
        after_mib: the same with the corrected terms.
        learnt: which terms the log corrected, by more than it rounds.
        agrees: the corrected plan lets a server serve that did; a log of another configuration does not.
    """

    terms: Terms
    before_mib: float | None
    after_mib: float | None
    learnt: tuple[str, ...]
    agrees: bool = True


def calibrate(question: Question, record: BootRecord, *, used_mib: float | None = None) -> Calibrated:
    """Correct the terms by the log of one start of this very configuration.

    Args:
        question: the configuration that was started; its ``terms`` are what is corrected.
        record: what the log told.
        used_mib: memory in use after the first requests, as the driver's tools show it, where it was seen.

    Raises:
        DeployError: the configuration cannot be planned.
    """
    before = plan(question)
    terms = question.terms or terms_for(question.card_memory_mib)
    corrected = _loading(question, terms, record)
    corrected = _leftovers(replace(question, terms=corrected), corrected, record)
    corrected = _running(replace(question, terms=corrected), corrected, record)
    planned = plan(replace(question, terms=corrected))
    # The peak of a start that ends early is none that a server under load could be held against.
    if used_mib is not None and planned.fails_at is None:
        missing = (used_mib - planned.predicted_peak_mib) / kernel_share(question.target)
        corrected = replace(corrected, kernels=max(corrected.kernels + missing, 0.0))
    after = plan(replace(question, terms=corrected))
    known = _spelled(terms, question)
    learnt = tuple(
        name
        for name, value in asdict(_spelled(corrected, question)).items()
        if _differ(getattr(known, name), value, 0.0 if name in _FACTOR_TERMS else 1.0)
    )
    served = record.free_at_ready_gib is not None
    agrees = not served or after.fails_at is None
    return Calibrated(corrected, _error_mib(before, record), _error_mib(after, record), learnt, agrees)


def _spelled(terms: Terms, question: Question) -> Terms:
    """With the sizes that model cards give where no log has given any."""
    draft_gib = question.draft.loaded_gib if question.draft else 0.0
    target, draft = terms.target_weights, terms.draft_weights
    return replace(
        terms,
        target_weights=question.target.loaded_gib * 1024 if target is None else target,
        draft_weights=draft_gib * 1024 if draft is None else draft,
    )


def _differ(before: float, after: float, rounding: float) -> bool:
    """By more than a log rounds."""
    return not math.isclose(before, after, rel_tol=0.01, abs_tol=rounding)


def _error_mib(budget: Budget, record: BootRecord) -> float | None:
    if record.free_at_ready_gib is None or not budget.kv_tokens:
        return None
    return _ready_mib(budget) - record.free_at_ready_gib * 1024


def _ready_mib(budget: Budget) -> float:
    """Free memory when the server is ready: below zero by what is missing, unlike what people are shown."""
    return budget.headroom_mib + sum(budget.pool_mib(name) for name in _AFTER_READY)


def _loading(question: Question, terms: Terms, record: BootRecord) -> Terms:
    """Context and weights, from the free memory around the loading."""
    free = record.free_before_load_gib
    if free is None:
        return terms
    if question.free_mib is None:
        context = question.card_memory_mib - terms.driver - question.other_mib - free * 1024
        if context > 0:
            terms = replace(terms, context=context)
        else:
            # More is free than the driver was thought to leave.
            terms = replace(terms, context=0.0, driver=max(terms.driver + context, 0.0))
    if not record.weights:
        return terms
    settings = question.settings()
    target_mib = (free - record.weights[0].free_after_gib) * 1024
    if target_mib > 0:
        whole = whole_target_mib(target_mib, settings, question.target)
        terms = replace(terms, target_weights=whole)
    if len(record.weights) > 1:
        draft_mib = (record.weights[0].free_after_gib - record.weights[-1].free_after_gib) * 1024
        if draft_mib > 0:
            terms = replace(terms, draft_weights=whole_draft_mib(draft_mib, settings.gpus))
    return terms


def _leftovers(question: Question, terms: Terms, record: BootRecord) -> Terms:
    """What was lost between loading a draft and sizing: the pools and what they left tell it."""
    free, tokens = record.free_after_pools_gib, record.kv_tokens
    if free is None or tokens is None or len(record.weights) < 2 or question.draft is None:
        return terms
    settings = question.settings()
    cells = cells_of(settings, question.target, question.draft)
    if cells.window or settings.post_capture:
        return terms
    pools = (tokens + settings.page_tokens) * (cells.target + cells.draft)
    if cells.slot:
        if record.state_cache is None or record.max_running_requests is None:
            return terms
        slots = record.state_cache.slots
        pools += (slots + 1) * cells.slot
        pools += sum(verify_bytes(settings, cells, record.max_running_requests, slots))
    lost_mib = (record.weights[-1].free_after_gib - free) * 1024 - pools / _MIB
    formula_mib = 0.0
    if settings.algorithm is not None and settings.algorithm.upper() == "DFLASH":
        formula_mib = projection_bytes(question.draft, settings.gpus) / _MIB
    return replace(terms, after_load=lost_mib - formula_mib) if abs(lost_mib) < 2048 else terms


def _running(question: Question, terms: Terms, record: BootRecord) -> Terms:
    """Graphs and workspaces, from what was captured and what was free around it."""
    budget = plan(question)
    if budget.certain:
        return terms
    logged = {"prefill": 0.0, "target": 0.0, "draft": 0.0}
    for graph in record.graphs:
        logged["prefill" if graph.what == "prefill" else graph.role] += graph.memory_gib * 1024
    predicted = {
        "prefill": budget.pool_mib("prefill graphs"),
        "target": budget.pool_mib("decode graphs") + budget.pool_mib("verify graphs"),
        "draft": budget.pool_mib("draft graphs"),
    }
    factor = _factor(logged["prefill"], predicted["prefill"])
    if factor is not None:
        terms = replace(terms, prefill_graphs=terms.prefill_graphs * factor)
    # Where the plan has no room for a draft's graphs and the server had, only the target's can be compared.
    both = ("target", "draft") if predicted["draft"] else ("target",)
    factor = _factor(sum(logged[role] for role in both), sum(predicted[role] for role in both))
    if factor is not None:
        terms = replace(terms, graphs=terms.graphs * factor)
    if record.free_at_ready_gib is None:
        return terms
    # The rest of what stands between the pools and the ready line, rounding of the pools among it.
    workspaces = budget.pool_mib("workspaces")
    graphs = sum(logged.values()) or sum(predicted.values())
    taken = _ready_mib(budget) + workspaces + sum(predicted.values()) - record.free_at_ready_gib * 1024
    factor = _factor(taken - graphs, workspaces)
    if factor is None:
        return terms
    return replace(
        terms,
        workspace=terms.workspace * factor,
        workspace_draft=terms.workspace_draft * factor,
        workspace_request=terms.workspace_request * factor,
    )


def _factor(logged_mib: float, predicted_mib: float) -> float | None:
    if logged_mib <= 0 or predicted_mib <= 0:
        return None
    factor = logged_mib / predicted_mib
    return factor if _FACTORS[0] <= factor <= _FACTORS[1] else None
