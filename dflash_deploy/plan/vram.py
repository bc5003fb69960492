"""The VRAM budget of a configuration: a start walked through stage by stage, on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dflash_deploy.engine.boot import Stage
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.cells import Cells, cells_of, projection_bytes
from dflash_deploy.plan.families import family_of
from dflash_deploy.plan.flagvalues import wrong
from dflash_deploy.plan.settings import FRACTION, Settings, read_settings
from dflash_deploy.plan.sizing import Refused, Sizing, size_pools, tokens_in, verify_bytes
from dflash_deploy.plan.terms import Remainder, Terms, remainder_of, terms_for
from dflash_deploy.plan.weights import draft_share_mib, target_share_mib

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.engine.launch import Flags, FlagValue

__all__ = [
    "Cells",
    "Planner",
    "Question",
    "Refused",
    "Sizing",
    "cells_of",
    "plan",
    "plan_budget",
    "size_pools",
]

_MIB = 1 << 20

_DRAFT_GRAPH_NEEDS_MIB = 1024.0
_HOST_NEEDS_MIB = 8192.0
"""Unified memory: with less free, the host's guard ends the server (the vendor's earlyoom)."""

_UNKNOWN_SHARE = 0.1

_EXACT = frozenset(
    {
        "other processes",
        "draft projections",
        "state conv",
        "state ssm",
        "verify ssm",
        "verify conv",
        "replay rings",
        "target KV",
        "window KV",
        "draft KV",
        "request table",
        "logits",
    }
)
"""Pools whose size follows from the engine's own arithmetic, or is measured."""
_EXACT_WITH_CONTEXT = _EXACT | {"context"}
_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Question:
    """All that a budget depends on.

    Attributes:
        card_memory_mib: total memory of one card, as the driver reports it.
        target: facts of the model.
        draft: facts of its draft model or head, None without one.
        flags: the engine's flags, by their newest names.
        version: the engine's.
        users: people at once.
        other_mib: memory that other processes (a desktop among them) hold on the card.
        free_mib: free memory just before anything is loaded, where it is known: it takes the place of what is
            assumed of context, driver and other processes.
        env: environment variables of the server that change its memory.
        terms: empirical figures; None takes the prior for a card of that size.
    """

    card_memory_mib: int
    target: ModelCard
    draft: ModelCard | None
    flags: Flags
    version: str
    users: int = 1
    other_mib: float = 0.0
    free_mib: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    terms: Terms | None = None

    def settings(self) -> Settings:
        """What the flags ask for, with the release's own defaults.

        Raises:
            DeployError: a flag's value that cannot be read.
        """
        return read_settings(
            self.flags,
            version=self.version,
            card_memory_mib=self.card_memory_mib,
            target=self.target,
            draft=self.draft,
            env=self.env,
        )


def plan_budget(
    *,
    card_memory_mib: int,
    target: ModelCard,
    draft: ModelCard | None,
    flags: Flags,
    version: str,
    users: int,
    other_mib: float = 0.0,
    free_mib: float | None = None,
    env: Mapping[str, str] = _NO_ENVIRONMENT,
    terms: Terms | None = None,
) -> Budget:
    """Predict what a configuration takes of one card, and whether it starts and serves.

    The arguments are those of ``Question``.

    Raises:
        DeployError: a flag's value that cannot be read, or a way of serving that is not planned for.
    """
    return plan(
        Question(card_memory_mib, target, draft, flags, version, users, other_mib, free_mib, env, terms)
    )


def plan(question: Question) -> Budget:
    """Predict what a configuration takes of one card, and whether it starts and serves.

    Raises:
        DeployError: a flag's value that cannot be read, or a way of serving that is not planned for.
    """
    return Planner(question).plan(question.flags)


class Planner:
    """``plan`` for many configurations of one question: what they share is worked out once.

    Raises:
        DeployError: no users, or no memory.
    """

    def __init__(self, question: Question) -> None:
        if question.users < 1 or question.card_memory_mib < 1:
            raise wrong("a plan needs at least one user, and a card with memory")
        self._question = question
        self._terms = question.terms or terms_for(question.card_memory_mib)
        self._known: dict[_Key, _Configuration] = {}

    def plan(self, flags: Flags) -> Budget:
        """``plan`` of the question with these flags in place of its own.

        Raises:
            DeployError: like ``plan``.
        """
        # Most searches try many fractions of each configuration: nothing but the sizing follows from them.
        rest = {name: value for name, value in flags.items() if name != FRACTION}
        if len(rest) == len(flags):
            return _Walk(self._question, self._read(flags), self._terms).budget()
        # A switch that is set and the number 1 are equal, but not the same to the engine.
        key = (tuple(rest.items()), tuple(map(type, rest.values())))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._read(flags)
        else:
            known = known._replace(settings=known.settings.with_fraction(flags))
        return _Walk(self._question, known, self._terms).budget()

    def _read(self, flags: Flags) -> _Configuration:
        settings = replace(self._question, flags=flags).settings()
        target = self._question.target
        draft = self._question.draft if settings.method != "none" else None
        unknown = _unknown(target, draft, settings, flags)
        return _Configuration(settings, draft, cells_of(settings, target, draft), unknown, {})


_Key = tuple[tuple[tuple[str, "FlagValue"], ...], tuple[type, ...]]


class _Configuration(NamedTuple):
    """What flags say; ``remainders`` are those worked out so far, by running requests."""

    settings: Settings
    draft: ModelCard | None
    cells: Cells
    unknown: tuple[str, ...]
    remainders: dict[int, Remainder]


class _Walk:
    """One start on its way: pools that stand, and memory that is left."""

    def __init__(self, question: Question, configuration: _Configuration, terms: Terms) -> None:
        self.question = question
        self.settings, self.draft, self.cells, self.unknown, self.remainders = configuration
        self.target = question.target
        self.terms = terms
        self.sizes: dict[str, float] = {}
        self.exact = _EXACT
        self.warnings: list[str] = []
        self.driver_mib = self.terms.driver
        self.free_mib = question.card_memory_mib - self.terms.driver
        self.refused: Refused | None = None
        self.certain = False
        self.sized: Sizing | None = None

    def budget(self) -> Budget:
        self._context()
        if self.settings.refusal is not None:
            self._refuse(Refused(Stage.ARGUMENTS, self.settings.refusal, ""), certain=True)
            return self._result(0.0, 0.0)
        before_mib = self.free_mib
        self._weights()
        if self.refused is None:
            self._size(before_mib)
        ready_free_mib = 0.0
        if self.sized is not None:
            ready_free_mib = self._after_sizing(self.sized, before_mib)
        return self._result(before_mib, ready_free_mib)

    def _take(self, name: str, mib: float) -> bool:
        """Put a pool into memory; False where it does not fit."""
        self.sizes[name] = mib
        self.free_mib -= mib
        return self.free_mib >= 0

    def _refuse(self, refused: Refused, *, certain: bool = False) -> None:
        if self.refused is None:
            self.refused = refused
            self.certain = certain

    def _context(self) -> None:
        other, free = self.question.other_mib, self.question.free_mib
        if free is not None:
            if not 0 < free <= self.question.card_memory_mib:
                raise wrong(f"{free:g} MiB cannot be free on a card of {self.question.card_memory_mib} MiB")
            self.driver_mib = min(self.driver_mib, self.question.card_memory_mib - free)
            self.free_mib = self.question.card_memory_mib - self.driver_mib
            self._take("context", max(self.free_mib - free, 0.0))
            self.exact = _EXACT_WITH_CONTEXT
            return
        if other:
            self._take("other processes", other)
        self._take("context", self.terms.context)

    def _weights(self) -> None:
        gpus, terms = self.settings.gpus, self.terms
        whole = self.target.loaded_gib * 1024 if terms.target_weights is None else terms.target_weights
        size = target_share_mib(whole, self.settings, self.target)
        free = self.free_mib
        if not self._take("weights", size):
            self._refuse(Refused(Stage.LOAD, _out_of_memory(size, free), "weights"))
            return
        if self.draft is None:
            return
        whole = self.draft.loaded_gib * 1024 if terms.draft_weights is None else terms.draft_weights
        size = draft_share_mib(whole, gpus)
        free = self.free_mib
        fits = self._take("draft weights", size)
        if self.settings.algorithm is not None and self.settings.algorithm.upper() == "DFLASH":
            # A machine where less is lost than the formula says shows it as leftovers below zero.
            stacked = max(projection_bytes(self.draft, gpus) / _MIB + min(self.terms.after_load, 0.0), 0.0)
            fits = self._take("draft projections", stacked) and fits
        if not fits:
            self._refuse(Refused(Stage.DRAFT_LOAD, _out_of_memory(size, free), "draft weights"))

    def _size(self, before_mib: float) -> None:
        if self.draft is not None:
            self._take("loading leftovers", min(max(self.terms.after_load, 0.0), max(self.free_mib, 0.0)))
        sized = size_pools(
            self.settings,
            self.cells,
            free_before_load_gib=before_mib / 1024,
            free_after_load_gib=self.free_mib / 1024,
            target=self.target,
        )
        if isinstance(sized, Refused):
            self._refuse(sized, certain=True)
        else:
            self.sized = sized

    def _after_sizing(self, sized: Sizing, before_mib: float) -> float:
        """Pools, graphs, first requests; the free memory when the server is ready."""
        settings = self.settings
        left = self._remainder(sized.running_requests)
        self._state_pools(sized)
        if settings.post_capture:
            sized = self._resize(sized, left, before_mib)
        self._kv_pools(sized)
        requests = sized.running_requests
        row = settings.context_tokens + 4 + settings.draft_tokens
        self._take("request table", (requests + 1) * row * 4 / _MIB)
        if self.free_mib < 0:
            self._refuse(Refused(Stage.POOLS, _out_of_memory(-self.free_mib, 0.0), "target KV"))
        free = self.free_mib
        if not self._take("workspaces", left.workspace):
            self._refuse(Refused(Stage.POOLS, _out_of_memory(left.workspace, free), "workspaces"))
        self._graphs(left)
        ready_free_mib = self.free_mib
        self._take("compiled kernels", left.kernels)
        self._take("activations", left.activations)
        self._take("logits", left.logits)
        if not self._take("fragments", left.fragments):
            text = _out_of_memory(left.activations, self.free_mib + left.activations + left.fragments)
            self._refuse(Refused(Stage.SERVING, text, "activations"))
        if self.terms.unified and self.free_mib < _HOST_NEEDS_MIB:
            self.warnings.append(
                f"{max(self.free_mib, 0.0) / 1024:.1f} GiB of the host's memory are left: where a guard "
                "(earlyoom) runs, it ends the server below 8 GiB (exit code -15)"
            )
        self._note_limits(sized)
        return ready_free_mib

    def _remainder(self, running_requests: int) -> Remainder:
        left = self.remainders.get(running_requests)
        if left is None:
            has_draft = self.draft is not None
            left = remainder_of(
                self.settings,
                self.terms,
                self.target,
                running_requests=running_requests,
                users=self.question.users,
                has_draft=has_draft,
            )
            self.remainders[running_requests] = left
        return left

    def _state_pools(self, sized: Sizing) -> None:
        cells = self.cells
        if not cells.slot:
            return
        # One slot of padding is made whether the release charges it or not.
        slots = sized.state_slots + 1
        self._take("state conv", slots * cells.conv / _MIB)
        self._take("state ssm", slots * cells.ssm / _MIB)
        ssm, conv, rings = verify_bytes(self.settings, cells, sized.running_requests, sized.state_slots)
        for name, size in (("verify ssm", ssm), ("verify conv", conv), ("replay rings", rings)):
            if size:
                self._take(name, size / _MIB)

    def _kv_pools(self, sized: Sizing) -> None:
        page, cells = self.settings.page_tokens, self.cells
        rows = sized.kv_tokens + page
        if cells.target:
            self._take("target KV", rows * cells.target / _MIB)
        if cells.window:
            self._take("window KV", (sized.window_tokens + page) * cells.window / _MIB)
        if cells.draft:
            self._take("draft KV", rows * cells.draft / _MIB)

    def _resize(self, sized: Sizing, left: Remainder, before_mib: float) -> Sizing:
        """The pool as it is backed once the graphs are captured, no larger than it was planned."""
        slack_mib = before_mib * (1 - self.settings.fraction)
        if self.cells.slot or max(left.batches, default=0) < sized.running_requests:
            slack_mib = max(slack_mib, self.settings.activation_reserve_gib * 1024)
        graphs = left.workspace + left.prefill_graphs + left.target_graphs + left.draft_graphs
        budget_mib = self.free_mib - graphs - slack_mib - self.settings.multimodal_gib * 1024
        again = tokens_in(
            self.settings,
            self.cells,
            int(max(budget_mib, 0.0) * _MIB),
            slots=sized.state_slots,
            target=self.target,
            cap=sized.kv_tokens,
        )
        if isinstance(again, Refused):
            self._refuse(replace(again, stage=Stage.DRAFT_CAPTURE if self.draft else Stage.DECODE_CAPTURE))
            return sized
        self.sized = again
        return again

    def _graphs(self, left: Remainder) -> None:
        free = self.free_mib
        if left.prefill_graphs and not self._take("prefill graphs", left.prefill_graphs):
            text = f"Fail when using backend: breakable for prefill runner. {_out_of_memory(256.0, free)}"
            self._refuse(Refused(Stage.PREFILL_CAPTURE, text, "prefill graphs"))
        free = self.free_mib
        name = "verify graphs" if self.settings.speculation else "decode graphs"
        if left.target_graphs and not self._take(name, left.target_graphs):
            text = f"Capture cuda graph failed: {_out_of_memory(left.target_graphs, free)}"
            self._refuse(Refused(Stage.DECODE_CAPTURE, text, name))
        if not left.draft_graphs:
            return
        free = self.free_mib
        if self.settings.method == "own-shape" and free < _DRAFT_GRAPH_NEEDS_MIB:
            self.warnings.append(
                f"the draft's graphs are left out: {free / 1024:.2f} GiB are free at their capture, and the "
                "engine wants 1.00; each draft pass is then launched piece by piece, and slower"
            )
            return
        if not self._take("draft graphs", left.draft_graphs):
            text = f"Capture cuda graph failed: {_out_of_memory(left.draft_graphs, free)}"
            self._refuse(Refused(Stage.DRAFT_CAPTURE, text, "draft graphs"))

    def _note_limits(self, sized: Sizing) -> None:
        settings = self.settings
        wanted = settings.running_requests
        if sized.limited_by == "state ssm" and wanted is not None:
            self.warnings.append(
                f"max_running_requests is capped to {sized.running_requests} by the mamba state cache "
                f"(max_mamba_cache_size={sized.state_slots}, {settings.slots_per_request} state slots per "
                "request)"
            )
        elif sized.limited_by is not None and wanted is not None:
            self.warnings.append(
                f"max_running_requests was reduced from the requested {wanted} to {sized.running_requests} "
                "due to the available KV cache capacity"
            )
        if settings.max_tokens is not None and settings.max_tokens > sized.profiled_tokens:
            self.warnings.append(
                f"max_total_tokens={settings.max_tokens} is larger than the profiled value "
                f"{sized.profiled_tokens}; the profiled value is used"
            )

    def _result(self, before_mib: float, ready_free_mib: float) -> Budget:
        settings, sized = self.settings, self.sized
        refused = self.refused
        tokens = sized.kv_tokens if sized else 0
        peak_mib = self.question.card_memory_mib - self.driver_mib - self.free_mib
        margin_mib = _UNKNOWN_SHARE * peak_mib if self.unknown else 0.0
        reserved = {}
        if before_mib > 0:
            reserved = {
                "slack": before_mib * (1 - settings.fraction),
                "images": settings.multimodal_gib * 1024,
            }
        return Budget(
            sizes=self.sizes,
            exact=self.exact,
            kv_tokens=tokens,
            state_slots=sized.state_slots if sized else 0,
            slots_per_request=settings.slots_per_request,
            max_running_requests=sized.running_requests if sized else 0,
            context_per_user=min(tokens // self.question.users, settings.context_tokens),
            predicted_peak_mib=peak_mib,
            total_mib=self.question.card_memory_mib,
            fails_at=refused.stage if refused else None,
            failure=refused.message if refused else None,
            certain=self.certain,
            binding_pool=self._binding(),
            reserved=reserved,
            window_tokens=sized.window_tokens if sized else 0,
            ready_free_mib=max(ready_free_mib, 0.0),
            driver_mib=self.driver_mib,
            unknown=self.unknown,
            margin_mib=margin_mib,
            warnings=tuple(self.warnings),
        )

    def _binding(self) -> str | None:
        if self.refused is not None:
            return self.refused.pool or None
        if self.sized is None:
            return None
        if self.sized.limited_by is not None:
            return self.sized.limited_by
        clamped = self.settings.max_tokens is not None and self.sized.kv_tokens < self.sized.profiled_tokens
        return None if clamped else "target KV" if self.cells.target else "window KV"


def _unknown(target: ModelCard, draft: ModelCard | None, settings: Settings, flags: Flags) -> tuple[str, ...]:
    found = []
    if family_of(target.architecture) is None:
        found.append(
            f"the architecture {target.architecture} is not known: its layers are taken for attention with "
            "grouped heads, its vision tower for the engine's reference"
        )
    if settings.method in ("own-shape", "target-shaped") and draft is None:
        found.append("nothing is known of the draft: its weights and its KV cache are not counted")
    if settings.target_kv_bytes < 1:
        found.append("where attention reads a KV cache of four bits as it is, less is needed than is counted")
    if flags.get("enable-torch-compile") is True and settings.graph_batches:
        found.append("torch.compile takes memory of its own for each captured batch, which is not counted")
    return tuple(found)


def _out_of_memory(wanted_mib: float, free_mib: float) -> str:
    return (
        f"CUDA out of memory. {wanted_mib / 1024:.2f} GiB are to be allocated, "
        f"{max(free_mib, 0) / 1024:.2f} GiB are free"
    )
