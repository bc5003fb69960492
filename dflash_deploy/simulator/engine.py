"""The scheduler on a real clock: steps end when they are due, and their answers go out."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Literal

from dflash_deploy.simulator import calibration as fitted
from dflash_deploy.simulator import logs
from dflash_deploy.simulator.boot import SchedulerDiedError, Up
from dflash_deploy.simulator.metrics import Timings
from dflash_deploy.simulator.scheduler import Job, Output, Scheduler

if TYPE_CHECKING:
    from dflash_deploy.simulator.faults import Faults
    from dflash_deploy.simulator.http import Connection, Group
    from dflash_deploy.simulator.replies import Reply

_DEATH_S = 5.0
_SHORTEST_WAIT_S = 0.001
_PATIENCE_S = 5.0
"""Of the clock: how long the others of a group are waited for."""

State = Literal["starting", "ready", "draining", "dead"]


class Engine:
    """Everything that runs behind the endpoints.

    Attributes:
        state: what /health and /ready go by.
        healthy: False once a health check has timed out.
        last_output_s: simulated time at which anything was last generated.
        replies: answers that are not out yet, by job.
    """

    def __init__(self, up: Up, *, seed: int, time_scale: float, faults: Faults, log: logs.Log) -> None:
        self.up = up
        self.seed = seed
        self.time_scale = time_scale
        self.faults = faults
        self.log = log
        self.scheduler = Scheduler(up, seed=seed, log=log.line, check=self._check_load, slow=faults.slow)
        self.timings = Timings()
        self.replies: dict[int, Reply] = {}
        self.state: State = "starting"
        self.healthy = True
        self.last_output_s = -1.0
        self._zero = time.monotonic()
        self._arriving: dict[str, list[Job]] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or arrives."""
        return self.scheduler.idle and not self._arriving

    @property
    def queued(self) -> int:
        """Requests that wait for a place, those that arrive among them."""
        places = self.up.pools.running - len(self.scheduler.running)
        arriving = sum(len(jobs) for jobs in self._arriving.values())
        return len(self.scheduler.waiting) + max(0, arriving - places)

    def now_s(self) -> float:
        """Simulated seconds since the engine was made."""
        return (time.monotonic() - self._zero) * self.time_scale

    async def sleep(self, seconds: float) -> None:
        """Let simulated time pass."""
        await asyncio.sleep(max(_SHORTEST_WAIT_S, seconds / self.time_scale))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run something beside everything else, and keep hold of it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, job: Job, reply: Reply | None = None, group: Group | None = None) -> None:
        """Hand a request to the scheduler, with all of its group once they are here."""
        if reply is not None:
            self.replies[job.id] = reply
        if self.faults.dead_scheduler or self.state == "dead":
            return
        if group is None:
            self._schedule([job])
            return
        together = self._arriving.setdefault(group.name, [])
        together.append(job)
        if len(together) >= group.size:
            self._schedule(self._arriving.pop(group.name))
        elif len(together) == 1:
            self.spawn(self._give_up(group.name, together))

    async def _give_up(self, name: str, together: list[Job]) -> None:
        """Begin without those of a group that do not come."""
        await asyncio.sleep(_PATIENCE_S)
        if self._arriving.get(name) is together:
            self._schedule(self._arriving.pop(name))

    def _schedule(self, jobs: list[Job]) -> None:
        """Jobs that arrive now, one after the other as they are tokenized."""
        now_s = self.now_s()
        try:
            for place, job in enumerate(jobs):
                arrives_s = now_s + place * fitted.TOKENIZE_S
                # What fell due before comes first, or a step of the past would take a job that was not there.
                self._hand_out(self.scheduler.advance(arrives_s))
                self.scheduler.submit(job, arrives_s)
        except SchedulerDiedError as failure:
            self.spawn(self.die(failure))
            return
        self._wake.set()

    def drop(self, job: Job) -> None:
        """Nobody waits for this one any more: its slot is free from the next step on."""
        self.replies.pop(job.id, None)
        for name, jobs in list(self._arriving.items()):
            if job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._arriving[name]
        self.scheduler.abort(job)

    async def drive(self) -> None:
        """Run steps when they are due: by the schedule, not by how long the last one took to send."""
        scheduler = self.scheduler
        while True:
            ends = scheduler.next_s
            if ends is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            # Always give way once, so that connections are read even when steps fall behind.
            await asyncio.sleep(max(0.0, (ends - self.now_s()) / self.time_scale))
            if self.state == "dead":
                return
            try:
                self._hand_out(scheduler.advance(self.now_s()))
                self._check_finished()
            except SchedulerDiedError as failure:
                await self.die(failure)
                return

    def _hand_out(self, outputs: list[Output]) -> None:
        touched: dict[int, Connection] = {}
        for output in outputs:
            self.last_output_s = output.at_s
            job = output.job
            if output.finished:
                self._measure(job)
            reply = self.replies.get(job.id)
            if reply is None:
                continue
            if reply.take(output):
                touched[job.id] = reply.connection
            if reply.complete:
                self.replies.pop(job.id, None)
                touched.pop(job.id, None)
        # One write for all the steps that fell due together; each step keeps its own event.
        for connection in touched.values():
            connection.flush()

    def _measure(self, job: Job) -> None:
        if job.probe or job.finished_s is None or job.first_token_s is None:
            return
        started = job.started_s if job.started_s is not None else job.arrived_s
        self.timings.first_token.add(job.first_token_s - job.arrived_s)
        self.timings.end_to_end.add(job.finished_s - job.arrived_s)
        self.timings.queue.add(started - job.arrived_s)

    def _check_finished(self) -> None:
        wanted = self.faults.die_after
        if wanted is not None and self.scheduler.counters.finished >= wanted:
            raise _injected_death()

    def _check_load(self) -> None:
        if self.faults.die_under_load and sum(not job.probe for job in self.scheduler.running) > 1:
            raise _injected_death()

    async def die(self, failure: SchedulerDiedError) -> None:
        """The scheduler is gone: SGLang's main process says so, waits, and kills itself."""
        if self.state == "dead":
            return
        self.state = "dead"
        trace = logs.traceback_of(failure.kind, failure.message, "srt/managers/scheduler.py")
        self.log.line(f"Scheduler hit an exception: {trace}")
        self.log.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        await self.sleep(_DEATH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    async def warm_up(self) -> None:
        """The request that SGLang sends itself before it calls itself ready."""
        if "warm-up" in self.faults.hang:
            return
        if "warm-up" in self.faults.die:
            await self.die(SchedulerDiedError("warm-up", "RuntimeError", "injected failure in stage warm-up"))
            return
        await self.sleep(1.0 * self.faults.slow_start)
        if self.up.settings.warm_up and not self.faults.dead_scheduler:
            job = Job(prompt_tokens=4, new_tokens=8, probe=True, fingerprint=1)
            self.submit(job)
            while job.finished_s is None:
                await self.sleep(0.1)
                if self.state == "dead":
                    return
        if self.state == "starting":
            self.state = "ready"
            self.log.line("The server is fired up and ready to roll!")


def _injected_death() -> SchedulerDiedError:
    return SchedulerDiedError(
        "serving", "RuntimeError", "CUDA error: an illegal memory access was encountered"
    )
