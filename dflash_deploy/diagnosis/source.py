"""A log as lines of bytes, whatever it comes in: a file, a pipe, compressed, cut short, of any size."""

from __future__ import annotations

import bz2
import codecs
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode

BLOCK_BYTES = 1 << 18
LONGEST_LINE_BYTES = 1 << 16
"""What is looked at of a line; the rest of a longer one is passed over."""

_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass
class Source:
    """Where lines come from, and what was noticed while they were read."""

    file: BufferedIOBase
    damaged: str | None = None

    def blocks(self) -> Iterator[list[bytes]]:
        """Lines without their ends, many at a time; a damaged archive ends where the damage is."""
        rest, passing = b"", False
        for data in self._unpacked():
            *lines, rest = (rest + data).split(b"\n")
            if passing and lines:
                del lines[0]
                passing = False
            if len(rest) > LONGEST_LINE_BYTES and not passing:
                lines.append(rest[:LONGEST_LINE_BYTES])
                passing = True
            if passing:
                rest = b""
            yield lines
        if rest:
            yield [rest]

    def _unpacked(self) -> Iterator[bytes]:
        head = self.file.read(BLOCK_BYTES)
        if head.startswith(_PACKED):
            yield from self._archive(head)
            return
        encoding = _WIDE.get(head[:2])
        if encoding is not None:
            # What PowerShell's `>` writes.
            decode = codecs.getincrementaldecoder(encoding)("replace").decode
            while head:
                yield decode(head).lstrip("\ufeff").encode()
                head = self.file.read(BLOCK_BYTES)
            return
        while head:
            yield head
            head = self.file.read(BLOCK_BYTES)

    def _archive(self, data: bytes) -> Iterator[bytes]:
        """Unpack piece by piece, so that an archive of any size takes no more memory than a block."""
        if data.startswith(b"\x1f\x8b"):
            yield from self._gzip(data)
            return
        make = bz2.BZ2Decompressor if data.startswith(b"BZh") else lzma.LZMADecompressor
        unpacker = make()
        try:
            while data or not unpacker.needs_input:
                yield unpacker.decompress(data, BLOCK_BYTES)
                if unpacker.eof:
                    data = unpacker.unused_data or self.file.read(BLOCK_BYTES)
                    unpacker = make()
                else:
                    data = self.file.read(BLOCK_BYTES) if unpacker.needs_input else b""
                    if not data and unpacker.needs_input:
                        self.damaged = "the archive is cut short"
        except (OSError, lzma.LZMAError) as error:
            self.damaged = f"the archive is damaged: {error}"

    def _gzip(self, data: bytes) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            while data:
                yield unpacker.decompress(data, BLOCK_BYTES)
                data = unpacker.unconsumed_tail
                if unpacker.eof:
                    data = unpacker.unused_data or self.file.read(BLOCK_BYTES)
                    unpacker = zlib.decompressobj(wbits=31)
                elif not data:
                    data = self.file.read(BLOCK_BYTES)
                    if not data:
                        self.damaged = "the archive is cut short"
        except zlib.error as error:
            self.damaged = f"the archive is damaged: {error}"


def open_log(path: Path) -> BufferedIOBase:
    """Open a log file.

    Raises:
        DeployError: it is not there (MISSING), or cannot be read (INVALID_INPUT).
    """
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DeployError(f"no log {path}", exit_code=ExitCode.MISSING) from error
    except OSError as error:
        raise DeployError(
            f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.INVALID_INPUT
        ) from error


def blocks_of(lines: Iterable[str]) -> Iterator[list[bytes]]:
    """Lines that are text already, as ``Source.blocks`` gives them."""
    block: list[bytes] = []
    for line in lines:
        block += line.encode("utf-8", "replace").rstrip(b"\n").split(b"\n")
        if len(block) > 10_000:
            yield block
            block = []
    yield block
