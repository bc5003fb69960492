"""Whether an environment needs a patch, told from its files, with the evidence for it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from dflash_deploy.engine.sglang.versions import order
from dflash_deploy.serving_env.patches import ledger, pip_record, rewrite
from dflash_deploy.serving_env.patches.bmm import DEFAULT, Decision
from dflash_deploy.serving_env.patches.description import Patch
from dflash_deploy.serving_env.patches.source import Source, UnreadableSourceError
from dflash_deploy.serving_env.patches.tree import Tree, read_bytes
from dflash_deploy.serving_env.refused import refused


class VerdictKind(StrEnum):
    """What is to be done about a patch."""

    NEEDED = "needed"
    UNMEASURED = "unmeasured"
    """It can be applied; whether it helps here, only a measurement on this machine can say."""
    NOT_NEEDED = "not-needed"
    NOT_APPLICABLE = "not-applicable"
    APPLIED = "applied"
    APPLIED_BY_OTHERS = "applied-by-others"
    DRIFTED = "drifted"
    """The code is not as the patch knows it: nothing is changed."""
    FILE_MISSING = "file-missing"
    """The file to look in is not there, which says nothing about whether it is fixed."""


@dataclass(frozen=True)
class Verdict:
    """What a patch means to an environment.

    Attributes:
        patch: its name.
        kind: the verdict.
        reason: why, in a sentence.
        evidence: what it was told from.
        differences: where it has drifted, what was looked for and what stands there.
        stale: a record says that it was applied, and what it changed has been replaced since.
        fix: the command or change that helps, where one is needed.
    """

    patch: str
    kind: VerdictKind
    reason: str
    evidence: tuple[str, ...] = ()
    differences: str | None = None
    stale: bool = False
    fix: str | None = None


@dataclass(frozen=True)
class Examination:
    """A verdict, and what it was told from, for whoever goes on to change the file."""

    verdict: Verdict
    path: Path
    content: bytes | None = None
    reading: rewrite.Reading | None = None
    entry: ledger.Entry | None = None


def examine(patch: Patch, tree: Tree, decision: Decision | None = None) -> Examination:
    """Tell what the patch means to the environment; nothing is changed.

    Args:
        patch: the patch.
        tree: the environment's SGLang.
        decision: what a measurement says, for a patch that is decided by one.

    Raises:
        DeployError: the environment's own records cannot be read.
    """
    path = tree.root / patch.file
    entry = next((one for one in ledger.entries(tree) if one.change.patch == patch.name), None)
    evidence = [_installed(tree)]

    def told(kind: VerdictKind, reason: str, **more: str | None) -> Verdict:
        return Verdict(patch.name, kind, reason, tuple(evidence), stale=stale, **more)

    stale = edited = False
    try:
        content = read_bytes(path)
    except OSError as error:
        stale = entry is not None
        missing, fix = _missing(patch, tree, error, evidence)
        verdict = told(VerdictKind.FILE_MISSING, missing, fix=fix)
        return Examination(verdict, path, entry=entry)
    if entry is not None and entry.state != "applied":
        reason = f"{entry.state} it was cut short, or goes on right now"
        fix = f"dflash-deploy patch check --env {tree.quoted}"
        return Examination(told(VerdictKind.DRIFTED, reason, fix=fix), path, content, entry=entry)
    if entry is not None:
        now = ledger.sha256(content)
        if now == entry.change.after:
            chosen = ", ".join(f"{name}={value}" for name, value in entry.change.parameters.items())
            evidence.append(f"{patch.file} has the SHA-256 that was recorded: {now[:16]}…")
            evidence += _variables(patch, content)
            reason = f"applied by this tool on {entry.change.applied_at}" + (
                f" with {chosen}" if chosen else ""
            )
            return Examination(told(VerdictKind.APPLIED, reason), path, content, entry=entry)
        edited = stands(entry.change, tree, content) is Standing.EDITED
        stale = not edited
        evidence.append(_lost(entry.change, tree, now))
    as_installed = is_as_installed(tree, patch.file, content)
    evidence.append(
        {
            True: f"{patch.file} is as it was installed (pip's RECORD)",
            False: f"{patch.file} was changed after it was installed (pip's RECORD)",
            None: f"pip's RECORD does not say how {patch.file} was installed",
        }[as_installed]
    )
    try:
        reading = rewrite.read(patch, Source.of(content))
    except UnreadableSourceError as error:
        return Examination(
            told(VerdictKind.DRIFTED, f"{patch.file}: {error}", fix=_again(tree)), path, content, entry=entry
        )
    verdict = _from_structure(
        patch,
        tree,
        reading,
        as_installed=as_installed,
        evidence=evidence,
        decision=decision,
        stale=stale,
        edited=edited,
    )
    if stale and verdict.fix is None:
        drop = f"dflash-deploy patch revert {patch.name} --env {tree.quoted}"
        verdict = replace(verdict, fix=f"{drop} (nothing is left to revert; the old record goes)")
    return Examination(verdict, path, content, reading, entry)


class Standing(StrEnum):
    """What stands where a patch was applied."""

    OURS = "ours"
    GONE = "gone"
    """The file is as an installer left it, or is not there: nothing is left to put back."""
    EDITED = "edited"
    """Somebody has changed it since."""


def stands(change: ledger.Change, tree: Tree, content: bytes | None) -> Standing:
    """What stands in the place of a file that was changed.

    Args:
        change: what was done.
        tree: the environment's SGLang.
        content: of the file now, None where there is none.
    """
    now = ledger.sha256(content) if content is not None else None
    if now == change.after:
        return Standing.OURS
    if content is None or now == change.before or change.version != tree.version:
        return Standing.GONE
    # A build of the same version, installed over it, has another content.
    return Standing.GONE if is_as_installed(tree, change.file, content) else Standing.EDITED


def revert_anyway(name: str, tree: Tree) -> str:
    """The command for a file that was edited since."""
    return (
        f"dflash-deploy patch revert {name} --env {tree.quoted} --force "
        "(the original comes back; the edited file is kept beside it)"
    )


def takes_variable(content: bytes, variable: str) -> bool:
    """Whether a patched file reads the variable; one that an older form of the patch wrote does not."""
    return f'"{variable}"'.encode() in content


def _variables(patch: Patch, content: bytes) -> list[str]:
    return [
        f"a server takes another {name} by {one.variable}={'|'.join(one.choices)}, read as it starts"
        for name, one in patch.parameters.items()
        if one.variable is not None and takes_variable(content, one.variable)
    ]


def _from_structure(
    patch: Patch,
    tree: Tree,
    reading: rewrite.Reading,
    *,
    as_installed: bool | None,
    evidence: list[str],
    decision: Decision | None,
    stale: bool,
    edited: bool,
) -> Verdict:
    def told(kind: VerdictKind, reason: str, **more: str | None) -> Verdict:
        return Verdict(patch.name, kind, reason, tuple(evidence), stale=stale, **more)

    put_back = _again(tree)
    if tree.editable:
        file = shlex.quote(patch.file)
        put_back = (
            f"revert it where it was applied from, or: git -C {shlex.quote(str(tree.root))} checkout {file}"
        )
    if edited and reading.marked:
        reason = f"{patch.file} was edited since this patch was applied"
        return told(VerdictKind.DRIFTED, reason, fix=revert_anyway(patch.name, tree))
    if reading.marked:
        reason = f"{patch.file} carries this patch's own lines, but not as they were written"
        if tree.editable:
            reason += ", or another environment that runs this checkout has applied it"
        return told(VerdictKind.DRIFTED, reason, fix=put_back)
    if reading.subject is None:
        evidence.append(f"{patch.file} defines none of: {', '.join(patch.subject.defines)}")
        if as_installed is False:
            reason = f"{patch.file} was changed by someone else, and has not what this patch is for"
            return told(VerdictKind.DRIFTED, reason, fix=put_back)
        return told(VerdictKind.NOT_APPLICABLE, patch.subject.absent)
    evidence.append(f"{patch.file} defines {reading.subject}")
    if reading.fixed is not None:
        evidence.append(f"{patch.file}: {reading.fixed.means}")
        if as_installed is False:
            reason = "someone else has changed this file, to the same end"
            return told(VerdictKind.APPLIED_BY_OTHERS, reason)
        since = (
            f"upstream since {patch.upstream.since}" if patch.upstream.since else "SGLang's own code does it"
        )
        return told(VerdictKind.NOT_NEEDED, since)
    if reading.refused is not None:
        reason = f"someone else has changed this: {reading.refused.means}"
        differences = rewrite.unmatched_in_words(patch, reading)
        return told(VerdictKind.DRIFTED, reason, differences=differences, fix=put_back)
    if reading.unmatched:
        reason = "the code is not as this patch knows it, so that nothing is changed"
        differences = rewrite.unmatched_in_words(patch, reading)
        return told(VerdictKind.DRIFTED, reason, differences=differences)
    evidence += [
        f"{place.function.name}: {place.edit.what}" for place in reading.places if place.edit.required
    ]
    evidence += [note.text for note in patch.notes if _holds(note.first, note.last, tree.version)]
    if patch.decided_by is None:
        return told(VerdictKind.NEEDED, patch.symptom, fix=_apply_command(patch, tree))
    if decision is None or not decision.decided:
        reason = "the code is there to be changed; whether that helps here, only a measurement can say"
        evidence.append(
            f"applied with --set backend={DEFAULT} it changes nothing by itself, and lets tune compare others"
        )
        fix = f"dflash-deploy patch check {patch.name} --env {tree.quoted} --measure"
        if decision is not None:
            reason += f", and there is none: {decision.reason}"
            fix = "measure on the machine that serves; or choose by hand: --set backend=cudnn --unmeasured"
        return told(VerdictKind.UNMEASURED, reason, fix=fix)
    evidence += decision.evidence
    if decision.backend is None:
        return told(VerdictKind.NOT_NEEDED, decision.reason, fix=decision.fix)
    return told(VerdictKind.NEEDED, decision.reason, fix=_apply_command(patch, tree))


def _apply_command(patch: Patch, tree: Tree) -> str:
    return f"dflash-deploy patch apply {patch.name} --env {tree.quoted}"


def _installed(tree: Tree) -> str:
    commit = f", commit {tree.commit}" if tree.commit else ""
    where = f", a checkout in {tree.root}" if tree.editable else ""
    return f"SGLang {tree.version}{commit}{where}"


def _holds(first: str, last: str, version: str) -> bool:
    return order(first) <= order(version) <= order(last)


def is_as_installed(tree: Tree, file: str, content: bytes) -> bool | None:
    """Whether a file is what pip's list says was installed; None where that does not say."""
    record = tree.record
    if record is None:
        return None
    try:
        line = pip_record.entry(read_bytes(record), file)
    except OSError:
        return None
    if line is None or b"sha256=" not in line.line:
        return None
    return line.describes(content)


def _again(tree: Tree) -> str:
    return (
        "have SGLang's own files back, then check again: dflash-deploy env restore NAME, where there is a "
        f"backup; else install it again (pip install --force-reinstall --no-deps sglang=={tree.version})"
    )


def _missing(patch: Patch, tree: Tree, error: OSError, evidence: list[str]) -> tuple[str, str | None]:
    if not isinstance(error, FileNotFoundError):
        told = refused(error, tree.root / patch.file)
        return f"{patch.file} cannot be read: {error.strerror or error}", told.fix
    record = tree.record
    try:
        listed = record is not None and pip_record.entry(read_bytes(record), patch.file) is not None
    except OSError:
        listed = False
    missing = tree.missing_files() if record is not None else []
    if listed:
        evidence.append(f"pip's RECORD lists it, with {len(missing)} of SGLang's files that are not there")
        return f"{patch.file} is not there: the installation is incomplete", _again(tree)
    evidence.append(
        "pip's RECORD does not list it" if record is not None else "there is no RECORD to look in"
    )
    reason = (
        f"{patch.file} is not there: this build keeps it elsewhere or is incomplete, so nothing can be told"
    )
    return reason, None


def _lost(change: ledger.Change, tree: Tree, now: str) -> str:
    if change.version != tree.version:
        return f"it was applied to SGLang {change.version}; {tree.version} has been installed since"
    if now == change.before:
        return f"it was applied on {change.applied_at}, and the original has been put back since"
    return f"it was applied on {change.applied_at}, and the file has been changed since"
