"""Changes that would make a configuration fit, or serve more: each one planned, with what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.sglang.versions import facts
from dflash_deploy.errors import DeployError
from dflash_deploy.plan.budget import Advice, Budget
from dflash_deploy.plan.settings import Settings
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import Question, plan

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import FlagValue

_WORTH_MIB = 64.0
_LAST_RESORTS = frozenset({"no-speculation", "no-radix", "text-only"})
_COST_SPEED = frozenset(
    {"draft-tokens-6", "draft-tokens-4", "smaller-chunk", "no-prefill-graphs", "no-radix"}
)
"""Not worth a word where memory is enough."""
_SPARE_MIB = 768.0
"""Left free at the peak: long requests and images take some of it."""
_HOST_NEEDS_MIB = 8192.0
"""The same where the memory is the host's too: with less its guard ends the server."""
_SHORT_TOKENS = 8192
"""A context that is short for a conversation."""


@dataclass(frozen=True)
class _Change:
    id: str
    flags: Mapping[str, FlagValue | None]
    what: str
    cost: str


def advise(question: Question, *, context_tokens: int | None = None) -> tuple[Advice, ...]:
    """What would help, the cheapest first; empty where nothing does.

    Args:
        question: the configuration.
        context_tokens: wanted for each user; None takes what the configuration gives.

    Raises:
        DeployError: the configuration itself cannot be planned.
    """
    now = plan(question)
    found: list[tuple[tuple[bool, bool, int], Advice]] = []
    for place, change in enumerate(_changes(question, now, context_tokens)):
        then = _with(question, change.flags)
        if then is None:
            continue
        gain = _gain(now, then, question.users, context_tokens)
        if gain is None or (change.id in _COST_SPEED and _enough(now, question.users, context_tokens)):
            continue
        one = Advice(
            change.id,
            f"{change.what}: {gain}",
            dict(change.flags),
            change.cost,
            makes_fit=then.fits and not now.fits,
            last_resort=change.id in _LAST_RESORTS,
        )
        # What makes it fit comes first; among equals the order of the list, which is that of the cost.
        found.append(((not one.makes_fit, one.last_resort, place), one))
    advice = [one for _, one in sorted(found, key=lambda pair: pair[0])]
    if now.fits:
        return tuple(advice)
    if not any(one.makes_fit and not one.last_resort for one in advice):
        together = _together(question, now, context_tokens)
        if together is not None:
            advice.insert(0, together)
    # A step that is not enough is worth a word only where nothing else helps.
    enough = [one for one in advice if one.makes_fit]
    return tuple(enough or advice)


def effect(question: Question, flags: Mapping[str, FlagValue | None]) -> str | None:
    """What a change of flags brings in words; None where it brings nothing, is not enough, or does harm.

    Raises:
        DeployError: the configuration itself cannot be planned.
    """
    now, then = plan(question), _with(question, flags)
    if then is None or not then.fits:
        return None
    return _gain(now, then, question.users, None)


def _together(question: Question, now: Budget, context_tokens: int | None) -> Advice | None:
    """The cheapest changes that make it fit where no single one does."""
    chosen: list[_Change] = []
    for change in _changes(question, now, context_tokens):
        if change.id in _LAST_RESORTS:
            continue
        chosen.append(change)
        if _fit_with(question, chosen):
            break
    else:
        return None
    for change in reversed(chosen[:-1]):
        fewer = [one for one in chosen if one is not change]
        if _fit_with(question, fewer):
            chosen = fewer
    flags = _merged(chosen)
    then = _with(question, flags)
    if then is None:
        return None
    gain = _gain(now, then, question.users, context_tokens)
    what = ", and ".join(change.what for change in chosen)
    cost = "; ".join(change.cost for change in chosen)
    return Advice("together", f"{what}: {gain}", flags, cost, makes_fit=True)


def _fit_with(question: Question, changes: list[_Change]) -> bool:
    then = _with(question, _merged(changes))
    return then is not None and then.fits and then.max_running_requests >= 1


def _merged(changes: list[_Change]) -> dict[str, FlagValue | None]:
    return {name: value for change in changes for name, value in change.flags.items()}


def _with(question: Question, flags: Mapping[str, FlagValue | None]) -> Budget | None:
    merged = {name: value for name, value in {**question.flags, **flags}.items() if value is not None}
    try:
        return plan(replace(question, flags=merged))
    except DeployError:
        return None


def _gain(now: Budget, then: Budget, users: int, context_tokens: int | None) -> str | None:
    """What a change brings in words, None where it brings nothing worth a word."""
    freed = now.predicted_peak_mib - then.predicted_peak_mib
    tokens = then.kv_tokens - now.kv_tokens
    requests = then.max_running_requests - now.max_running_requests
    changed = f" ({tokens:+,})" if tokens else ""
    figures = f"{then.kv_tokens:,} KV tokens{changed}, "
    if requests or not now.fits:
        figures += f"{_requests(then.max_running_requests)} at once, "
    figures += f"{then.headroom_mib:,.0f} MiB left (predicted)"
    if now.fits and not then.fits:
        return None
    if not now.fits:
        if then.fits:
            return f"it fits: {figures}"
        if _order(then) > _order(now):
            end = f"it then ends at {then.fails_at}" if then.fails_at else "memory is still short"
            return f"nearer, but not enough alone: {end}"
        gained = then.headroom_mib - now.headroom_mib
        near = then.fails_at == now.fails_at and gained > _WORTH_MIB
        return f"nearer, but not enough alone: {gained:,.0f} MiB" if near else None
    wanting = _wanting(now, users, context_tokens)
    tight = now.headroom_mib < _SPARE_MIB
    if requests > 0 and now.max_running_requests < users:
        return figures
    if tokens > max(512, now.kv_tokens // 50) and then.max_running_requests >= min(
        users, now.max_running_requests
    ):
        return figures
    if tight and freed > _WORTH_MIB and not (wanting and tokens < 0):
        return f"frees {freed:,.0f} MiB: {figures}"
    return None


def _wanting(now: Budget, users: int, context_tokens: int | None) -> bool:
    wanted = _SHORT_TOKENS if context_tokens is None else context_tokens
    return now.max_running_requests < users or now.context_per_user < wanted


def _enough(now: Budget, users: int, context_tokens: int | None) -> bool:
    return now.fits and now.headroom_mib >= _SPARE_MIB and not _wanting(now, users, context_tokens)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _order(budget: Budget) -> int:
    return len(Stage) if budget.fails_at is None else list(Stage).index(budget.fails_at)


def _changes(question: Question, now: Budget, context_tokens: int | None) -> Iterator[_Change]:
    """Candidates, the cheapest first."""
    settings = question.settings()
    users = question.users
    hybrid = question.target.linear is not None
    if hybrid:
        yield from _state_changes(settings, users, question)
    if settings.graph_batches and max(settings.graph_batches) > users and now.max_running_requests > users:
        yield _Change(
            "graphs",
            {"cuda-graph-max-bs-decode": users, "cuda-graph-bs-decode": None, "max-running-requests": users},
            f"capture graphs and admit requests for {users} at once only",
            f"request {users + 1} waits in the queue",
        )
    if question.target.vision and settings.vision and facts(question.version).reserves_for_images:
        yield _Change(
            "text-only",
            {"language-model-only": True},
            "leave the vision tower out",
            "pictures are refused",
        )
    if settings.target_kv_bytes > 1:
        yield _Change(
            "fp8-kv",
            {"kv-cache-dtype": "fp8_e4m3"},
            "keep keys and values in FP8",
            "a little accuracy at long contexts",
        )
    if question.draft is not None and settings.draft_kv_bytes > 1 and settings.method == "own-shape":
        yield _Change(
            "fp8-draft-kv",
            {"speculative-draft-kv-cache-dtype": "fp8_e4m3"},
            "keep the draft's keys and values in FP8",
            "the answers stay the same, the accept length may fall a little",
        )
    terms = question.terms or terms_for(question.card_memory_mib)
    yield from _limits(settings, now, users, context_tokens, unified=terms.unified)
    if settings.prefill_sizes:
        yield _Change(
            "no-prefill-graphs",
            {"disable-prefill-cuda-graph": True},
            "capture no prefill graphs",
            "the first token comes some ten milliseconds later",
        )
    if settings.chunk_tokens > 1024:
        yield _Change(
            "smaller-chunk",
            {"chunked-prefill-size": settings.chunk_tokens // 2},
            f"read prompts {settings.chunk_tokens // 2} tokens at a time",
            "long prompts take a little longer to the first token",
        )
    for fewer in (6, 4):
        if settings.draft_tokens > fewer and settings.algorithm == "DFLASH":
            yield _Change(
                f"draft-tokens-{fewer}",
                {"speculative-num-draft-tokens": fewer},
                f"check {fewer} draft tokens a step instead of {settings.draft_tokens}",
                "fewer tokens a step where the text is easy to guess (code, lists)",
            )
    if hybrid and settings.radix_cache and users <= 4:
        yield _Change(
            "no-radix",
            {
                "disable-radix-cache": True,
                "max-running-requests": users,
                "max-mamba-cache-size": users,
                "mamba-radix-cache-strategy": None,
            },
            f"keep no prefixes: one state slot a request instead of {now.slots_per_request}",
            "every prompt is read from its beginning, in a chat the whole history each time",
        )
    if settings.speculation:
        yield _Change(
            "no-speculation",
            {name: None for name in question.flags if name.startswith("speculative-")},
            "serve without a draft",
            "two to four times slower",
        )


def _state_changes(settings: Settings, users: int, question: Question) -> Iterator[_Change]:
    if settings.state_bytes > 2:
        yield _Change(
            "bf16-state",
            {"mamba-ssm-dtype": "bfloat16"},
            "keep the recurrent state in bfloat16, half the size",
            "published runs lost nothing by it; long contexts are less well tested",
        )
    lazy = question.flags.get("mamba-radix-cache-strategy") == "extra_buffer_lazy"
    spoken = not settings.speculation or facts(question.version).dflash2
    if settings.radix_cache and settings.overlap and not lazy and settings.slots_per_request > 4 and spoken:
        slots = settings.state_slots
        yield _Change(
            "lazy-state",
            {
                "mamba-radix-cache-strategy": "extra_buffer_lazy",
                "max-mamba-cache-size": None if slots is None else max(4 * users, slots // 5 * 4),
            },
            "four state slots a request instead of five",
            "none is known",
        )
    wanted = settings.slots_per_request * users
    if settings.state_slots is not None and settings.state_slots != wanted:
        more = settings.state_slots < wanted
        yield _Change(
            "state-slots",
            {"max-mamba-cache-size": wanted, "max-running-requests": max(users, 1)},
            f"{wanted} state slots, what {users} at once need",
            "memory that the KV cache would have" if more else "fewer prefixes are kept for later requests",
        )
    elif settings.state_slots is None and settings.radix_cache:
        yield _Change(
            "state-slots",
            {"max-mamba-cache-size": wanted, "max-running-requests": max(users, 1)},
            f"{wanted} state slots for {users} at once, instead of a share of the memory",
            "fewer prefixes are kept for later requests",
        )


def _limits(
    settings: Settings, now: Budget, users: int, context_tokens: int | None, *, unified: bool
) -> Iterator[_Change]:
    """The two levers on the KV pool: the fraction, and the number of tokens."""
    spare_mib = _HOST_NEEDS_MIB + _SPARE_MIB if unified else _SPARE_MIB
    if now.fails_at is Stage.SIZING:
        for step in range(1, 8):
            fraction = round(min(settings.fraction + 0.02 * step, 0.97), 3)
            if fraction > settings.fraction:
                yield _Change(
                    f"fraction-{fraction}",
                    {"mem-fraction-static": fraction},
                    f"raise mem-fraction-static to {fraction}",
                    "less is left for graphs and long prompts",
                )
            if fraction >= 0.97:
                break
    elif now.fits and now.headroom_mib > spare_mib + 256 and settings.max_tokens is None:
        before_mib = (
            now.total_mib - now.driver_mib - now.pool_mib("context") - now.pool_mib("other processes")
        )
        more = (now.headroom_mib - spare_mib) / max(before_mib, 1)
        fraction = int(min(settings.fraction + more, 0.98) * 100) / 100
        if fraction > settings.fraction:
            yield _Change(
                "raise-fraction",
                {"mem-fraction-static": fraction},
                f"raise mem-fraction-static from {settings.fraction:g} to {fraction:g}",
                "less is left for pictures and for what this prediction does not know",
            )
    elif now.kv_tokens and (not now.fits or now.headroom_mib < _SPARE_MIB):
        pools = now.pool_mib("target KV") + now.pool_mib("draft KV") + now.pool_mib("window KV")
        token_mib = pools / now.kv_tokens
        missing = _SPARE_MIB - now.headroom_mib
        tokens = int(now.kv_tokens - missing / token_mib) // 256 * 256 if token_mib else 0
        wanted = users * context_tokens if context_tokens else 0
        if tokens >= max(wanted, 1024 * users):
            yield _Change(
                "cap-tokens",
                {"max-total-tokens": tokens},
                f"cap the KV pool at {tokens:,} tokens",
                f"{tokens // users:,} tokens for each user instead of {now.context_per_user:,}",
            )
