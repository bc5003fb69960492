"""An HTTP proxy that writes down what it is asked, and leads everything to one server, or nowhere."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def recording_proxy(target: tuple[str, int] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yields its address, and the first lines of what reaches it, as they come."""
    seen: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                asking, _ = listener.accept()
                threading.Thread(target=_lead, args=(asking, target, seen), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://me:p%40ss@127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        # Closed alone it would go on accepting until the next one came.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _lead(asking: socket.socket, target: tuple[str, int] | None, seen: list[str]) -> None:
    with asking, suppress(OSError):
        head = b""
        while b"\r\n\r\n" not in head:
            if not (data := asking.recv(65536)):
                return
            head += data
        lines = head.decode("latin-1").lower().split("\r\n")
        seen.append(head.split(b"\r\n", 1)[0].decode())
        # "me:p@ss"
        if target is None or "proxy-authorization: basic bwu6cebzcw==" not in lines:
            asking.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            return
        with socket.create_connection(target) as server:
            if head.startswith(b"CONNECT "):
                asking.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                # A server is asked for a path, a proxy for an address.
                server.sendall(re.sub(rb" http://[^/ ]+", b" ", head, count=1))
            back = threading.Thread(target=_pass_on, args=(server, asking), daemon=True)
            back.start()
            _pass_on(asking, server)
            back.join()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)
