"""How each figure of a budget comes about: the formula in words, with its numbers put in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_deploy.plan.cells import cells_of
from dflash_deploy.plan.settings import Settings
from dflash_deploy.plan.terms import (
    Terms,
    graph_parts,
    prefill_parts,
    remainder_of,
    requests_together,
    small_factor,
    terms_for,
)

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.plan.budget import Budget
    from dflash_deploy.plan.vram import Question

_MIB = 1 << 20
_SHOWN = 1e-3


@dataclass(frozen=True)
class Formula:
    """One pool's formula.

    Attributes:
        text: in words, with numbers.
        mib: what these numbers come to; None where the words tell no whole formula.
    """

    text: str
    mib: float | None = None


def explained(question: Question, budget: Budget) -> Mapping[str, Formula]:
    """The formula of each pool of a budget that ``plan`` made of this question, by the pool's name."""
    settings = question.settings()
    terms = question.terms or terms_for(question.card_memory_mib)
    words = _Words(question, budget, settings, terms)
    found = {**dict(words.loaded()), **dict(words.pools()), **dict(words.fitted())}
    return {name: found[name] for name in budget.sizes if name in found}


def _product(*factors: tuple[float, str], rest: str = "") -> Formula:
    """Factors in words; the last one is in bytes."""
    size = math.prod(factor for factor, _ in factors) / _MIB
    parts = " x ".join(f"{_number(factor)} {name}".rstrip() for factor, name in factors)
    return Formula(f"{parts}{rest}", size)


def _sum(*parts: tuple[float, str], rest: str = "") -> Formula:
    """MiB added up."""
    kept = [(mib, name) for mib, name in parts if mib]
    text = " + ".join(f"{mib:,.0f} {name}" for mib, name in kept)
    return Formula(f"{text or 'nothing'}{rest}", sum(mib for mib, _ in kept))


def _scaled(parts: Iterable[tuple[float, str]], factor: float) -> list[tuple[float, str]]:
    return [(mib * factor, name) for mib, name in parts]


def _bytes(size: float) -> str:
    return "byte" if size == 1 else "bytes"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < _SHOWN else f"{value:,.2f}"


@dataclass(frozen=True)
class _Words:
    question: Question
    budget: Budget
    settings: Settings
    terms: Terms

    @property
    def draft(self) -> ModelCard | None:
        return self.question.draft if self.settings.method != "none" else None

    def loaded(self) -> Iterator[tuple[str, Formula]]:
        """What stands before the sizing."""
        question, terms = self.question, self.terms
        yield "other processes", _sum((question.other_mib, "in use on the card now (measured)"))
        card = question.card_memory_mib
        if question.free_mib is None:
            yield "context", _sum((terms.context, "CUDA context and libraries, before anything is loaded"))
        else:
            text = (
                f"{_number(card)} of the card - {_number(self.budget.driver_mib)} kept by the driver - "
                f"{_number(question.free_mib)} free before the load"
            )
            yield "context", Formula(text, card - self.budget.driver_mib - question.free_mib)
        text_only = question.target.vision and not self.settings.vision
        without = ", without its vision tower" if text_only else ""
        yield "weights", self._weights(terms.target_weights, question.target, without)
        if self.draft is None:
            return
        yield "draft weights", self._weights(terms.draft_weights, self.draft, "")
        heads = max(1, self.draft.kv_heads // self.settings.gpus)
        stacked = _product(
            (self.draft.layers, "draft layers"),
            (2, "(key and value)"),
            (heads, "KV heads"),
            (self.draft.head_dim, "head dim"),
            (self.draft.hidden_size, "hidden size"),
            (2, "bytes"),
            rest=": their projections, stacked once more",
        )
        if terms.after_load < 0 and stacked.mib is not None:
            stacked = Formula(
                f"{stacked.text}, less {_number(-terms.after_load)} that this machine's log does not show",
                max(stacked.mib + terms.after_load, 0.0),
            )
        yield "draft projections", stacked
        yield "loading leftovers", Formula("taken between loading and sizing in logs")

    def _weights(self, logged_mib: float | None, model: ModelCard, without: str) -> Formula:
        shared = (
            f", of which each of {self.settings.gpus} cards holds its part" if self.settings.gpus > 1 else ""
        )
        if logged_mib is not None:
            return Formula(f"{_number(logged_mib)} MiB in a log of this machine{without}{shared}")
        source = next(
            (text for text in model.sources if text.startswith("loaded:")), "loaded: its model card"
        )
        return Formula(
            f"{model.loaded_gib:.2f} GiB{without}{shared} ({source.removeprefix('loaded:').strip()})"
        )

    def pools(self) -> Iterator[tuple[str, Formula]]:
        """What the engine sizes."""
        settings, budget, target = self.settings, self.budget, self.question.target
        cells = cells_of(settings, target, self.draft)
        slots = (budget.state_slots + 1, "state slots (one of them padding)")
        requests = (budget.max_running_requests + 1, "requests (one of them padding)")
        if target.linear is not None:
            linear, layers = target.linear, target.linear_attention_layers
            window = cells.conv // cells.conv_column if cells.conv_column else 0
            column = (cells.conv_column, "bytes a column of convolution windows")
            yield "state conv", _product(slots, (window, "columns"), column)
            yield (
                "state ssm",
                _product(
                    slots,
                    (layers, "recurrent layers"),
                    (linear.value_heads // settings.gpus, "value heads"),
                    (linear.value_dim, "value dim"),
                    (linear.key_dim, "key dim"),
                    (settings.state_bytes, _bytes(settings.state_bytes)),
                ),
            )
            tokens = (settings.draft_tokens, "draft tokens")
            yield "verify ssm", _product(requests, tokens, (cells.ssm, "bytes of one slot's state"))
            columns = settings.draft_tokens + window - 1
            if settings.branching:
                columns = settings.draft_tokens * window
            yield "verify conv", _product(requests, (columns, "columns"), column)
            rings = requests if settings.version.replay_rings_by_request else slots
            yield "replay rings", _product(rings, (cells.replay, "bytes of rings"))
        page = settings.page_tokens
        padding = "padding" if page == 1 else "a page"
        rows = (budget.kv_tokens + page, f"tokens ({budget.kv_tokens:,} and {padding})")
        full = target.full_attention_layers - target.sliding_layers
        yield "target KV", self._keys(rows, full, target, settings.target_kv_bytes)
        windows = (budget.window_tokens + page, "tokens of the window")
        yield "window KV", self._keys(windows, target.sliding_layers, target, settings.target_kv_bytes)
        if self.draft is not None and settings.method == "own-shape":
            layers = self.draft.full_attention_layers
            yield "draft KV", self._keys(rows, layers, self.draft, settings.draft_kv_bytes)
        elif cells.draft:
            yield "draft KV", _product(rows, (cells.draft, "bytes, of the target's shape"))
        row = settings.context_tokens + 4 + settings.draft_tokens
        yield "request table", _product(requests, (row, "places (context and draft tokens)"), (4, "bytes"))
        yield (
            "logits",
            _product(
                (2, "copies"),
                (
                    requests_together(settings, budget.max_running_requests, self.question.users),
                    "requests at once",
                ),
                (max(settings.draft_tokens, 1), "rows"),
                (target.vocab_size, "vocabulary"),
                (4, "bytes"),
            ),
        )

    def _keys(self, rows: tuple[float, str], layers: int, model: ModelCard, size: float) -> Formula:
        heads = max(1, model.kv_heads // self.settings.gpus)
        return _product(
            rows,
            (layers, "layers"),
            (heads, "KV heads"),
            (2, "(key and value)"),
            (model.head_dim, "head dim"),
            (size, _bytes(size)),
        )

    def fitted(self) -> Iterator[tuple[str, Formula]]:
        """What is fitted to logs."""
        settings, budget, terms = self.settings, self.budget, self.terms
        requests = budget.max_running_requests
        left = remainder_of(
            settings,
            terms,
            self.question.target,
            running_requests=requests,
            users=self.question.users,
            has_draft=self.draft is not None,
        )
        small = small_factor(self.question.target)
        rows = max(left.batches, default=0) * max(settings.draft_tokens, 1)
        graphs = _scaled(graph_parts(len(left.batches), rows, settings), small * terms.graphs)
        corrected = "" if terms.graphs == 1 else f"; {terms.graphs:.2f} of the usual, says this machine's log"
        yield "verify graphs", _sum(*graphs, rest=f"{corrected} (fitted to logs)")
        yield "decode graphs", _sum(*graphs, rest=f"{corrected} (fitted to logs)")
        yield (
            "draft graphs",
            Formula("0.95 of the verify graphs: a second set, for the draft (fitted to logs)"),
        )
        factor = terms.prefill_graphs
        corrected = "" if factor == 1 else f"; {factor:.2f} of the usual, says this machine's log"
        prefill = _scaled(prefill_parts(settings, self.question.target), small * factor)
        yield "prefill graphs", _sum(*prefill, rest=f"{corrected} (fitted to logs)")
        each = min(requests, 4) * terms.workspace_request if settings.speculation else 0.0
        yield (
            "workspaces",
            _sum(
                (small * terms.workspace, "attention and autotuning"),
                (small * terms.workspace_draft if self.draft else 0.0, "the draft's"),
                (small * each, "by requests (up to four)"),
                rest=" (fitted to logs)",
            ),
        )
        yield "compiled kernels", Formula("loaded when the first tokens go through: fitted to two settings")
        halved = " / 2 (prefill graphs hold the rest)" if settings.prefill_sizes else ""
        split = f" / {settings.gpus**0.5:.2f} ({settings.gpus} cards)" if settings.gpus > 1 else ""
        yield (
            "activations",
            Formula(
                f"{settings.chunk_tokens:,} prompt tokens at a time x {self.question.target.hidden_size:,} "
                f"hidden size x 20 bytes{halved}{split}",
                left.activations,
            ),
        )
        yield "fragments", Formula("held by the allocator and of no use to it: fitted to a start at the edge")
