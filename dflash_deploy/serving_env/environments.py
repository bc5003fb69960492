"""The environments that are there, and where everything of theirs lies.

``envs/NAME`` is the virtual environment itself; ``envs/NAME/.complete``, written last, says that it is whole
and what it was made from. ``envs/.NAME.*`` is work in progress and never an environment.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash_deploy import paths, yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.lock import exclusive
from dflash_deploy.serving_env import records
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.records import EnvironmentRecord, Making
from dflash_deploy.serving_env.refused import refused

STAMP = ".complete"
CONSTRAINTS = "constraints.txt"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Environment:
    """A whole environment.

    Attributes:
        folder: its place of ours; of an adopted one only the record lies there.
    """

    name: str
    folder: Path
    record: EnvironmentRecord

    @property
    def adopted(self) -> bool:
        """Whether it is somebody else's: read, never written to."""
        return self.record.adopted is not None

    @property
    def prefix(self) -> Path:
        """Folder of the virtual environment."""
        return Path(self.record.adopted) if self.record.adopted is not None else self.folder

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.prefix / "bin" / "python"


@dataclass(frozen=True)
class Broken:
    """A folder that is no environment, why, and what helps."""

    name: str
    problem: str
    fix: str


def root() -> Path:
    """Where environments lie."""
    return paths.data_dir() / "envs"


def is_name(name: str) -> bool:
    """Whether an environment may be named so."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def folder_of(name: str) -> Path:
    """Where the environment of that name lies or would.

    Raises:
        DeployError: it is no name of one.
    """
    if not is_name(name):
        raise DeployError(
            f"{yaml_file.describe(name)} is no name of an environment",
            fix="use small letters, digits, '.', '_' and '-', 64 at most, beginning with a letter or digit",
            exit_code=ExitCode.USAGE,
        )
    return root() / name


def making_file(name: str) -> Path:
    """The note that says a folder is being made."""
    return root() / f".{name}.making"


def find_environment(name: str) -> Environment | None:
    """The environment of that name, None where there is none that is whole.

    Raises:
        DeployError: no name of one, or its record is wrong.
    """
    folder = folder_of(name)
    record = records.read(folder / STAMP, EnvironmentRecord)
    if record is None or folder.is_symlink():
        return None
    if record.name != name:
        raise DeployError(
            f"{folder / STAMP} is the record of {record.name!r}, not of {name!r}: was the folder moved?",
            fix=f"move it back to {root() / record.name}: its scripts hold that path",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return Environment(name, folder, record)


def need_environment(name: str) -> Environment:
    """The environment of that name.

    Raises:
        DeployError: there is none, with what there is.
    """
    found = find_environment(name)
    if found is not None:
        return found
    if making_file(name).is_file():
        raise DeployError(
            f"environment {name} is half-made: its making was cut short, or goes on right now",
            fix=f"dflash-deploy env create {name}; or, to have its last backup again: dflash-deploy env "
            f"restore {name}",
            exit_code=ExitCode.MISSING,
        )
    known = [environment.name for environment in list_environments()[0]]
    raise DeployError(
        f"there is no environment {name}{yaml_file.nearest(name, known)}",
        fix=f"use one of: {', '.join(known)}" if known else f"dflash-deploy env create {name}",
        exit_code=ExitCode.MISSING,
    )


def list_environments() -> tuple[list[Environment], list[Broken]]:
    """Whole environments by name, and folders that are none.

    Raises:
        DeployError: their folder cannot be read.
    """
    whole: list[Environment] = []
    broken: list[Broken] = []
    names: set[str] = set()
    try:
        for entry in root().iterdir():
            if is_name(entry.name) and entry.is_dir() and any(entry.iterdir()):
                names.add(entry.name)
            elif entry.name.endswith(".making") and is_name(entry.name[1:-7]):
                names.add(entry.name[1:-7])
    except FileNotFoundError:
        pass
    except OSError as error:
        raise refused(error, root()) from error
    for name in sorted(names):
        try:
            found = find_environment(name)
        except DeployError as error:
            broken.append(Broken(name, error.message, error.fix or f"move {folder_of(name)} away"))
            continue
        if found is not None:
            whole.append(found)
        elif making_file(name).is_file():
            what = "it is being made, or its making was cut short"
            broken.append(Broken(name, what, f"dflash-deploy env create {name}"))
        else:
            what = "it has no record of this tool, so it is left alone"
            broken.append(Broken(name, what, f"move {folder_of(name)} away"))
    return whole, broken


@contextmanager
def changing(name: str) -> Iterator[int]:
    """Hold the right to change an environment and its backups; gives the lock's descriptor.

    What an earlier, interrupted change left is put in order first.

    Raises:
        DeployError: another process is at it, or the folder cannot be written. Also for every OSError within.
    """
    folder_of(name)
    try:
        root().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root() / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise refused(error, root()) from error
    busy = DeployError(
        f"environment {name} is being changed by another process",
        fix="wait until that has ended, then run this again",
        exit_code=ExitCode.UNAVAILABLE,
    )
    try:
        with exclusive(descriptor, busy=busy), ExitStack() as held:
            _put_in_order(name)
            # No patch is applied or reverted meanwhile: a copy would hold one half.
            for site_packages in sorted(folder_of(name).glob("lib/python3*/site-packages")):
                held.enter_context(ledger.held(site_packages))
            yield descriptor
    except OSError as error:
        raise refused(error, root()) from error


def is_being_changed(name: str) -> bool:
    """Whether another process is at it right now."""
    try:
        descriptor = os.open(root() / f".{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def replaced_folder(name: str) -> Path:
    """Where a tree stands aside while another takes its place (``trees.exchange``)."""
    return root() / f".{name}.replaced"


def _put_in_order(name: str) -> None:
    folder, aside = folder_of(name), replaced_folder(name)
    if aside.is_dir() and not folder.exists():
        aside.rename(folder)
    for leftover in (aside, *root().glob(f".{name}.removing-*"), *root().glob(f".{name}.restoring")):
        if leftover.is_dir() and not leftover.is_symlink():
            delete_tree(leftover)
    for unfinished in root().glob(f".{making_file(name).name}.*"):
        unfinished.unlink()
    if (folder / STAMP).is_file():
        making_file(name).unlink(missing_ok=True)


def discard(folder: Path, name: str) -> None:
    """Delete a tree of ours: out of its place in one step, then file by file."""
    doomed = root() / f".{name}.removing-{os.getpid()}"
    folder.rename(doomed)
    delete_tree(doomed)


def delete_tree(folder: Path) -> None:
    """Delete a tree, also one with folders that may not be written to; no link is followed."""
    try:
        shutil.rmtree(folder)
    except PermissionError:
        folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder)


def read_making(name: str) -> Making | None:
    """The note of a making that goes on or was cut short."""
    return records.read(making_file(name), Making)


def now() -> str:
    """The time, for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")
