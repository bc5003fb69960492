"""What was measured, as plain values. Times are seconds of the server's own time (unscaled)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

ErrorKind = Literal[
    "unreachable",
    "untrusted",
    "busy",
    "denied",
    "absent",
    "redirected",
    "refused",
    "http",
    "no-stream",
    "stalled",
    "timeout",
    "cut",
    "broken",
    "server",
    "uncounted",
]
"""How a request failed: no connection; none by TLS; 429 or 503; 401 or 403; 404 or 405; 3xx; another 4xx;
another status; an answer that is no stream of events; nothing came for long; no end; the stream ended early;
what came is not the protocol; an error told in the stream; no token count."""


_AT_ONCE_S = 2e-4
"""Chunks nearer to each other are of one step, or out of a buffer."""

_FASTEST_TOKENS_PER_S = 50_000.0
"""No engine decodes one answer as fast: what seems to be came out of a buffer."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the model called, with its arguments as it wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True)
class RequestResult:
    """One streamed request.

    Attributes:
        user: index of the concurrent user that sent it.
        prompt_tokens: tokens of the prompt, from the server's ``usage``.
        output_tokens: tokens generated, from the server's ``usage`` and never from counting chunks.
        sent_s: when it was sent, on a clock that the requests of one round share.
        ttft_s: from sending until the first chunk that carries text.
        decode_s: from the first chunk with text to the last.
        total_s: from sending until the stream's end.
        text: what was generated.
        chunks: chunks that carried text; each holds one token or more.
        error: why the request failed, or None; then the times are those until it failed.
        error_kind: the same in a word.
        chunk_s: when each chunk with text came, from sending.
        chunk_tokens: tokens of each, those that were shown shared out by length of text.
        hidden_tokens: of ``output_tokens``, thoughts that the server keeps to itself.
        tokens_estimated: the server does not count, so a chunk was taken for a token: the true number is
            this or higher.
        cached_tokens: of the prompt, found in the server's prefix cache; None where it does not say.
        accept_length: tokens a verify step gave in this answer, the bonus token among them; None where the
            server does not say or does not speculate. ``accept_rate``: drafts accepted of those proposed.
        verify_steps: of this answer.
        finish_reason: as the server puts it.
        tool_calls: made by the model.
        waited_s: from the moment at which it was due until it was sent.
        ends_freely: no length was asked for.
        prompt_id: of the question, whatever salt it began with; ``long`` where it wants a long answer.
    """

    user: int
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    ttft_s: float
    decode_s: float
    total_s: float
    text: str
    chunks: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    hidden_tokens: int = 0
    tokens_estimated: bool = False
    cached_tokens: int | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    verify_steps: int | None = None
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    waited_s: float = 0.0
    ends_freely: bool = False
    prompt_id: str = ""
    long: bool = True

    @property
    def arrivals(self) -> Iterator[tuple[float, int]]:
        """When tokens came, and how many: chunks that come at once are one arrival."""
        came_s, before_s, so_far = 0.0, 0.0, 0
        for at_s, tokens in zip(self.chunk_s, self.chunk_tokens, strict=False):
            if so_far and at_s - before_s >= _AT_ONCE_S:
                yield came_s, so_far
                so_far = 0
            came_s = came_s if so_far else at_s
            so_far += tokens
            before_s = at_s
        if so_far:
            yield came_s, so_far

    @property
    def token_waits(self) -> Iterator[tuple[float, int]]:
        """The wait for a token after the first arrival, and for how many: what came at once shares it."""
        for (earlier_s, _), (later_s, tokens) in pairwise(self.arrivals):
            yield (later_s - earlier_s) / tokens, tokens

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first arrival, over the time that they took.

        None where it cannot be told: an error, one token, no time, or all at once out of a buffer.
        """
        if self.error or self.decode_s <= 0:
            return None
        _, at_first = next(self.arrivals, (0.0, 1))
        speed = (self.output_tokens - self.hidden_tokens - at_first) / self.decode_s
        return speed if 0 < speed <= _FASTEST_TOKENS_PER_S else None


@dataclass(frozen=True)
class Round:
    """All users at once, one request each."""

    requests: tuple[RequestResult, ...]

    @property
    def wall_s(self) -> float:
        """From the first send to the last end."""
        ends = [request.sent_s + request.total_s for request in self.requests]
        return max(ends) - min(request.sent_s for request in self.requests)

    @property
    def total_tokens_per_s(self) -> float:
        """Tokens of all users over the round's wall time; 0 where it took none."""
        tokens = sum(request.output_tokens for request in self.requests)
        return tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class Quantiles:
    """A figure over many requests or tokens."""

    median: float
    low: float
    high: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        """None where there is no value."""
        return cls.of_counted((value, 1) for value in values)

    @classmethod
    def of_counted(cls, values: Iterable[tuple[float, int]]) -> Quantiles | None:
        """Of values that each stand for so many, one or more; a server may claim a billion tokens."""
        import numpy as np  # noqa: PLC0415 - a tenth of a second, for whoever reads records alone

        known = np.fromiter(values, dtype=np.dtype([("value", "f8"), ("count", "i8")]))
        if not len(known):
            return None
        known.sort(order="value")
        until = known["count"].cumsum()

        def at(share: float) -> float:
            place = share * (int(until[-1]) - 1)
            below = int(place)
            near = [
                float(known["value"][until.searchsorted(min(number, int(until[-1]) - 1), side="right")])
                for number in (below, below + 1)
            ]
            return near[0] + (near[1] - near[0]) * (place - below)

        return cls(at(0.5), float(known["value"][0]), float(known["value"][-1]), at(0.95), at(0.99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of the way through sorted values, between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class LoadFigures:
    """What many requests came to.

    Attributes:
        requests: that were sent, the failed ones among them.
        errors: how many failed, by kind; ``first_error`` is one of them in words.
        wall_s: from the first send to the last end.
        prompt_tokens: of the answered ones, as ``output_tokens`` and all that follows.
        cached_tokens: of the prompts, found in prefix caches; None where the server does not say.
        total_tokens_per_s: output tokens over ``wall_s``.
        user_tokens_per_s: decode speed of one answer, from its first chunk to its last.
        inter_token_s: over all tokens; those that came at once share the wait for them.
        latency_s: from sending to the end of the answer.
        waited_s: from the moment at which a request was due until it was sent.
        accept_length: tokens per verify step over all answers, from their own metadata.
        accept_rate: drafts accepted of those proposed, mean over the answers weighted by verify steps.
        tokens_estimated: the server does not count some answers' tokens; they are that many or more.
    """

    requests: int
    errors: dict[ErrorKind, int]
    first_error: str | None
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    total_tokens_per_s: float
    user_tokens_per_s: Quantiles | None
    ttft_s: Quantiles | None
    inter_token_s: Quantiles | None
    latency_s: Quantiles | None
    waited_s: Quantiles | None
    accept_length: float | None
    accept_rate: float | None
    tokens_estimated: bool

    @classmethod
    def of(cls, results: Sequence[RequestResult]) -> LoadFigures:
        """The figures of one load; there is one request or more."""
        answered = [one for one in results if one.error is None]
        errors = Counter(one.error_kind or "broken" for one in results if one.error is not None)
        wall_s = max(one.sent_s + one.total_s for one in results) - min(one.sent_s for one in results)
        tokens = sum(one.output_tokens for one in answered)
        cached = [one.cached_tokens for one in answered if one.cached_tokens is not None]
        return cls(
            requests=len(results),
            errors=dict(errors.most_common()),
            first_error=next((one.error for one in results if one.error is not None), None),
            wall_s=wall_s,
            prompt_tokens=sum(one.prompt_tokens for one in answered),
            output_tokens=tokens,
            cached_tokens=sum(cached) if cached else None,
            total_tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
            user_tokens_per_s=Quantiles.of(
                speed for one in answered if (speed := one.decode_tokens_per_s) is not None
            ),
            ttft_s=Quantiles.of(one.ttft_s for one in answered),
            inter_token_s=Quantiles.of_counted(wait for one in answered for wait in one.token_waits),
            latency_s=Quantiles.of(one.total_s for one in answered),
            waited_s=Quantiles.of(one.waited_s for one in results),
            accept_length=_per_step([(one.output_tokens, one.verify_steps) for one in answered]),
            accept_rate=_mean_by_steps([(one.accept_rate, one.verify_steps) for one in answered]),
            tokens_estimated=any(one.tokens_estimated for one in answered),
        )


def windows(
    results: Sequence[RequestResult], window_s: float
) -> Iterator[tuple[int, list[RequestResult], LoadFigures]]:
    """A long load part by part: its number, the answers that ended in it, and their figures.

    Its speed is that of the tokens that came in it, whichever answers they belong to: answers rarely end with
    a part. As soon as one of the users is done, the others alone are no load like that before, and a rest
    that is shorter than half a part is none.
    """
    begun_s = min(one.sent_s for one in results)
    done_s: dict[int, float] = {}
    for one in results:
        done_s[one.user] = max(done_s.get(one.user, 0.0), one.sent_s + one.total_s - begun_s)
    lasts_s = min(done_s.values())
    parts = max(1, int(lasts_s / window_s + 0.5))
    tokens = [0.0] * parts
    ended: list[list[RequestResult]] = [[] for _ in tokens]

    def part_at(time_s: float) -> int | None:
        number = int(time_s / window_s)
        return number if number < parts and time_s <= lasts_s else None

    for one in results:
        sent_s = one.sent_s - begun_s
        if (part := part_at(sent_s + one.total_s)) is not None:
            ended[part].append(one)
        if one.error is not None:
            continue
        # Thoughts that were not shown were made at the same time.
        made_of_shown = one.output_tokens / max(1, sum(one.chunk_tokens))
        for at_s, count in zip(one.chunk_s, one.chunk_tokens, strict=True):
            if (part := part_at(sent_s + at_s)) is not None:
                tokens[part] += count * made_of_shown
    for number, answers in enumerate(ended):
        length_s = min(window_s, lasts_s - number * window_s)
        if answers and length_s > 0:
            speed = tokens[number] / length_s
            yield number, answers, replace(LoadFigures.of(answers), wall_s=length_s, total_tokens_per_s=speed)


def _per_step(pairs: Sequence[tuple[int, int | None]]) -> float | None:
    steps = sum(steps for _, steps in pairs if steps)
    return sum(tokens for tokens, count in pairs if count) / steps if steps else None


def _mean_by_steps(pairs: Sequence[tuple[float | None, int | None]]) -> float | None:
    known = [(rate, steps) for rate, steps in pairs if rate is not None and steps]
    total = sum(steps for _, steps in known)
    return sum(rate * steps for rate, steps in known) / total if total else None


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a figure over the measured rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class RoundFigures:
    """One measured round in four figures (medians over its users, but for the total).

    Round *n* asks the same questions whatever the server, so two servers are compared round by round.
    """

    total_tokens_per_s: float
    user_tokens_per_s: float
    ttft_s: float
    latency_s: float


@dataclass(frozen=True)
class Measurement:
    """The measured rounds of one load level, warm-up left out.

    Attributes:
        users: requests at once.
        total_tokens_per_s: over rounds.
        user_tokens_per_s: decode speed that one user sees, over all requests of all rounds.
        ttft_s: over all requests; ``ttft_p95_s`` is their 95th percentile.
        latency_s: from sending to the end of the answer, over all requests.
        cold_ttft_s: median TTFT of the warm-up round: the first one after the start.
        accept_length: tokens per verify step including the bonus token, or None without speculation.
        vram_used_mib: highest use of the card's memory seen while measuring, or None without a card.
        faults: what is wrong with the answers (an id and an example), empty where all is well.
        per_round: the figures of each round, in order.
        samples: how some answers begin, for a person to judge.
    """

    users: int
    rounds: int
    total_tokens_per_s: Spread
    user_tokens_per_s: Spread
    ttft_s: Spread
    latency_s: Spread
    ttft_p95_s: float
    cold_ttft_s: float
    output_tokens: int
    accept_length: float | None = None
    vram_used_mib: int | None = None
    vram_total_mib: int | None = None
    faults: tuple[str, ...] = ()
    per_round: tuple[RoundFigures, ...] = ()
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotMeasured:
    """The server did not get through the load, so there is no figure to trust.

    Attributes:
        reason: the first error, in words.
        errors: every error of the round that ended it.
        completed_rounds: measured rounds that had gone well before.
    """

    reason: str
    errors: tuple[str, ...]
    completed_rounds: int
