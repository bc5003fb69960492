"""One streamed chat request: what is sent, what is timed, and how it can fail."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, field

import httpx

from dflash_deploy.bench.measurement import RequestResult
from dflash_deploy.bench.sse import EventReader, TooLongError

MAX_ANSWER_CHARS = 4 << 20
_MAX_ERROR_BYTES = 4096
_DONE = b"[DONE]"


@dataclass(frozen=True)
class ChatRequest:
    """One question to the server; decoding is greedy and without a thinking phase.

    Attributes:
        model: name to ask for (SGLang answers to any).
        prompt: the user's message.
        max_tokens: tokens to generate at most, and exactly with ``ignore_eos``.
    """

    model: str
    prompt: str
    max_tokens: int
    ignore_eos: bool = True

    def body(self) -> dict[str, object]:
        """The JSON of the request."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": self.ignore_eos,
            "chat_template_kwargs": {"enable_thinking": False},
        }


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds of the clock: for any chunk, and for the whole answer."""

    stall_s: float
    total_s: float


class _BrokenStreamError(Exception):
    """The answer is not what the protocol says; the text is the error as reported."""


@dataclass(frozen=True)
class _Times:
    """When things happened, in seconds of one clock."""

    sent_s: float
    first_s: float
    last_s: float
    ended_s: float


@dataclass(frozen=True)
class Streamed:
    """One request as timed from here, and as a simulated server says that it went."""

    by_our_clock: RequestResult
    by_the_servers: RequestResult | None


@dataclass
class _Answer:
    """What has come so far."""

    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    first: float | None = None
    last: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    times: _Times | None = None
    done: bool = False

    def take(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self.done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise _BrokenStreamError(f"broken JSON in the stream: {_excerpt(data)}") from None
        if not isinstance(event, dict):
            raise _BrokenStreamError(f"an event that is no object: {_excerpt(data)}")
        if event.get("error"):
            raise _BrokenStreamError(f"error in the stream: {_excerpt(json.dumps(event['error']).encode())}")
        text = _text(event)
        if text:
            self.first = now if self.first is None else self.first
            self.last = now
            self.pieces.append(text)
            self.chars += len(text)
            if self.chars > MAX_ANSWER_CHARS:
                raise _BrokenStreamError("the answer does not end")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
            self.times = _simulated_times(event.get("simulated"))


def build(
    client: httpx.AsyncClient,
    base_url: str,
    request: ChatRequest,
    patience: Patience,
    *,
    together: str | None = None,
) -> httpx.Request:
    """Make the HTTP request ready, so that its making is not timed.

    Args:
        client: that will send it.
        base_url: root of the server, without ``/v1``.
        request: what to ask.
        patience: bounds on waiting.
        together: for a simulated server whose time runs fast, ``<round>/<users>``: whose requests, and how
            many, arrive at one moment.

    Raises:
        httpx.InvalidURL: ``base_url`` is none.
    """
    timeout = httpx.Timeout(patience.stall_s, connect=min(patience.stall_s, 10.0))
    url = f"{base_url}/v1/chat/completions"
    # Not compressed: a compressor may keep chunks back.
    headers = {"accept": "text/event-stream", "accept-encoding": "identity"}
    if together is not None:
        headers["x-simulated-together"] = together
    return client.build_request("POST", url, json=request.body(), headers=headers, timeout=timeout)


async def stream_chat(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    user: int,
    patience: Patience,
    time_scale: float = 1.0,
) -> Streamed:
    """Send one request and time its stream; whatever goes wrong is the result's ``error``.

    Args:
        client: its limits must allow every user a connection.
        request: from ``build``.
        user: who asks, kept in the result.
        patience: bounds on waiting.
        time_scale: server seconds that pass in a second of the clock; times are given in the server's.
    """
    answer = _Answer()
    error: str | None = None
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(patience.total_s):
            await _read_stream(client, request, answer)
    except _BrokenStreamError as broken:
        error = str(broken)
    except TooLongError as too_long:
        error = f"broken stream: {too_long}"
    except TimeoutError:
        error = f"no end after {patience.total_s * time_scale:.0f} s"
    except httpx.ReadTimeout:
        error = f"stalled: nothing came for {patience.stall_s * time_scale:.0f} s"
    except httpx.ConnectError as failure:
        error = f"connection refused: {failure}"
    except httpx.RemoteProtocolError as failure:
        error = f"stream cut: {failure}"
    except httpx.HTTPError as failure:
        error = f"connection lost: {type(failure).__name__} {failure}".rstrip()
    ended = time.perf_counter()
    if error is None:
        error = _what_is_missing(answer)
    first = answer.first if answer.first is not None else ended
    last = answer.last if answer.last is not None else first
    ours = _Times(begun * time_scale, first * time_scale, last * time_scale, ended * time_scale)
    told = answer.times
    return Streamed(
        by_our_clock=_result(user, answer, ours, error),
        by_the_servers=None if told is None else _result(user, answer, told, error),
    )


def _result(user: int, answer: _Answer, times: _Times, error: str | None) -> RequestResult:
    return RequestResult(
        user=user,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=answer.output_tokens or 0,
        sent_s=times.sent_s,
        ttft_s=times.first_s - times.sent_s,
        decode_s=times.last_s - times.first_s,
        total_s=times.ended_s - times.sent_s,
        text="".join(answer.pieces),
        chunks=len(answer.pieces),
        error=error,
    )


async def _read_stream(client: httpx.AsyncClient, request: httpx.Request, answer: _Answer) -> None:
    response = await client.send(request, stream=True)
    try:
        if response.status_code != httpx.codes.OK:
            raise _BrokenStreamError(f"HTTP {response.status_code}: {await _error_text(response)}")
        reader = EventReader()
        async for piece in response.aiter_raw():
            now = time.perf_counter()
            for data in reader.feed(piece):
                answer.take(data, now)
    finally:
        await response.aclose()


async def _error_text(response: httpx.Response) -> str:
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return _excerpt(body)


def _text(event: dict[str, object]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    delta = choices[0].get("delta")
    if not isinstance(delta, dict):
        return ""
    parts = (delta.get("reasoning_content"), delta.get("content"))
    return "".join(part for part in parts if isinstance(part, str))


def _simulated_times(value: object) -> _Times | None:
    if not isinstance(value, dict):
        return None
    told = [value.get(key) for key in ("arrived_s", "first_token_s", "finished_s")]
    times = [float(one) for one in told if isinstance(one, int | float) and math.isfinite(one)]
    if len(times) != len(told) or times != sorted(times):
        return None
    arrived_s, first_s, finished_s = times
    return _Times(arrived_s, first_s, finished_s, finished_s)


def _count(value: object, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before


def _what_is_missing(answer: _Answer) -> str | None:
    if not answer.done:
        return "stream cut: it ended without [DONE]"
    if answer.output_tokens is None:
        return "no usage in the stream, so tokens cannot be counted"
    return None


def _excerpt(body: bytes, length: int = 200) -> str:
    text = " ".join(body[: 4 * length].decode(errors="replace").split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
