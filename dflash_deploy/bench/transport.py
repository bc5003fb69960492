"""One HTTP request on a connection of its own, its answer timed as the bytes arrive.

A client for all purposes takes tens of microseconds for every chunk of a stream, and what it takes for one
stream delays the others: ``benchmarks/load_generator.py`` shows by how much. Here the bytes of all
connections are read together and go through a parser written in C to whoever asked; no task is woken until
the answer is over.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from dflash_deploy.bench.measurement import ErrorKind
from dflash_deploy.bench.tunnel import Proxy, Refused, connect_through
from dflash_deploy.proxy import proxy_for

CONNECT_S = 10.0
_BUFFER_BYTES = 16 << 10
_MAX_HEAD_BYTES = 64 << 10
_MAX_WORDS_BYTES = 4096
_OK = 200
_EVENTS = b"text/event-stream"
_EVENT_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_KIND_OF: Mapping[int, ErrorKind] = {
    401: "denied",
    403: "denied",
    404: "absent",
    405: "absent",
    429: "busy",
    503: "busy",
    3: "redirected",
    4: "refused",
}
"""By status, else by its hundreds."""


class Failure(Exception):  # noqa: N818  (a value as well: what an answer came to)
    """Why there is no whole answer."""

    def __init__(self, kind: ErrorKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds of the clock: for any bytes, and for the whole answer."""

    stall_s: float
    total_s: float


@dataclass(frozen=True)
class Address:
    """Where a server listens, from the root of its interface (``http://127.0.0.1:30000``).

    Attributes:
        proxy: asked in its place, as the person's environment has it; never for this machine's own addresses.
    """

    host: str
    port: int
    tls: bool
    root: str
    proxy: Proxy | None = None

    @classmethod
    def parse(cls, base_url: str) -> Address:
        """Read an address.

        Raises:
            ValueError: it is none.
            DeployError: the proxy before it is none that is spoken to.
        """
        try:
            url: SplitResult = urlsplit(base_url)
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
            url = SplitResult("", "", "", "", "")
        if url.scheme not in ("http", "https") or not host or not _is_word(host + url.path):
            raise ValueError(f"{base_url!r} is no address like http://127.0.0.1:30000")
        if url.username or url.query or url.fragment:
            raise ValueError("an address holds neither a user nor a query")
        tls = url.scheme == "https"
        proxy = proxy_for(base_url)
        through = Proxy.parse(proxy) if proxy is not None else None
        return cls(host, port or (443 if tls else 80), tls, url.path.rstrip("/"), through)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        by_name = self.proxy is not None and not self.tls
        place = f"http://{host}:{self.port}" if by_name else ""
        lines = [
            f"POST {place}{self.root}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            # A compressor may keep chunks back.
            "accept-encoding: identity",
            "connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
            *(self.proxy.headers if self.proxy is not None and by_name else ()),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _is_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def tls_context(address: Address) -> ssl.SSLContext | None:
    """For connections to this address; reading the certificates takes longer than many an answer."""
    return ssl.create_default_context() if address.tls else None


async def connect(
    address: Address,
    tls: ssl.SSLContext | None,
    take: Callable[[bytes, float], bool],
    reader: Reader | None = None,
) -> Exchange:
    """Open a connection for one request.

    Args:
        address: the server's.
        tls: from ``tls_context``.
        take: gets every piece of the answer's body with the time at which it came, and says whether the
            answer is over; may raise ``Failure``.
        reader: reads this connection together with others. One by TLS reads by itself.

    Raises:
        Failure: nobody listens, or nobody answers in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            if address.proxy is not None and tls is not None:
                exchange = Exchange(loop, take)
                await connect_through(address.proxy, address.host, address.port, tls, exchange)
            else:
                to = address.proxy or address
                _, exchange = await loop.create_connection(
                    lambda: Exchange(loop, take), to.host, to.port, ssl=tls
                )
    except Refused as error:
        raise Failure(
            "unreachable", f"the proxy does not connect to it: {excerpt(str(error).encode())}"
        ) from None
    except TimeoutError:
        raise Failure("unreachable", f"no connection within {CONNECT_S:.0f} s") from None
    except ssl.SSLCertVerificationError as error:
        raise Failure("untrusted", f"its certificate is not trusted: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise Failure("untrusted", f"no connection by TLS: {error.reason or error}") from None
    except ConnectionRefusedError as error:
        raise Failure("unreachable", f"connection refused: {error.strerror or error}") from None
    except (OSError, UnicodeError) as error:
        raise Failure("unreachable", f"cannot be reached: {error}") from None
    if reader is not None and tls is None:
        exchange.read_with(reader)
    return exchange


class Reader:
    """Reads all connections of one event loop that have something to say, in one go.

    For each of them by itself the loop takes as long as the reading: at many streams that is half of the cost
    and of the delay.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._exchanges: dict[int, Exchange] = {}

    def __enter__(self) -> Self:
        self._loop.add_reader(self._epoll.fileno(), self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def add(self, descriptor: int, exchange: Exchange) -> None:
        """Read this connection from now on."""
        self._exchanges[descriptor] = exchange
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Read it no more; to be called before it is closed."""
        if self._exchanges.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _read(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            exchange = self._exchanges.get(descriptor)
            if exchange is None:
                continue
            try:
                data = os.read(descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self.remove(descriptor)
                exchange.connection_lost(error)
                continue
            if data:
                exchange.received(data)
            else:
                self.remove(descriptor)
                exchange.connection_lost(None)


class Exchange(asyncio.BufferedProtocol):
    """A request and its answer.

    Made by ``connect``; then ``send`` once, and ``over`` awaited once. The connection is closed afterwards.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[bytes, float], bool],
    ) -> None:
        self._loop = loop
        self._take = take
        self._reader: Reader | None = None
        self._over: asyncio.Future[Failure | None] = loop.create_future()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._timers: list[asyncio.TimerHandle] = []
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._streams = False
        self._words = b""
        self._now = 0.0
        # Given to the loop to read into: of its own it takes 256 KiB for every read, which costs more than
        # all the rest together.
        self._buffer = memoryview(b"")
        self.ended = 0.0

    def read_with(self, reader: Reader) -> None:
        """Leave the reading to ``reader`` from now on.

        Not while the connection is made: Python 3.11.2 begins to read after that, whatever was paused then.
        """
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.pause_reading()
        self._descriptor = self._transport.get_extra_info("socket").fileno()
        self._reader = reader
        reader.add(self._descriptor, self)

    def send(self, request: bytes, patience: Patience) -> float:
        """Send the request; returns when, by ``time.perf_counter``."""
        self._now = sent = time.perf_counter()
        if self._transport is None or self._over.done():
            self._end(Failure("cut", "stream cut: the connection was closed before the request"))
            return sent
        self._transport.write(request)
        self._timers = [
            self._loop.call_later(patience.stall_s, self._look_for_stall, patience.stall_s),
            self._loop.call_later(
                patience.total_s, self._end, Failure("timeout", f"no end after {patience.total_s:.0f} s")
            ),
        ]
        return sent

    async def over(self) -> Failure | None:
        """Wait for the end of the answer."""
        try:
            return await self._over
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the connection."""
        for timer in self._timers:
            timer.cancel()
        if self._reader is not None:
            self._reader.remove(self._descriptor)
        if self._transport is not None:
            self._transport.abort()
        # Each holds the other: without this they would wait for a collection, and none is made meanwhile.
        self._parser = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002, D102
        if not self._buffer:
            # No bytearray: TLS reads on into a slice of it, which would be a copy.
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        self.received(bytes(self._buffer[:nbytes]))

    def received(self, data: bytes) -> None:
        """Take what has just come."""
        self._now = time.perf_counter()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end(Failure("broken", "the answer goes on in another protocol"))
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                # It came while the parser was calling us.
                raise error.__context__ from None
            self._end(Failure("broken", f"the answer is not HTTP: {error}"))
        if not self._status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._end(Failure("broken", "the answer's headers do not end"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if self._reader is not None:
            self._reader.remove(self._descriptor)
        if self._status == 0:
            self._end(Failure("cut", f"stream cut: {exc or 'closed before any answer'}"))
        elif exc is None or not self._streams:
            self.on_message_complete()
        else:
            self._end(Failure("cut", f"stream cut: {exc}"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:  # noqa: D102
        assert self._parser is not None  # noqa: S101  (it is calling)
        status = self._parser.get_status_code()
        if status < _OK:
            # A hint before the answer.
            self._headers.clear()
            return
        self._status = status
        packing = self._headers.get(b"content-encoding", b"identity").strip().lower()
        if packing not in (b"", b"identity"):
            self._end(
                Failure("broken", f"the answer is packed ({excerpt(packing)}), which was not asked for")
            )
        self._streams = status == _OK and _EVENTS in self._headers.get(b"content-type", b"").lower()

    def on_body(self, piece: bytes) -> None:  # noqa: D102
        if self._over.done():
            return
        if not self._streams:
            self._keep(piece)
            return
        try:
            done = self._take(piece, self._now)
        except Failure as failure:
            self._end(failure)
        else:
            if done:
                self._end(None)

    def on_message_complete(self) -> None:  # noqa: D102
        if self._streams:
            self._end(None)
        elif self._status:
            self._end(self._refusal())

    def _keep(self, piece: bytes) -> None:
        """The words of an answer that is none; or events, of a server that does not call them so."""
        self._words += piece
        begin = self._words.lstrip()
        if self._status == _OK and begin and any(begin.startswith(field) for field in _EVENT_FIELDS):
            self._streams = True
            self.on_body(self._words)
        elif len(self._words) >= _MAX_WORDS_BYTES:
            self._end(self._refusal())

    def _refusal(self) -> Failure:
        status, words = self._status, excerpt(self._words)
        if status == _OK:
            kind = excerpt(self._headers.get(b"content-type", b"nothing that is named"))
            return Failure("no-stream", f"no stream of events came, but {kind}: {words or 'nothing'}")
        hints = [
            f"{name}: {excerpt(self._headers[name.encode()])}"
            for name in ("location", "retry-after")
            if name.encode() in self._headers
        ]
        parts = [f"HTTP {status}", f" ({', '.join(hints)})" if hints else "", f": {words}" if words else ""]
        return Failure(_KIND_OF.get(status) or _KIND_OF.get(status // 100, "http"), "".join(parts))

    def _look_for_stall(self, stall_s: float) -> None:
        left_s = self._now + stall_s - time.perf_counter()
        if left_s > 0:
            self._timers[0] = self._loop.call_later(left_s, self._look_for_stall, stall_s)
        else:
            self._end(Failure("stalled", f"stalled: nothing came for {stall_s:.0f} s"))

    def _end(self, failure: Failure | None) -> None:
        if not self._over.done():
            self.ended = time.perf_counter()
            self._over.set_result(failure)


def excerpt(body: bytes, length: int = 200) -> str:
    """The beginning of what a server said, fit for one line."""
    text = " ".join(body[: 4 * length].decode(errors="replace").split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
