"""A chat server written on raw sockets, with a token schedule known to the test and bad manners on demand."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Script:
    """How each request is answered: text pieces at given waits, then usage, then the end."""

    pieces: tuple[str, ...] = ("one two ", "three ", "four ", "five")
    first_wait_s: float = 0.0
    wait_s: float = 0.0
    usage: dict[str, object] | None = field(
        default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 9}
    )
    status: str = "200 OK"
    body: bytes | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    raw: bytes | None = None
    done: bool = True
    simulated: object = None
    simulated_for: frozenset[int] | None = None
    answer_of: Callable[[int], tuple[str, ...]] | None = None
    events: tuple[dict, ...] | None = None
    half_close_after: int | None = None
    open_end: bool = False
    tokenizes: bool = False
    plain_only: bool = False
    counts: bool = False
    longest_words: int | None = None
    beyond: Literal["refuses", "cuts", "dies"] = "refuses"
    together: int = 1
    """So many must be there at once before the first is answered."""


@dataclass
class Seen:
    """What the server was asked, and how many it served at once."""

    bodies: list[dict] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    now: int = 0
    most: int = 0
    connections: int = 0
    left: int = 0
    """Clients that have asked, and closed their connection: they have what they wanted."""


@contextmanager
def serving(script: Script, *, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Seen]]:
    """Run the server in a thread; yields its root address and what it has seen."""
    seen = Seen()
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        asked = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(
                    next(x for x in head.lower().split(b"\r\n") if b"content-length" in x).split(b":")[1]
                )
                seen.heads.append(head.lower())
                seen.bodies.append(json.loads(await reader.readexactly(length)))
                asked = True
                seen.now += 1
                seen.most = max(seen.most, seen.now)
                try:
                    while seen.most < script.together:
                        await asyncio.sleep(0.005)
                    too_long = _words(seen.bodies[-1]) > (script.longest_words or 1 << 30)
                    if too_long and script.beyond == "dies":
                        script.status, script.body, script.tokenizes = "500 Gone", b"out of memory", False
                    if too_long and script.beyond == "refuses" and not head.startswith(b"POST /tokenize"):
                        await _play(Script(status="400 Bad Request", body=b"too long"), 0, writer)
                        continue
                    if script.counts and head.startswith(b"POST /tokenize"):
                        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                        continue
                    if script.tokenizes and head.startswith(b"POST /tokenize"):
                        await _count_words(script, seen.bodies[-1], writer)
                        continue
                    if script.counts and not seen.bodies[-1].get("stream"):
                        await _count_words(script, seen.bodies[-1], writer)
                        continue
                    wrong = script.plain_only and "ignore_eos" in seen.bodies[-1]
                    refusal = Script(status="400 Bad Request", body=b"unknown: ignore_eos")
                    await _play(refusal if wrong else script, len(seen.bodies) - 1, writer)
                finally:
                    seen.now -= 1
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            seen.left += asked
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}", seen
    finally:

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _play(script: Script, number: int, writer: asyncio.StreamWriter) -> None:
    if script.body is not None:
        writer.write(
            f"HTTP/1.1 {script.status}\r\ncontent-length: {len(script.body)}\r\n\r\n".encode() + script.body
        )
        await writer.drain()
        return
    writer.write(
        f"HTTP/1.1 {script.status}\r\ncontent-type: text/event-stream\r\n".encode()
        + b"transfer-encoding: chunked\r\n\r\n"
    )
    if script.raw is not None:
        await _chunk(writer, script.raw)
    await _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await asyncio.sleep(script.first_wait_s)
    for event in script.events or ():
        await asyncio.sleep(script.wait_s)
        await _event(writer, event)
    pieces = script.answer_of(number) if script.answer_of else () if script.events else script.pieces
    for place, piece in enumerate(pieces):
        if place == script.cut_after:
            writer.transport.abort()
            return
        if place == script.half_close_after:
            writer.write_eof()
            await asyncio.sleep(3600)
        if place == script.stall_after:
            await asyncio.sleep(3600)
        if place:
            await asyncio.sleep(script.wait_s)
        await _event(writer, {"choices": [{"index": 0, "delta": {"content": piece}}]})
    if script.usage is not None:
        silent = script.simulated_for is not None and number not in script.simulated_for
        told = {} if script.simulated is None or silent else {"simulated": script.simulated}
        await _event(writer, {"choices": [], "usage": script.usage, **told})
    if script.done:
        await _chunk(writer, b"data: [DONE]\n\n")
    if script.open_end:
        await asyncio.sleep(3600)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _words(body: dict) -> int:
    return sum(len(message["content"].split()) for message in body.get("messages", ()))


async def _count_words(script: Script, body: dict, writer: asyncio.StreamWriter) -> None:
    words = _words(body)
    if script.beyond == "cuts":
        words = min(words, script.longest_words or words)
    told = {"usage": {"prompt_tokens": words}} if "max_tokens" in body else {"count": words}
    answer = json.dumps(told).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
    await writer.drain()


async def _event(writer: asyncio.StreamWriter, event: dict) -> None:
    await _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()
