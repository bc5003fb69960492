"""The answer of ``plan`` as text of 80 columns, and as JSON. Every figure of it is predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_deploy.cli.plan_request import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.engine.boot import BootRecord
    from dflash_deploy.engine.launch import FlagValue
    from dflash_deploy.engine.sglang.advice import Advice
    from dflash_deploy.plan.budget import Budget
    from dflash_deploy.plan.calibration import Calibrated

SCHEMA_VERSION = 1
_WIDTH = 80
_BAR = 28
_TOLD = 10
"""Advice that is told without --explain."""
_VERSION_WORDS = {
    "given": "",
    "text": " (says the text)",
    "profile": " (says the profile)",
    "newest": " (taken as the newest known; say yours with --sglang)",
}
_FORMULAS: Mapping[str, str] = {
    "other processes": "memory that is in use on the card now",
    "context": "CUDA context and libraries; with --free-mib, all that is not free before the load",
    "weights": "what loading the model took in published logs, or its tensors' bytes",
    "draft weights": "the same of the draft",
    "draft projections": "layers of the draft stacked once more for one matrix product",
    "loading leftovers": "taken between the end of loading and the sizing",
    "state conv": "(state slots + 1) x convolution windows of all recurrent layers",
    "state ssm": "(state slots + 1) x value heads x value dim x key dim x bytes x recurrent layers",
    "verify ssm": "(running requests + 1) x draft tokens x recurrent state of one slot",
    "verify conv": "(running requests + 1) x windows for the draft tokens",
    "replay rings": "(running requests + 1) x rings that replace the verify states",
    "target KV": "(tokens + a page) x full-attention layers x KV heads x 2 x head dim x bytes",
    "window KV": "the same for the layers that see a window only",
    "draft KV": "one row a target token x the draft's layers x KV heads x 2 x head dim x bytes",
    "request table": "(requests + 1) x (context + 4 + draft tokens) x 4 bytes",
    "workspaces": "attention workspaces and autotuning, fitted to logs",
    "prefill graphs": "by number and size of the captured token counts, fitted to logs",
    "verify graphs": "by captured batches x draft tokens, fitted to logs",
    "decode graphs": "by captured batches, fitted to logs",
    "draft graphs": "as the target's, a second set for the draft",
    "compiled kernels": "loaded when the first tokens go through, fitted to logs",
    "activations": "of the largest chunk of a prompt",
    "logits": "requests x draft tokens x vocabulary x 4 bytes",
    "fragments": "held by the allocator and of no use to it, fitted to logs",
}


def as_json(answer: Answer) -> dict[str, object]:
    """The keys that docs/json.md describes."""
    configuration = answer.configuration
    return {
        "schema_version": SCHEMA_VERSION,
        **answer.budget.as_json(),
        "advice": [_advice_json(one) for one in answer.advice],
        "card": answer.card.card.id if answer.card.card else None,
        "sglang": {"version": configuration.version, "from": configuration.version_from},
        "source": configuration.source,
        "model": answer.target.path or answer.target.id,
        "draft": (answer.draft.path or answer.draft.id) if answer.draft else None,
        "users": answer.users,
        "flags": _plain(configuration.flags),
        "notes": list(answer.notes),
        "observed": None if answer.observed is None else _compared(answer.budget, answer.observed),
        "calibration": None
        if answer.calibrated is None
        else {
            "ready_free_error_before_mib": answer.calibrated.before_mib,
            "ready_free_error_after_mib": answer.calibrated.after_mib,
            "learnt": list(answer.calibrated.learnt),
        },
    }


def lines(answer: Answer, *, explain: bool = False) -> Iterator[str]:
    """The same for people."""
    yield from _heading(answer)
    yield ""
    yield from _pools(answer.budget, explain=explain)
    yield ""
    yield from _figures(answer)
    yield from _verdict(answer.budget)
    if answer.observed is not None:
        yield from _observed(answer.budget, answer.observed)
    if answer.calibrated is not None and answer.calibrated.before_mib is not None:
        yield from _calibration(answer.calibrated)
    if answer.notes or answer.budget.warnings or answer.budget.unknown:
        yield ""
        yield "Notes"
        for note in (*answer.notes, *answer.budget.unknown, *answer.budget.warnings):
            yield from _item("-", note)
    if answer.advice:
        yield ""
        yield "Advice, what matters most first"
        told = answer.advice if explain else answer.advice[:_TOLD]
        for number, one in enumerate(told, start=1):
            yield from _advice(number, one, explain=explain)
    if not explain:
        more = len(answer.advice) - _TOLD
        yield ""
        yield "--explain says how each figure comes about and what each advice costs" + (
            f" ({more} more)." if more > 0 else "."
        )


def _heading(answer: Answer) -> Iterator[str]:
    configuration = answer.configuration
    yield from _wrapped(
        f"Plan for {configuration.source}; every figure is predicted, nothing was run", _WIDTH
    )
    yield from _row("card", f"{answer.card.name}, {answer.card.memory_mib:,} MiB ({answer.card.how})")
    yield from _row("SGLang", configuration.version + _VERSION_WORDS[configuration.version_from])
    yield from _row("model", answer.target.path or answer.target.id)
    if answer.draft is not None:
        yield from _row("draft", answer.draft.path or answer.draft.id)


def _pools(budget: Budget, *, explain: bool) -> Iterator[str]:
    yield f"  {'pool':<20}{'MiB':>11}  {'kind':<10}  share of the card"
    for pool in budget.pools:
        share = max(0, min(_BAR, round(pool.mib / budget.total_mib * _BAR)))
        yield f"  {pool.name[:20]:<20}{pool.mib:>11,.1f}  {pool.kind:<10}  {'#' * share}".rstrip()
        if explain:
            yield from _wrapped(
                _FORMULAS.get(pool.name, "fitted to logs"),
                _WIDTH,
                first="      = ",
                others="        ",
            )
    used = max(0, min(_BAR, round(budget.predicted_peak_mib / budget.total_mib * _BAR)))
    bar = "#" * used + "." * (_BAR - used)
    yield f"  {'predicted peak':<20}{budget.predicted_peak_mib:>11,.1f}  {'':<10}  {bar}"
    if explain:
        for name, mib in budget.reserved.items():
            yield from _wrapped(
                f"kept free of pools for {name}: {mib:,.0f} MiB; graphs and workspaces live in it",
                _WIDTH,
                first="      ",
                others="        ",
            )


def _figures(answer: Answer) -> Iterator[str]:
    budget = answer.budget
    yield from _row("KV tokens", f"{budget.kv_tokens:,}")
    if budget.slots_per_request:
        yield from _row("state slots", f"{budget.state_slots} ({budget.slots_per_request} for each request)")
    yield from _row("requests", f"{budget.max_running_requests} at once")
    people = "1 user" if answer.users == 1 else f"{answer.users} users"
    yield from _row("context", f"{budget.context_per_user:,} tokens for each of {people}")
    yield from _row(
        "headroom",
        f"{budget.headroom_mib:,.0f} MiB at the peak"
        + (f" (the driver keeps {budget.driver_mib:,.0f} besides)" if budget.driver_mib else ""),
    )
    if budget.margin_mib:
        yield from _row("margin", f"the unknown may add {budget.margin_mib:,.0f} MiB")
    yield from _row("binding pool", budget.binding_pool or "none: a flag is the limit")


def _verdict(budget: Budget) -> Iterator[str]:
    if budget.fits:
        yield from _row("verdict", "fits: it starts and serves")
        return
    if budget.fails_at is None:
        yield from _row("verdict", f"does not fit: {-budget.headroom_mib:,.0f} MiB are missing")
        return
    sure = "fails" if budget.certain else "probably fails"
    yield from _row("verdict", f"{sure} at stage {budget.fails_at}")
    if budget.failure:
        yield from _row("", budget.failure)


def _observed(budget: Budget, record: BootRecord) -> Iterator[str]:
    yield ""
    yield f"  {'predicted and observed':<28}{'predicted':>12}{'observed':>12}{'error':>10}"
    for name, row in _compared(budget, record).items():
        predicted, observed = row["predicted"], row["observed"]
        error = f"{(predicted - observed) / observed:+.1%}" if observed else ""
        yield f"  {name:<28}{predicted:>12,.0f}{observed:>12,.0f}{error:>10}"
    if record.failure is not None:
        yield from _row("the log", f"failed at stage {record.failure.stage}: {record.failure.message}")
    elif not record.ready:
        yield from _row("the log", f"ends at stage {record.stage}")


def _calibration(calibrated: Calibrated) -> Iterator[str]:
    after = calibrated.after_mib
    text = f"free memory when ready is predicted {calibrated.before_mib:+,.0f} MiB off this log"
    if after is not None and calibrated.learnt:
        learnt = ", ".join(name.replace("_", " ") for name in calibrated.learnt)
        text += f"; {after:+,.0f} MiB with what the log teaches ({learnt})"
    yield from _row("calibration", text)


def _compared(budget: Budget, record: BootRecord) -> dict[str, dict[str, float]]:
    """What both the plan and the log tell."""
    state = sum(budget.pool_mib(name) for name in ("state conv", "state ssm", "verify ssm", "verify conv"))
    weights = [loaded.memory_gib * 1024 for loaded in record.weights]
    pairs: list[tuple[str, float, float | None]] = [
        ("weights_mib", budget.pool_mib("weights"), weights[0] if weights else None),
        ("draft_weights_mib", budget.pool_mib("draft weights"), weights[1] if len(weights) > 1 else None),
        ("state_slots", budget.state_slots, record.state_cache.slots if record.state_cache else None),
        ("state_mib", state, record.state_cache.total_gib * 1024 if record.state_cache else None),
        ("kv_tokens", budget.kv_tokens, record.kv_tokens),
        ("max_running_requests", budget.max_running_requests, record.max_running_requests),
        (
            "ready_free_mib",
            budget.ready_free_mib,
            None if record.free_at_ready_gib is None else record.free_at_ready_gib * 1024,
        ),
    ]
    return {
        name: {"predicted": round(predicted, 1), "observed": round(observed, 1)}
        for name, predicted, observed in pairs
        if observed is not None
    }


def _advice(number: int, advice: Advice, *, explain: bool) -> Iterator[str]:
    yield from _item(f"{number:>2}.", f"{advice.text} [{advice.id}]")
    change = _change(advice.flags)
    if change:
        yield from _item("", f"change: {change}")
    if explain:
        yield from _item("", f"cost: {advice.cost}")
        yield from _item("", f"known from: {advice.evidence}")


def _change(flags: Mapping[str, FlagValue | None]) -> str:
    parts = []
    for name, value in flags.items():
        if value is None:
            parts.append(f"leave out --{name}")
        elif value is True:
            parts.append(f"--{name}")
        else:
            text = " ".join(str(one) for one in value) if isinstance(value, tuple) else str(value)
            parts.append(f"--{name} {text}")
    return ", ".join(parts)


def _advice_json(advice: Advice) -> dict[str, object]:
    return {
        "id": advice.id,
        "text": advice.text,
        "flags": _plain(advice.flags),
        "cost": advice.cost,
        "evidence": advice.evidence,
        "weight": advice.weight.name.lower(),
    }


def _plain(flags: Mapping[str, FlagValue | None]) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}


def _row(label: str, text: str) -> Iterator[str]:
    parts = _wrapped(_printable(text), _WIDTH - 16) or [""]
    yield f"  {label:<14}{parts[0]}".rstrip()
    yield from (f"{'':<16}{part}" for part in parts[1:])


def _item(mark: str, text: str) -> Iterator[str]:
    parts = _wrapped(_printable(text), _WIDTH - 6) or [""]
    yield f"  {mark:<4}{parts[0]}".rstrip()
    yield from (f"{'':<6}{part}" for part in parts[1:])


def _wrapped(text: str, width: int, *, first: str = "", others: str = "") -> list[str]:
    """Lines of a text; flags are not broken at their dashes."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _printable(text: str) -> str:
    """Text of others' making, unable to move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
