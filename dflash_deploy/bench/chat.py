"""One streamed chat request: what is sent, what is timed, and how it can fail."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass

from dflash_deploy.bench.answer import Answer, Times
from dflash_deploy.bench.claims import GIVEN_UP, count, figure
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.measurement import RequestResult, ToolCall
from dflash_deploy.bench.transport import Address, Exchange, Failure, Patience, Reader, connect
from dflash_deploy.bench.workloads import Prompt


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


def body_of(endpoint: Endpoint, prompt: Prompt, sampling: Sampling) -> bytes:
    """The JSON of a request."""
    body: dict[str, object] = {
        "model": endpoint.model,
        "messages": [{"role": role, "content": content} for role, content in prompt.messages],
        "max_tokens": prompt.output_tokens or sampling.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if endpoint.extras:
        body["ignore_eos"] = sampling.ignore_eos and not prompt.ends_freely
    if endpoint.extras and sampling.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    if prompt.tool is not None:
        body["tools"] = [{"type": "function", "function": prompt.tool}]
    if endpoint.engine == "sglang":
        # Known since 0.5.19; passed over before.
        body["return_spec_tokens_details"] = True
    return json.dumps(body).encode()


class Question:
    """A request that is ready: its connection is open and nothing is left to do but to send it.

    Made by ``prepare``; ``ask`` once.
    """

    def __init__(
        self, exchange: Exchange | Failure, answer: Answer, request: bytes, patience: Patience
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
        held_s: float = 0.0,
        estimate_tokens: bool = False,
    ) -> Streamed:
        """Send it and time its stream; whatever goes wrong is the result's ``error``.

        Args:
            user: who asks, kept in the result.
            time_scale: server seconds that pass in a second of the clock; times are given in the server's.
            waited_s: since it was due, kept in the result.
            held_s: that the server took no connection for it: part of every time in the result.
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
        begun -= held_s
        failure = _scaled(failure, self._patience, time_scale) or _what_is_missing(answer, estimate_tokens)
        first = answer.at_s[0] if answer.at_s else ended
        last = answer.at_s[-1] if answer.at_s else first
        ours = Times(begun * time_scale, first * time_scale, last * time_scale, ended * time_scale)
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
    answer = Answer(prompt.id, long=prompt.long, ends_freely=prompt.ends_freely)
    try:
        return Question(await connect(address, tls, answer.take, reader), answer, request, patience)
    except Failure as failure:
        return Question(failure, answer, request, patience)


def _result(
    user: int,
    answer: Answer,
    times: Times,
    failure: Failure | None,
    *,
    chunk_s: tuple[float, ...] = (),
    waited_s: float = 0.0,
) -> RequestResult:
    estimated = answer.output_tokens is None
    tokens = len(answer.pieces) if estimated else answer.output_tokens or 0
    text = "".join(answer.pieces)
    hidden = 0 if answer.thinks_aloud or "</think>" in text else answer.thought_tokens
    # A chunk has a token, whatever is said of thoughts.
    shown = max(len(answer.pieces), tokens - hidden)
    steps = count(answer.spec.get("spec_verify_ct"))
    return RequestResult(
        user=user,
        prompt_id=answer.prompt_id,
        long=answer.long,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=tokens if failure is None or not estimated else 0,
        sent_s=times.sent_s,
        ttft_s=times.first_s - times.sent_s,
        decode_s=times.last_s - times.first_s,
        total_s=times.ended_s - times.sent_s,
        text=text,
        chunks=len(answer.pieces),
        error=None if failure is None else failure.reason,
        error_kind=None if failure is None else failure.kind,
        chunk_s=chunk_s,
        chunk_tokens=_shared_out(shown, [len(piece) for piece in answer.pieces]),
        hidden_tokens=max(0, tokens - shown),
        tokens_estimated=estimated and failure is None,
        cached_tokens=answer.cached_tokens,
        accept_length=figure(answer.spec.get("spec_accept_length")) if steps else None,
        accept_rate=figure(answer.spec.get("spec_accept_rate")) if steps else None,
        verify_steps=steps or None,
        finish_reason=answer.finish_reason,
        tool_calls=tuple(ToolCall(*answer.calls[place]) for place in sorted(answer.calls)),
        waited_s=waited_s,
        ends_freely=answer.ends_freely,
    )


def _shared_out(tokens: int, lengths: list[int]) -> tuple[int, ...]:
    """One token for every chunk, and the others in proportion to what its text is longer than one's."""
    spare = tokens - len(lengths)
    if spare <= 0:
        return (1,) * len(lengths)
    text = sum(lengths)
    beyond = [max(0, length * tokens - text) for length in lengths]
    total, so_far, given = sum(beyond), 0, 0
    shares: list[int] = []
    for length in beyond:
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


def _what_is_missing(answer: Answer, estimate_tokens: bool) -> Failure | None:
    if answer.finish_reason in GIVEN_UP:
        return Failure("server", f"the server gave the answer up: finish_reason {answer.finish_reason}")
    if not answer.done and answer.finish_reason is None:
        return Failure("cut", "stream cut: it ended without [DONE]")
    if answer.output_tokens is None and not (estimate_tokens and answer.pieces):
        return Failure("uncounted", "no usage in the stream, so tokens cannot be counted")
    return None
