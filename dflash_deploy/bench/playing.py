"""Rounds of one load on one live server, kept one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player
from dflash_deploy.bench.measure import DEFAULT_STALL_S, patience
from dflash_deploy.bench.measurement import LoadFigures, RequestResult
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.bench.results import Failure, LoadRows, RoundRow, round_row, tails_of
from dflash_deploy.bench.workloads import Prompt
from dflash_deploy.errors import DeployError, ExitCode

_SLOWEST_TOKENS_PER_S = 0.5
_SAMPLE_EVERY_S = 0.25


@dataclass(frozen=True)
class Rounds:
    """What is asked, how often.

    Attributes:
        users: requests at once in each round.
        output_tokens: of each answer.
        forced_length: answers have exactly that length, whatever the model wants.
        rounds: that count. ``cold``: rounds before them, which are shown and do not count.
    """

    users: int
    output_tokens: int
    rounds: int
    cold: int = 1
    forced_length: bool = True


@dataclass(frozen=True)
class Played:
    """What came of it.

    Attributes:
        rows: the rounds that went well, in order.
        failures: of the round that ended it, empty where all went well.
        faults: what is wrong with the answers.
        accept_length: tokens per verify step from the answers' own metadata, None where they have none.
        vram_used_mib: highest reading meanwhile.
    """

    rows: LoadRows
    failures: tuple[Failure, ...]
    faults: tuple[str, ...]
    accept_length: float | None
    vram_used_mib: int | None


def play(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    rounds: Rounds,
    *,
    salt: str | None,
    vram_used_mib: Callable[[], int | None] | None = None,
    read_text: bool = True,
    on_round: Callable[[str], None] = lambda _: None,
) -> Played:
    """Play all rounds, or as many as go well.

    Args:
        endpoint: the server.
        prompts: asked in turn, again from the first in the first round that counts.
        rounds: how many.
        salt: begins every prompt, with its round and user, so that no cache can help; None adds nothing.
        vram_used_mib: reads the card's use.
        read_text: judge the answers' texts.
        on_round: told what is going on, in a few words.
    """
    player = player_of(endpoint, prompts, rounds, salt=salt)
    with peak_of(vram_used_mib) as peak:
        rows, results, failed = asyncio.run(_play(player, rounds, on_round))
    return Played(
        LoadRows(users=rounds.users, rounds=rows, tails=tails_of(results)),
        failures_of(failed),
        faults_of(endpoint, results, rounds, read_text=read_text),
        LoadFigures.of(results).accept_length if results else None,
        peak(),
    )


def player_of(endpoint: Endpoint, prompts: Sequence[Prompt], rounds: Rounds, *, salt: str | None) -> Player:
    """Who plays such rounds.

    Raises:
        DeployError: the endpoint's address is none.
    """
    load = Load(
        endpoint,
        prompts,
        Sampling(rounds.output_tokens, rounds.forced_length),
        patience(DEFAULT_STALL_S, 60.0 + rounds.output_tokens / _SLOWEST_TOKENS_PER_S, endpoint.time_scale),
        salt,
        # A server of another kind may not count; what it lacks is told with the result.
        estimate_tokens=endpoint.engine is None,
    )
    try:
        return Player(load)
    except ValueError as error:
        raise DeployError(
            str(error), fix="give an address like http://127.0.0.1:30000", exit_code=ExitCode.USAGE
        ) from None


async def _play(
    player: Player, rounds: Rounds, tell: Callable[[str], None]
) -> tuple[list[RoundRow], list[RequestResult], list[RequestResult]]:
    rows: list[RoundRow] = []
    results: list[RequestResult] = []
    for number in range(rounds.cold + rounds.rounds):
        counts = number >= rounds.cold
        place = number - rounds.cold if counts else number
        name = str(place + 1) if counts else ("cold" if rounds.cold == 1 else f"cold {place + 1}")
        tell(f"round {place + 1}/{rounds.rounds}" if counts else f"{name} round")
        played = await player.round(rounds.users, "r" if counts else "w", place)
        if any(one.error is not None for one in played.requests):
            return rows, results, list(played.requests)
        rows.append(round_row(name, played, counts=counts))
        if counts:
            results.extend(played.requests)
    return rows, results, []


def faults_of(
    endpoint: Endpoint, results: Sequence[RequestResult], rounds: Rounds, *, read_text: bool
) -> tuple[str, ...]:
    """What is wrong with the answers to such rounds."""
    # To force a length is no part of OpenAI's interface, so that others than SGLang may end before.
    exact = rounds.forced_length and endpoint.engine is not None
    return find_faults(
        results,
        rounds.output_tokens if exact else None,
        read_text=read_text,
        free_end=not rounds.forced_length,
    )


def failures_of(requests: Sequence[RequestResult]) -> tuple[Failure, ...]:
    """The requests that failed, by kind."""
    found: dict[str, list[str]] = {}
    for one in requests:
        if one.error is not None:
            found.setdefault(one.error_kind or "broken", []).append(one.error)
    return tuple(
        Failure(kind=kind, count=len(errors), example=errors[0][:4096]) for kind, errors in found.items()
    )


@contextmanager
def peak_of(read: Callable[[], int | None] | None) -> Iterator[Callable[[], int | None]]:
    """The highest reading from a thread of its own, and one at the end; what it yields tells it."""
    readings: list[int] = []
    over = threading.Event()

    def look() -> None:
        reading = read() if read is not None else None
        if reading is not None:
            readings.append(reading)

    def watch() -> None:
        while not over.wait(_SAMPLE_EVERY_S):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    if read is not None:
        thread.start()
    try:
        yield lambda: max(readings, default=None)
    finally:
        over.set()
        if read is not None:
            thread.join()
            look()
