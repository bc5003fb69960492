"""What ``doctor`` shows: the same findings as JSON, and as lines of 80 columns with what is wrong first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from dflash_deploy.doctor.examination import exit_code
from dflash_deploy.doctor.finding import Finding, Status
from dflash_deploy.doctor.repair import Done
from dflash_deploy.doctor.subject import Request
from dflash_deploy.machine.text import printable

SCHEMA_VERSION = 1
WIDTH = 80
_INDENT = "  "
_LONGEST = 2000


def as_json(
    request: Request, findings: Sequence[Finding], repairs: Sequence[Done], took_s: float
) -> dict[str, object]:
    """The keys that docs/json.md describes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": request.profile_name,
        "deep": request.deep,
        "hashes": request.hashes,
        "took_s": round(took_s, 3),
        "exit_status": int(exit_code(tuple(findings), repairs)),
        "summary": {str(status): _count(findings, status) for status in Status},
        "findings": [_finding_json(finding) for finding in findings],
        "repairs": [
            {"id": done.id, "what": done.what, "outcome": done.outcome, "text": done.text} for done in repairs
        ],
    }


def lines(findings: Sequence[Finding], request: Request, took_s: float, *, everything: bool) -> Iterator[str]:
    """For people: what is wrong by group, each with its fix; what is right in one line a group.

    Args:
        findings: of all checks.
        request: what was asked for.
        took_s: how long it took.
        everything: show each check that passes, and what every finding was told from.
    """
    counts = ", ".join(f"{_count(findings, status)} {status}" for status in Status)
    about = f"profile {request.profile_name}" if request.profile_name else "this machine"
    yield from wrap(f"{about}: {counts}  (measured in {took_s:.1f} s)", WIDTH)
    for group in _groups(findings):
        yield ""
        yield group[0].group
        for finding in sorted(group, key=lambda one: one.status.rank):
            if finding.answer.waits_for is None and (everything or finding.status is not Status.PASS):
                yield from _finding_lines(finding, everything=everything)
        yield from _waiting(group, {one.id: one.title for one in findings})
        right = [one.title for one in group if one.status is Status.PASS]
        if right and not everything:
            yield from _wrapped("pass     ", ", ".join(right))


def _finding_lines(finding: Finding, *, everything: bool) -> Iterator[str]:
    answer = finding.answer
    kind = "" if answer.kind == "measured" else f" [{answer.kind}]"
    yield from _wrapped(f"{finding.status:<9}", f"{finding.title}: {_plain(answer.text)}{kind}")
    if answer.fix is not None:
        # Whole, so that it can be copied: a terminal breaks it, and a breath in it would be another command.
        yield f"{_INDENT}{'':<9}fix: {_plain(answer.fix)}"
    if everything:
        for one in answer.evidence:
            yield from _wrapped(f"{'':<9}", f"- {_plain(one)}")


def _waiting(group: Sequence[Finding], titles: Mapping[str, str]) -> Iterator[str]:
    """Checks that could not look for one and the same reason, together."""
    for reason in dict.fromkeys(one.answer.waits_for for one in group if one.answer.waits_for):
        waiting = ", ".join(one.title for one in group if one.answer.waits_for == reason)
        yield from _wrapped("unknown  ", f"not checked because of {titles.get(reason, reason)}: {waiting}")


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings by group, the group with the worst first."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    return sorted(groups.values(), key=lambda group: min(one.status.rank for one in group))


def _finding_json(finding: Finding) -> dict[str, object]:
    answer = finding.answer
    return {
        "id": finding.id,
        "group": finding.group,
        "title": finding.title,
        "status": str(finding.status),
        "text": answer.text,
        "fix": answer.fix,
        "fixable": answer.repair is not None,
        "kind": answer.kind,
        "evidence": list(answer.evidence),
        "waits_for": answer.waits_for,
    }


def _count(findings: Sequence[Finding], status: Status) -> int:
    return sum(finding.status is status for finding in findings)


def _plain(text: str) -> str:
    return printable(" ".join(text.split()), longest=_LONGEST)


def _wrapped(label: str, text: str) -> list[str]:
    start = f"{_INDENT}{label}"
    return wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    ) or [start.rstrip()]
