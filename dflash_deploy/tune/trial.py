"""One trial: launch, measure, judge, stop. However it goes, the result is a record."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dflash_deploy.bench.measure import measure
from dflash_deploy.bench.measurement import Measurement, NotMeasured
from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.bench.telemetry import Telemetry
from dflash_deploy.diagnosis import diagnose
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.launch import Launch
from dflash_deploy.engine.sglang.http import server_info
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import GpuSample
from dflash_deploy.profile.schema import Profile
from dflash_deploy.server.outcome import NotServed
from dflash_deploy.server.ports import free_port
from dflash_deploy.server.process import Server
from dflash_deploy.tune.launching import Launcher
from dflash_deploy.tune.limits import describe, figures, limits_of, objective_value, violations
from dflash_deploy.tune.proof import Promise, prove
from dflash_deploy.tune.records import (
    Candidate,
    Cause,
    Outcome,
    Predicted,
    Proof,
    TrialRecord,
    trial_folder,
)

_DEGRADING = frozenset({"draft-graph-lost", "draft-head-eager"})
"""What a server says it goes without although speed hangs on it."""

_REFUSED = re.compile(r"user \d+: HTTP 4")
"""The server takes no such request, for instance one that is longer than its context."""

_SERVED = frozenset({"served", "infeasible"})
"""Outcomes of servers that did what they could."""

_SLOWEST_TOKENS_PER_S = 0.5
_ASK_S = 5.0


class Verdict(NamedTuple):
    """How a trial ended; the fields are those of ``TrialRecord``."""

    outcome: Outcome
    reason: str | None = None
    measured: Measurement | None = None
    objective: float | None = None
    violations: dict[str, float] = {}  # noqa: RUF012  (never changed)


@dataclass(frozen=True)
class Gauge:
    """How the card is read while a server is loaded.

    Attributes:
        used_mib: its memory in use.
        look: that, clocks, power and heat at once; None where there is no card that tells.
    """

    used_mib: Callable[[], int | None]
    total_mib: int | None
    look: Callable[[], GpuSample | None] | None = None


def run_trial(
    candidate: Candidate,
    *,
    folder: Path,
    profile: Profile,
    launcher: Launcher,
    gauge: Gauge | None,
    predicted: Predicted | None,
    on_stage: Callable[[str], None],
    promise: Promise | None = None,
) -> TrialRecord:
    """Try one configuration.

    Args:
        candidate: what to launch.
        folder: the study's.
        profile: the load to measure and the limits to keep.
        launcher: makes the command.
        gauge: the card's memory, None for a simulated card (which tells by itself) or where there is none.
        predicted: the plan's figures, kept in the record.
        on_stage: told where it stands, in a few words.
        promise: what must hold besides; None does not ask so much of it.

    Raises:
        DeployError: what a person must fix before any trial can go on.
    """
    begun = time.monotonic()
    launch = launcher.launch(candidate.flags, launcher.port or free_port(launcher.host))
    server = Server(
        launch,
        trial_folder(folder, candidate.number),
        on_progress=lambda progress: on_stage(progress.detail),
    )
    boot: BootRecord
    levels: tuple[Measurement, ...] = ()
    proof: Proof | None = None
    telemetry: Telemetry | None = None
    with server:
        started = server.start()
        boot = started.boot
        if isinstance(started, NotServed):
            verdict = Verdict("failed", f"{started.stage}: {started.reason}")
        elif missing := degradation(boot, profile.workload.users):
            verdict = Verdict("degraded", missing)
        else:
            load = _Load(profile, launch, gauge, on_stage)
            measured = load.measure()
            telemetry = load.telemetry
            verdict = judge(profile, boot, measured, alive=server.survives(), last_words=_last_words(server))
            if verdict.outcome == "served" and promise is not None:
                proof = load.prove(promise, boot)
                verdict = _proven(verdict, proof, alive=server.survives(), last_words=_last_words(server))
            elif verdict.measured is not None:
                levels = load.levels(boot)
        on_stage("stopping")
        leftovers = server.stop().leftovers
    cause = None if verdict.outcome in _SERVED else cause_of(server.log_path)
    return TrialRecord(
        number=candidate.number,
        source=candidate.source,
        flags=candidate.flags,
        argv=list(launch.argv),
        env=dict(launch.env),
        outcome=verdict.outcome,
        reason="; ".join(filter(None, (verdict.reason, *leftovers))) or None,
        boot=server.boot or boot,
        measured=verdict.measured,
        predicted=predicted,
        objective=verdict.objective,
        violations=verdict.violations,
        feasible=verdict.outcome == "served",
        started=candidate.started,
        why=candidate.why,
        cause=cause,
        levels=levels,
        proves=candidate.proves,
        proof=proof,
        telemetry=telemetry,
        boot_s=started.boot_s,
        wall_s=time.monotonic() - begun,
    )


def not_launched(
    candidate: Candidate,
    outcome: Outcome,
    reason: str,
    predicted: Predicted | None = None,
    *,
    wall_s: float = 0.0,
) -> TrialRecord:
    """The record of a trial that came to nothing: refused before its launch, or cut short."""
    return TrialRecord(
        number=candidate.number,
        source=candidate.source,
        flags=candidate.flags,
        argv=[],
        env={},
        outcome=outcome,
        reason=reason,
        predicted=predicted,
        feasible=False,
        started=candidate.started,
        why=candidate.why,
        proves=candidate.proves,
        wall_s=wall_s,
    )


def cause_of(log: Path) -> Cause | None:
    """What the failure catalogue makes of a server's log; None where it finds nothing wrong, or no log."""
    try:
        found = diagnose(log).root
    except DeployError:
        return None
    if found is None:
        return None
    return Cause(id=found.id, cause=found.cause, fix=found.fix.text if found.fix else None)


def judge(
    profile: Profile,
    boot: BootRecord,
    measured: Measurement | NotMeasured,
    *,
    alive: bool,
    last_words: str = "",
) -> Verdict:
    """What a server that was put under load has come to.

    Args:
        profile: the limits to keep.
        boot: what its log said up to then.
        measured: under load.
        alive: it still serves.
        last_words: what it died of, in brackets.
    """
    users = profile.workload.users
    if isinstance(measured, NotMeasured):
        if alive and _REFUSED.match(measured.reason):
            return Verdict("infeasible", measured.reason)
        return Verdict("unstable", f"{measured.reason}{last_words}")
    if not alive:
        return Verdict("unstable", f"died under load{last_words}", measured)
    found, limits = figures(measured, boot, users), limits_of(profile)
    broken = violations(found, limits)
    if measured.faults and "context_tokens" not in broken:
        return Verdict("bad-output", "; ".join(measured.faults), measured)
    # Answers that end where the pool ends are short, not wrong; and their speed is that of another task.
    objective = (
        None if measured.faults else objective_value(profile.objective.optimize, measured, boot, users)
    )
    if broken:
        reason = describe(broken, found, limits)
        return Verdict("infeasible", reason, measured, objective, broken)
    return Verdict("served", None, measured, objective)


def degradation(boot: BootRecord, users: int) -> str | None:
    """What a server that came up goes without although speed or users hang on it."""
    running = boot.max_running_requests
    if running is not None and running < users:
        return f"serves {running} at once, {users} are wanted"
    lost = [degradation.text for degradation in boot.degradations if degradation.id in _DEGRADING]
    return "; ".join(lost) or None


def _proven(verdict: Verdict, proof: Proof, *, alive: bool, last_words: str) -> Verdict:
    if proof.problem is None and alive:
        return verdict
    wrong = proof.exam is not None and bool(proof.exam.faults)
    outcome: Outcome = "unstable" if not alive else "bad-output" if wrong else "infeasible"
    return verdict._replace(outcome=outcome, reason=f"{proof.problem or 'died under load'}{last_words}")


class _Load:
    """What is put to one server that is up."""

    def __init__(
        self, profile: Profile, launch: Launch, gauge: Gauge | None, on_stage: Callable[[str], None]
    ) -> None:
        self._profile = profile
        self._launch = launch
        self._on_stage = on_stage
        read = _simulated_gauge(launch) if launch.simulated else gauge
        self._look = read.look if read else None
        self._vram = read.used_mib if read else None
        self._total_mib = read.total_mib if read else None
        self._samples: list[GpuSample] = []

    def measure(self) -> Measurement | NotMeasured:
        """The profile's users; ``telemetry`` is the card meanwhile."""
        wanted = self._profile.measure
        vram = self._vram if self._look is None else self._looked
        return self._played(self._profile.workload.users, wanted.rounds, wanted.warm_up, vram)

    @property
    def telemetry(self) -> Telemetry | None:
        """The card while ``measure`` went on; None where it never told."""
        return Telemetry.of(self._samples)

    def _looked(self) -> int | None:
        sample = self._look() if self._look else None
        if sample is None:
            return None
        self._samples.append(sample)
        return sample.vram_used_mib

    def levels(self, boot: BootRecord) -> tuple[Measurement, ...]:
        """Other numbers of users, one round each, as far as the server takes so many at once."""
        most = boot.max_running_requests
        found = []
        for users in self._profile.measure.levels:
            if users == self._profile.workload.users or (most is not None and users > most):
                continue
            self._on_stage(f"{users} at once")
            measured = self._played(users, 1, 1, self._vram)
            if isinstance(measured, NotMeasured):
                break
            found.append(measured)
        return tuple(found)

    def prove(self, promise: Promise, boot: BootRecord) -> Proof:
        """Whether it would hold."""
        return prove(
            self._launch,
            self._profile,
            promise,
            kv_tokens=boot.kv_tokens,
            vram=self._vram or (lambda: None),
            total_mib=self._total_mib,
            on_stage=self._on_stage,
        )

    def _played(
        self, users: int, rounds: int, warm_up: int, vram: Callable[[], int | None] | None
    ) -> Measurement | NotMeasured:
        workload, launch = self._profile.workload, self._launch
        return measure(
            launch.base_url,
            users=users,
            prompts=mixed_prompts(workload.tasks, users * max(rounds, warm_up)),
            output_tokens=workload.output_tokens,
            rounds=rounds,
            warm_up=warm_up,
            time_scale=launch.time_scale,
            vram=vram,
            vram_total_mib=self._total_mib,
            # Asking the simulator takes time from the streams that it is sending.
            vram_every_s=3600.0 if launch.simulated else 0.25,
            accept_length=lambda: _accept_length(launch),
            timeout_s=60.0 + workload.output_tokens / _SLOWEST_TOKENS_PER_S,
            model=self._profile.model.served_name or "default",
            check_output=self._profile.measure.check_output,
            # The server is fresh, so nothing is cached; and every trial is asked the very same questions.
            salt="trial",
            on_round=self._on_stage,
        )


def _simulated_gauge(launch: Launch) -> Gauge:
    def used_mib() -> int | None:
        info = server_info(launch.base_url, timeout_s=_ASK_S)
        used = info.simulator.vram_used_mib if info and info.simulator else None
        return None if used is None else round(used)

    info = server_info(launch.base_url, timeout_s=_ASK_S)
    total = info.simulator.vram_total_mib if info and info.simulator else None
    return Gauge(used_mib, None if total is None else round(total))


def _accept_length(launch: Launch) -> float | None:
    info = server_info(launch.base_url, timeout_s=_ASK_S)
    return info.accept_length if info else None


def _last_words(server: Server) -> str:
    boot = server.boot
    return f" ({boot.failure.message})" if boot and boot.failure else ""
