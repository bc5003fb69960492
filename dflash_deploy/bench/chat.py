"""One streamed chat request: what is sent, what is timed, and how it can fail."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.bench.claims import count, figure
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.measurement import RequestResult, ToolCall
from dflash_deploy.bench.sse import EventReader, TooLongError
from dflash_deploy.bench.transport import Address, Exchange, Failure, Patience, Reader, connect, excerpt
from dflash_deploy.bench.workloads import Prompt

MAX_ANSWER_BYTES = 16 << 20
_BYTES_A_CHUNK = 64
"""That a chunk takes beside its text."""

_MOST_TOOL_CALLS = 64
_DONE = b"[DONE]"
_DATA = b"data: "
_TEXTS = ("content", "reasoning_content", "reasoning")
_PROBE = b"\x7fprobe\x7f"
_MOST_FORMS = 8
"""Forms of events that are learnt without one that follows: each costs as much as two events."""

_parse = json.JSONDecoder().decode
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*').fullmatch
"""What stands in JSON as it is."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is asked for; the default is greedy, without a thinking phase.

    Attributes:
        max_tokens: tokens to generate at most, and exactly with ``ignore_eos``.
        thinking: None leaves it to the model's template.
    """

    max_tokens: int
    ignore_eos: bool = True
    temperature: float | None = 0
    thinking: bool | None = False


@dataclass(frozen=True)
class Streamed:
    """One request as timed from here, and as a simulated server says that it went."""

    by_our_clock: RequestResult
    by_the_servers: RequestResult | None


@dataclass(frozen=True)
class _Times:
    """When things happened, in seconds of one clock."""

    sent_s: float
    first_s: float
    last_s: float
    ended_s: float


def body_of(endpoint: Endpoint, prompt: Prompt, sampling: Sampling) -> bytes:
    """The JSON of a request."""
    body: dict[str, object] = {
        "model": endpoint.model,
        "messages": [{"role": role, "content": content} for role, content in prompt.messages],
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if sampling.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    if prompt.tool is not None:
        body["tools"] = [{"type": "function", "function": prompt.tool}]
    if endpoint.engine == "sglang":
        # Known since 0.5.19; passed over before.
        body["return_spec_tokens_details"] = True
    return json.dumps(body).encode()


@dataclass
class _Form:
    """The bytes around the text of an event like which many follow."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, piece: bytes, event: dict[str, object], text: str) -> _Form | None:
        """From a piece that is one event of text alone; None where it is not sure to be one of a kind.

        Sure is what is parsed: with another text in the same place, all but the text must come out the same.
        """
        encoded = text.encode(errors="surrogatepass")
        at = piece.find(b'"%s"' % encoded)
        if at < 0 or not _PLAIN(encoded) or _PROBE in piece or _says_more(event):
            return None
        form = cls(piece[: at + 1], piece[at + 1 + len(encoded) :])
        try:
            other = _parse((form.before + _PROBE + form.after)[len(_DATA) :].decode())
        except (ValueError, RecursionError):
            return None
        for key in _TEXTS:
            ours, theirs = _delta(event), _delta(other)
            if ours.get(key) == text and theirs.get(key) == _PROBE.decode():
                theirs[key] = text
                return form if other == event else None
        return None


@dataclass
class _Answer:
    """What has come so far."""

    pieces: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    spec: Mapping[str, object] = field(default_factory=dict)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None
    times: _Times | None = None
    done: bool = False
    _reader: EventReader = field(default_factory=EventReader)
    _form: _Form | None = None
    _forms_left: int = _MOST_FORMS

    def take(self, piece: bytes, now: float) -> bool:
        """Take bytes as they come; True once the answer is over.

        Raises:
            Failure: they are no answer.
        """
        form = self._form
        if form is not None and piece.startswith(form.before) and piece.endswith(form.after):
            text = piece[len(form.before) : -len(form.after)]
            if text and _PLAIN(text):
                # As the parser would have it, at a tenth of the time.
                try:
                    self._keep(text.decode(), now)
                except UnicodeDecodeError:
                    # For the parser to refuse.
                    self._form = None
                else:
                    self._forms_left = _MOST_FORMS
                    return False
        try:
            events = self._reader.feed(piece)
        except TooLongError as error:
            raise Failure("broken", f"broken stream: {error}") from None
        for data in events:
            self._event(data, piece, now)
        if not self._reader.between_events:
            self._form = None
        return self.done

    def _event(self, data: bytes, piece: bytes, now: float) -> None:
        if data == _DONE:
            self.done = True
            return
        try:
            event = _parse(data.decode())
        except (ValueError, RecursionError):
            raise Failure("broken", f"broken JSON in the stream: {excerpt(data)}") from None
        if not isinstance(event, dict):
            raise Failure("broken", f"an event that is no object: {excerpt(data)}")
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            text = self._choice(choices[0])
            if text:
                self._keep(text, now)
                if self._forms_left and piece == b"%s%s\n\n" % (_DATA, data):
                    self._forms_left -= 1
                    self._form = _Form.of(piece, event, text)
        elif event.get("error"):
            raise Failure("server", f"error in the stream: {excerpt(json.dumps(event['error']).encode())}")
        if event.get("usage") is not None or event.get("sglext") is not None:
            self._facts(event)

    def _keep(self, text: str, now: float) -> None:
        self.pieces.append(text)
        self.at_s.append(now)
        self.held_bytes += len(text) + _BYTES_A_CHUNK
        if self.held_bytes > MAX_ANSWER_BYTES:
            raise Failure("broken", "the answer does not end")

    def _choice(self, choice: dict[str, object]) -> str:
        """Whatever the model wrote, to be seen or not: all of it took time."""
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason[:40]
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return ""
        calls = delta.get("tool_calls")
        written = self._calls(calls) if isinstance(calls, list) else ""
        content, *thoughts = (delta.get(key) for key in _TEXTS)
        thought = next(filter(None, thoughts), None)
        return "".join(part for part in (thought, content, written) if isinstance(part, str))

    def _calls(self, calls: list[object]) -> str:
        written = ""
        for call in calls[:_MOST_TOOL_CALLS]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(call, dict) or not isinstance(function, dict):
                continue
            index = call.get("index")
            place = index if isinstance(index, int) and 0 <= index < _MOST_TOOL_CALLS else 0
            name, arguments = (
                part if isinstance(part, str) else ""
                for part in (function.get("name"), function.get("arguments"))
            )
            known = self.calls.setdefault(place, ["", ""])
            known[0] += name[:200]
            known[1] += arguments
            written += name + arguments
        return written

    def _facts(self, event: dict[str, object]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _last(count(usage.get("prompt_tokens")), self.prompt_tokens)
            self.output_tokens = _last(count(usage.get("completion_tokens")), self.output_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _last(count(details.get("cached_tokens")), self.cached_tokens)
            self.times = _simulated_times(event.get("simulated")) or self.times
        extension = event.get("sglext")
        spec = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
        if isinstance(spec, dict):
            self.spec = spec


class Question:
    """A request that is ready: its connection is open and nothing is left to do but to send it.

    Made by ``prepare``; ``ask`` once.
    """

    def __init__(
        self, exchange: Exchange | Failure, answer: _Answer, request: bytes, patience: Patience
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._request = request
        self._patience = patience

    def close(self) -> None:
        """Let go of a question that is not asked."""
        if isinstance(self._exchange, Exchange):
            self._exchange.close()

    async def ask(
        self,
        *,
        user: int,
        time_scale: float = 1.0,
        waited_s: float = 0.0,
        estimate_tokens: bool = False,
    ) -> Streamed:
        """Send it and time its stream; whatever goes wrong is the result's ``error``.

        Args:
            user: who asks, kept in the result.
            time_scale: server seconds that pass in a second of the clock; times are given in the server's.
            waited_s: since it was due, kept in the result.
            estimate_tokens: take a chunk for a token where the server does not count, in place of an error.
        """
        answer, exchange = self._answer, self._exchange
        failure: Failure | None
        if isinstance(exchange, Failure):
            begun = ended = time.perf_counter()
            failure = exchange
        else:
            begun = exchange.send(self._request, self._patience)
            failure = await exchange.over()
            ended = exchange.ended
        failure = _scaled(failure, self._patience, time_scale) or _what_is_missing(answer, estimate_tokens)
        first = answer.at_s[0] if answer.at_s else ended
        last = answer.at_s[-1] if answer.at_s else first
        ours = _Times(begun * time_scale, first * time_scale, last * time_scale, ended * time_scale)
        chunk_s = tuple((at_s - begun) * time_scale for at_s in answer.at_s)
        told = answer.times
        return Streamed(
            by_our_clock=_result(
                user, answer, ours, failure, chunk_s=chunk_s, waited_s=waited_s * time_scale
            ),
            by_the_servers=None if told is None else _result(user, answer, told, failure),
        )


async def prepare(
    endpoint: Endpoint,
    prompt: Prompt,
    sampling: Sampling,
    patience: Patience,
    *,
    address: Address,
    tls: ssl.SSLContext | None,
    reader: Reader | None = None,
    together: str | None = None,
) -> Question:
    """Make a request ready and open its connection, so that neither is timed.

    Args:
        endpoint: who is asked.
        prompt: what to ask.
        sampling: how.
        patience: bounds on waiting.
        address: of the endpoint.
        tls: from ``transport.tls_context``.
        reader: reads its connection together with others.
        together: for a simulated server whose time runs fast, ``<round>/<users>``: whose requests, and how
            many, arrive at one moment.
    """
    headers = {"accept": "text/event-stream"}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    if together is not None:
        headers["x-simulated-together"] = together
    request = address.post("/v1/chat/completions", body_of(endpoint, prompt, sampling), headers)
    answer = _Answer()
    try:
        return Question(await connect(address, tls, answer.take, reader), answer, request, patience)
    except Failure as failure:
        return Question(failure, answer, request, patience)


def _result(
    user: int,
    answer: _Answer,
    times: _Times,
    failure: Failure | None,
    *,
    chunk_s: tuple[float, ...] = (),
    waited_s: float = 0.0,
) -> RequestResult:
    estimated = answer.output_tokens is None
    tokens = len(answer.pieces) if estimated else answer.output_tokens or 0
    steps = count(answer.spec.get("spec_verify_ct"))
    return RequestResult(
        user=user,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=tokens if failure is None or not estimated else 0,
        sent_s=times.sent_s,
        ttft_s=times.first_s - times.sent_s,
        decode_s=times.last_s - times.first_s,
        total_s=times.ended_s - times.sent_s,
        text="".join(answer.pieces),
        chunks=len(answer.pieces),
        error=None if failure is None else failure.reason,
        error_kind=None if failure is None else failure.kind,
        chunk_s=chunk_s,
        chunk_tokens=_shared_out(tokens, [len(piece) for piece in answer.pieces]),
        tokens_estimated=estimated and failure is None,
        cached_tokens=answer.cached_tokens,
        accept_length=figure(answer.spec.get("spec_accept_length")) if steps else None,
        accept_rate=figure(answer.spec.get("spec_accept_rate")) if steps else None,
        verify_steps=steps or None,
        finish_reason=answer.finish_reason,
        tool_calls=tuple(ToolCall(*answer.calls[place]) for place in sorted(answer.calls)),
        waited_s=waited_s,
    )


def _shared_out(tokens: int, lengths: list[int]) -> tuple[int, ...]:
    """One token for every chunk, and the others in proportion to the length of its text."""
    spare = max(0, tokens - len(lengths))
    total, so_far, given = sum(lengths), 0, 0
    shares: list[int] = []
    for length in lengths:
        so_far += length
        until = spare * so_far // total
        shares.append(1 + until - given)
        given = until
    return tuple(shares)


def _scaled(failure: Failure | None, patience: Patience, time_scale: float) -> Failure | None:
    """Waits are told in the server's own time."""
    if failure is not None and failure.kind == "stalled":
        return Failure("stalled", f"stalled: nothing came for {patience.stall_s * time_scale:.0f} s")
    if failure is not None and failure.kind == "timeout":
        return Failure("timeout", f"no end after {patience.total_s * time_scale:.0f} s")
    return failure


def _simulated_times(value: object) -> _Times | None:
    if not isinstance(value, dict):
        return None
    told = [value.get(key) for key in ("arrived_s", "first_token_s", "finished_s")]
    times = [time for one in told if (time := figure(one)) is not None]
    if len(times) != len(told) or times != sorted(times) or times[0] == times[-1]:
        return None
    arrived_s, first_s, finished_s = times
    return _Times(arrived_s, first_s, finished_s, finished_s)


def _last(told: int | None, before: int | None) -> int | None:
    return before if told is None else told


def _delta(event: dict[str, Any]) -> dict[str, object]:
    """Of an event that is known to have one."""
    delta: dict[str, object] = event["choices"][0]["delta"]
    return delta


def _says_more(event: dict[str, Any]) -> bool:
    """It tells something beside a text, which is not to be passed over."""
    told = (event.get("usage"), event.get("sglext"), event["choices"][0].get("finish_reason"))
    return any(one is not None for one in told) or bool(_delta(event).get("tool_calls"))


def _what_is_missing(answer: _Answer, estimate_tokens: bool) -> Failure | None:
    if not answer.done and answer.finish_reason is None:
        return Failure("cut", "stream cut: it ended without [DONE]")
    if answer.output_tokens is None and not (estimate_tokens and answer.pieces):
        return Failure("uncounted", "no usage in the stream, so tokens cannot be counted")
    return None
