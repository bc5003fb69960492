"""Backups of environments: made and put back byte for byte, checked against digests, never half there.

``backups/NAME/ID/tree`` is the environment; ``manifest.jsonl`` beside it lists every entry with its digest,
and ``record.json`` what it is. A backup is a copy (see ``trees``); only an environment that is replaced is
moved.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash_deploy import __version__, paths
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env import environments, records, trees, usage
from dflash_deploy.serving_env.environments import Environment
from dflash_deploy.serving_env.installer import Say
from dflash_deploy.serving_env.records import BackupRecord
from dflash_deploy.serving_env.refused import refused

_TREE, _MANIFEST, _RECORD = "tree", "manifest.jsonl", "record.json"
_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z(-[0-9]{1,4})?")
_SAY_EVERY_BYTES = 1 << 30
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Backup:
    """One whole backup and where it lies."""

    folder: Path
    record: BackupRecord

    @property
    def tree(self) -> Path:
        """The environment's copy."""
        return self.folder / _TREE


def list_backups(name: str) -> list[Backup]:
    """Whole backups of an environment, oldest first."""
    environments.folder_of(name)
    found = []
    for folder in _folders(_place(name)):
        if _ID.fullmatch(folder.name) and (folder / _TREE).is_dir():
            with suppress(DeployError):
                record = records.read(folder / _RECORD, BackupRecord)
                if record is not None and record.id == folder.name and record.name == name:
                    found.append(Backup(folder, record))
    return found


def all_backups() -> list[Backup]:
    """Whole backups by environment, also of environments that are gone."""
    names = [folder.name for folder in _folders(paths.data_dir() / "backups")]
    return [backup for name in names if environments.is_name(name) for backup in list_backups(name)]


def find_backup(name: str, backup_id: str | None) -> Backup:
    """A backup by id, or the newest.

    Raises:
        DeployError: there is none.
    """
    known = list_backups(name)
    for backup in reversed(known):
        if backup_id in (None, backup.record.id):
            return backup
    ids = ", ".join(backup.record.id for backup in known)
    make = "backup" if environments.find_environment(name) is not None else "create"
    raise DeployError(
        f"environment {name} has no backup{f' {backup_id}' if backup_id and known else ''}",
        fix=f"use one of: {ids}" if known else f"dflash-deploy env {make} {name}",
        exit_code=ExitCode.MISSING,
    )


def back_up(environment: Environment, *, reason: str, say: Say) -> Backup:
    """Copy an environment.

    Raises:
        DeployError: it is not ours, the disk cannot hold a copy, or another process changes it.
    """
    _refuse_adopted(environment)
    with environments.changing(environment.name):
        place = _place(environment.name)
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        size = trees.size_bytes(environment.folder)
        shared = _need_space(place, size, environment.name)
        backup_id = _new_id(place)
        say(
            f"copying {environment.folder}, {size / (1 << 30):.2f} GiB"
            f"{' (blocks are shared until one side is written)' if shared else ''}"
        )
        half = place / f".{backup_id}.making"
        try:
            half.mkdir()
            entries = trees.copy(environment.folder, half / _TREE, _progress(say, size))
            _write_about(half, environment, backup_id, reason, entries)
            half.rename(place / backup_id)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise
    made = find_backup(environment.name, backup_id)
    say(f"backup {backup_id} of {environment.name}: {made.record.entries} entries")
    return made


def restore(name: str, backup_id: str | None, *, say: Say, force: bool = False) -> Environment:
    """Put a backup in its environment's place, in one step; also where that was removed.

    What stood there made from something else becomes a backup itself.

    Args:
        name: of the environment.
        backup_id: None for the newest.
        say: told each step.
        force: also while a server runs from the environment.

    Raises:
        DeployError: there is no such backup, it is damaged, or the environment is in use.
    """
    with environments.changing(name):
        backup = find_backup(name, backup_id)
        folder = environments.folder_of(name)
        if backup.record.folder != str(folder):
            raise DeployError(
                f"backup {backup.record.id} was made of {backup.record.folder}, and this is {folder}: "
                "its scripts hold the other path, so it would not work here",
                fix="set XDG_DATA_HOME to what it was when the backup was made",
                exit_code=ExitCode.INVALID_INPUT,
            )
        standing = _check_standing(name, folder, force=force)
        _need_space(environments.root(), backup.record.size_bytes, name)
        say(f"copying backup {backup.record.id}, {backup.record.size_bytes / (1 << 30):.2f} GiB")
        staged = environments.root() / f".{name}.restoring"
        try:
            entries = trees.copy(backup.tree, staged, _progress(say, backup.record.size_bytes))
            _compare(backup, entries)
            back = backup.record.environment.pin
            differs = standing is not None and standing.record.pin != back
            kept = _place_for(standing, f"replaced by {back.source}", say) if standing and differs else None
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        was = trees.exchange(staged, folder, environments.replaced_folder(name))
        if kept is not None:
            was.rename(kept / _TREE)
        environments.making_file(name).unlink(missing_ok=True)
        if kept is None and was.exists():
            environments.discard(was, name)
    say(f"{name} is what it was at {backup.record.made_at}: {backup.record.environment.pin.source}")
    return environments.need_environment(name)


def move_to_backup(environment: Environment, reason: str, say: Say) -> str:
    """Make an environment a backup by moving it, to make room at its path; returns the backup's id.

    To be called by the holder of ``environments.changing``.
    """
    place = _place_for(environment, reason, say)
    environment.folder.rename(place / _TREE)
    return place.name


def _place_for(environment: Environment, reason: str, say: Say) -> Path:
    """The folder of a backup that the environment's tree need only be moved into.

    Without its tree it counts as none, so until then the environment is still in its place.
    """
    place = _place(environment.name)
    place.mkdir(parents=True, exist_ok=True)
    _sweep(place)
    backup_id = _new_id(place)
    say(f"keeping {environment.folder} as backup {backup_id}: {environment.record.pin.source}")
    entries = trees.scan(environment.folder, _progress(say, trees.size_bytes(environment.folder)))
    half = place / f".{backup_id}.making"
    half.mkdir()
    _write_about(half, environment, backup_id, reason, entries)
    return half.rename(place / backup_id)


def move_back(name: str, backup_id: str) -> None:
    """Undo ``move_to_backup``."""
    folder = _place(name) / backup_id
    (folder / _TREE).rename(environments.folder_of(name))
    environments.delete_tree(folder)


def remove_backup(name: str, backup_id: str) -> None:
    """Delete a backup.

    Raises:
        DeployError: there is none of that id.
    """
    with environments.changing(name):
        backup = find_backup(name, backup_id)
        doomed = backup.folder.with_name(f".{backup_id}.making")
        backup.folder.rename(doomed)
        environments.delete_tree(doomed)


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise refused(error, place) from error


def _place(name: str) -> Path:
    return paths.data_dir() / "backups" / name


def _refuse_adopted(environment: Environment) -> None:
    if environment.adopted:
        raise DeployError(
            f"environment {environment.name} is adopted from {environment.prefix}: nothing is ever written "
            "there, so a backup could not be put back",
            fix=f"make one of our own: dflash-deploy env create NAME (from {environment.prefix}'s versions: "
            "pip freeze, then --constraints FILE)",
            exit_code=ExitCode.USAGE,
        )


def _check_standing(name: str, folder: Path, *, force: bool) -> Environment | None:
    """What is about to be replaced is an environment of ours, a half-made one, or nothing."""
    standing = environments.find_environment(name)
    if standing is not None:
        _refuse_adopted(standing)
        usage.refuse_while_running(standing, "restored", force=force)
    elif folder.is_symlink() or (folder.exists() and environments.read_making(name) is None):
        raise DeployError(
            f"{folder} is there and was not made by this tool; it is left alone",
            fix="move it away",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return standing


def _need_space(place: Path, size: int, name: str) -> bool:
    """Whether a copy shares blocks with its origin; where it does not, there must be room for it.

    Raises:
        DeployError: there is none.
    """
    if trees.can_share_blocks(place):
        return True
    free, need = shutil.disk_usage(place).free, size + _SPARE_BYTES
    if free < need:
        raise DeployError(
            f"{place} has too little space for a copy: {need / (1 << 30):.2f} GiB are needed (measured), "
            f"{free / (1 << 30):.2f} GiB are free",
            fix=f"free some space, or delete an old backup: dflash-deploy env remove {name} --backup ID",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return False


def _write_about(
    half: Path, environment: Environment, backup_id: str, reason: str, entries: tuple[trees.Entry, ...]
) -> None:
    manifest = trees.write_manifest(entries)
    write_atomic(half / _MANIFEST, manifest)
    record = BackupRecord(
        id=backup_id,
        name=environment.name,
        made_at=environments.now(),
        made_by=__version__,
        reason=reason,
        folder=str(environment.folder),
        environment=environment.record,
        entries=len(entries),
        size_bytes=sum(entry.size for entry in entries),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )
    write_atomic(half / _RECORD, records.write_text(record))


def _compare(backup: Backup, found: tuple[trees.Entry, ...]) -> None:
    path = backup.folder / _MANIFEST
    try:
        intact = hashlib.sha256(path.read_bytes()).hexdigest() == backup.record.manifest_sha256
    except OSError:
        intact = False
    if not intact:
        problems = [f"{path}: was changed since the backup was made, or cannot be read"]
    else:
        problems = list(trees.differences(trees.read_manifest(path), found))
    if problems:
        more = f"\n    ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DeployError(
            f"backup {backup.record.id} of {backup.record.name} is damaged:\n    "
            + "\n    ".join(problems[:10])
            + more,
            fix=f"use another one (dflash-deploy env show {backup.record.name} lists them)",
            exit_code=ExitCode.INVALID_INPUT,
        )


def _sweep(place: Path) -> None:
    """Delete what interrupted backups left: work in progress, and records whose tree never came."""
    for folder in place.iterdir():
        half = folder.name.endswith(".making") and _ID.fullmatch(folder.name[1:-7])
        treeless = _ID.fullmatch(folder.name) and not (folder / _TREE).exists()
        if folder.is_dir() and not folder.is_symlink() and (half or treeless):
            environments.delete_tree(folder)


def _new_id(place: Path) -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    taken = {folder.name for folder in place.iterdir()}
    numbered = (stamp if number == 1 else f"{stamp}-{number:04}" for number in range(1, 10_000))
    return next(backup_id for backup_id in numbered if backup_id not in taken)


def _progress(say: Say, total_bytes: int) -> Callable[[int], None]:
    done = said = 0

    def on_file(size: int) -> None:
        nonlocal done, said
        done += size
        if done - said >= _SAY_EVERY_BYTES:
            said = done
            say(f"  {done / (1 << 30):.1f} of {total_bytes / (1 << 30):.1f} GiB")

    return on_file
