"""The report as Markdown, for an issue or a wiki.

What comes from records is shown as text: it can be neither markup nor a link there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from dflash_deploy.machine.text import printable
from dflash_deploy.report import words
from dflash_deploy.report.contents import Report
from dflash_deploy.report.verdict import verdict
from dflash_deploy.tune.outlook import duration
from dflash_deploy.tune.screen import GOAL_UNITS, outcome_line
from dflash_deploy.tune.summary import again_words, interval_words, proof_line, repeated_line, versus

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$@&]|^[-+=]|(?<=http):|(?<=https):|(?<=www)\.)", re.IGNORECASE)
"""What begins markup, a mention or, as some read it, a link."""
_LONGEST_TEXT = 2000
_MIB_PER_GIB = 1024.0


def render_markdown(report: Report) -> str:
    """The document."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    study, kind = report.study, report.kind
    yield f"# {_text(study.name)}"
    yield ""
    yield f"**{_text(verdict(report))}**"
    if study.simulated:
        yield ""
        yield "Simulated: no figure here says anything about a real card until it is measured on one."
    if report.state != "at rest":
        yield ""
        yield f"The study is {report.state}; this is how far it has come."
    yield from _command(report)
    yield from _comparison(report)
    yield from _section("Trials")
    unit = GOAL_UNITS[study.profile.objective.optimize]
    yield from _table(
        ("trial", "source", "outcome", f"{unit} ({kind})", "launching", "measuring"), _trial_rows(report)
    )
    yield from _memory(report)
    yield from _importance(report)
    yield from _failures(report)
    yield from _output(report)
    yield from _section("Machine and versions")
    yield from _table(
        ("", ""),
        (
            ("card", report.card.name if report.card else study.card or "not known"),
            ("engine", f"SGLang {study.engine_version}"),
            ("model", study.profile.model.target),
            ("draft", study.profile.speculation.draft or study.profile.speculation.method),
            ("load", f"{study.profile.workload.users} at once"),
            ("seed", str(study.seed)),
            ("tuned with", f"dflash-deploy {study.tool_version}"),
            ("report", f"dflash-deploy {report.made_by}, {report.made:%Y-%m-%d %H:%M:%S %Z}"),
        ),
    )


def _command(report: Report) -> Iterator[str]:
    yield from _section("Best command")
    if report.best is None:
        yield "There is none."
        return
    command = printable(report.best.command, longest=20_000)
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
    yield f"{fence}sh"
    yield words.folded(command)
    yield fence
    yield ""
    proof = _text(proof_line(report.proof, report.kind))
    yield f"{proof[0].upper()}{proof[1:]}."
    if report.repeated is not None:
        told = _text(repeated_line(report.repeated, report.study.profile.objective.optimize))
        yield f"{told[0].upper()}{told[1:]} ({report.kind})."
    if report.reasons:
        yield ""
        yield from _table(("flag", "why it is there"), report.reasons.items())


def _comparison(report: Report) -> Iterator[str]:
    best, goal = report.best, report.study.profile.objective.optimize
    yield from _section("Before and after")
    if best is None:
        yield "Nothing to compare."
        return
    yield from _table(
        (
            "setting",
            f"{GOAL_UNITS[goal]} ({report.kind})",
            "interval",
            "the best is",
        ),
        (
            (
                f"trial {best.trial}",
                words.number(best.objective),
                interval_words(best.interval),
                "",
            ),
            *(
                (
                    one.name,
                    "none" if one.objective is None else words.number(one.objective),
                    one.reason or one.outcome if one.objective is None else interval_words(one.interval),
                    "" if one.gain is None else versus(one.gain, one.name, goal) + again_words(one),
                )
                for one in report.baselines
                if one.trial != best.trial
            ),
        ),
    )


def _trial_rows(report: Report) -> Iterator[Sequence[str]]:
    times = {one.number: one for one in report.schedule.stretches}
    for trial in report.trials:
        time = times.get(trial.number)
        yield (
            str(trial.number),
            trial.source,
            trial.outcome if trial.feasible else outcome_line(report.study, trial),
            "" if trial.objective is None else words.number(trial.objective),
            duration(time.launch_s) if time else "",
            duration(time.measure_s) if time else "",
        )


def _memory(report: Report) -> Iterator[str]:
    memory = report.memory
    if memory.predicted or memory.observed:
        yield from _section(f"VRAM of the best, GiB (predicted; observed is {report.kind})")
        yield from _table(
            ("part", "predicted", "observed"),
            (
                (
                    part,
                    words.number(memory.predicted[part] / _MIB_PER_GIB) if memory.predicted else "",
                    words.number(memory.observed[part] / _MIB_PER_GIB) if memory.observed else "",
                )
                for part in memory.predicted or memory.observed
            ),
        )


def _importance(report: Report) -> Iterator[str]:
    yield from _section("What made the difference")
    importance = report.importance
    if not importance.weights:
        yield f"Cannot be told: {importance.problem}."
        return
    yield from _table(
        ("parameter", "explains by itself", "by chance"),
        (
            (
                ", ".join((one.flag, *one.together)),
                words.percent(one.share) + ("" if one.told else ", not told from chance"),
                words.percent(one.by_chance),
            )
            for one in importance.weights
        ),
    )


def _failures(report: Report) -> Iterator[str]:
    yield from _section("What failed, and why")
    if not report.failures:
        yield "Nothing failed."
    for one in report.failures:
        trials = ", ".join(map(str, one.trials))
        outcome = one.outcome if one.launched else "refused by the plan"
        yield f"- **{outcome}** (trials {trials}): {_text(one.reason)}"
        if one.diagnosis:
            yield f"  - diagnosis: {_text(one.diagnosis)}"
        if one.fix:
            yield f"  - what helps: {_text(one.fix)}"


def _output(report: Report) -> Iterator[str]:
    yield from _section("Were the answers right")
    looked = [trial for trial in report.trials if trial.measured]
    faulty = [trial for trial in looked if trial.measured and trial.measured.faults]
    if report.study.profile.measure.check_output:
        yield f"{len(looked)} trials were looked at, {len(faulty)} of them with faults."
    else:
        yield (
            "The profile wants only tokens to be counted, not text to be read: "
            f"{len(faulty)} of {len(looked)} trials counted wrongly."
        )
    for trial in faulty:
        for fault in trial.measured.faults if trial.measured else ():
            yield f"- trial {trial.number}: {_text(fault)}"
    best = report.best
    for sample in best.measured.samples if best and best.measured else ():
        yield ""
        yield f"> {_text(' '.join(sample.split()))}"


def _section(title: str) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_text, head))} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_text, row))} |"


def _text(text: str) -> str:
    """Text that Markdown takes as nothing but text, on one line."""
    return _SPECIAL.sub(r"\\\1", printable(" ".join(text.split()), longest=_LONGEST_TEXT))
