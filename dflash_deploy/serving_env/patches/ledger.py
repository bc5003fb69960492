"""What was done to an environment, kept in its own site-packages so that it goes where the environment goes.

``.dflash-deploy-patches/`` there holds ``<patch>.<state>.json`` for each patch, the originals under ``kept/``
by their SHA-256, and ``<patch>.evidence.json``, the measurement that a patch was chosen by. The state in a
file's name is the journal: ``applying`` stands before the first file changes, a rename to ``applied`` ends
it, and ``reverting`` stands until everything is back. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Literal

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches.tree import Tree, read_bytes
from dflash_deploy.serving_env.refused import refused

State = Literal["applying", "applied", "reverting"]
STATES: tuple[State, ...] = ("applying", "applied", "reverting")
FOLDER = ".dflash-deploy-patches"
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Change:
    """One patch in one environment.

    Attributes:
        patch: its name.
        parameters: what was chosen.
        version: SGLang's, when it was applied.
        applied_at: UTC, ISO 8601.
        file: the changed module, below the folder that holds ``sglang/``.
        before: SHA-256 of the original.
        after: SHA-256 of the patched file.
        link: target of the original where it was a symbolic link.
        record_before: SHA-256 of pip's list before, or None where it was not changed.
        record_after: the same afterwards.
        line_before: the module's line in that list before.
        line_after: the same afterwards.
    """

    patch: str
    parameters: dict[str, str]
    version: str
    applied_at: str
    file: str
    before: str
    after: str
    link: str | None
    record_before: str | None
    record_after: str | None
    line_before: str | None
    line_after: str | None

    def as_json(self) -> bytes:
        """The record's content."""
        return json.dumps({"schema_version": 1, **asdict(self)}, indent=2).encode() + b"\n"


@dataclass(frozen=True)
class Entry:
    """A change and how far it has come."""

    state: State
    path: Path
    change: Change


def folder(tree: Tree) -> Path:
    """Where the environment's changes are recorded."""
    return tree.site_packages / FOLDER


def kept(tree: Tree, sha256: str) -> Path:
    """Where an original lies."""
    return folder(tree) / "kept" / sha256


def state_path(tree: Tree, patch: str, state: State) -> Path:
    """The record of a patch in a state."""
    return folder(tree) / f"{patch}.{state}.json"


def evidence_path(tree: Tree, patch: str) -> Path:
    """The measurement that a patch was chosen by."""
    return folder(tree) / f"{patch}.evidence.json"


def entries(tree: Tree) -> list[Entry]:
    """Every recorded change of an environment.

    Raises:
        DeployError: a record cannot be read.
    """
    found: list[Entry] = []
    for state in STATES:
        for path in sorted(folder(tree).glob(f"*.{state}.json")):
            found.append(Entry(state, path, _read(tree, path)))  # noqa: PERF401 - the loops read better
    return found


def sha256(content: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def locked(tree: Tree, *, wait_s: float = 30.0) -> Iterator[None]:
    """Hold the environment alone.

    Raises:
        DeployError: another process holds it for longer than ``wait_s``, or it cannot be locked.
    """
    with held(tree.site_packages, wait_s=wait_s):
        yield


@contextmanager
def held(site_packages: Path, *, wait_s: float = 30.0) -> Iterator[None]:
    """Hold a folder of packages alone; the lock is on the folder itself and leaves nothing behind.

    Raises:
        DeployError: as above.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            descriptor = os.open(site_packages, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise refused(error, site_packages) from error
        try:
            _lock(descriptor, site_packages, deadline)
            # Where another environment was put in its place in the meantime, that one is meant.
            if _stands_at(descriptor, site_packages):
                yield
                return
        finally:
            os.close(descriptor)


def _stands_at(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except OSError:
        return False


def _lock(descriptor: int, site_packages: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise DeployError(
                    f"another process is changing {site_packages} right now",
                    fix="wait until it has ended, then run this again",
                    exit_code=ExitCode.UNAVAILABLE,
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise refused(error, site_packages) from error
        else:
            return


def _read(tree: Tree, path: Path) -> Change:
    wrong = DeployError(
        f"{path}: not a record of an applied patch",
        fix=f"install SGLang {tree.version} again, then remove {path.parent}",
        exit_code=ExitCode.INVALID_INPUT,
    )
    try:
        if path.stat().st_size > _MAX_RECORD_BYTES:
            raise wrong
        record: object = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(record, dict) or any(field.name not in record for field in fields(Change)):
        raise wrong
    values = {field.name: record[field.name] for field in fields(Change)}
    parameters = values.pop("parameters")
    optional = {"link", "record_before", "record_after", "line_before", "line_after"}
    if not isinstance(parameters, dict) or not all(
        isinstance(value, str) or (value is None and name in optional) for name, value in values.items()
    ):
        raise wrong
    file = PurePosixPath(values["file"])
    if file.is_absolute() or ".." in file.parts:
        raise wrong
    return Change(parameters={str(key): str(value) for key, value in parameters.items()}, **values)
