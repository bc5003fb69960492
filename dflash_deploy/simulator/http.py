"""HTTP/1.1 for one small server: keep-alive, bounded requests, chunked event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote, urlsplit

_MAX_HEAD_BYTES = 64 << 10
_MAX_BODY_BYTES = 64 << 20
_MAX_UNREAD_BYTES = 16 << 20


GROUP_HEADER = "x-simulated-together"
_MAX_GROUP = 1024


@dataclass(frozen=True)
class Group:
    """Requests that a client sent at one moment, although they reach a server one after the other.

    Where time runs fast, the milliseconds in between would be seconds, and differ from run to run.
    """

    name: str
    size: int


@dataclass(frozen=True)
class Request:
    """One request, whole. Header names are lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def group(self) -> Group | None:
        """What ``GROUP_HEADER`` says, as ``<name>/<requests>``; None where it says nothing of use."""
        name, _, size = self.headers.get(GROUP_HEADER, "").rpartition("/")
        if not name or not (size.isascii() and size.isdigit()) or len(size) > 4:
            return None
        return Group(name, int(size)) if 1 < int(size) <= _MAX_GROUP else None


class Connection(asyncio.Protocol):
    """One client. Requests are answered in order; the next one is read when the last answer is out.

    Attributes:
        on_close: called once when the client goes away before the answer is out.
        peer: the client's address, for the access log.
    """

    def __init__(self, app: Callable[[Request, Connection], None]) -> None:
        self._app = app
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._busy = False
        self._chunked = True
        self._keep_alive = True
        self._head_only = False
        self._pending = bytearray()
        self.on_close: Callable[[], None] | None = None
        self.peer = "127.0.0.1:0"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            transport.set_write_buffer_limits(high=_MAX_UNREAD_BYTES)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:
            self.peer = f"{name[0]}:{name[1]}"

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client went."""
        self._transport = None
        gone, self.on_close = self.on_close, None
        if gone is not None:
            gone()

    def pause_writing(self) -> None:
        """The client reads nothing any more: let it go rather than keep its text for ever."""
        self.close()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._buffer += data
        if not self._busy:
            self._next()
        elif len(self._buffer) > _MAX_BODY_BYTES:
            self.close()

    @property
    def open(self) -> bool:
        """The client is still there."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _next(self) -> None:
        """Take a whole request from the buffer, if there is one."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if end > _MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        head = _read_head(bytes(self._buffer[:end]))
        if head is None:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        method, target, version, headers = head
        body: bytes | None
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body, used = _read_chunks(self._buffer, end + 4)
            if used < 0:
                self._refuse(HTTPStatus.BAD_REQUEST if used == -1 else HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return
        else:
            length = headers.get("content-length", "0")
            if not length.isascii() or not length.isdigit():
                self._refuse(HTTPStatus.BAD_REQUEST)
                return
            if len(length) > 12 or int(length) > _MAX_BODY_BYTES:
                self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return
            used = end + 4 + int(length)
            body = bytes(self._buffer[end + 4 : used]) if len(self._buffer) >= used else None
        if body is None:
            self._ask_on(headers)
            return
        del self._buffer[:used]
        self._busy = True
        wishes = {word.strip().lower() for word in headers.get("connection", "").split(",")}
        self._chunked = version != "HTTP/1.0"
        self._keep_alive = "close" not in wishes and (self._chunked or "keep-alive" in wishes)
        self._head_only = method == "HEAD"
        try:
            parts = urlsplit(target)
            query = dict(parse_qsl(parts.query, max_num_fields=100))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        self._app(Request(method, unquote(parts.path), query, headers, body), self)

    def _ask_on(self, headers: Mapping[str, str]) -> None:
        if headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, status: HTTPStatus) -> None:
        self._busy = True
        self._keep_alive = False
        self.respond(status, status.phrase, content_type="text/plain")

    def respond(self, status: int, body: object, *, content_type: str = "application/json") -> None:
        """Answer at once. A body that is no text or bytes is written as JSON."""
        if isinstance(body, bytes):
            data = body
        elif isinstance(body, str):
            data = body.encode("utf-8", "replace")
        else:
            data = json.dumps(body, separators=(",", ":")).encode()
        keep = "keep-alive" if self._keep_alive else "close"
        head = (
            f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\ncontent-length: {len(data)}\r\n"
            f"content-type: {content_type}\r\nconnection: {keep}\r\n\r\n"
        )
        if self._transport is not None:
            self._transport.write(head.encode() + (b"" if self._head_only else data))
        self._done()

    def begin_stream(self) -> None:
        """Start an event stream; one that knows no chunks ends with the connection."""
        self._keep_alive = self._keep_alive and self._chunked
        keep = "keep-alive" if self._keep_alive else "close"
        framing = "transfer-encoding: chunked\r\n" if self._chunked else ""
        self._raw(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
            f"{framing}connection: {keep}\r\n\r\n".encode()
        )

    def event(self, data: bytes) -> None:
        """One server-sent event; it goes out with the next :meth:`flush`."""
        self._pending += b"data: "
        self._pending += data
        self._pending += b"\n\n"

    def flush(self) -> None:
        """Send the events that have come together, as one chunk."""
        if self._pending:
            events = bytes(self._pending)
            self._raw(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
            self._pending.clear()

    def end_stream(self) -> None:
        """The stream is complete."""
        self.flush()
        if self._chunked:
            self._raw(b"0\r\n\r\n")
        self._done()

    def _raw(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _done(self) -> None:
        self._busy = False
        self.on_close = None
        if not self._keep_alive:
            self.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        if not self._busy and self._buffer and self.open:
            self._next()


def _read_head(head: bytes) -> tuple[str, str, str, dict[str, str]] | None:
    """Method, target, version and headers; None where it is no HTTP."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[0].isalpha() or not words[2].startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return None
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            return None
        headers[name] = value
    return words[0].upper(), words[1], words[2], headers


def _read_chunks(buffer: bytearray, at: int) -> tuple[bytes | None, int]:
    """A chunked body and where it ends; None where more must come; -1 or -2 for a wrong or too large one."""
    body = bytearray()
    while True:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return (None, -1) if len(buffer) - at > 1000 else (None, 0)
        size_text = bytes(buffer[at:end]).partition(b";")[0].strip()
        if (
            not size_text
            or len(size_text) > 8
            or any(ch not in b"0123456789abcdefABCDEF" for ch in size_text)
        ):
            return None, -1
        size = int(size_text, 16)
        if len(body) + size > _MAX_BODY_BYTES:
            return None, -2
        at = end + 2
        if len(buffer) < at + size + 2:
            return None, 0
        if size and buffer[at + size : at + size + 2] != b"\r\n":
            return None, -1
        body += buffer[at : at + size]
        at += size + 2
        if size == 0:
            return bytes(body), at
