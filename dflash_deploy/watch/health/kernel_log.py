"""The NVIDIA driver's Xid messages in the kernel's log."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

_KMSG = Path("/dev/kmsg")
_RECORD_LIMIT_BYTES = 8192
_RECORDS_LIMIT = 100_000
# A record of /dev/kmsg: priority,sequence,microseconds since boot,flags;text
_XID = re.compile(
    r"^\d{1,10},\d{1,20},(\d{1,20}),[^;]{0,100};NVRM: Xid \(([^)]{1,60})\): (\d{1,4}),", re.MULTILINE
)


@dataclass(frozen=True)
class Xid:
    """One message: its number in NVIDIA's catalogue, the card's PCI address, seconds since the boot."""

    number: int
    pci: str
    at_s: float


def read_xids(path: Path = _KMSG) -> tuple[Xid, ...] | None:
    """All that the kernel still has, oldest first; None where it may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found: list[Xid] = []
    try:
        for _ in range(_RECORDS_LIMIT):
            try:
                record = os.read(descriptor, _RECORD_LIMIT_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EINVAL):
                    # Overwritten while it was read, or longer than any of the driver's: the next one, then.
                    continue
                return None if not found else tuple(found)
            if not record:
                break
            found += parse(record.decode(errors="replace"))
    finally:
        os.close(descriptor)
    return tuple(found)


def parse(text: str) -> list[Xid]:
    """The Xid messages among the records of ``text``."""
    return [Xid(int(match[3]), match[2], int(match[1]) / 1e6) for match in _XID.finditer(text)]
