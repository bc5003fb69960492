"""Sending many requests: all users at once, users one after the other's answer, or at given moments."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from dflash_deploy.bench.chat import Question, Sampling, Streamed, prepare
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.measurement import RequestResult, Round
from dflash_deploy.bench.transport import Address, Patience, Reader, tls_context
from dflash_deploy.bench.workloads import Prompt

_CONNECT_AHEAD_S = 0.05
"""A request at a given moment opens its connection so long before."""

_NOT_TAKEN_S = 0.5
"""A connection that takes longer was not taken at first: its user waits for the server, as for an answer.

A server whose queue of connections is full leaves them without a word, and TCP asks again after a second.
"""

_MOST_FAILURES = 20
"""One after the other, and a load ends: the server is not to be stormed, nor a person kept waiting."""

_AFTER_FAILURE_S = 0.1


DEFAULT_STALL_S = 120.0
"""Server seconds without a chunk after which a stream counts as stalled; a long prefill takes less."""

_LEAST_STALL_S = 10.0
_LEAST_TIMEOUT_S = 20.0
"""Bounds on waiting never get shorter than these by the clock, however fast simulated time runs."""


@dataclass(frozen=True)
class Load:
    """Who is asked what, and how.

    Attributes:
        endpoint: the server.
        prompts: asked in turn, and again from the first.
        sampling: how answers are asked for.
        patience: bounds on waiting, by the clock.
        salt: begins every prompt, with its number, so that no prefix cache can help; None adds nothing.
        estimate_tokens: take a chunk for a token where the server does not count.
    """

    endpoint: Endpoint
    prompts: Sequence[Prompt]
    sampling: Sampling
    patience: Patience
    salt: str | None = field(default_factory=lambda: secrets.token_hex(4))
    estimate_tokens: bool = False

    def prompt(self, number: int, name: str) -> Prompt:
        """The prompt of this number, salted under this name."""
        chosen = self.prompts[number % len(self.prompts)]
        # In front, because a prefix cache matches from the first token on.
        return chosen if self.salt is None else chosen.salted(f"{self.salt}-{name}")


class Turn(NamedTuple):
    """One of several rounds.

    Attributes:
        label: for people.
        salt: with ``number``, what makes its prompts its own.
        counts: is measured; the others warm up.
    """

    label: str
    salt: str
    number: int
    counts: bool


def turns(warm_up: int, rounds: int) -> Iterator[Turn]:
    """The rounds of a load: those that warm up and those that count, either from the first prompt on."""
    for number in range(warm_up):
        yield Turn(f"warm-up {number + 1}" if number else "cold", "w", number, counts=False)
    for number in range(rounds):
        yield Turn(f"round {number + 1}", "r", number, counts=True)


class Player:
    """Sends a load's requests from within one event loop.

    Raises:
        ValueError: the endpoint's address is none.
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self._address = Address.parse(load.endpoint.base_url)
        self._tls: ssl.SSLContext | None = tls_context(self._address)

    async def turn(self, users: int, turn: Turn) -> Round:
        """One of ``turns``."""
        return await self.round(users, turn.salt, turn.number)

    async def round(self, users: int, name: str, number: int) -> Round:
        """All users at once, one request each."""
        fast = self.load.endpoint.time_scale != 1
        together = f"{secrets.token_hex(4)}/{users}" if fast else None
        with Reader() as reader:
            questions = [
                asyncio.create_task(
                    self._prepare(
                        reader,
                        self.load.prompt(number * users + user, f"{name}{number}-{user}"),
                        together=together,
                    )
                )
                for user in range(users)
            ]
            # A server may take no more connections until it has answered the first.
            _, held = await asyncio.wait(questions, timeout=_NOT_TAKEN_S)
            begun = time.perf_counter()

            async def ask(user: int) -> Streamed:
                question = await questions[user]
                held_s = time.perf_counter() - begun if questions[user] in held else 0.0
                return await self._ask(question, user, held_s=held_s)

            with no_collections():
                streamed = await asyncio.gather(*(ask(user) for user in range(users)))
        told = [one.by_the_servers for one in streamed if one.by_the_servers is not None]
        # By our clock every delay of ours counts as many times over; but one round has one clock.
        if fast and len(told) == users:
            return Round(tuple(told))
        return Round(tuple(one.by_our_clock for one in streamed))

    async def closed(
        self,
        users: int,
        *,
        requests: int | None = None,
        duration_s: float | None = None,
        name: str = "",
        on_answer: Callable[[RequestResult], None] = lambda _: None,
    ) -> list[RequestResult]:
        """Each user sends the next request as soon as the last is answered, as long as any is.

        Args:
            users: at once.
            requests: to send in all, None for as many as fit.
            duration_s: no request begins later than this, in seconds of the clock; None for no end.
            name: goes into the salt, so that two loads with one salt ask different prompts.
            on_answer: told of every answer.
        """
        if requests is None and duration_s is None:
            raise ValueError("requests or duration_s: one of them ends the load")
        numbers: Iterator[int] = count() if requests is None else iter(range(requests))
        begun = time.perf_counter()
        results: list[RequestResult] = []
        failed = 0

        async def user(index: int) -> None:
            nonlocal failed
            while failed < _MOST_FAILURES and (
                duration_s is None or time.perf_counter() - begun < duration_s
            ):
                number = next(numbers, None)
                if number is None:
                    return
                connecting = time.perf_counter()
                question = await self._prepare(reader, self.load.prompt(number, f"{name}{number}"))
                held_s = time.perf_counter() - connecting
                held_s = held_s if held_s > _NOT_TAKEN_S else 0.0
                result = (await self._ask(question, index, held_s=held_s)).by_our_clock
                results.append(result)
                on_answer(result)
                failed = failed + 1 if result.error else 0
                if failed:
                    await asyncio.sleep(_AFTER_FAILURE_S)

        with Reader() as reader, no_collections():
            await asyncio.gather(*(user(index) for index in range(users)))
        return results

    async def open(
        self,
        arrivals_s: Sequence[float],
        *,
        name: str = "",
        on_answer: Callable[[RequestResult], None] = lambda _: None,
    ) -> list[RequestResult]:
        """A request at each of these moments, however many are still being answered, as long as any is.

        Args:
            arrivals_s: seconds of the clock from now on, in order.
            name: goes into the salt.
            on_answer: told of every answer.
        """
        begun = time.perf_counter() + _CONNECT_AHEAD_S

        in_vain = asyncio.Event()
        failed = 0

        async def one(number: int, due: float) -> RequestResult | None:
            nonlocal failed
            with suppress(TimeoutError):
                async with asyncio.timeout(due - _CONNECT_AHEAD_S - time.perf_counter()):
                    await in_vain.wait()
            if in_vain.is_set():
                return None
            connecting = time.perf_counter()
            question = await self._prepare(reader, self.load.prompt(number, f"{name}{number}"))
            ready = time.perf_counter()
            held_s = max(0.0, ready - due) if ready - connecting > _NOT_TAKEN_S else 0.0
            await asyncio.sleep(due - ready)
            late_s = max(0.0, time.perf_counter() - due - held_s)
            result = (await self._ask(question, number, waited_s=late_s, held_s=held_s)).by_our_clock
            on_answer(result)
            # One that is busy may be what the load is to show.
            failed = failed + 1 if result.error and result.error_kind != "busy" else 0
            if failed >= _MOST_FAILURES:
                in_vain.set()
            return result

        with Reader() as reader, no_collections():
            results = await asyncio.gather(
                *(one(number, begun + arrival_s) for number, arrival_s in enumerate(arrivals_s))
            )
        return [result for result in results if result is not None]

    async def _prepare(self, reader: Reader, prompt: Prompt, *, together: str | None = None) -> Question:
        load = self.load
        return await prepare(
            load.endpoint,
            prompt,
            load.sampling,
            load.patience,
            address=self._address,
            tls=self._tls,
            reader=reader,
            together=together,
        )

    async def _ask(
        self, question: Question, user: int, *, waited_s: float = 0.0, held_s: float = 0.0
    ) -> Streamed:
        return await question.ask(
            user=user,
            time_scale=self.load.endpoint.time_scale,
            waited_s=waited_s,
            held_s=held_s,
            estimate_tokens=self.load.estimate_tokens,
        )


def patience(stall_s: float, total_s: float, time_scale: float) -> Patience:
    """Bounds in server seconds as bounds by the clock."""
    return Patience(
        _on_the_clock(stall_s, time_scale, _LEAST_STALL_S),
        _on_the_clock(total_s, time_scale, _LEAST_TIMEOUT_S),
    )


def _on_the_clock(limit_s: float, time_scale: float, least_s: float) -> float:
    return limit_s if time_scale == 1 else max(limit_s / time_scale, least_s)


def poisson(rate_per_s: float, requests: int, *, seed: int = 0) -> tuple[float, ...]:
    """Moments of independent arrivals; the same seed gives the same ones.

    Args:
        rate_per_s: arrivals in a second on average.
        requests: how many.
        seed: of the random numbers.
    """
    if rate_per_s <= 0:
        raise ValueError("a rate is above zero")
    generator = random.Random(seed)  # noqa: S311  (no secret)
    at_s, moments = 0.0, []
    for _ in range(requests):
        moments.append(at_s)
        at_s += generator.expovariate(rate_per_s)
    return tuple(moments)


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's garbage collector from stopping streams that are being timed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
