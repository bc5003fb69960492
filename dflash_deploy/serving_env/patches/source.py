"""A Python source file edited in places, with every other byte as it was: encoding, line ends, BOM."""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_LINE_END = re.compile(r"\r\n|\r|\n")
"""What ends a line for Python; a form feed or a Unicode line separator does not."""


class UnreadableSourceError(Exception):
    """The bytes are no Python source that can be edited safely; the message says why."""


@dataclass(frozen=True)
class Replacement:
    """Text to stand in place of ``text[start:end]``; an insertion where both are equal."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """A file's text and how its bytes spell it."""

    text: str
    encoding: str
    bom: bool

    @classmethod
    def of(cls, raw: bytes) -> Source:
        """Read a file's bytes.

        Raises:
            UnreadableSourceError: another encoding than it says, or not to be written back as it was.
        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            bom = raw.startswith(codecs.BOM_UTF8)
            codec = "utf-8" if bom else encoding
            source = cls((raw[len(codecs.BOM_UTF8) :] if bom else raw).decode(codec), codec, bom)
            same = source.to_bytes(source.text) == raw
        except (SyntaxError, LookupError, UnicodeError) as error:
            raise UnreadableSourceError(f"its encoding cannot be read: {error}") from error
        if not same:
            raise UnreadableSourceError(f"its bytes cannot be written back as they are ({encoding})")
        return source

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree.

        Raises:
            UnreadableSourceError: it does not parse.
        """
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise UnreadableSourceError(
                f"it is not valid Python: line {error.lineno}: {error.msg}"
            ) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise UnreadableSourceError(f"it cannot be parsed: {error}") from error

    @cached_property
    def line_end(self) -> str:
        """The line end of the first line, for lines that are put in."""
        found = _LINE_END.search(self.text)
        return found[0] if found else "\n"

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node's text begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None  # noqa: S101 - parsed
        return (
            self._index(node.lineno, node.col_offset),
            self._index(node.end_lineno, node.end_col_offset),
        )

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """A node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_start(self, line: int) -> int:
        """Where a line begins, counted from one."""
        return self._line_starts[line - 1]

    def edited(self, replacements: Iterable[Replacement]) -> bytes:
        """The file's bytes with the replacements made.

        Raises:
            UnreadableSourceError: two of them overlap, or the result is not valid Python.
        """
        text, kept = "", 0
        for one in sorted(replacements, key=lambda one: (one.start, one.end)):
            if one.start < kept:
                raise UnreadableSourceError("two edits want the same place")
            text += self.text[kept : one.start] + one.text
            kept = one.end
        text += self.text[kept:]
        raw = self.to_bytes(text)
        _ = Source.of(raw).tree
        return raw

    def to_bytes(self, text: str) -> bytes:
        """``text`` as this file spells it."""
        return (codecs.BOM_UTF8 if self.bom else b"") + text.encode(self.encoding)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    def _index(self, line: int, column: int) -> int:
        """Index of a place that the parser gives as a line and a column of UTF-8 bytes."""
        start = self.line_start(line)
        if line < len(self._line_starts):
            text = self.text[start : self._line_starts[line]]
        else:
            text = self.text[start:]
        return start + len(text.encode()[:column].decode())
