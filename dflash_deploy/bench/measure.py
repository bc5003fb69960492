"""Load one running server with N users at once, and say what they saw."""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Callable, Sequence

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import DEFAULT_STALL_S, Load, Player, patience, turns
from dflash_deploy.bench.measurement import (
    Measurement,
    NotMeasured,
    RequestResult,
    Round,
    RoundFigures,
    Spread,
    percentile,
)
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.bench.workloads import Prompt

_SAMPLE_CHARACTERS = 600
_MOST_SAMPLES = 3


def measure(
    base_url: str,
    *,
    users: int,
    prompts: Sequence[Prompt],
    output_tokens: int,
    rounds: int,
    warm_up: int,
    time_scale: float = 1.0,
    vram: Callable[[], int | None] | None = None,
    vram_total_mib: int | None = None,
    vram_every_s: float = 0.25,
    accept_length: Callable[[], float | None] | None = None,
    timeout_s: float,
    stall_s: float = DEFAULT_STALL_S,
    model: str = "default",
    ignore_eos: bool = True,
    check_output: bool = True,
    salt: str | None = "",
    on_round: Callable[[str], None] | None = None,
) -> Measurement | NotMeasured:
    """Run the warm-up rounds and the measured rounds of one load level.

    Args:
        base_url: root of a server with OpenAI's chat interface, without ``/v1``.
        users: requests at once in each round.
        prompts: asked in turn, again from the first in the first measured round.
        output_tokens: tokens of each answer.
        rounds: measured rounds.
        warm_up: rounds before them that count for ``cold_ttft_s`` alone; at least one.
        time_scale: server seconds that pass in a second of the clock.
        vram: the card's memory in use now, in MiB; asked from a thread.
        vram_total_mib: the card's memory, kept in the result.
        vram_every_s: how often ``vram`` is asked, on the clock; besides, after every round.
        accept_length: the server's own figure, asked once after the last round.
        timeout_s: bound on one answer, in server seconds.
        stall_s: bound on the wait for any chunk, in server seconds.
        model: name to ask for.
        ignore_eos: generate exactly ``output_tokens`` whatever the model wants.
        check_output: look at the text of the answers; off for a model whose text means nothing.
        salt: starts every prompt, with round and user, so that no cache can help; the empty default
            makes a random one, None adds nothing.
        on_round: told what is going on, in a few words.
    """
    if min(users, rounds, warm_up, output_tokens, len(prompts)) < 1:
        raise ValueError("users, rounds, warm_up, output_tokens and prompts are one or more")
    load = Load(
        Endpoint(base_url, model, time_scale=time_scale),
        prompts,
        Sampling(output_tokens, ignore_eos),
        patience(stall_s, timeout_s, time_scale),
        secrets.token_hex(4) if salt == "" else salt,
    )
    try:
        player = Player(load)
    except ValueError as error:
        return NotMeasured(str(error), (), 0)
    peak = _Peak(vram, vram_every_s)
    played = asyncio.run(
        _play_all(
            player,
            users,
            rounds,
            warm_up,
            peak=peak,
            tell=on_round or (lambda _: None),
        )
    )
    if isinstance(played, NotMeasured):
        return played
    cold, measured = played
    requests = [request for one in measured for request in one.requests]
    return Measurement(
        users=users,
        rounds=len(measured),
        total_tokens_per_s=_spread([one.total_tokens_per_s for one in measured]),
        user_tokens_per_s=_spread([_speed(request) for request in requests]),
        ttft_s=_spread([request.ttft_s for request in requests]),
        latency_s=_spread([request.total_s for request in requests]),
        ttft_p95_s=percentile(sorted(request.ttft_s for request in requests), 0.95),
        cold_ttft_s=statistics.median(request.ttft_s for request in cold.requests),
        output_tokens=sum(request.output_tokens for request in requests),
        accept_length=accept_length() if accept_length else None,
        vram_used_mib=peak.mib,
        vram_total_mib=vram_total_mib,
        faults=find_faults(requests, output_tokens if ignore_eos else None, read_text=check_output),
        per_round=tuple(_figures(one) for one in measured),
        samples=tuple(one.requests[0].text[:_SAMPLE_CHARACTERS] for one in measured[:_MOST_SAMPLES]),
    )


class _Peak:
    """The highest reading of a gauge that may have nothing to say."""

    def __init__(self, read: Callable[[], int | None] | None, every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self.mib: int | None = None

    async def watch(self) -> None:
        while self._read is not None:
            await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        if self._read is not None:
            # A reading may take the driver a while, and streams are being timed meanwhile.
            reading = await asyncio.to_thread(self._read)
            self.mib = max(filter(None, (self.mib, reading)), default=None)


async def _play_all(
    player: Player,
    users: int,
    rounds: int,
    warm_up: int,
    *,
    peak: _Peak,
    tell: Callable[[str], None],
) -> tuple[Round, list[Round]] | NotMeasured:
    watch = asyncio.create_task(peak.watch())
    try:
        cold: Round | None = None
        measured: list[Round] = []
        for turn in turns(warm_up, rounds):
            kind, of = ("round", rounds) if turn.counts else ("warm-up round", warm_up)
            tell(f"{kind} {turn.number + 1}/{of}")
            played = await player.turn(users, turn)
            if failure := _failure(played, len(measured)):
                return failure
            cold = cold or played
            if not turn.counts:
                continue
            measured.append(played)
            await peak.look()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    assert cold is not None  # noqa: S101  (warm_up is one or more)
    return cold, measured


def _failure(played: Round, completed: int) -> NotMeasured | None:
    errors = [f"user {request.user}: {request.error}" for request in played.requests if request.error]
    untimed = [
        f"user {request.user}: {request.output_tokens} tokens at once: no decode speed to tell"
        for request in played.requests
        if not request.error and request.decode_tokens_per_s is None and request.text
    ]
    found = tuple(errors or untimed)
    return NotMeasured(found[0], found, completed) if found else None


def _speed(request: RequestResult) -> float:
    return request.decode_tokens_per_s or 0.0


def _figures(one: Round) -> RoundFigures:
    return RoundFigures(
        total_tokens_per_s=one.total_tokens_per_s,
        user_tokens_per_s=statistics.median(_speed(request) for request in one.requests),
        ttft_s=statistics.median(request.ttft_s for request in one.requests),
        latency_s=statistics.median(request.total_s for request in one.requests),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
