"""Checkpoints in the Hugging Face cache: where it lies and how it is laid out.

``models--OWNER--NAME/refs/BRANCH`` holds a commit, ``snapshots/COMMIT/`` links to the files.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint.cards import doubt_of
from dflash_deploy.paths import expanded

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,200}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{6,40}")
_MAX_REF_BYTES = 200
DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class Snapshot:
    """One revision of a repository in the cache."""

    path: Path
    commit: str


def is_hub_name(name: str) -> bool:
    """``OWNER/NAME``, or ``NAME`` alone as the oldest repositories have it."""
    return _HUB_NAME.fullmatch(name) is not None and ".." not in name and "--" not in name


def is_commit(revision: str) -> bool:
    """A commit's full hash."""
    return _COMMIT.fullmatch(revision) is not None


def is_revision(revision: str) -> bool:
    """A branch, tag or commit that can stand in a path and a URL."""
    return _REVISION.fullmatch(revision) is not None and ".." not in revision and "//" not in revision


def how_to_get(name: str) -> str:
    """The command that brings a checkpoint to this machine."""
    command = (
        f"run `hf download {name}` (older: `huggingface-cli download {name}`) where the hub can be reached"
    )
    doubt = doubt_of(name)
    return f"{command}; {doubt}" if doubt else command


def cache_dir() -> Path:
    """The cache's folder, as ``huggingface_hub`` finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return expanded(value)
    return hugging_face_dir() / "hub"


def hugging_face_dir() -> Path:
    """The folder of the cache and the token."""
    if value := os.environ.get("HF_HOME"):
        return expanded(value)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def find_snapshot(name: str, revision: str | None, *, cache: Path | None = None) -> Snapshot | None:
    """A revision of a repository, None where the cache does not hold it.

    Args:
        name: hub name.
        revision: branch, tag, commit or the beginning of one; None for ``main``.
        cache: the cache's folder; None for one's own.
    """
    repository = (cache or cache_dir()) / f"models--{name.replace('/', '--')}"
    wanted = revision or DEFAULT_REVISION
    commit = wanted if is_commit(wanted) else _commit_of(repository / "refs" / wanted)
    if commit is None and _SHORT_COMMIT.fullmatch(wanted):
        commit = _only_commit(repository / "snapshots", wanted)
    if commit is None:
        return None
    path = repository / "snapshots" / commit
    return Snapshot(path, commit) if path.is_dir() else None


def _commit_of(reference: Path) -> str | None:
    try:
        if not reference.is_file():
            return None
        with reference.open("rb") as file:
            commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if is_commit(commit) else None


def _only_commit(snapshots: Path, beginning: str) -> str | None:
    try:
        found = [entry.name for entry in snapshots.iterdir() if entry.name.startswith(beginning)]
    except OSError:
        return None
    return found[0] if len(found) == 1 and is_commit(found[0]) else None
