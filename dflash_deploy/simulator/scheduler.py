"""The batch: who waits, who runs, and what each step yields. Simulated time only; no clock, no network."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_deploy.simulator import calibration as fitted
from dflash_deploy.simulator import logs
from dflash_deploy.simulator.boot import SchedulerDiedError
from dflash_deploy.simulator.physics import memory
from dflash_deploy.simulator.physics.acceptance import Draws, acceptance
from dflash_deploy.simulator.prefix_cache import Prefix, PrefixCache

if TYPE_CHECKING:
    from dflash_deploy.simulator.boot import Up

# SGLang's guess of how much of what running requests may still ask for they will: from the first down to the
# second in so many steps, and up again when it had to send requests back.
_RATIO_FIRST, _RATIO_LEAST, _RATIO_STEPS = 0.7, 0.098, 600
_CLIP_NEW_TOKENS = 4096
_ids = itertools.count(1)


@dataclass(eq=False)
class Job:
    """One generation.

    Attributes:
        new_tokens: tokens the answer will have.
        stops_by_itself: it ends with an end-of-text token rather than at the limit.
        probe: a health check or the warm-up, which costs little and changes nothing.
        arrived_s: simulated time at which it was handed to the scheduler.
    """

    prompt_tokens: int
    new_tokens: int
    task: str = "instruction"
    fingerprint: int = 0
    boundaries: tuple[Prefix, ...] = ()
    stops_by_itself: bool = False
    probe: bool = False
    arrived_s: float = 0.0
    id: int = field(default_factory=lambda: next(_ids))
    cached: int = 0
    prefilled: int = 0
    produced: int = 0
    retractions: int = 0
    verify_steps: int = 0
    histogram: list[int] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    aborted: bool = False
    draws: Draws | None = None

    @property
    def context(self) -> int:
        """Tokens it holds in the pools."""
        return self.prompt_tokens + self.produced

    @property
    def to_prefill(self) -> int:
        """Tokens that must go through before it can go on."""
        return self.context - self.prefilled


@dataclass(frozen=True)
class Output:
    """What one step gave one job."""

    job: Job
    tokens: int
    finished: bool
    at_s: float


@dataclass
class Counters:
    """Sums since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    verify_steps: int = 0
    accepted: int = 0
    graph_steps: int = 0


@dataclass
class _Window:
    """What the next Decode line tells of."""

    since_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    verify: int = 0


@dataclass(frozen=True)
class _Step:
    ends_s: float
    prefill: tuple[tuple[Job, int], ...] = ()
    decode: tuple[Job, ...] = ()


class Scheduler:
    """All generations of one server.

    ``submit`` and ``abort`` take effect between steps; ``advance`` runs every step that ends by a given time
    and returns what they yielded. Memory that grows under load is checked before each step.
    """

    def __init__(
        self,
        up: Up,
        *,
        seed: int = 0,
        log: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
        slow: float = 1.0,
    ) -> None:
        """Begin with nothing to do.

        Args:
            up: the server.
            seed: of the noise.
            log: takes what SGLang would print.
            check: called before every decode step; may raise ``SchedulerDiedError``.
            slow: every step takes so many times as long.
        """
        settings = up.settings
        self.up = up
        self.counters = Counters()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.last_throughput = 0.0
        self.accept_length: float | None = None
        self.accept_rate: float | None = None
        self.reserved_gib = 0.0
        hybrid = settings.target.linear is not None
        spare = max(0, up.pools.slots - up.pools.running) if hybrid else None
        self.cache = PrefixCache(spare)
        self._log = log or (lambda _: None)
        self._check = check or (lambda: None)
        self._slow = slow
        self._rng = random.Random(f"steps/{settings.card.id}/{seed}")  # noqa: S311 - not for secrets
        self._seed = seed
        self._now_s = 0.0
        self._ratio = _RATIO_FIRST
        self._step: _Step | None = None
        self._cold_prefill = True
        self._cold_decode = True
        self._most_running = 0
        self._largest_pass = 0
        self._window = _Window()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self._step is None and not self.waiting and not self.running

    @property
    def next_s(self) -> float | None:
        """When the step under way ends."""
        return self._step.ends_s if self._step else None

    @property
    def used_tokens(self) -> int:
        """Rows of the KV pool held by running requests."""
        return sum(job.context for job in self.running)

    @property
    def free_gib(self) -> float:
        """Memory that nobody has taken."""
        return self.up.free_gib - self.reserved_gib

    def submit(self, job: Job, now_s: float) -> None:
        """A request arrives."""
        job.arrived_s = now_s
        self.waiting.append(job)
        if self._step is None:
            self._now_s = max(self._now_s, now_s)
            self._begin()

    def abort(self, job: Job) -> None:
        """Nobody wants the rest; the slot is free from the next step on."""
        if job.finished_s is not None or job.aborted:
            return
        job.aborted = True
        self.counters.aborted += 1
        if job in self.waiting:
            self.waiting.remove(job)

    def abort_all(self) -> None:
        """Forget every request."""
        for job in [*self.waiting, *self.running]:
            self.abort(job)

    def advance(self, until_s: float) -> list[Output]:
        """Run the steps that end by ``until_s``.

        Raises:
            SchedulerDiedError: out of memory; what was yielded before is lost with the process.
        """
        outputs: list[Output] = []
        while self._step is not None and self._step.ends_s <= until_s:
            step = self._step
            self._step = None
            self._now_s = step.ends_s
            if step.prefill:
                self._end_prefill(step, outputs)
            else:
                self._end_decode(step, outputs)
            self._begin()
        return outputs

    def _begin(self) -> None:
        """Choose the next step, prompts first."""
        self.running = [job for job in self.running if not job.aborted]
        prefill = self._admit()
        if prefill:
            self._start_prefill(prefill)
        elif self.running:
            self._make_room()
            self._start_decode()

    def _admit(self) -> tuple[tuple[Job, int], ...]:
        settings, pools = self.up.settings, self.up.pools
        chunked = settings.chunked_prefill_size > 0
        # Without chunks a prompt goes through whole, however long; one always may.
        budget = settings.chunked_prefill_size if chunked else max(1, settings.max_prefill_tokens)
        chosen: list[tuple[Job, int]] = []
        for job in self.running:
            if job.to_prefill > 0 and budget > 0:
                tokens = min(job.to_prefill, budget) if chunked else job.to_prefill
                chosen.append((job, tokens))
                budget -= tokens
        free = pools.tokens - self.used_tokens
        free -= int(
            sum(min(job.new_tokens - job.produced, _CLIP_NEW_TOKENS) for job in self.running) * self._ratio
        )
        while self.waiting and budget > 0 and len(self.running) < pools.running:
            job = self.waiting[0]
            left = min(job.new_tokens - job.produced, _CLIP_NEW_TOKENS)
            if self.running and free < job.context + int(left * self._ratio):
                break
            self.waiting.popleft()
            job.cached = self.cache.match(job.boundaries) if settings.radix_cache else 0
            job.prefilled = job.cached
            if job.started_s is None:
                job.started_s = self._now_s
            free -= job.context + int(left * self._ratio)
            tokens = min(job.to_prefill, budget) if chunked else job.to_prefill
            budget -= tokens
            chosen.append((job, tokens))
            self.running.append(job)
        return tuple(chosen)

    def _start_prefill(self, prefill: tuple[tuple[Job, int], ...]) -> None:
        tokens = sum(count for _, count in prefill)
        self._largest_pass = max(self._largest_pass, tokens)
        self._grow(tokens)
        context = max(job.prefilled for job, _ in prefill)
        seconds = self.up.speed.prefill_s(tokens, context) * self._noise()
        real = any(not job.probe for job, _ in prefill)
        if not real:
            seconds = min(seconds, 0.05)
        elif self._cold_prefill:
            self._cold_prefill = False
            seconds += fitted.COLD_PREFILL_S
        if real:
            graph = tokens <= self.up.speed.prefill_captured
            self._log(
                f"Prefill batch, #new-seq: {len(prefill)}, #new-token: {tokens}, "
                f"#cached-token: {sum(job.cached for job, _ in prefill)}, {self._usage()}, "
                f"#running-req: {len(self.running) - len(prefill)}, #queue-req: {len(self.waiting)}, "
                f"#pending-token: {sum(job.to_prefill for job in self.waiting)}, cuda graph: {graph}, "
                f"input throughput (token/s): {tokens / seconds:.2f}"
            )
        self._step = _Step(self._now_s + seconds * self._slow, prefill=prefill)

    def _end_prefill(self, step: _Step, outputs: list[Output]) -> None:
        for job, tokens in step.prefill:
            job.prefilled += tokens
            if job.aborted or job.to_prefill > 0:
                continue
            if not job.probe:
                self.counters.prompt_tokens += job.prompt_tokens
                self.counters.cached_tokens += job.cached
            if self.up.settings.radix_cache:
                self.cache.insert(job.boundaries)
                self.cache.shrink(self.up.pools.tokens - self.used_tokens)
            self._yield(job, 1, step.ends_s, outputs)

    def _make_room(self) -> None:
        """Send requests back to the queue when the next step would overflow the KV pool."""
        rows = self.up.speed.rows_per_request
        while len(self.running) > 1 and self.used_tokens + rows * len(self.running) > self.up.pools.tokens:
            job = max(self.running, key=lambda one: (one.new_tokens - one.produced, one.id))
            self.running.remove(job)
            gained = job.context
            job.prefilled = 0
            job.retractions += 1
            self.counters.retracted += 1
            self.waiting.appendleft(job)
            before = self._ratio
            held = sum(one.produced for one in self.running) + 20 * len(self.running)
            self._ratio = min(1.0, held / max(1, sum(one.new_tokens for one in self.running)))
            self._log(
                f"KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: {gained}, "
                f"#new_token_ratio: {before:.4f} -> {self._ratio:.4f}"
            )

    def _start_decode(self) -> None:
        self._check()
        self._ratio = max(_RATIO_LEAST, self._ratio - (_RATIO_FIRST - _RATIO_LEAST) / _RATIO_STEPS)
        self._most_running = max(self._most_running, len(self.running))
        self._grow(0)
        self.cache.shrink(self.up.pools.tokens - self.used_tokens)
        seconds = self.up.speed.decode_s([job.context for job in self.running]) * self._noise()
        if self._cold_decode and not all(job.probe for job in self.running):
            self._cold_decode = False
            seconds += fitted.COLD_DECODE_S
        self._step = _Step(self._now_s + seconds * self._slow, decode=tuple(self.running))

    def _end_decode(self, step: _Step, outputs: list[Output]) -> None:
        yielded = 0
        verified = 0
        for job in step.decode:
            if job.aborted:
                continue
            length = 1
            if job.draws is not None:
                length = job.draws.next()
                job.verify_steps += 1
                job.histogram[length - 1] += 1
                verified += 1
                if not job.probe:
                    self.counters.verify_steps += 1
                    self.counters.accepted += length
            length = min(length, job.new_tokens - job.produced)
            yielded += length
            self._yield(job, length, step.ends_s, outputs)
        window = self._window
        if window.steps == 0:
            window.since_s = self._now_s
        window.steps += 1
        window.tokens += yielded
        window.verify += verified
        graph = len(step.decode) <= max(self.up.speed.captured, default=0)
        self.counters.graph_steps += graph
        if window.steps >= self.up.settings.decode_log_interval:
            self._log_decode(len(step.decode), graph)

    def _log_decode(self, running: int, graph: bool) -> None:
        window, self._window = self._window, _Window()
        elapsed = self._now_s - window.since_s
        self.last_throughput = window.tokens / elapsed if elapsed > 0 else 0.0
        accept = ""
        rows = self.up.speed.rows_per_request
        if window.verify:
            self.accept_length = window.tokens / window.verify
            self.accept_rate = (self.accept_length - 1) / (rows - 1) if rows > 1 else 0.0
            accept = f"accept len: {self.accept_length:.2f}, accept rate: {self.accept_rate:.2f}, "
        self._log(
            f"Decode batch, #running-req: {running}, {self._usage()}, {accept}cuda graph: {graph}, "
            f"gen throughput (token/s): {self.last_throughput:.2f}, #queue-req: {len(self.waiting)}"
        )

    def _yield(self, job: Job, tokens: int, at_s: float, outputs: list[Output]) -> None:
        if job.first_token_s is None:
            job.first_token_s = at_s
        if job.draws is None and self.up.settings.speculation is not None:
            self._draw(job)
        job.produced += tokens
        job.prefilled = job.context
        self.counters.generated_tokens += tokens
        finished = job.produced >= job.new_tokens
        if finished:
            job.finished_s = at_s
            self.running.remove(job)
            if not job.probe:
                self.counters.finished += 1
        outputs.append(Output(job, tokens, finished, at_s))

    def _draw(self, job: Job) -> None:
        speculation = self.up.settings.speculation
        if speculation is None:
            return
        rng = random.Random(job.fingerprint ^ self._seed)  # noqa: S311 - not for secrets
        law = acceptance(
            task=job.task,
            method=speculation.method,
            draft_tokens=speculation.draft_tokens,
            block_size=speculation.block_size,
            factor=self.up.residuals.acceptance,
            difficulty=rng.gauss(0.0, fitted.REQUEST_NOISE),
            quality=fitted.ACCEPT_FP8_KV if self.up.settings.kv_bytes < 2 else 1.0,
        )
        job.draws = law.drawn(rng.random())
        job.histogram = [0] * speculation.draft_tokens

    def _grow(self, tokens: int) -> None:
        """Take what this step needs beyond all steps before, or die of it."""
        settings = self.up.settings
        requests = max(1, len(self.running))
        need = memory.first_request(settings, self.up.residuals)
        need += memory.logits(settings, max(requests, self._most_running))
        need += memory.prefill_activation(settings, max(tokens, self._largest_pass))
        need += memory.fragmentation(
            settings, served=self.counters.finished, concurrent=max(requests, self._most_running) - 1
        )
        if need > self.up.free_gib:
            missing = need - self.reserved_gib
            raise SchedulerDiedError(
                "serving",
                "torch.OutOfMemoryError",
                logs.out_of_memory(
                    settings.card.memory_mib,
                    wanted=max(missing, 0.02),
                    free=min(max(self.free_gib, 0.0), max(missing, 0.02) * 0.95),
                ),
            )
        self.reserved_gib = max(self.reserved_gib, need)

    def _usage(self) -> str:
        hybrid = self.up.settings.target.linear is not None
        per_request = self.up.settings.state_slots_per_request
        used = min(self.up.pools.slots, len(self.running) * min(per_request, 3))
        return logs.usage(self.used_tokens, self.up.pools.tokens, hybrid, (used, self.up.pools.slots))

    def _noise(self) -> float:
        return 1.0 + self._rng.gauss(0.0, fitted.STEP_NOISE)
