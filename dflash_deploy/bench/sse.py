"""Server-sent events, read piece by piece as they come off a socket, with a bound on what is held."""

from __future__ import annotations

from codecs import BOM_UTF8

MAX_EVENT_BYTES = 1 << 20
"""Longest line and longest event that is read; a chunk of a chat answer is a few hundred bytes."""


class TooLongError(ValueError):
    """A line or an event went over ``MAX_EVENT_BYTES``."""


class EventReader:
    """Turns bytes into the ``data`` of events; other fields and comments are skipped.

    But for ``error``, which llama.cpp has: it comes as the data of an event that tells of one.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._size = 0
        self._begun = False
        self._after_return = False

    @property
    def between_events(self) -> bool:
        """Nothing is held: the next byte begins a line of a new event."""
        return not self._tail and not self._data

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of every event that ``piece`` completes, lines joined by newlines.

        Raises:
            TooLongError: what has come so far cannot be an honest event.
        """
        # Nearly always one piece is one event of one line.
        if (
            not self._tail
            and not self._data
            and piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and piece.find(b"\n") == len(piece) - 2
            and b"\r" not in piece
            and len(piece) <= MAX_EVENT_BYTES
        ):
            return [piece[6:-2]]
        return self._feed_lines(piece)

    def _feed_lines(self, piece: bytes) -> list[bytes]:
        events: list[bytes] = []
        # A line ends with a line feed, a carriage return or both, and the feed may come with the next piece.
        if self._after_return:
            piece = piece.removeprefix(b"\n")
        self._after_return = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._tail + piece).split(b"\n")
        self._tail = lines.pop()
        if lines and not self._begun:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            self._begun = True
        if len(self._tail) > MAX_EVENT_BYTES:
            raise TooLongError("a line without an end")
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                self._size += len(value)
                if self._size > MAX_EVENT_BYTES:
                    raise TooLongError("an event without an end")
                self._data.append(value)
            elif line.startswith(b"error:"):
                events.append(b'{"error":%s}' % line[6:])
        return events
