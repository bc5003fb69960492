"""Apply and revert: journal first, one atomic write a file; what was cut short is undone by the next run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TypeVar

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches import ledger, pip_record, rewrite
from dflash_deploy.serving_env.patches.bmm import Decision
from dflash_deploy.serving_env.patches.description import Patch, patches_dir
from dflash_deploy.serving_env.patches.disk import Disk
from dflash_deploy.serving_env.patches.source import UnreadableSourceError
from dflash_deploy.serving_env.patches.tree import Tree, read_bytes
from dflash_deploy.serving_env.patches.verdict import (
    Examination,
    Standing,
    Verdict,
    VerdictKind,
    examine,
    revert_anyway,
    stands,
)
from dflash_deploy.serving_env.refused import refused

Result = TypeVar("Result")


@dataclass(frozen=True)
class Prepared:
    """What an application would write."""

    path: Path
    before: bytes
    after: bytes

    def diff(self, file: str) -> str:
        """The change as a unified diff."""
        return unified_diff(file, self.before, self.after)


def prepare(patch: Patch, found: Examination, parameters: Mapping[str, str]) -> Prepared:
    """The file with the patch in it.

    Raises:
        DeployError: a parameter is missing, or the code cannot be changed safely.
    """
    missing = patch.parameters.keys() - parameters.keys()
    if missing:
        name = min(missing)
        raise DeployError(
            f"{patch.name} needs a value for {name}: {patch.parameters[name].summary}",
            fix=f"--set {name}={patch.parameters[name].choices[0]}",
            exit_code=ExitCode.USAGE,
        )
    assert found.content is not None  # noqa: S101 - the callers ask for a verdict of a file that was read
    assert found.reading is not None  # noqa: S101
    insertion = None
    if patch.insert is not None:
        insertion = (patches_dir() / patch.name / patch.insert).read_text(encoding="utf-8")
    try:
        after = rewrite.applied(patch, found.reading, parameters, insertion)
    except UnreadableSourceError as error:
        raise DeployError(f"{found.path}: {error}; nothing was changed") from error
    return Prepared(found.path, found.content, after)


def apply(
    patch: Patch,
    tree: Tree,
    parameters: Mapping[str, str],
    *,
    decision: Decision | None = None,
    evidence: bytes | None = None,
    disk: Disk | None = None,
    wait_s: float = 30.0,
) -> Verdict:
    """Apply a patch; where it is applied already, no more is done than to keep a measurement that is given.

    Args:
        patch: the patch.
        tree: the environment's SGLang.
        parameters: a value for each of the patch's parameters.
        decision: what it was decided by, for a patch that a measurement decides.
        evidence: that measurement's record, to be kept.
        disk: the file operations.
        wait_s: how long to wait for another process that changes the environment.

    Returns:
        The verdict afterwards.

    Raises:
        DeployError: the patch is not needed here, the code is not as it knows it, or a file cannot be written
            (everything is then as it was).
    """
    disk = disk or Disk()
    check_parameters(patch, parameters)
    with ledger.locked(tree, wait_s=wait_s):
        _guarded(tree, lambda: _mend(tree, disk))
        found = examine(patch, tree, decision)
        verdict = found.verdict
        if verdict.kind is VerdictKind.APPLIED:
            _require_same_parameters(patch, tree, found, parameters)
            kept = ledger.evidence_path(tree, patch.name)
            if evidence is not None and _digest(kept) != ledger.sha256(evidence):
                _guarded(tree, lambda: disk.replace(kept, evidence))
            return verdict
        if verdict.kind is not VerdictKind.NEEDED:
            raise _refusal(patch, verdict)
        prepared = prepare(patch, found, parameters)
        change = _change(patch, tree, parameters, prepared)

        def write() -> None:
            if found.entry is not None:
                _forget(tree, found.entry, disk)
            _write(tree, change, prepared, evidence, disk)

        try:
            write()
        except OSError as error:
            _guarded(tree, lambda: _mend(tree, disk))
            raise refused(error, prepared.path, left="everything is as it was") from error
        except BaseException:
            # Ctrl-C: the next run would mend it too, but a server may be started before that.
            _guarded(tree, lambda: _mend(tree, disk))
            raise
        after = examine(patch, tree, decision).verdict
        if after.kind is not VerdictKind.APPLIED:
            raise DeployError(
                f"{prepared.path} was changed by another program while the patch was being applied"
            )
        return after


def revert(
    patch_name: str, tree: Tree, *, force: bool = False, disk: Disk | None = None, wait_s: float = 30.0
) -> str:
    """Put a patch's original back, byte for byte.

    Args:
        patch_name: the patch.
        tree: the environment's SGLang.
        force: also where the file was edited since; what stands there is kept beside it.
        disk: the file operations.
        wait_s: how long to wait for another process that changes the environment.

    Returns:
        What was done, in a sentence.

    Raises:
        DeployError: it is not applied here, the file was changed since, or it cannot be written.
    """
    disk = disk or Disk()
    with ledger.locked(tree, wait_s=wait_s):
        mended = _guarded(tree, lambda: _mend(tree, disk))
        entry = next((one for one in ledger.entries(tree) if one.change.patch == patch_name), None)
        if entry is None:
            if mended:
                return "; ".join(mended)
            raise DeployError(
                f"{patch_name} is not applied in {tree.site_packages}",
                fix=f"dflash-deploy patch check --env {tree.quoted}",
                exit_code=ExitCode.MISSING,
            )
        change = entry.change
        standing = how_it_stands(tree, change, force=force)
        if standing is Standing.GONE:
            _guarded(tree, lambda: _forget(tree, entry, disk))
            return f"{patch_name} was gone already: {change.file} has been replaced since it was applied"
        _original(tree, change)
        done = f"{patch_name} is reverted: {change.file} is as it was before, byte for byte"
        if standing is Standing.EDITED:
            aside = _guarded(tree, lambda: _set_aside(tree, entry, disk))
            done += f"; what had been edited is kept in {aside}"

        def put_back() -> None:
            try:
                disk.rename(entry.path, ledger.state_path(tree, change.patch, "reverting"))
                _mend(tree, disk)
            except KeyboardInterrupt:
                _mend(tree, disk)
                raise

        _guarded(tree, put_back)
        return done


def how_it_stands(tree: Tree, change: ledger.Change, *, force: bool = False) -> Standing:
    """What a reverting would find.

    Raises:
        DeployError: it would be refused, since the file was edited.
    """
    path = tree.root / change.file
    standing = stands(change, tree, _content(path))
    if standing is Standing.EDITED and not force:
        raise DeployError(
            f"{path} was changed since the patch was applied: the original would undo that too",
            fix=revert_anyway(change.patch, tree),
            exit_code=ExitCode.UNAVAILABLE,
        )
    return standing


def _set_aside(tree: Tree, entry: ledger.Entry, disk: Disk) -> Path:
    """Keep an edited file beside itself, and take it from now on for what the patch wrote."""
    path = tree.root / entry.change.file
    content = read_bytes(path)
    numbers = (f".{number}" if number else "" for number in count())
    aside = next(
        one for one in (path.with_name(f"{path.name}.edited{n}") for n in numbers) if not one.exists()
    )
    disk.replace(aside, content, like=path.stat())
    edited = replace(entry.change, after=ledger.sha256(content))
    disk.replace(entry.path, edited.as_json())
    return aside


def mend(tree: Tree, *, disk: Disk | None = None, wait_s: float = 30.0) -> list[str]:
    """Undo what an earlier run left unfinished.

    Returns:
        What was mended, a sentence each.

    Raises:
        DeployError: another process is at work, or a file cannot be written.
    """
    if not unfinished(tree):
        return []
    disk = disk or Disk()
    with ledger.locked(tree, wait_s=wait_s):
        return _guarded(tree, lambda: _mend(tree, disk))


def unfinished(tree: Tree) -> list[str]:
    """What an earlier run left unfinished, a sentence each."""
    words = {"applying": "applying {} was cut short", "reverting": "reverting {} was cut short"}
    return [
        words[one.state].format(one.change.patch) for one in ledger.entries(tree) if one.state != "applied"
    ]


def applied_diff(tree: Tree, entry: ledger.Entry) -> str | None:
    """What an applied patch changed, as a unified diff; None where it does not stand any more.

    Raises:
        DeployError: the original or the file cannot be read.
    """
    change = entry.change
    try:
        after = _content(tree.root / change.file)
        if after is None or ledger.sha256(after) != change.after:
            return None
        before = read_bytes(ledger.kept(tree, change.before))
    except OSError as error:
        raise refused(error, tree.root / change.file) from error
    return unified_diff(change.file, before, after)


def unified_diff(file: str, before: bytes, after: bytes) -> str:
    """Two contents of a file as a unified diff."""
    old, new = (content.decode(errors="replace").splitlines(keepends=True) for content in (before, after))
    return "".join(difflib.unified_diff(old, new, fromfile=f"a/{file}", tofile=f"b/{file}"))


def check_parameters(patch: Patch, parameters: Mapping[str, str]) -> None:
    """Every parameter that is given is one of the patch's, and has one of its values.

    Raises:
        DeployError: otherwise.
    """
    for name, value in parameters.items():
        known = patch.parameters.get(name)
        if known is None:
            takes = f"; it takes {', '.join(patch.parameters)}" if patch.parameters else "; it takes none"
            raise DeployError(f"{patch.name} has no parameter {name!r}{takes}", exit_code=ExitCode.USAGE)
        if value not in known.choices:
            choices = ", ".join(known.choices)
            raise DeployError(f"{name}: expected one of {choices}, found {value!r}", exit_code=ExitCode.USAGE)


def _change(patch: Patch, tree: Tree, parameters: Mapping[str, str], prepared: Prepared) -> ledger.Change:
    change = ledger.Change(
        patch=patch.name,
        parameters=dict(parameters),
        version=tree.version,
        applied_at=datetime.now(UTC).isoformat(timespec="seconds"),
        file=patch.file,
        before=ledger.sha256(prepared.before),
        after=ledger.sha256(prepared.after),
        link=str(prepared.path.readlink()) if prepared.path.is_symlink() else None,
        record_before=None,
        record_after=None,
        line_before=None,
        line_after=None,
    )
    if not prepared.path.parent.resolve().is_relative_to(tree.root.resolve()):
        raise DeployError(
            f"{prepared.path} lies outside the environment, in {prepared.path.parent.resolve()}: others "
            "would be changed too",
            fix="make an environment of its own for serving: dflash-deploy env create",
            exit_code=ExitCode.UNAVAILABLE,
        )
    if tree.record is None:
        return change
    record = read_bytes(tree.record)
    line = pip_record.entry(record, patch.file)
    if line is None:
        return change
    new = pip_record.line_of(patch.file, prepared.after)
    return replace(
        change,
        record_before=ledger.sha256(record),
        record_after=ledger.sha256(pip_record.with_line(record, line, new)),
        line_before=line.line.decode(),
        line_after=new.decode(),
    )


def _write(tree: Tree, change: ledger.Change, prepared: Prepared, evidence: bytes | None, disk: Disk) -> None:
    disk.make_folder(ledger.folder(tree))
    disk.make_folder(ledger.folder(tree) / "kept")
    disk.keep(prepared.path, ledger.kept(tree, change.before))
    if tree.record is not None and change.record_before is not None:
        disk.keep(tree.record, ledger.kept(tree, change.record_before))
    if evidence is not None:
        disk.replace(ledger.evidence_path(tree, change.patch), evidence)
    applying = ledger.state_path(tree, change.patch, "applying")
    disk.replace(applying, change.as_json())
    disk.replace(prepared.path, prepared.after, like=prepared.path.stat())
    disk.remove_bytecode(prepared.path)
    if tree.record is not None and change.line_before is not None and change.line_after is not None:
        _write_record_line(tree.record, change.file, change.line_before, change.line_after, disk)
    disk.rename(applying, ledger.state_path(tree, change.patch, "applied"))


def _mend(tree: Tree, disk: Disk) -> list[str]:
    """Bring every unfinished change back to the original, and drop what nothing refers to."""
    said: list[str] = []
    for entry in ledger.entries(tree):
        if entry.state == "applied":
            continue
        change = entry.change
        _put_back(tree, change, disk)
        disk.remove(ledger.evidence_path(tree, change.patch))
        disk.remove(entry.path)
        verb = "applying" if entry.state == "applying" else "reverting"
        left = _digest(tree.root / change.file)
        is_now = (
            "is as it was before" if left == change.before else "has been replaced since and is left as it is"
        )
        said.append(f"{verb} {change.patch} had been cut short: {change.file} {is_now}")
    _tidy(tree, disk)
    return said


def _put_back(tree: Tree, change: ledger.Change, disk: Disk) -> None:
    path = tree.root / change.file
    disk.clear_leftover(path)
    if _digest(path) == change.after:
        if change.link is not None:
            disk.restore_link(change.link, path)
        else:
            disk.restore(_original(tree, change), path)
    disk.remove_bytecode(path)
    record = tree.record
    if record is None or change.line_before is None or change.line_after is None:
        return
    disk.clear_leftover(record)
    if change.record_before is not None and _digest(record) == change.record_after:
        kept = ledger.kept(tree, change.record_before)
        if _digest(kept) == change.record_before:
            disk.restore(kept, record)
            return
    _write_record_line(record, change.file, change.line_after, change.line_before, disk)


def _original(tree: Tree, change: ledger.Change) -> Path:
    """The kept original, found to be whole."""
    kept = ledger.kept(tree, change.before)
    if _digest(kept) != change.before:
        raise DeployError(
            f"the original of {tree.root / change.file}, kept in {kept}, is missing or damaged",
            fix=f"install SGLang {tree.version} again, then revert again",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return kept


def _write_record_line(record: Path, file: str, old: str, new: str, disk: Disk) -> None:
    content = read_bytes(record)
    line = pip_record.entry(content, file)
    if line is not None and line.line == old.encode():
        disk.replace(record, pip_record.with_line(content, line, new.encode()), like=record.stat())


def _forget(tree: Tree, entry: ledger.Entry, disk: Disk) -> None:
    """Drop the record of a change that something else has undone."""
    disk.remove(ledger.evidence_path(tree, entry.change.patch))
    disk.remove(entry.path)
    _tidy(tree, disk)


def _tidy(tree: Tree, disk: Disk) -> None:
    folder = ledger.folder(tree)
    if not folder.is_dir():
        return
    entries = ledger.entries(tree)
    wanted = {one for entry in entries for one in (entry.change.before, entry.change.record_before)}
    patches = {entry.change.patch for entry in entries}
    for path in sorted((folder / "kept").glob("*")) + sorted((folder / "kept").glob(".*")):
        if path.name not in wanted:
            disk.remove(path)
    for path in sorted(folder.glob(".*")):
        disk.remove(path)
    for path in sorted(folder.glob("*.evidence.json")):
        if path.name.removesuffix(".evidence.json") not in patches:
            disk.remove(path)
    disk.remove_folder(folder / "kept")
    disk.remove_folder(folder)


def _digest(path: Path) -> str | None:
    content = _content(path)
    return None if content is None else ledger.sha256(content)


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None


def _require_same_parameters(
    patch: Patch, tree: Tree, found: Examination, parameters: Mapping[str, str]
) -> None:
    assert found.entry is not None  # noqa: S101 - it is applied
    chosen = found.entry.change.parameters
    differs = {name for name, value in parameters.items() if chosen.get(name) != value}
    if differs:
        name = min(differs)
        raise DeployError(
            f"{patch.name} is applied already, with {name}={chosen.get(name)}",
            fix=f"dflash-deploy patch revert {patch.name} --env {tree.quoted}, then apply it with "
            f"{name}={parameters[name]}",
        )


def _refusal(patch: Patch, verdict: Verdict) -> DeployError:
    missing = verdict.kind in {VerdictKind.FILE_MISSING, VerdictKind.UNMEASURED}
    message = f"{patch.name} is not applied ({verdict.kind}): {verdict.reason}"
    if verdict.differences:
        message += f"\n{verdict.differences}"
    return DeployError(message, fix=verdict.fix, exit_code=ExitCode.MISSING if missing else ExitCode.FAILED)


def _guarded(tree: Tree, work: Callable[[], Result]) -> Result:
    """Run file work whose failure leaves a journal that the next run goes on with."""
    try:
        return work()
    except OSError as error:
        check = f"dflash-deploy patch check --env {tree.quoted}"
        raise refused(error, tree.site_packages, then=check) from error
