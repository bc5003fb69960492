"""What ``diagnose`` shows: for people, as JSON, and as a bug report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from textwrap import wrap

from dflash_deploy import __version__
from dflash_deploy.diagnosis.redact import redacted
from dflash_deploy.diagnosis.verdict import Diagnosis, Finding

_WIDTH = 100
_MARKS = {"error": "ERROR", "warning": "warning", "note": "note", "benign": "benign"}


def as_json(diagnosis: Diagnosis) -> list[dict[str, object]]:
    """The findings, root cause first, with the keys that docs/json.md describes."""
    return [_as_json(finding) for finding in (*diagnosis.findings, *diagnosis.benign)]


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "id": finding.id,
        "stage": finding.stage.value,
        "severity": finding.severity,
        "cause": finding.cause,
        "fix": finding.fix.text if finding.fix else None,
        "flags": dict(finding.fix.flags) if finding.fix else {},
        "lines": [{"number": line.number, "text": line.text} for line in finding.lines if line.number],
        "confidence": finding.confidence,
        "count": finding.count,
    }


def as_text(diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """For people: the root cause whole, the rest in short."""
    root = diagnosis.root
    out: list[str] = []
    if root is None:
        out.append(f"No failure found in {diagnosis.lines_read:,} lines (reached: {diagnosis.stage}).")
    else:
        out += _whole("root cause", root)
    rest = diagnosis.findings if root is None else diagnosis.findings[1:]
    for title, severities in (
        ("also", ("error",)),
        ("odd", ("warning",)),
        ("by the way", ("note",)),
    ):
        chosen = [finding for finding in rest if finding.severity in severities]
        if chosen:
            out += ["", f"{title}:", *(line for finding in chosen for line in _short(finding))]
    if diagnosis.benign:
        out += ["", "benign (looks bad, means nothing):"]
        if verbose:
            out += [line for finding in diagnosis.benign for line in _short(finding)]
        else:
            out += _wrapped("  ", ", ".join(f"{f.id} ({f.count})" for f in diagnosis.benign))
    out += ["", *(f"note: {note}" for note in diagnosis.notes)] if diagnosis.notes else []
    return "\n".join(out)


def report(diagnosis: Diagnosis, *, flags: Sequence[str] = ()) -> str:
    """A bug report in Markdown, without what others should not read."""
    root, unknown = diagnosis.root, diagnosis.unknown
    title = (unknown.exception if unknown else root.cause if root else None) or "Server failed"
    where = unknown.stage if unknown else root.stage if root else diagnosis.stage
    excerpt = unknown.excerpt if unknown else root.lines if root else ()
    rows = [
        f"# {title[:120]}",
        "",
        f"- stage: {where}",
        f"- exception: {unknown.exception if unknown else '-'}",
        f"- frame: {unknown.frame if unknown else '-'}",
        f"- named: {root.id if root else 'nothing'} ({root.confidence if root else '-'})",
        f"- dflash-deploy {__version__}, Python {platform.python_version()}, {platform.system()}",
        *(f"- flags: {' '.join(flags)}" for _ in range(1 if flags else 0)),
        f"- also seen: {', '.join(finding.id for finding in diagnosis.findings[1:]) or '-'}",
        "",
        f"Lines of the log ({diagnosis.lines_read} in all):",
        "",
        "```",
        *(f"{line.number:>7}  {line.text}" for line in excerpt),
        "```",
        "",
    ]
    return "\n".join(redacted(row) for row in rows)


def _whole(title: str, finding: Finding) -> list[str]:
    out = [f"{title}: {finding.id} (stage {finding.stage}, confidence {finding.confidence})"]
    out += _wrapped("  ", finding.cause)
    if finding.fix is not None:
        out += _wrapped("  fix: ", finding.fix.text)
        out += _flags("  flags: ", finding)
    lines = [line for line in finding.lines if line.number]
    if lines:
        out.append("  shown by:")
        out += [f"    {line.number:>7}: {_cut(line.text)}" for line in lines]
    if finding.evidence:
        out += _wrapped("  known from: ", "; ".join(finding.evidence))
    return out


def _short(finding: Finding) -> list[str]:
    line = next((line.number for line in finding.lines if line.number), None)
    place = f", line {line}" if line else ""
    times = f" ({finding.count} lines)" if finding.count > 1 else ""
    out = _wrapped("  - ", f"{_MARKS[finding.severity]} {finding.id}{place}{times}: {finding.cause}")
    if finding.fix is not None:
        out += _wrapped("    fix: ", finding.fix.text)
    return out


def _flags(label: str, finding: Finding) -> list[str]:
    if finding.fix is None or not finding.fix.flags:
        return []
    words = [
        f"without --{name}" if value is None else f"--{name}" if value is True else f"--{name} {value}"
        for name, value in finding.fix.flags.items()
    ]
    return _wrapped(label, ", ".join(words))


def _wrapped(label: str, text: str) -> list[str]:
    lines = wrap(text, _WIDTH - len(label), break_long_words=False, break_on_hyphens=False) or [""]
    return [label + lines[0], *(" " * len(label) + line for line in lines[1:])]


def _cut(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text.strip())
    return text if len(text) <= 240 else f"{text[:239]}…"
