"""Whether files are as the hub published them, by the digests that its client recorded.

In the hub's cache a large file's blob is named by its SHA-256 and a small one's by git's SHA-1. Beside files
downloaded into a folder, ``.cache/huggingface/download/NAME.metadata`` holds commit, digest and time.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_BLOCK_BYTES = 8 << 20
_MAX_RECORD_BYTES = 4096


@dataclass(frozen=True)
class Verified:
    """One file; ``same`` is None where no digest is recorded of it."""

    name: str
    same: bool | None


def verify(folder: Path, names: Iterable[str]) -> tuple[Verified, ...]:
    """Read files whole, and compare.

    Args:
        folder: of the checkpoint.
        names: of files in it; those that are not there are passed over.

    Raises:
        OSError: a file cannot be read.
    """
    paths = (folder / name for name in dict.fromkeys(names))
    # One after the other, as disks read best; and a thread of a pool would outlive Ctrl-C.
    return tuple(_verify(path) for path in paths if path.is_file())


def recorded(path: Path) -> str | None:
    """The digest that the hub's client recorded of a file."""
    if path.is_symlink():
        named = path.resolve().name
        if _SHA256.fullmatch(named) or _SHA1.fullmatch(named):
            return named
    record = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    try:
        with record.open("rb") as file:
            lines = file.read(_MAX_RECORD_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return None
    digest = lines[1].strip() if len(lines) > 1 else ""
    return digest if _SHA256.fullmatch(digest) or _SHA1.fullmatch(digest) else None


def digest_of(path: Path, like: str) -> str:
    """The digest of a file's bytes, of the kind that ``like`` is."""
    if len(like) == 64:
        digest = hashlib.sha256()
    else:
        # Git names a blob by the digest of its kind, its length and its bytes; no secret rests on it.
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _verify(path: Path) -> Verified:
    expected = recorded(path)
    return Verified(path.name, None if expected is None else digest_of(path, expected) == expected)
