"""What our client measures is what the real server says of the same answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import pytest

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import discover
from dflash_deploy.bench.load import Load, Player
from dflash_deploy.bench.measurement import LoadFigures, RequestResult
from dflash_deploy.bench.server_side import between, standing
from dflash_deploy.bench.sse import EventReader
from dflash_deploy.bench.transport import Address, Patience, connect
from dflash_deploy.bench.workloads import load
from dflash_deploy.bench.workloads.lengths import ServerCounter, fit

from .conftest import Running

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOKENS = 480
TRIES = 12
"""A busy machine holds up either clock now and then; a wrong measure is wrong every time."""

MOST_ANSWERS = 16
"""Under speculation a chat's chunks tell by their length alone which token they end with: off by two in a
hundred either way in one answer, and by none in the median of many."""

AGREES = 0.02
PATIENCE = Patience(120.0, 600.0)
_DECODE = re.compile(r"Decode batch.*?#token: (\d+).*?gen throughput \(token/s\): ([\d.]+)")


@pytest.fixture(params=["plain", "speculating"])
def running(request) -> Running:
    return request.getfixturevalue(request.param)


@dataclass(frozen=True)
class Clocked:
    """An answer by our clock: when how many of its tokens had come."""

    at_s: Sequence[float]
    tokens: Sequence[int]
    prompt_tokens: int
    logged: str
    sent_s: float = 0.0

    def latency_s(self) -> float:
        return self.at_s[-1] - self.sent_s

    def speed(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (self.at_s[-1] - self.at_s[0])

    def speed_between(self, first: int, last: int) -> float:
        """Tokens per second from one number of tokens to another."""

        def when(tokens: int) -> float:
            return next(at_s for at_s, until in zip(self.at_s, self.tokens, strict=True) if until >= tokens)

        return (last - first) / (when(last) - when(first))

    def apart_from_the_log(self) -> float:
        """By what share our speed is above the log's over the very same tokens.

        A line tells the speed since the line before, and how many tokens the pool then held.
        """
        lines = [
            (int(held) - self.prompt_tokens, float(speed)) for held, speed in _DECODE.findall(self.logged)
        ]
        lines = [line for line in lines if 0 < line[0] <= self.tokens[-1]]
        assert len(lines) >= 3, self.logged
        first, last = lines[0][0], lines[-1][0]
        seconds = sum((held - before) / speed for (before, _), (held, speed) in pairwise(lines))
        return self.speed_between(first, last) / ((last - first) / seconds) - 1


def generated(running: Running, prompt: str) -> tuple[Clocked, dict[str, object]]:
    """A streamed answer of ``/generate``, timed by our transport, and its last metadata."""
    asked = {
        "text": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    reader = EventReader()
    seen: list[tuple[float, dict[str, object]]] = []

    def take(piece: bytes, now: float) -> bool:
        for data in reader.feed(piece):
            if data == b"[DONE]":
                return True
            seen.append((now, json.loads(data)["meta_info"]))
        return False

    async def play() -> float:
        address = Address.parse(running.launch.base_url)
        exchange = await connect(address, None, take)
        sent_s = exchange.send(address.post("/generate", json.dumps(asked).encode(), {}), PATIENCE)
        assert await exchange.over() is None
        return sent_s

    logged = log_of(running)
    sent_s = asyncio.run(play())
    last = seen[-1][1]
    clocked = Clocked(
        [now for now, _ in seen],
        [int(str(meta["completion_tokens"])) for _, meta in seen],
        int(str(last["prompt_tokens"])),
        logged(),
        sent_s,
    )
    return clocked, last


def chatted(running: Running, salt: str) -> tuple[Clocked, RequestResult]:
    """An answer as a bench asks for it."""
    player = Player(
        Load(discover(running.launch.base_url), load("prose")[:1], Sampling(TOKENS), PATIENCE, salt)
    )
    logged = log_of(running)
    (result,) = asyncio.run(player.closed(1, requests=1))
    assert result.error is None, result.error
    assert result.output_tokens == TOKENS
    tokens = list(accumulate(result.chunk_tokens))
    return Clocked(result.chunk_s, tokens, result.prompt_tokens, logged()), result


def log_of(running: Running) -> Callable[[], str]:
    """What the server logs from now on."""
    before = running.server.log_path.stat().st_size

    def since() -> str:
        with running.server.log_path.open("rb") as log:
            log.seek(before)
            return log.read().decode()

    return since


def test_speed_is_that_of_the_log_and_of_the_answers_metadata(running):
    by_log, by_metadata = [], []
    for number in range(TRIES):
        clocked, meta = generated(running, f"Question {number}: explain what a lock file is.")
        assert clocked.tokens[-1] == TOKENS
        by_log.append(abs(clocked.apart_from_the_log()))
        apart = [abs(clocked.latency_s() / float(str(meta["e2e_latency"])) - 1)]
        # Told with --enable-metrics alone.
        if running.launch.argv.count("--enable-metrics"):
            apart.append(abs(clocked.speed() / float(str(meta["decode_throughput"])) - 1))
        by_metadata.append(max(apart))
        if min(by_log) <= AGREES and min(by_metadata) <= AGREES:
            return
    pytest.fail(f"apart from the log by {by_log}, from the metadata by {by_metadata}")


def test_a_benchs_speed_is_that_of_the_log(running):
    apart: list[float] = []
    for number in range(MOST_ANSWERS):
        clocked, result = chatted(running, f"speed-{number}")
        assert result.decode_tokens_per_s is not None
        apart.append(clocked.apart_from_the_log())
        if abs(median(apart)) <= AGREES:
            return
    pytest.fail(f"apart by {apart}")


def test_accept_length_is_the_servers_own(speculating):
    _, meta = generated(speculating, "Tell me of draft tokens.")
    steps = int(str(meta["spec_verify_ct"]))
    assert meta["spec_accept_length"] == TOKENS / steps

    endpoint = discover(speculating.launch.base_url)
    before = standing(endpoint)
    _, result = chatted(speculating, "accept")
    told = between(before, standing(endpoint))
    assert result.verify_steps
    assert result.accept_length == TOKENS / result.verify_steps
    assert 0 < result.accept_rate < 1
    assert told is not None
    assert told.generated_tokens == TOKENS
    assert told.accept_length == LoadFigures.of([result]).accept_length == result.accept_length
    assert told.queue_s is not None


def test_without_speculation_there_is_no_accept_length(plain):
    _, result = chatted(plain, "none")
    assert result.accept_length is None
    assert LoadFigures.of([result]).accept_length is None


def test_a_prompt_of_an_exact_length(plain):
    endpoint = discover(plain.launch.base_url)
    count = ServerCounter(endpoint.base_url, endpoint.model, api_key=None)
    fitted = fit(load("prose")[0], 700, count, salt="exact")
    assert fitted is not None
    assert fitted.tokens == 700
    player = Player(Load(endpoint, [fitted.prompt], Sampling(8), PATIENCE, None))
    (result,) = asyncio.run(player.closed(1, requests=1))
    assert result.prompt_tokens == 700
