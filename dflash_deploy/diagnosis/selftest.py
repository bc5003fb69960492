"""Every entry of the catalogue against its own examples."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_deploy.diagnosis.entry import Entry
from dflash_deploy.diagnosis.read import diagnose
from dflash_deploy.diagnosis.scan import Index
from dflash_deploy.diagnosis.verdict import Diagnosis


def failures(entries: Sequence[Entry]) -> list[str]:
    """What is wrong with a catalogue: a line for each example or look-alike that is not judged right."""
    found = [f"{entry.id}: the id is used twice" for entry, other in _twice(entries) if entry is not other]
    index = Index(entries)
    for entry in entries:
        for number, example in enumerate(entry.examples, 1):
            diagnosis = diagnose(example.log.splitlines(), index=index)
            named = _named(entry, diagnosis)
            if named is not None:
                found.append(f"{entry.id}, example {number}: {named}")
            elif example.fix_holds is not None:
                fix = next(f.fix for f in diagnosis.findings if f.id == entry.id)
                if fix is None or example.fix_holds not in fix.text:
                    found.append(f"{entry.id}, example {number}: no {example.fix_holds!r} in the fix: {fix}")
        for line in entry.lookalikes:
            diagnosis = diagnose(line.splitlines(), index=index)
            if entry.id in (finding.id for finding in diagnosis.findings):
                found.append(f"{entry.id}: found in its look-alike {line[:80]!r}")
    return found


def _twice(entries: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    first: dict[str, Entry] = {}
    return [(entry, first.setdefault(entry.id, entry)) for entry in entries]


def _named(entry: Entry, diagnosis: Diagnosis) -> str | None:
    """What stands where the entry should; None where it is as it should be."""
    if entry.severity == "benign":
        if any(finding.severity == "error" for finding in diagnosis.findings):
            return f"benign, and taken for {diagnosis.findings[0].id}"
        return None if entry.id in (f.id for f in diagnosis.benign) else "not found"
    ids = [finding.id for finding in diagnosis.findings]
    if entry.severity == "error":
        return None if ids[:1] == [entry.id] else f"the root cause is {ids[:1] or 'nothing'}"
    return None if entry.id in ids else f"found is {ids or 'nothing'}"
