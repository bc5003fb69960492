"""A whole run on a virtual clock: start a server, let users ask, read the figures."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.versions import NEWEST
from dflash_deploy.simulator import calibration as fitted
from dflash_deploy.simulator.boot import Pass, Say, SchedulerDiedError, Up, start
from dflash_deploy.simulator.physics.residuals import Residuals, draw_residuals
from dflash_deploy.simulator.scheduler import Job, Output, Scheduler
from dflash_deploy.simulator.settings import ArgumentsRefusedError, resolve
from dflash_deploy.simulator.shipped import load_card
from dflash_deploy.simulator.text import fingerprint


@dataclass(frozen=True)
class Ask:
    """One request of a user."""

    prompt_tokens: int = 60
    new_tokens: int = 1024
    task: str = "instruction"
    name: str = "prompt"


@dataclass(frozen=True)
class Round:
    """Figures of one round, all simulated. Rates are tokens after the first over the time after the first."""

    total_tokens_per_s: float
    user_tokens_per_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    seconds: float
    accept_length: float | None

    @property
    def median_tokens_per_s(self) -> float:
        """Of the median user."""
        return statistics.median(self.user_tokens_per_s)

    @property
    def median_ttft_s(self) -> float:
        """Of the median user."""
        return statistics.median(self.ttft_s)


@dataclass(frozen=True)
class VirtualRun:
    """How a start ended, and the rounds that followed.

    Attributes:
        stage: where it failed, ``arguments`` to ``serving``; None where it did not.
        message: SGLang's own, where it failed.
        boot_s: simulated seconds until it was ready or dead.
        rounds: those that were finished.
    """

    stage: str | None
    message: str
    boot_s: float
    log: tuple[str, ...]
    rounds: tuple[Round, ...] = ()
    vram_used_mib: int = 0
    up: Up | None = None

    @property
    def served(self) -> bool:
        """It came up and lived through every round."""
        return self.stage is None


def run_virtual(
    flags: Sequence[str],
    rounds: Sequence[Sequence[Ask]],
    *,
    card: str = "rtx-5090",
    seed: int = 0,
    version: str = NEWEST,
    env: Mapping[str, str] | None = None,
    residuals: Residuals | None = None,
    slow: float = 1.0,
) -> VirtualRun:
    """Start a server with SGLang flags and put rounds of simultaneous requests to it.

    Args:
        flags: as SGLang's command line; a wrong one ends the process as argparse does.
        rounds: the first one is the cold one.
        card: id of a shipped card.
        seed: draws the hidden deviations, unless ``residuals`` gives them.
        version: SGLang release.
        env: SGLang's environment variables.
        residuals: instead of those drawn from the seed.
        slow: every step takes so many times as long, as where heat holds the card back.
    """
    args = _parser(version).parse_args(list(flags))
    facts = load_card(card)
    hidden = residuals or draw_residuals(card, seed)
    log: list[str] = []
    seconds = 5.0
    try:
        settings = resolve(args, card=facts, version=version, env=env or {})
        boot = start(settings, fitted.card_calibration(facts), hidden)
        while True:
            try:
                event = next(boot)
            except StopIteration as stop:
                up: Up = stop.value
                break
            if isinstance(event, Pass):
                seconds += event.seconds
            elif isinstance(event, Say):
                log.append(event.text)
    except ArgumentsRefusedError as failure:
        return VirtualRun("arguments", failure.message, seconds, tuple(log))
    except SchedulerDiedError as failure:
        return VirtualRun(failure.stage, failure.message, seconds, tuple(log))
    scheduler = Scheduler(up, seed=seed, log=log.append, slow=slow)
    done: list[Round] = []
    stage, message = None, ""
    now = 0.0
    try:
        if settings.warm_up:
            now = _round(scheduler, [Ask(4, 8)], now, probe=True)[1]
        for asks in rounds:
            result, now = _round(scheduler, asks, now + 1.0)
            done.append(result)
    except SchedulerDiedError as failure:
        stage, message = "serving" if done or not settings.warm_up else "warm-up", failure.message
    return VirtualRun(
        stage,
        message,
        seconds,
        tuple(log),
        tuple(done),
        vram_used_mib(up, scheduler),
        up,
    )


@cache
def _parser(version: str) -> argparse.ArgumentParser:
    return FlagTable.for_version(version).parser()


def vram_used_mib(up: Up, scheduler: Scheduler | None) -> int:
    """Memory that the driver would report as used."""
    free = scheduler.free_gib if scheduler is not None else up.free_gib
    return round(up.settings.card.memory_mib - free * 1024)


def _round(
    scheduler: Scheduler, asks: Sequence[Ask], now_s: float, *, probe: bool = False
) -> tuple[Round, float]:
    jobs: list[Job] = []
    before = (scheduler.counters.accepted, scheduler.counters.verify_steps)
    last: dict[int, float] = {}
    for place, ask in enumerate(asks):
        arrives = now_s + place * fitted.TOKENIZE_S
        _collect(scheduler.advance(arrives), last)
        job = Job(
            prompt_tokens=ask.prompt_tokens,
            new_tokens=ask.new_tokens,
            task=ask.task,
            fingerprint=fingerprint(ask.name, str(place)),
            probe=probe,
        )
        jobs.append(job)
        scheduler.submit(job, arrives)
    while not scheduler.idle:
        ends = scheduler.next_s
        if ends is None:
            break
        _collect(scheduler.advance(ends), last)
    finish = max(last.values(), default=now_s)
    accepted = scheduler.counters.accepted - before[0]
    steps = scheduler.counters.verify_steps - before[1]
    firsts = [job.first_token_s if job.first_token_s is not None else finish for job in jobs]
    return (
        Round(
            total_tokens_per_s=sum(job.produced for job in jobs) / max(finish - now_s, 1e-9),
            user_tokens_per_s=tuple(
                (job.produced - 1) / max(last.get(job.id, first) - first, 1e-9)
                for job, first in zip(jobs, firsts, strict=True)
            ),
            ttft_s=tuple(first - now_s for first in firsts),
            seconds=finish - now_s,
            accept_length=accepted / steps if steps else None,
        ),
        finish,
    )


def _collect(outputs: Sequence[Output], last: dict[int, float]) -> None:
    for output in outputs:
        last[output.job.id] = output.at_s
