"""The plan against what published servers logged: ``python benchmarks/plan_accuracy.py [--json]``.

Every row of ``tests/plan/data/boots.json`` is printed: compared with its error, or left out with the reason.
All that is called predicted comes from the plan, all that is called observed from published logs and reports.
Tokens, slots and pools follow from the engine's formulas; the memory at the peak also from terms that were
fitted to some of these rows (``plan/terms.py`` says to which).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dflash_deploy.checkpoint.cards import ModelCard, load_model_card
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.cells import cells_of
from dflash_deploy.plan.settings import read_settings
from dflash_deploy.plan.sizing import Refused, Sizing, size_pools
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import plan_budget
from dflash_deploy.plan.weights import whole_draft_mib, whole_target_mib

DATA = Path(__file__).resolve().parents[1] / "tests" / "plan" / "data" / "boots.json"

KV_WORST = 0.03
KV_MEDIAN = 0.01
PEAK_GIB = 0.5
LOGGED_GIB = 0.011
"""A log rounds to a hundredth of a GiB, and keys and values are told apart."""


@dataclass(frozen=True)
class Comparison:
    """One figure.

    Attributes:
        kind: ``kv`` (relative error), ``bytes``, ``count``, ``pool`` and ``peak`` (GiB), ``stage``.
        counted: the row tells all that the figure depends on.
        ok: within the limit for its kind.
    """

    row: str
    what: str
    kind: str
    predicted: float | str | None
    observed: float | str | None
    error: float | None
    ok: bool
    counted: bool = True
    note: str | None = None


def comparisons(data: Mapping[str, list[dict]]) -> Iterator[Comparison]:
    """All figures of all rows."""
    for row in data["boots"]:
        yield from _boot(row)
    for row in data["splits"]:
        yield from _split(row)
    for row in data["rests"]:
        yield from _rest(row)


def budget_of(row: Mapping) -> Budget:
    """The plan of a row, with the free memory and the loaded sizes that it tells."""
    free = row.get("free_before_gib")
    terms = terms_for(row["card_memory_mib"])
    target = _model(row["target"])
    draft = None if row["draft"] is None else _model(row["draft"])
    if "target_gib" in row:
        settings = read_settings(
            _flags(row),
            version=row["version"],
            card_memory_mib=row["card_memory_mib"],
            target=target,
            draft=draft,
            env=row.get("env", {}),
        )
        logged = row.get("draft_gib")
        terms = replace(
            terms,
            target_weights=whole_target_mib(row["target_gib"] * 1024, settings, target),
            draft_weights=None if logged is None else whole_draft_mib(logged * 1024, settings.gpus),
        )
    return plan_budget(
        card_memory_mib=row["card_memory_mib"],
        target=target,
        draft=draft,
        flags=_flags(row),
        version=row["version"],
        users=1,
        free_mib=None if free is None else free * 1024,
        env=row.get("env", {}),
        terms=terms,
    )


def _boot(row: Mapping) -> Iterator[Comparison]:
    budget = budget_of(row)
    seen = row["observed"]
    name = row["id"]
    counted = "incomplete" not in row
    note = row.get("incomplete") or row.get("note")
    if "kv_tokens" in seen:
        error = budget.kv_tokens / seen["kv_tokens"] - 1
        exact = budget.kv_tokens == seen["kv_tokens"]
        yield Comparison(
            name,
            "KV tokens",
            "count" if exact and "max-total-tokens" in row["flags"] else "kv",
            budget.kv_tokens,
            seen["kv_tokens"],
            error,
            abs(error) <= KV_WORST,
            counted,
            note,
        )
    for what, value in (
        ("state slots", budget.state_slots),
        ("max running requests", budget.max_running_requests),
    ):
        known = seen.get(what.replace(" ", "_"))
        if known is not None:
            # The engine rounds what it measured to whole slots: a hundredth of a GiB may move it by one.
            chosen = what == "state slots" and "max-mamba-cache-size" not in row["flags"]
            ok = abs(value - known) <= (1 if chosen else 0)
            kind = "slots" if chosen else "count"
            yield Comparison(name, what, kind, value, known, float(value - known), ok)
    for pool, size in seen.get("bytes", {}).items():
        mine = round(_pool(budget, pool) * 2**20)
        if pool == "target KV":
            # The pool's rows follow from its tokens, which are compared above.
            mine = round((seen["kv_tokens"] + 1) * mine / (budget.kv_tokens + 1))
        yield Comparison(name, f"{pool} bytes", "bytes", mine, size, float(mine - size), mine == size)
    for pool, size in seen.get("gib", {}).items():
        mine = _pool(budget, pool) / 1024
        if pool.endswith("KV"):
            mine *= seen["kv_tokens"] / max(budget.kv_tokens, 1)
        elif pool.startswith("state") and "state_slots" in seen:
            mine *= (seen["state_slots"] + 1) / (budget.state_slots + 1)
        yield Comparison(name, pool, "pool", mine, size, mine - size, abs(mine - size) <= LOGGED_GIB)
    if "used_gib" in seen:
        mine = budget.predicted_peak_mib / 1024
        error = mine - seen["used_gib"]
        yield Comparison(name, "VRAM used", "peak", mine, seen["used_gib"], error, abs(error) <= PEAK_GIB)
    if "ready_free_gib" in seen:
        mine = budget.ready_free_mib / 1024
        error = seen["ready_free_gib"] - mine
        yield Comparison(
            name, "free when ready", "peak", mine, seen["ready_free_gib"], error, abs(error) <= PEAK_GIB
        )
    for what, logged in (
        ("prefill", "prefill_graphs"),
        ("verify", "verify_graphs"),
        ("draft", "draft_graphs"),
    ):
        if f"{logged}_gib" in seen:
            mine = budget.pool_mib(f"{what} graphs") / 1024
            error = mine - seen[f"{logged}_gib"]
            yield Comparison(
                name, f"{what} graphs", "peak", mine, seen[f"{logged}_gib"], error, abs(error) <= PEAK_GIB
            )
    if "all_graphs_gib" in seen:
        mine = sum(pool.mib for pool in budget.pools if pool.name.endswith("graphs")) / 1024
        error = mine - seen["all_graphs_gib"]
        yield Comparison(
            name, "all graphs", "peak", mine, seen["all_graphs_gib"], error, abs(error) <= PEAK_GIB
        )
    if "fails_at" in seen:
        stage = None if budget.fails_at is None else str(budget.fails_at)
        wanted = " or ".join(str(one or "serves") for one in seen["fails_at"])
        yield Comparison(
            name,
            "ends at",
            "stage",
            stage or "serves",
            wanted,
            None,
            stage in seen["fails_at"],
            counted,
            note,
        )


def _split(row: Mapping) -> Iterator[Comparison]:
    """The slots tell the memory that was split, and that tells the tokens."""
    low, high = row["state_slots"]
    sized = [size for size in _sizes(row) if low <= size.state_slots <= high]
    wanted = row["max_running_requests"]
    if wanted is not None:
        sized = [size for size in sized if size.running_requests == wanted]
    tokens = sorted(size.kv_tokens for size in sized)
    seen = row["kv_tokens"]
    nearest = min(tokens, key=lambda one: abs(one - seen), default=0)
    error = nearest / seen - 1
    known = f"{low}" if low == high else f"{low} to {high}"
    yield Comparison(
        row["id"],
        f"KV tokens beside {known} slots",
        "split",
        f"{tokens[0]:,}-{tokens[-1]:,}" if tokens else "none",
        seen,
        error,
        abs(error) <= KV_WORST,
        note=row["note"],
    )


def _sizes(row: Mapping) -> Iterator[Sizing]:
    target = _model(row["target"])
    draft = None if row["draft"] is None else _model(row["draft"])
    for step in range(100, 8000):
        sized = _sized(row, target, draft, step / 100)
        if isinstance(sized, Sizing):
            yield sized


def _rest(row: Mapping) -> Iterator[Comparison]:
    """The memory that was split is told itself."""
    target = _model(row["target"])
    draft = None if row["draft"] is None else _model(row["draft"])
    sized = _sized(row, target, draft, row["rest_gib"])
    if isinstance(sized, Refused):
        ok = row["message"] is not None and sized.message.startswith(row["message"])
        yield Comparison(row["id"], "message", "stage", sized.message[:90], row["message"], None, ok)
        return
    wanted = row["max_running_requests"]
    yield Comparison(
        row["id"],
        "max running requests",
        "count",
        sized.running_requests,
        wanted,
        float(sized.running_requests - wanted),
        sized.running_requests == wanted,
    )


def _sized(row: Mapping, target: ModelCard, draft: ModelCard | None, rest_gib: float) -> Sizing | Refused:
    flags = {"mem-fraction-static": 1.0, "language-model-only": True, **_flags(row)}
    settings = read_settings(flags, version=row["version"], card_memory_mib=32607, target=target, draft=draft)
    cells = cells_of(settings, target, draft)
    return size_pools(settings, cells, free_before_load_gib=rest_gib, free_after_load_gib=rest_gib)


def _model(given: str | dict) -> ModelCard:
    return load_model_card(given) if isinstance(given, str) else ModelCard.model_validate(given)


def _flags(row: Mapping) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row["flags"].items()}


def _pool(budget: Budget, name: str) -> float:
    parts = {name, f"{name} conv", f"{name} ssm"}
    return sum(pool.mib for pool in budget.pools if pool.name in parts)


def summary(found: list[Comparison]) -> dict[str, object]:
    """The figures that the plan promises."""
    kv = sorted(abs(one.error) for one in found if one.kind == "kv" and one.counted and one.error is not None)
    splits = [abs(one.error) for one in found if one.kind == "split" and one.error is not None]
    peaks = [abs(one.error) for one in found if one.kind == "peak" and one.error is not None]
    exact = [one for one in found if one.kind in ("bytes", "count")]
    stages = [one for one in found if one.kind == "stage" and one.counted]
    return {
        "kv_rows": len(kv),
        "kv_median_error": statistics.median(kv),
        "kv_worst_error": max(kv),
        "split_rows": len(splits),
        "split_worst_error": max(splits),
        "peak_figures": len(peaks),
        "peak_worst_gib": max(peaks),
        "exact_figures": len(exact),
        "exact_right": sum(one.ok for one in exact),
        "stages": len(stages),
        "stages_right": sum(one.ok for one in stages),
    }


def _shown(value: float | str | None) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shown_error(one: Comparison) -> str:
    if one.error is None:
        return "" if one.ok or not one.counted else "WRONG"
    text = f"{one.error:+.2%}" if one.kind in ("kv", "split") else f"{one.error:+.2f} GiB"
    if one.kind in ("bytes", "count", "slots"):
        text = f"{one.error:+,.0f}" if one.error else "exact"
    return text if one.ok or not one.counted else f"{text} WRONG"


def main() -> int:
    """Print the table; status 1 where a promise is not kept."""
    data = json.loads(DATA.read_text())
    found = list(comparisons(data))
    result = summary(found)
    if "--json" in sys.argv:
        print(json.dumps({"summary": result, "comparisons": [asdict(one) for one in found]}, indent=1))
    else:
        print(f"{'row':28} {'figure':32} {'predicted':>22} {'observed':>16}  error")
        for one in found:
            told = "" if one.counted else "  (not counted: " + str(one.note) + ")"
            print(
                f"{one.row:28} {one.what:32} {_shown(one.predicted)[:60]:>22} "
                f"{_shown(one.observed)[:40]:>16}  {_shown_error(one)}{told}"
            )
        print("\nleft out")
        for row in data["unusable"]:
            print(f"  {row['what']}: {row['why']}")
        print()
        for name, value in result.items():
            print(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}")
    kept = (
        result["kv_median_error"] <= KV_MEDIAN
        and result["kv_worst_error"] <= KV_WORST
        and result["peak_worst_gib"] <= PEAK_GIB
        and result["exact_right"] == result["exact_figures"]
        and result["stages_right"] == result["stages"]
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
