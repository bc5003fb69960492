"""What was seen, put in order: the root cause first, then what else is odd, and what is benign."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_deploy.diagnosis.entry import Fix, Role, Severity
from dflash_deploy.diagnosis.expression import Value
from dflash_deploy.diagnosis.scan import Scanner, Seen, Start
from dflash_deploy.diagnosis.stage import Stage, told_by_frames

Confidence = Literal["high", "medium", "low"]

UNKNOWN_FAILURE = "unknown-failure"
_LAST = 1 << 60
_TOLD_TO_END = frozenset({None, 0, -2, -15, 130, 143})
"""Exit statuses that are no failure in themselves: SIGINT and SIGTERM among them."""
_NEAR = 400
"""Lines apart that two messages can still be of one failure."""

# What differs between two starts of one command.
_OWN_OF_A_START = frozenset({"random_seed", "port", "nccl_port", "dist_init_addr", "node_rank"})
_SECRET = re.compile(
    r"(--[a-z-]{0,20}api-key[= ]|"
    r"(?:api[-_]?key|(?:access|auth|hf|hub)[-_]?token|password|secret|authorization)['\"]?\s?[=:]\s?['\"]?"
    r"(?:bearer |basic )?)[^\s'\",;)]{4,300}"
    r"|\b(?:hf_|sk-|ghp_|nvapi-)[\w-]{8,200}",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Line:
    """A line of the log that shows something; lines are counted from 1."""

    number: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        stage: where the start stood.
        lines: that show it, a few of them.
        count: how many lines showed it.
    """

    id: str
    stage: Stage
    severity: Severity
    role: Role
    cause: str
    fix: Fix | None
    lines: tuple[Line, ...]
    confidence: Confidence
    count: int = 1
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnknownFailure:
    """A failure that no entry names: what a report of it needs.

    Attributes:
        ends_at: last line of the traceback that ended the server, None without one.
    """

    stage: Stage
    ends_at: int | None
    exception: str | None
    frame: str | None
    excerpt: tuple[Line, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What a log says.

    Attributes:
        findings: the root cause first, then the rest by weight.
        benign: what looks bad and is not.
        stage: how far the last start came.
        unknown: the failure, where no entry names it.
        notes: about the log itself: cut short, several starts.
    """

    findings: tuple[Finding, ...]
    benign: tuple[Finding, ...]
    stage: Stage
    lines_read: int
    unknown: UnknownFailure | None = None
    notes: tuple[str, ...] = ()

    @property
    def root(self) -> Finding | None:
        """The root cause; None where nothing of severity error was found."""
        first = self.findings[0] if self.findings else None
        return first if first is not None and first.severity == "error" else None


def judge(
    scanner: Scanner, flags: Mapping[str, Value], *, exit_status: int | None, damaged: str | None
) -> Diagnosis:
    """Put in order what a scanner saw."""
    story = _story(scanner.starts)
    findings: list[Finding] = []
    benign: list[Finding] = []
    unknown: UnknownFailure | None = None
    aftermath: set[str] = set()
    for start in story:
        kept = _kept(start)
        names = {**start.figures(), **flags}
        benign += [_finding(seen, names, "high") for seen in kept if seen.entry.severity == "benign"]
        found = _ordered([seen for seen in kept if seen.entry.severity != "benign"])
        findings += [
            replace(_finding(seen, names, _confidence(seen, start)), severity=_severity(seen, start))
            for seen in found
        ]
        if start is story[-1] or unknown is None:
            unknown = _unknown(scanner, start, found, exit_status) or unknown
            aftermath |= {seen.entry.id for seen in found if _after(seen, unknown)}
    findings = _ranked(_merged(findings))
    if unknown is not None and not any(
        f.severity == "error" and f.role != "symptom" and f.id not in aftermath for f in findings
    ):
        findings = [_unnamed(unknown), *map(_followed, findings)]
    else:
        unknown = None
    notes = [damaged] if damaged else []
    if story[-1].stage is Stage.UNKNOWN and not findings and not benign:
        notes.append(
            "not one line is known as a server's: is it the right log? A unit's is read with --unit NAME, a "
            "trial's with --trial N"
        )
    if len(scanner.starts) > 1:
        notes.append(
            f"the log holds {len(scanner.starts)} starts; "
            + (
                "all of the same command"
                if len(story) == len(scanner.starts)
                else f"told is of the last {len(story)}, from line {story[0].number}: others had other flags"
            )
        )
    return Diagnosis(
        tuple(findings), tuple(_merged(benign)), story[-1].stage, scanner.lines_read, unknown, tuple(notes)
    )


def _story(starts: Sequence[Start]) -> list[Start]:
    """The last start, and those before it of the same command: a service that was started again and again."""
    story = [starts[-1]]
    for start in reversed(starts[:-1]):
        if _command(start) != _command(story[0]):
            break
        story.insert(0, start)
    return story


def _command(start: Start) -> dict[str, Value]:
    return {name: value for name, value in start.arguments.items() if name not in _OWN_OF_A_START}


def _kept(start: Start) -> list[Seen]:
    kept = []
    for index, seen in start.seen.items():
        entry = seen.entry
        met = all((index, 1, at) in start.context for at in range(len(entry.needs)))
        barred = any((index, 2, at) in start.context for at in range(len(entry.unless)))
        within_benign = seen.trace is not None and seen.trace.benign and not seen.trace.fatal
        if met and not barred and (entry.severity == "benign" or not within_benign):
            kept.append(seen)
    return kept


def _ordered(seen: list[Seen]) -> list[Seen]:
    """Without what a better entry says of the same line or the same traceback."""
    weight = {"cause": 2, "generic": 1, "symptom": 0}
    kept: list[Seen] = []
    for one in sorted(seen, key=lambda s: (-weight[s.entry.role], s.number or _LAST, -s.span)):
        rivals = [other for other in kept if other.entry.severity == "error" or one.entry.severity != "error"]
        # A note of a line says something else of it than the error does.
        note = one.entry.severity == "note" and one.entry.role == "cause"
        same_line = not note and any(other.number == one.number and other.number for other in rivals)
        generic = one.entry.role == "generic"
        covered = generic and any(
            other.entry.role == "cause"
            and other.entry.severity == "error"
            and (
                (one.trace is not None and other.trace is one.trace)
                or abs(other.number - one.number) <= _NEAR
            )
            for other in rivals
        )
        if not (same_line or covered):
            kept.append(one)
    return kept


def _severity(seen: Seen, start: Start) -> Severity:
    """An error that the server outlived was none, unless it came again."""
    lived = start.ready_at is not None and 0 < seen.last < start.ready_at
    return "warning" if seen.entry.severity == "error" and lived else seen.entry.severity


def _finding(seen: Seen, names: Mapping[str, Value], confidence: Confidence) -> Finding:
    entry = seen.entry
    known = {**names, **seen.names, "stage": seen.stage.value}
    stage = entry.stage if entry.stage is not Stage.UNKNOWN else seen.stage
    return Finding(
        entry.id,
        stage,
        entry.severity,
        entry.role,
        entry.cause(known),
        entry.fix(known),
        tuple(Line(number, hidden(text)) for number, text in seen.lines),
        confidence,
        seen.count,
        entry.evidence,
    )


def _confidence(seen: Seen, start: Start) -> Confidence:
    if seen.entry.role == "symptom":
        return "low"
    if seen.entry.role == "generic":
        return "medium"
    ended = start.ended or (seen.trace is not None and seen.trace.fatal)
    return "high" if ended or seen.entry.severity != "error" or seen.stage in _ENDS_AT_ONCE else "medium"


_ENDS_AT_ONCE = frozenset({Stage.ARGUMENTS, Stage.ENVIRONMENT, Stage.UNKNOWN})


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding an entry: later starts that fail alike add their count."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        first = merged.get(finding.id)
        merged[finding.id] = finding if first is None else replace(first, count=first.count + finding.count)
    return list(merged.values())


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    severity = {"error": 0, "warning": 1, "note": 2, "benign": 3}
    role = {"cause": 0, "generic": 1, "symptom": 2}
    ranked = sorted(findings, key=lambda f: (severity[f.severity], role[f.role], f.lines[0].number or _LAST))
    if ranked and ranked[0].role != "symptom":
        return [ranked[0], *map(_followed, ranked[1:])]
    return ranked


def _followed(finding: Finding) -> Finding:
    """A symptom beside the cause that it follows from."""
    if finding.role != "symptom":
        return finding
    return replace(finding, severity="note", cause="what is said once a process has died", fix=None)


def _unknown(
    scanner: Scanner, start: Start, found: Sequence[Seen], exit_status: int | None
) -> UnknownFailure | None:
    traces = [trace for trace in start.traces if not trace.benign or trace.fatal]
    if start.ready_at is not None:
        traces = [trace for trace in traces if trace.fatal and trace.number > start.ready_at]
    died = any(seen.entry.role == "symptom" and seen.entry.severity == "error" for seen in found)
    if not traces and (exit_status in _TOLD_TO_END or died):
        return None
    trace = next((trace for trace in traces if trace.fatal), traces[-1] if traces else None)
    innermost = trace.innermost if trace else None
    excerpt = scanner.excerpts.get(trace.number) if trace else None
    stage = start.stage
    if trace is not None and stage in (Stage.UNKNOWN, Stage.ENVIRONMENT):
        stage = told_by_frames(trace.frames) or stage
    return UnknownFailure(
        stage,
        trace.raised[-1].number if trace and trace.fatal and trace.raised else None,
        hidden(innermost.text) if innermost else None,
        innermost.frame if innermost else None,
        tuple(Line(number, hidden(text)) for number, text in excerpt or scanner.tail),
    )


def _after(seen: Seen, unknown: UnknownFailure | None) -> bool:
    """How a process ended that had told of a fatal error before: that error is the cause."""
    return (
        unknown is not None
        and unknown.ends_at is not None
        and seen.entry.role == "generic"
        and seen.number > unknown.ends_at
    )


def _unnamed(unknown: UnknownFailure) -> Finding:
    what = unknown.exception or "the process ended, and the log does not say why"
    where = f" ({unknown.frame})" if unknown.frame else ""
    return Finding(
        UNKNOWN_FAILURE,
        unknown.stage,
        "error",
        "cause",
        f"not a failure that the catalogue knows: {what}{where}",
        Fix("dflash-deploy diagnose LOG --report writes a bug report, redacted, ready to be filed", {}),
        unknown.excerpt,
        "low",
    )


def hidden(text: str) -> str:
    """The text without keys and tokens, which no output may repeat."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}***", text)
