"""pip's list of installed files (``RECORD``), of which one line is changed and every other byte kept."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """The line of one file, without its line end."""

    start: int
    end: int
    line: bytes

    def describes(self, content: bytes) -> bool:
        """The line's hash is that of ``content``; a line without one says nothing and fits nothing."""
        return self.line.split(b",")[1:2] == [_hash(content)]


def entry(record: bytes, name: str) -> Entry | None:
    """The line of the file ``name``, a path with slashes, or None."""
    wanted = name.encode() + b","
    start = 0 if record.startswith(wanted) else record.find(b"\n" + wanted) + 1
    if start == 0 and not record.startswith(wanted):
        return None
    end = record.find(b"\n", start)
    end = len(record) if end < 0 else end
    if record[end - 1 : end] == b"\r":
        end -= 1
    return Entry(start, end, record[start:end])


def line_of(name: str, content: bytes) -> bytes:
    """The line that pip writes of a file with this content."""
    return b",".join([name.encode(), _hash(content), str(len(content)).encode()])


def with_line(record: bytes, old: Entry, line: bytes) -> bytes:
    """The list with one line in the place of another."""
    return record[: old.start] + line + record[old.end :]


def _hash(content: bytes) -> bytes:
    digest = hashlib.sha256(content).digest()
    return b"sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=")
