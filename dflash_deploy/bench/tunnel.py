"""Connections through a person's HTTP proxy, to servers that stand behind it."""

from __future__ import annotations

import asyncio
import base64
import ssl
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote, urlsplit

from dflash_deploy.errors import DeployError, ExitCode

_MAX_HEAD_BYTES = 16 << 10


@dataclass(frozen=True)
class Proxy:
    """Where a proxy listens, and the header that it wants of whoever has an account with it."""

    host: str
    port: int
    headers: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """Read a proxy's address, as it stands in ``http_proxy``.

        Raises:
            DeployError: it is none, or no proxy that is spoken to by HTTP. Its text tells no password.
        """
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port or 80
        except ValueError:
            scheme, host = "", None
        if scheme != "http" or not host:
            named = f"a proxy by {scheme}://" if scheme.isalnum() else "the proxy of the environment"
            raise DeployError(
                f"{named} is not spoken to, only one by http://HOST:PORT",
                fix="set http_proxy (for https:// addresses https_proxy) to such a one, or name the server "
                "in no_proxy to reach it without",
                exit_code=ExitCode.USAGE,
            )
        account = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        told = base64.b64encode(account.encode()).decode()
        headers = (f"proxy-authorization: Basic {told}",) if parts.username else ()
        return cls(host, port, headers)


class Refused(Exception):  # noqa: N818  (what became of the wish)
    """The proxy does not connect to that server; its words say why."""


async def connect_through(
    proxy: Proxy, host: str, port: int, tls: ssl.SSLContext, protocol: asyncio.BufferedProtocol
) -> None:
    """Have the proxy connect to a server by TLS, and ``protocol`` speak to that server.

    Raises:
        Refused: the proxy would not.
        OSError: the proxy is not reached, or the server is not trusted (``ssl.SSLError``).
    """
    loop = asyncio.get_running_loop()
    transport, asking = await loop.create_connection(lambda: _Asking(loop), proxy.host, proxy.port)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = (f"CONNECT {target} HTTP/1.1", f"host: {target}", *proxy.headers, "", "")
    try:
        transport.write("\r\n".join(lines).encode("latin-1"))
        await asking.agreed
        secured = await loop.start_tls(transport, protocol, tls, server_hostname=host)
    except BaseException:
        transport.abort()
        raise
    # `start_tls` does not say so to the protocol, which takes over here.
    protocol.connection_made(cast("asyncio.Transport", secured))


class _Asking(asyncio.Protocol):
    """The proxy's answer to CONNECT; ``agreed`` is done when it has connected, and raises ``Refused``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.agreed: asyncio.Future[None] = loop.create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head:
            self._end(self._head.split(b"\r\n", 1)[0].decode(errors="replace"))
        elif len(self._head) > _MAX_HEAD_BYTES:
            self._end("an answer without end")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was closed: {exc or 'without an answer'}")

    def _end(self, line: str) -> None:
        if self.agreed.done():
            return
        if line.split(" ", 1)[-1].startswith("2"):
            self.agreed.set_result(None)
        else:
            self.agreed.set_exception(Refused(line))
