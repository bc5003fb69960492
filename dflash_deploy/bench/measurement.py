"""What was measured, as plain values. Times are seconds of the server's own time (unscaled)."""

from __future__ import annotations

from dataclasses import dataclass


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
        error: why the request failed, or None.
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

    @property
    def decode_tokens_per_s(self) -> float | None:
        """(tokens - 1) / decode time; None where it cannot be told (error, one token, no time)."""
        if self.error or self.output_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.output_tokens - 1) / self.decode_s


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
        """Tokens of all users over the round's wall time."""
        return sum(request.output_tokens for request in self.requests) / self.wall_s


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
