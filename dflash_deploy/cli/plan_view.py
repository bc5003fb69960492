"""The answer of ``plan`` as text of up to 80 columns, and as JSON. Every figure of it is predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dflash_deploy.engine.sglang.advice import Weight
from dflash_deploy.plan.explain import explained
from dflash_deploy.plan.speed import starting_draft_tokens
from dflash_deploy.plan.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.calibration import CalibrationRecord
    from dflash_deploy.cli.plan_request import Answer, Correction
    from dflash_deploy.engine.boot import BootRecord
    from dflash_deploy.engine.launch import FlagValue
    from dflash_deploy.engine.sglang.advice import Advice
    from dflash_deploy.plan.budget import Budget
    from dflash_deploy.plan.calibration import Calibrated
    from dflash_deploy.plan.speed import Range, Speed

SCHEMA_VERSION = 1
_MOST_WIDTH = 80
_LEAST_WIDTH = 40
_OWN_ERROR_MIB = 400.0
"""Peaks of published servers were predicted within this, but for the one at the edge."""
_WITH_BAR = 68
_BAR = 28
_TOLD = 5
"""Advice that is told without --explain, beside what keeps a server from starting or serving rightly."""
_VERSION_WORDS = {
    "given": "",
    "text": " (says the text)",
    "profile": " (says the profile)",
    "newest": " (taken as the newest known; say yours with --sglang)",
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
        "speed": None if answer.speed is None else _speed_json(answer.speed, answer.alone),
        "correction": None if answer.correction is None else _correction_json(answer.correction),
        "observed": None if answer.observed is None else _compared(answer.budget, answer.observed),
        "calibration": None
        if answer.calibrated is None
        else {
            "ready_free_error_before_mib": answer.calibrated.before_mib,
            "ready_free_error_after_mib": answer.calibrated.after_mib,
            "learnt": list(answer.calibrated.learnt),
            "kept": answer.kept,
        },
    }


def records_json(records: Sequence[CalibrationRecord]) -> dict[str, object]:
    """The keys of ``plan --calibration --json`` that docs/json.md describes."""
    return {"schema_version": SCHEMA_VERSION, "calibration": [one.model_dump(mode="json") for one in records]}


def record_lines(records: Sequence[CalibrationRecord], width: int) -> Iterator[str]:
    """What logs taught, for people."""
    if not records:
        yield "Nothing is kept: no log has corrected the plan here yet."
        return
    page = _Page(width)
    for record in records:
        yield from page.wrapped(f"{record.machine}, SGLang {record.version}")
        yield from page.row("model", record.target + (f" with {record.draft}" if record.draft else ""))
        yield from page.row("boots", f"{record.boots}; the last one counts")
        if record.before_mib is not None and record.after_mib is not None:
            yield from page.row(
                "its error",
                f"{record.before_mib:+,.0f} MiB free when ready, predicted less logged; "
                f"{record.after_mib:+,.0f} MiB since",
            )
        taught = record.corrected()
        usual = Terms()
        changed = [
            f"{name.replace('_', ' ')} {value:,.2f}"
            for name, value in asdict(taught).items()
            if value != getattr(usual, name) and not isinstance(value, bool)
        ]
        yield from page.row("figures", ", ".join(changed) or "as usual")
        yield ""
    yield from page.wrapped("dflash-deploy plan --reset-calibration [--gpu NAME] forgets them.")


def lines(answer: Answer, *, explain: bool = False, width: int = _MOST_WIDTH) -> Iterator[str]:
    """The same for people, in as many columns as there are up to 80."""
    yield from _Page(width).answer(answer, explain=explain)


@dataclass(frozen=True)
class _Page:
    """Text of a width."""

    asked_width: int

    @property
    def width(self) -> int:
        return max(_LEAST_WIDTH, min(self.asked_width, _MOST_WIDTH))

    def answer(self, answer: Answer, *, explain: bool) -> Iterator[str]:
        yield from self._heading(answer)
        yield ""
        yield from self._pools(answer, explain=explain)
        yield ""
        yield from self._figures(answer)
        yield from self._verdict(answer.budget)
        if answer.speed is not None:
            yield ""
            yield from self._speed(answer, answer.speed, explain=explain)
        if answer.correction is not None:
            yield ""
            yield from self._correction(answer.correction, answer.budget)
        if answer.observed is not None:
            yield from self._observed(answer.budget, answer.observed)
        if answer.calibrated is not None:
            yield from self._calibration(answer, answer.calibrated)
        if answer.notes or answer.budget.warnings or answer.budget.unknown:
            yield ""
            yield "Notes"
            for note in (*answer.notes, *answer.budget.unknown, *answer.budget.warnings):
                yield from self.item("-", note)
        yield from self._all_advice(answer.advice, explain=explain)

    def _all_advice(self, advice: tuple[Advice, ...], *, explain: bool) -> Iterator[str]:
        urgent = sum(one.weight in (Weight.REFUSED, Weight.WRONG) for one in advice)
        worthwhile = sum(one.weight is not Weight.NOTE for one in advice)
        told = advice if explain else advice[: max(urgent, min(worthwhile, _TOLD))]
        yield ""
        yield "Advice, what matters most first" if told else "There is nothing to advise."
        for number, one in enumerate(told, start=1):
            yield from self._advice(number, one, explain=explain)
        if not explain:
            more = len(advice) - len(told)
            yield ""
            yield from self.wrapped(
                "--explain says how each figure comes about and what each advice costs"
                + (f", with {more} more notes and advice." if more > 0 else ".")
            )

    def _heading(self, answer: Answer) -> Iterator[str]:
        configuration = answer.configuration
        yield from self.wrapped(
            f"Plan for {configuration.source}; every figure is predicted, nothing was run"
        )
        yield from self.row("card", f"{answer.card.name}, {answer.card.memory_mib:,} MiB ({answer.card.how})")
        yield from self.row("SGLang", configuration.version + _VERSION_WORDS[configuration.version_from])
        yield from self.row("model", answer.target.path or answer.target.id)
        if answer.draft is not None:
            yield from self.row("draft", answer.draft.path or answer.draft.id)

    def _pools(self, answer: Answer, *, explain: bool) -> Iterator[str]:
        budget = answer.budget
        formulas = explained(answer.question, budget) if explain else {}
        yield self._pool("pool", "MiB", "kind", "share of the card")
        for pool in budget.pools:
            yield self._pool(pool.name, f"{pool.mib:,.1f}", pool.kind, "#" * _bar(pool.mib, budget.total_mib))
            if pool.name in formulas:
                text = formulas[pool.name].text
                yield from self.wrapped(text, first="      = ", others="        ")
        used = _bar(budget.predicted_peak_mib, budget.total_mib)
        bar = "#" * used + "." * (_BAR - used)
        yield self._pool("predicted peak", f"{budget.predicted_peak_mib:,.1f}", "", bar)
        if explain:
            for name, mib in budget.reserved.items():
                yield from self.wrapped(
                    f"kept free of pools for {name}: {mib:,.0f} MiB; graphs and workspaces live in it",
                    first="      ",
                    others="        ",
                )

    def _pool(self, name: str, mib: str, kind: str, bar: str) -> str:
        if self.width < _WITH_BAR:
            return f"  {name[:18]:<18}{mib:>9}  {kind}".rstrip()
        return f"  {name[:20]:<20}{mib:>11}  {kind:<10}  {bar}".rstrip()

    def _figures(self, answer: Answer) -> Iterator[str]:
        budget = answer.budget
        if budget.kv_tokens:
            yield from self._capacity(answer)
        if budget.margin_mib:
            yield from self.row("margin", f"the unknown may add {budget.margin_mib:,.0f} MiB")
        yield from self.row("binding pool", budget.binding_pool or "none: a flag is the limit")

    def _capacity(self, answer: Answer) -> Iterator[str]:
        """What the pools hold; nothing is said of a start that ends before there are any."""
        budget = answer.budget
        yield from self.row("KV tokens", f"{budget.kv_tokens:,}")
        if budget.slots_per_request:
            slots = f"{budget.state_slots} ({budget.slots_per_request} for each request)"
            yield from self.row("state slots", slots)
        yield from self.row("requests", f"{budget.max_running_requests:,} at once")
        people = "one user" if answer.users == 1 else f"each of {answer.users} users"
        yield from self.row("context", f"{budget.context_per_user:,} tokens for {people}")
        yield from self.row(
            "headroom",
            f"{budget.headroom_mib:,.0f} MiB at the peak"
            + (f" (the driver keeps {budget.driver_mib:,.0f} besides)" if budget.driver_mib else ""),
        )

    def _verdict(self, budget: Budget) -> Iterator[str]:
        if budget.fits:
            doubt_mib = _OWN_ERROR_MIB + budget.margin_mib
            barely = (
                f"fits, by less than this prediction may be wrong ({doubt_mib:,.0f} MiB): leave more room"
            )
            close = budget.headroom_mib < doubt_mib
            yield from self.row("verdict", barely if close else "fits: it starts and serves")
            return
        if budget.fails_at is None:
            yield from self.row("verdict", f"does not fit: {-budget.headroom_mib:,.0f} MiB are missing")
            return
        sure = "fails" if budget.certain else "probably fails"
        yield from self.row("verdict", f"{sure} at stage {budget.fails_at}")
        if budget.failure:
            yield from self.row("", budget.failure)

    def _speed(self, answer: Answer, speed: Speed, *, explain: bool) -> Iterator[str]:
        each = "one user" if speed.users == 1 else f"each of {speed.users} users"
        yield from self.row("speed", f"{_range(speed.user_tokens_per_s)} tokens/s for {each} (predicted)")
        if answer.alone is not None and speed.users > 1:
            yield from self.row(
                "",
                f"{_range(speed.total_tokens_per_s)} together; "
                f"{_range(answer.alone.user_tokens_per_s)} for one user alone",
            )
        share = f"{speed.share.low:.0%} to {speed.share.high:.0%}"
        yield from self.row(
            "",
            f"memory bandwidth allows {speed.roofline_tokens_per_s:,.0f} without speculation; {share} of it "
            "is reached",
        )
        if speed.accept_length is not None and speed.verify_cost is not None:
            yield from self.row(
                "",
                f"speculation: {_range(speed.accept_length, 1)} tokens a step, which costs "
                f"{_range(speed.verify_cost, 2)} plain steps"
                + ("" if answer.configuration.tasks else " (for instructions; prose is slower)"),
            )
        if explain:
            yield from self.row("", _rests_on(speed))
            if speed.accept_length is not None:
                tasks = answer.configuration.tasks
                start = f"{starting_draft_tokens(tasks)} for this load" if tasks else "8"
                yield from self.row(
                    "",
                    f"draft tokens to begin with: {start} (8 for instructions, code and mathematics, "
                    "6 for a mix, 4 for free prose)",
                )

    def _correction(self, correction: Correction, budget: Budget) -> Iterator[str]:
        record, without = correction.record, correction.without
        boots = "one log" if record.boots == 1 else f"{record.boots} logs"
        yield from self.row(
            "corrected",
            f"by {boots} of this card with this SGLang and model: predicted peak "
            f"{without.predicted_peak_mib:,.0f} -> {budget.predicted_peak_mib:,.0f} MiB, KV tokens "
            f"{without.kv_tokens:,} -> {budget.kv_tokens:,} (plan --calibration shows it, "
            "--reset-calibration forgets it)",
        )

    def _observed(self, budget: Budget, record: BootRecord) -> Iterator[str]:
        yield ""
        wide = self.width >= _WITH_BAR
        name_width, figure_width = (28, 12) if wide else (18, 9)
        title = "predicted and observed" if wide else "figure"
        columns = f"{'predicted':>{figure_width}}{'observed':>{figure_width}}"
        yield f"  {title:<{name_width}}{columns}" + (f"{'error':>10}" if wide else "")
        for name, row in _compared(budget, record).items():
            predicted, observed = row["predicted"], row["observed"]
            error = f"{(predicted - observed) / observed:+.1%}" if observed and wide else ""
            figures = f"{predicted:>{figure_width},.0f}{observed:>{figure_width},.0f}{error:>10}"
            yield f"  {name[:name_width]:<{name_width}}{figures}".rstrip()
        if record.failure is not None:
            text = f"failed at stage {record.failure.stage}: {record.failure.message}"
            yield from self.row("the log", text)
        elif not record.ready:
            yield from self.row("the log", f"ends at stage {record.stage}")

    def _calibration(self, answer: Answer, calibrated: Calibrated) -> Iterator[str]:
        if not calibrated.learnt:
            agrees = "this log agrees with what is kept"
            nothing = "this log teaches nothing that later plans could be corrected by"
            yield from self.row("calibration", agrees if answer.correction else nothing)
            return
        learnt = ", ".join(name.replace("_", " ") for name in calibrated.learnt)
        text = f"the log teaches {learnt}"
        if calibrated.before_mib is not None and calibrated.after_mib is not None:
            text = (
                "without this log, free memory when ready would be predicted "
                f"{calibrated.before_mib:+,.0f} MiB off; with it {calibrated.after_mib:+,.0f} MiB ({learnt})"
            )
        yield from self.row("calibration", text)
        subject = f"{answer.card.name}, SGLang {answer.configuration.version}, {answer.target.id}" + (
            f" and {answer.draft.id}" if answer.draft else ""
        )
        if answer.kept:
            yield from self.row("", f"kept: later plans for {subject} are corrected by it")
        else:
            yield from self.row(
                "", f"not kept; if it is of your machine, --keep corrects later plans for {subject} by it"
            )

    def _advice(self, number: int, advice: Advice, *, explain: bool) -> Iterator[str]:
        yield from self.item(f"{number:>2}.", f"{advice.text} [{advice.id}]")
        change = _change(advice.flags)
        if change:
            yield from self.item("", f"change: {change}")
        if explain:
            yield from self.item("", f"cost: {advice.cost}")
            yield from self.item("", f"known from: {advice.evidence}")

    def row(self, label: str, text: str) -> Iterator[str]:
        """A label and what belongs to it."""
        parts = _wrapped(_printable(text), self.width - 16) or [""]
        yield f"  {label:<14}{parts[0]}".rstrip()
        yield from (f"{'':<16}{part}" for part in parts[1:])

    def item(self, mark: str, text: str) -> Iterator[str]:
        """An entry of a list."""
        parts = _wrapped(_printable(text), self.width - 6) or [""]
        yield f"  {mark:<4}{parts[0]}".rstrip()
        yield from (f"{'':<6}{part}" for part in parts[1:])

    def wrapped(self, text: str, *, first: str = "", others: str = "") -> list[str]:
        """A paragraph."""
        return _wrapped(_printable(text), self.width, first=first, others=others)


def _bar(mib: float, total_mib: float) -> int:
    return max(0, min(_BAR, round(mib / total_mib * _BAR)))


def _range(value: Range, digits: int = 0) -> str:
    low, high = f"{value.low:,.{digits}f}", f"{value.high:,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _rests_on(speed: Speed) -> str:
    ranges = "published servers of this card" if speed.published else "published servers of other cards"
    return (
        f"the range rests on {ranges}: bytes that a step reads over the card's bandwidth, the share of it "
        "that they reach"
        + (", accept lengths by kind of text, and what a verify step costs" if speed.accept_length else "")
    )


def _speed_json(speed: Speed, alone: Speed | None) -> dict[str, object]:
    one = alone or speed
    return {
        "kind": "predicted",
        "users": speed.users,
        "user_tokens_per_s": _ends(speed.user_tokens_per_s),
        "total_tokens_per_s": _ends(speed.total_tokens_per_s),
        "one_user_tokens_per_s": _ends(one.user_tokens_per_s),
        "roofline_tokens_per_s": round(speed.roofline_tokens_per_s, 1),
        "share_of_roofline": _ends(speed.share, 3),
        "plain_tokens_per_s": _ends(speed.plain_tokens_per_s),
        "accept_length": None if speed.accept_length is None else _ends(speed.accept_length, 2),
        "verify_cost": None if speed.verify_cost is None else _ends(speed.verify_cost, 2),
        "rests_on": _rests_on(speed),
    }


def _ends(value: Range, digits: int = 1) -> dict[str, float]:
    return {"low": round(value.low, digits), "high": round(value.high, digits)}


def _correction_json(correction: Correction) -> dict[str, object]:
    without = correction.without
    return {
        "machine": correction.record.machine,
        "boots": correction.record.boots,
        "without": {
            "predicted_peak_mib": round(without.predicted_peak_mib, 1),
            "ready_free_mib": round(without.ready_free_mib, 1),
            "kv_tokens": without.kv_tokens,
            "fits": without.fits,
        },
    }


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


def _wrapped(text: str, width: int, *, first: str = "", others: str = "") -> list[str]:
    """Lines of a text; flags are not broken at their dashes."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _printable(text: str) -> str:
    """Text of others' making, unable to move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
