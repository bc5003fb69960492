"""The report as one HTML page that needs nothing but itself.

Records are untrusted: everything is escaped, what no reader should be fooled by (direction marks, control
characters) is replaced, and the page's own policy lets it load nothing and run nothing but our one script.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jinja2
from markupsafe import Markup

from dflash_deploy.bench.measurement import Measurement
from dflash_deploy.machine.text import printable
from dflash_deploy.profile.schema import FlagSetting
from dflash_deploy.report import words
from dflash_deploy.report.chart import Axis, Mark, Plot, Segment, axis, stacked
from dflash_deploy.report.contents import Report
from dflash_deploy.report.memory import PARTS
from dflash_deploy.report.pareto import Figure, Spot, figures_shown, front
from dflash_deploy.report.verdict import verdict
from dflash_deploy.resources import resource_dir
from dflash_deploy.tune.gain import Gain
from dflash_deploy.tune.outlook import duration
from dflash_deploy.tune.screen import GOAL_UNITS
from dflash_deploy.tune.summary import (
    again_words,
    interval_words,
    proof_line,
    repeated_line,
    serving_command,
    versus,
)

_LONGEST_TEXT = 20_000
_PLOT = (400.0, 300.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 388.0, 12.0, 244.0
_BAR = 1000.0
_LABEL = 18.0
_MOST_BASELINES = 3


def render_page(report: Report) -> str:
    """The page."""
    template, style, script = _parts()
    study = report.study
    goal = study.profile.objective.optimize
    held, shares = _held(report)
    return template.render(
        report=report,
        study=study,
        kind=report.kind,
        unit=GOAL_UNITS[goal],
        verdict=verdict(report),
        style=Markup(style),  # noqa: S704  (our own files)
        script=Markup(script),  # noqa: S704
        policy=_policy(style, script),
        held=held,
        shares=shares,
        changes=_changes(report),
        columns=_columns(report),
        proof=proof_line(report.proof, report.kind),
        repeated=repeated_line(report.repeated, goal) if report.repeated else None,
        default_tried=_default_tried(report),
        plots=_plots(report),
        timeline=_timeline(report),
        memory_bars=_memory_bars(report),
        peaks=_peaks(report),
        total_mark=_total_mark(report),
        parts=PARTS,
        command=lambda flags: serving_command(study, flags),
    )


@cache
def _parts() -> tuple[jinja2.Template, str, str]:
    """The template, our style and our script."""
    folder = resource_dir("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_safe,
    )
    environment.filters |= {
        "number": words.number,
        "percent": words.percent,
        "signed": words.signed_percent,
        "gib": words.gib,
        "setting": words.setting,
        "duration": duration,
        "folded": words.folded,
    }
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return environment.get_template("report.html.j2"), style, script


def _safe(value: object) -> object:
    """What every value goes through on its way into the page."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(printable(line, longest=_LONGEST_TEXT) for line in value.split("\n"))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@dataclass(frozen=True)
class Held:
    """One setting held against the best: ``at`` is its place in per cent of the best, ``words`` say so."""

    name: str
    value: float | None
    interval: str
    at: Mapping[str, float]
    words: str
    best: bool


def _held(report: Report) -> tuple[list[Held], Axis | None]:
    """The best first, then every known setting, on an axis of per cent of the best."""
    best, goal = report.best, report.study.profile.objective.optimize
    if best is None:
        return [], None
    shares = {
        one.trial: _shares(one.gain) for one in report.baselines if one.gain and one.trial != best.trial
    }
    shared = axis([100.0, *(share for known in shares.values() for share in known)], 0.0, _BAR, ticks=5)
    own = next((one.name for one in report.baselines if one.trial == best.trial), None)
    name = f"trial {best.trial}" + (f" ({own})" if own else "")
    whole = {"low": shared.place(100.0), "value": shared.place(100.0), "high": shared.place(100.0)}
    shown = [Held(name, best.objective, interval_words(best.interval), whole, "the one to take", best=True)]
    for one in report.baselines:
        if one.trial == best.trial:
            continue
        if one.gain is None:
            told = f"{one.outcome}: {one.reason or 'no figure'}"
            shown.append(Held(one.name, one.objective, "", {}, told, best=False))
            continue
        low, value, high = (shared.place(share) for share in shares[one.trial])
        told = f"the best is {versus(one.gain, one.name, goal)}{again_words(one)}"
        at = {"low": low, "value": value, "high": high}
        shown.append(Held(one.name, one.objective, interval_words(one.interval), at, told, best=False))
    return shown, shared


def _shares(gain: Gain) -> tuple[float, float, float]:
    """Where a setting stands in per cent of the best that beats it by so much, with its interval."""
    low = gain.median if gain.low is None else gain.low
    high = gain.median if gain.high is None else gain.high
    return _share(high), _share(gain.median), _share(low)


def _share(better: float) -> float:
    # A few rounds that differ much leave the interval open to anything.
    return min(max(100 / max(1 + better, 0.01), 25.0), 400.0)


def _default_tried(report: Report) -> bool:
    """A setting was tried that leaves everything that is searched to the engine."""
    bare = {known.name for known in report.study.profile.known if not known.flags}
    return any(one.name in bare or one.name in ("default", "defaults") for one in report.baselines)


@dataclass(frozen=True)
class Change:
    """One flag that differs between the first known setting and the best."""

    flag: str
    before: FlagSetting | None
    after: FlagSetting | None


def _changes(report: Report) -> list[Change]:
    best = report.best_record
    if best is None or not report.baselines or report.baselines[0].trial == best.number:
        return []
    before = next(trial for trial in report.trials if trial.number == report.baselines[0].trial).flags
    flags = [*best.flags, *(flag for flag in before if flag not in best.flags)]
    return [
        Change(flag, before.get(flag), best.flags.get(flag))
        for flag in flags
        if before.get(flag) != best.flags.get(flag)
    ]


def _columns(report: Report) -> list[tuple[str, Measurement]]:
    """The best and some known settings, those that were measured."""
    best = report.best
    if best is None or best.measured is None:
        return []
    records = {trial.number: trial.measured for trial in report.trials}
    others = [one for one in report.baselines if one.trial != best.trial]
    known = [(one.name, measured) for one in others if (measured := records[one.trial]) is not None]
    return [("best", best.measured), *known[:_MOST_BASELINES]]


def _plots(report: Report) -> list[Plot]:
    if not report.spots:
        return []
    up, *across = figures_shown(report.study.profile)
    return [_plot(report, one, up) for one in across]


def _plot(report: Report, across: Figure, up: Figure) -> Plot:
    shown = [
        (spot, right, high)
        for spot in report.spots
        if (right := _scaled(spot, across)) is not None and (high := _scaled(spot, up)) is not None
    ]
    x = axis((right for _, right, _ in shown), _LEFT, _RIGHT, ticks=4)
    y = axis((high for _, _, high in shown), _BOTTOM, _TOP)
    on_front = front([spot for spot, _, _ in shown], (up, across))
    marks = _without_overlaps(
        [
            Mark(
                x.place(right),
                y.place(high),
                _kind_of(report, spot, on_front),
                str(spot.number),
                f"trial {spot.number}: {_figure(high)} {_NAMES[up]}, {_figure(right)} {_NAMES[across]} "
                f"({report.kind})" + ("" if spot.feasible else ", broke a limit or did not hold"),
            )
            for spot, right, high in shown
        ]
    )
    line = sorted(
        (mark.x, mark.y) for mark, (spot, _, _) in zip(marks, shown, strict=True) if spot.number in on_front
    )
    placed = {spot.number for spot, _, _ in shown}
    lost = [trial for trial in report.launched if trial.number not in placed and trial.proves is None]
    return Plot(
        x,
        y,
        _NAMES[across],
        _NAMES[up],
        marks,
        " ".join(f"{right},{high}" for right, high in line),
        [
            (_LEFT + 10 + 16 * place, f"trial {trial.number}: {trial.outcome}, {trial.reason or ''}")
            for place, trial in enumerate(lost[:20])
        ],
    )


_NAMES: Mapping[Figure, str] = dict(GOAL_UNITS) | {"ttft_s": "time to first token, ms"}


def _scaled(spot: Spot, figure: Figure) -> float | None:
    value: float | None = getattr(spot, figure)
    return None if value is None else value * 1000 if figure == "ttft_s" else value


def _figure(value: float) -> str:
    return words.number(value, 0 if abs(value) >= 1000 else 2)


def _without_overlaps(marks: Sequence[Mark]) -> list[Mark]:
    """Labels for the best and the front, as far as none covers another."""
    labelled: list[Mark] = []
    for mark in sorted(marks, key=lambda one: one.kind != "best"):
        wanted = mark.kind in ("best", "front")
        if wanted and all(math.dist((mark.x, mark.y), (one.x, one.y)) > _LABEL for one in labelled):
            labelled.append(mark)
    return [mark if mark in labelled else replace(mark, label="") for mark in marks]


def _kind_of(report: Report, spot: Spot, on_front: Collection[int]) -> str:
    if report.best is not None and spot.number == report.best.trial:
        return "best"
    return "front" if spot.number in on_front else "plain" if spot.feasible else "broken"


@dataclass(frozen=True)
class Row:
    """A labelled bar."""

    label: str
    segments: Sequence[Segment]
    note: str
    kind: str = ""


def _timeline(report: Report) -> list[Row]:
    schedule = report.schedule
    full_s = max((one.start_s + one.launch_s + one.measure_s for one in schedule.stretches), default=0.0)
    return [
        Row(
            f"{one.number}",
            stacked(
                [
                    ("gap", one.start_s, ""),
                    ("launch" if one.measure_s > 0 else "failed", one.launch_s, "launching"),
                    ("measure", one.measure_s, "measuring"),
                ],
                full_s,
                _BAR,
            ),
            one.outcome,
            "" if one.feasible else "bad",
        )
        for one in schedule.stretches
    ]


def _memory_bars(report: Report) -> list[Row]:
    memory = report.memory
    bars = [("predicted", memory.predicted), ("observed", memory.observed)]
    full = max([memory.total_mib or 0.0, *(sum(parts.values()) for _, parts in bars)])
    return [
        Row(
            name if name == "predicted" else f"observed ({report.kind})",
            stacked(
                (
                    (f"part{place}", parts[part], f"{part}: {words.gib(parts[part])} GiB")
                    for place, part in enumerate(PARTS)
                ),
                full,
                _BAR,
            ),
            f"{words.gib(sum(parts.values()))} GiB",
        )
        for name, parts in bars
        if parts
    ]


@dataclass(frozen=True)
class PeakRow:
    """One trial's peaks on a common axis, None where unknown; ``words`` has both in GiB."""

    number: int
    predicted: float | None
    observed: float | None
    words: str


def _peak_axis(report: Report) -> Axis:
    total = report.memory.total_mib
    seen = [mib for one in report.memory.peaks for mib in (one.predicted_mib, one.observed_mib)]
    return axis([*(mib for mib in seen if mib is not None), *([total] if total else [])], 0.0, _BAR)


def _total_mark(report: Report) -> float | None:
    total = report.memory.total_mib
    return None if total is None else _peak_axis(report).place(total)


def _peaks(report: Report) -> list[PeakRow]:
    shared = _peak_axis(report)
    rows = []
    for one in report.memory.peaks:
        told = [words.gib(mib) if mib is not None else "?" for mib in (one.predicted_mib, one.observed_mib)]
        rows.append(
            PeakRow(
                one.number,
                None if one.predicted_mib is None else shared.place(one.predicted_mib),
                None if one.observed_mib is None else shared.place(one.observed_mib),
                " / ".join(told),
            )
        )
    return rows
