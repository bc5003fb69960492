"""The web server alone: framing, and what is no HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DEADLINE_S, Simulated, launching

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n\r\n"
STREAM = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": true}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with launching(Path(tmp_path_factory.mktemp("http"))) as launch:
        yield launch(scale=500)


def answer(server: Simulated, sent: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as client:
        client.sendall(sent)
        received = b""
        while part := client.recv(65536):
            received += part
    return received


def chunked(body: bytes) -> bytes:
    return b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n" + CLOSE + body


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nbroken\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nname : value\r\n\r\n",
        b"GET http://[bad/ HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 30\r\n\r\n{}",
        chunked(b"zz\r\n"),
        chunked(b"2\r\n{}XX0\r\n\r\n"),
    ],
)
def test_what_is_no_http_is_refused_and_the_connection_closed(server: Simulated, sent: bytes) -> None:
    assert answer(server, sent).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"POST /generate HTTP/1.1\r\ncontent-length: 99999999999999\r\n\r\n", b"413"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n", b"431"),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", b"200"),
        (b"BREW /health HTTP/1.1\r\n" + CLOSE, b"405"),
        (b"GET /%ff%00%zz HTTP/1.1\r\n" + CLOSE, b"404"),
        (chunked(b'c\r\n{"text":"x"}\r\n0\r\n\r\n'), b"200"),
    ],
)
def test_the_status_fits(server: Simulated, sent: bytes, status: bytes) -> None:
    assert answer(server, sent).split()[1] == status


def test_a_head_has_no_body(server: Simulated) -> None:
    first, _, second = answer(server, MODELS.replace(b"GET", b"HEAD") + b"\r\n" + MODELS + CLOSE).partition(
        b"\r\n\r\n"
    )
    assert first.startswith(b"HTTP/1.1 405")
    assert second.startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(server: Simulated) -> None:
    received = answer(server, MODELS + b"\r\n" + b"GET /none HTTP/1.1\r\n\r\n" + MODELS + CLOSE)
    assert [part.split()[0] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


@pytest.mark.parametrize("wish", [b"close", b"Close", b"te, close"])
def test_a_connection_is_closed_when_asked(server: Simulated, wish: bytes) -> None:
    assert answer(server, MODELS + b"connection: " + wish + b"\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_an_old_client_gets_its_stream_without_chunks(server: Simulated) -> None:
    length = str(len(STREAM)).encode()
    received = answer(
        server, b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: " + length + b"\r\n\r\n" + STREAM
    )
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_slow_clients_keep_nobody_waiting(server: Simulated) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for client in slow:
        client.sendall(b"GET /v1/mo")
    assert answer(server, MODELS + CLOSE).startswith(b"HTTP/1.1 200")
    for client in slow:
        client.close()
