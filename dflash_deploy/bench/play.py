"""A protocol played against a server: levels of load, one after the other, and what each came to."""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player, patience, poisson, turns
from dflash_deploy.bench.measurement import LoadFigures, RequestResult, windows
from dflash_deploy.bench.protocols import Options, Protocol, prompts_of
from dflash_deploy.bench.server_side import ServerFigures, between, standing
from dflash_deploy.bench.telemetry import GpuWatch, Telemetry
from dflash_deploy.bench.workloads import Message, Prompt
from dflash_deploy.bench.workloads.lengths import Fitted, ServerCounter, fit
from dflash_deploy.machine.gpu import GpuSample

_SLOWEST_TOKENS_PER_S = 0.5
_WINDOW_S = 60.0
_LEAST_OF_WANTED = 0.9
_MOST_CACHED = 0.5
"""Of the prompts' tokens; a chat template may begin short ones alike."""
_ROOM_TOKENS = 16
"""Between a prompt with its answer and the longest context: a template may end an answer with some."""

UNCOUNTED = (
    "the server does not count its tokens: a chunk was taken for one, so the true figures are these or higher"
)


@dataclass(frozen=True)
class UserRow:
    """What one user saw, over the requests of a level."""

    user: int
    requests: int
    output_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    latency_s: float | None
    errors: int


@dataclass(frozen=True)
class Level:
    """One load, and what it came to.

    Attributes:
        label: ``cold``, ``round 2``, ``8 users``, ``minute 3``, ``4096 tokens`` …
        users: at once.
        cold: the first load after a start reads low: not to be compared with others.
        prompt_tokens: of each prompt where the protocol sets them, as the server counts.
        prefill_tokens_per_s: prompt tokens over the median TTFT, where the protocol sets them.
        requests: every one of them; none of a window.
        window: part of the level before it, which has the requests.
    """

    label: str
    users: int
    cold: bool
    figures: LoadFigures
    per_user: tuple[UserRow, ...]
    requests: tuple[RequestResult, ...]
    prompt_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    window: bool = False


@dataclass(frozen=True)
class ProtocolResult:
    """A protocol as it went.

    Attributes:
        kind: ``simulated`` where the server is a simulated one.
        levels: in the order in which they were played.
        server: the server's own view of all of it, None where it has none.
        gpu: None without a card of this machine.
        stopped: why it ended before its last level, in words; None where it did not.
        interrupted: a person ended it.
        notes: what a reader of the figures must know.
        warm_up_tokens: of answers that no level has, those that counted prompts among them.
    """

    protocol: Protocol
    endpoint: Endpoint
    kind: Literal["measured", "simulated"]
    levels: tuple[Level, ...]
    server: ServerFigures | None
    gpu: Telemetry | None
    stopped: str | None
    interrupted: bool
    notes: tuple[str, ...]
    warm_up_tokens: int = 0


def run_protocol(
    endpoint: Endpoint,
    protocol: Protocol,
    options: Options = Options(),  # noqa: B008  (frozen)
    *,
    gpu: Callable[[], GpuSample | None] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    on_level: Callable[[ProtocolResult], None] = lambda _: None,
) -> ProtocolResult:
    """Play a protocol. Whatever the server does is a value; not to be called from a coroutine.

    Ctrl-C is one as well: the result then holds what had been measured.

    Args:
        endpoint: from ``endpoint.discover``.
        protocol: one of ``PROTOCOLS``, or one like it.
        options: what a person set.
        gpu: looks at the card that serves, None without one.
        on_progress: told what is going on, in a few words.
        on_level: given what there is after each level, as if it were interrupted there.

    Raises:
        ValueError: the endpoint's address is none.
    """
    salt = secrets.token_hex(4) if options.salt == "" else options.salt
    play = _Play(endpoint, protocol, replace(options, salt=salt), on_progress, on_level)
    watch: GpuWatch | None = None
    server: ServerFigures | None = None
    interrupted = False
    try:
        before = standing(endpoint)
        with ExitStack() as stack:
            watch = stack.enter_context(GpuWatch(gpu)) if gpu is not None else None
            play.all()
        server = between(before, standing(endpoint))
    except KeyboardInterrupt:
        interrupted = True
        play.end_level()
    gpu_seen = watch.telemetry() if watch else None
    return replace(play.result(), server=server, gpu=gpu_seen, interrupted=interrupted)


def player_of(endpoint: Endpoint, protocol: Protocol, options: Options, prompts: Sequence[Prompt]) -> Player:
    """Asks these prompts as the protocol does.

    Raises:
        ValueError: the endpoint's address is none.
    """
    longest = max([protocol.output_tokens, *(prompt.output_tokens or 0 for prompt in prompts)])
    total_s = 60.0 + longest / _SLOWEST_TOKENS_PER_S
    return Player(
        Load(
            endpoint,
            prompts,
            Sampling(protocol.output_tokens),
            patience(options.stall_s, total_s, endpoint.time_scale),
            options.salt,
            options.estimate_tokens,
        )
    )


class _Play:
    """One run of a protocol, as far as it has come."""

    def __init__(
        self,
        endpoint: Endpoint,
        protocol: Protocol,
        options: Options,
        tell: Callable[[str], None],
        on_level: Callable[[ProtocolResult], None],
    ) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._options = options
        self._tell = tell
        self._on_level = on_level
        self._level = ("", 0)
        self._answers: list[RequestResult] = []
        self._levels: list[Level] = []
        self._notes: list[str] = []
        self._warm_up_tokens = 0
        self.stopped: str | None = None
        if options.salt is None:
            self._notes.append("prompts are not salted: prefix caches may have helped")

    def all(self) -> None:
        match self._protocol.shape:
            case "rounds":
                asyncio.run(self._rounds())
            case "closed":
                asyncio.run(self._closed())
            case "ladder":
                self._ladder()

    def result(self) -> ProtocolResult:
        """What there is until now, without what is known at the end alone."""
        notes = list(self._notes)
        figures = [level.figures for level in self._levels if not level.window]
        prompts = sum(one.prompt_tokens for one in figures)
        cached = sum(one.cached_tokens or 0 for one in figures)
        if self._options.salt is not None and cached > _MOST_CACHED * prompts:
            notes.append(
                f"{cached / prompts:.0%} of the prompts' tokens were in the server's prefix cache, although "
                "each prompt begins in its own way: first tokens came sooner for it"
            )
        if any(level.figures.tokens_estimated for level in self._levels):
            notes.append(UNCOUNTED)
        if any(
            one.output_tokens != self._protocol.output_tokens
            for level in self._levels
            for one in level.requests
            if one.error is None and not one.tokens_estimated and not one.ends_freely
        ):
            notes.append(f"not every answer had {self._protocol.output_tokens} tokens")
        if any(prompt.output_tokens is not None for prompt in self._options.prompts or ()):
            notes.append("answers have as many tokens as the file says at most, and may end before")
        return ProtocolResult(
            protocol=self._protocol,
            endpoint=self._endpoint,
            kind="simulated" if self._endpoint.simulated else "measured",
            levels=tuple(self._levels),
            server=None,
            gpu=None,
            stopped=self.stopped,
            interrupted=True,
            notes=tuple(notes),
            warm_up_tokens=self._warm_up_tokens,
        )

    def _player(self, prompts: Sequence[Prompt]) -> Player:
        return player_of(self._endpoint, self._protocol, self._options, prompts)

    def _prompts(self, count: int) -> Sequence[Prompt]:
        return prompts_of(self._protocol, self._options, count)

    async def _rounds(self) -> None:
        protocol = self._protocol
        for users in protocol.users:
            player = self._player(self._prompts(users * max(protocol.rounds, protocol.warm_up)))
            if player.load.salt is not None:
                # The rounds of every number of users have the same names.
                player.load = replace(player.load, salt=f"{player.load.salt}-{users}")
            for turn in turns(protocol.warm_up, protocol.rounds):
                self._tell(f"{_users(users)}, {turn.label}")
                played = await player.turn(users, turn)
                self._add(turn.label, users, played.requests, cold=not turn.counts)
                if self.stopped:
                    return

    async def _closed(self) -> None:
        protocol = self._protocol
        for number in range(protocol.passes):
            for users in protocol.users:
                await self._closed_level(users, number)
                if self.stopped:
                    return

    async def _closed_level(self, users: int, number: int) -> None:
        protocol, options = self._protocol, self._options
        requests = users * protocol.rounds
        player = self._player(self._prompts(max(requests, 64)))
        for turn in turns(protocol.warm_up, 0) if number == 0 else ():
            self._tell(f"{_users(users)}, {turn.label}")
            played = await player.round(users, f"w{users}-", turn.number)
            self._warm_up_tokens += sum(one.output_tokens for one in played.requests)
            if self._all_failed(turn.label, played.requests):
                self._add(turn.label, users, played.requests, cold=True)
                return
        # Kept from answer to answer, so that a load that is cut short leaves what it had.
        keep = self._answers.append
        name = f"{number}-{users}-"
        if options.open_loop is not None:
            # However many are waiting at once.
            self._begin_level(options.open_loop, 0)
            await player.open(self._arrivals(requests), name=name, on_answer=keep)
        else:
            self._begin_level(_users(users), users)
            limit = None if protocol.duration_s is not None else requests
            await player.closed(
                users, requests=limit, duration_s=protocol.duration_s, name=name, on_answer=keep
            )
        self.end_level()

    def _arrivals(self, requests: int) -> Sequence[float]:
        options, duration_s = self._options, self._protocol.duration_s
        if options.rate_per_s is None:
            return options.arrivals_s or ()
        if duration_s is not None:
            requests = max(1, round(options.rate_per_s * duration_s))
        return poisson(options.rate_per_s, requests, seed=options.seed)

    def _begin_level(self, label: str, users: int) -> None:
        self._tell(label)
        self._level = (label, users)

    def end_level(self) -> None:
        """Put down the level that is being played, if there is one with answers."""
        results, (label, users) = list(self._answers), self._level
        self._answers.clear()
        if not results:
            return
        open_loop = self._options.open_loop is not None
        self._add(label, users, results, by_user=not open_loop)
        if self._protocol.duration_s is not None and not open_loop:
            self._by_minute(users, results)

    def _by_minute(self, users: int, results: Sequence[RequestResult]) -> None:
        """The answers that ended in each minute, and its speed."""
        for minute, ended, figures in windows(results, _WINDOW_S):
            self._add(f"minute {minute + 1}", users, ended, window=figures)

    def _ladder(self) -> None:
        counter = ServerCounter(
            self._endpoint.base_url,
            self._endpoint.model,
            api_key=self._endpoint.api_key,
            extras=self._endpoint.extras,
        )
        for users in self._protocol.users:
            for wanted in self._protocol.prompt_tokens:
                goes_on = self._rung(users, wanted, counter)
                self._warm_up_tokens = counter.generated_tokens
                if not goes_on:
                    break
            if self.stopped:
                return

    def _rung(self, users: int, wanted: int, counter: ServerCounter) -> bool:
        """Prompts of one length; False where there is no use in longer ones."""
        protocol, longest = self._protocol, self._endpoint.context_tokens
        if longest is not None and wanted + protocol.output_tokens + _ROOM_TOKENS > longest:
            self._note(f"the context of {longest:,} tokens has no room for a prompt of {wanted:,}")
            return False
        whose = "" if users == 1 else f"{_users(users)}, "
        self._tell(f"{whose}{wanted} tokens: making prompts of that length")
        requests = users * protocol.rounds
        bases = self._prompts(requests)
        prompts = []
        for number in range(requests):
            one = self._prompt_of(bases[number % len(bases)], wanted, counter, f"{users}-{wanted}-{number}")
            if one is None:
                return self._goes_on_without(bases[number % len(bases)], wanted, counter)
            if one.tokens < wanted * _LEAST_OF_WANTED:
                self._note(
                    f"the server counts {one.tokens:,} tokens of a longer prompt too: it cuts off the rest"
                )
                return False
            prompts.append(one)
        self._tell(f"{whose}{wanted} tokens")
        player = self._player([one.prompt for one in prompts])
        player.load = replace(player.load, salt=None)
        results = asyncio.run(player.closed(users, requests=requests))
        if self._levels and all(one.error_kind == "refused" for one in results):
            self._note(f"the server refuses a prompt of {wanted:,} tokens")
            return False
        counted = [one.prompt_tokens for one in results if one.prompt_tokens]
        tokens = min(counted if counter.by_asking and counted else [one.tokens for one in prompts])
        self._add(f"{whose}{tokens} tokens", users, results, prompt_tokens=tokens)
        return self.stopped is None

    def _note(self, words: str) -> None:
        if words not in self._notes:
            self._notes.append(words)

    def _goes_on_without(self, base: Prompt, wanted: int, counter: ServerCounter) -> bool:
        """Say why there is no prompt of this length; False where there will be no longer one either."""
        bare = counter(base)
        if bare is not None and bare + _ROOM_TOKENS > wanted:
            self._note(f"a prompt itself has {bare:,} tokens: there is no level of {wanted:,}")
            return True
        if bare is not None:
            self._note(f"the server refuses a prompt of {wanted:,} tokens, or takes too long to count it")
            return False
        # Whether it is there at all is told by asking.
        results = asyncio.run(self._player([base]).closed(1, requests=1))
        if results[0].error is not None:
            self._add(f"{wanted} tokens", 1, results)
        else:
            self.stopped = f"{wanted} tokens: the server does not count a prompt's tokens"
        return False

    def _prompt_of(self, base: Prompt, wanted: int, counter: ServerCounter, name: str) -> Fitted | None:
        salt = self._options.salt
        if salt is None:
            return fit(base, wanted, counter)
        fitted = fit(base, wanted, counter, salt=f"{salt}-{name}")
        if fitted is None or not counter.by_asking:
            return fitted
        # Counting has put the prompt into the prefix cache. One that begins in another way is not there, and
        # has as many tokens, or one or two more or less.
        other = secrets.token_hex(4)
        first, *more = fitted.prompt.messages
        anew = Message(first.role, first.content.replace(salt, other, 1))
        return replace(fitted, prompt=replace(fitted.prompt, messages=(anew, *more)))

    def _add(
        self,
        label: str,
        users: int,
        results: Sequence[RequestResult],
        *,
        cold: bool = False,
        prompt_tokens: int | None = None,
        window: LoadFigures | None = None,
        by_user: bool = True,
    ) -> None:
        figures = window or LoadFigures.of(results)
        prefill = None
        # Of several users one waits for the others' prompts too.
        if (
            prompt_tokens is not None
            and users == 1
            and figures.ttft_s is not None
            and figures.ttft_s.median > 0
        ):
            prefill = prompt_tokens / figures.ttft_s.median
        self._levels.append(
            Level(
                label=label,
                users=users,
                cold=cold,
                figures=figures,
                per_user=_per_user(results) if by_user else (),
                requests=() if window else tuple(results),
                window=window is not None,
                prompt_tokens=prompt_tokens,
                prefill_tokens_per_s=prefill,
            )
        )
        if not window and not self._all_failed(label, results):
            self._on_level(self.result())

    def _all_failed(self, label: str, results: Sequence[RequestResult]) -> bool:
        if all(one.error is not None for one in results):
            self.stopped = f"{label}: {results[0].error}"
            return True
        return False


def _per_user(results: Sequence[RequestResult]) -> tuple[UserRow, ...]:
    rows = []
    for user in sorted({one.user for one in results}):
        theirs = [one for one in results if one.user == user]
        answered = [one for one in theirs if one.error is None]
        speeds = [speed for one in answered if (speed := one.decode_tokens_per_s) is not None]
        rows.append(
            UserRow(
                user=user,
                requests=len(theirs),
                output_tokens=sum(one.output_tokens for one in answered),
                ttft_s=statistics.median(one.ttft_s for one in answered) if answered else None,
                tokens_per_s=statistics.median(speeds) if speeds else None,
                latency_s=statistics.median(one.total_s for one in answered) if answered else None,
                errors=len(theirs) - len(answered),
            )
        )
    return tuple(rows)


def _users(users: int) -> str:
    return "1 user" if users == 1 else f"{users} users"
