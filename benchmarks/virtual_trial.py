"""One trial on the simulator's virtual clock: the physics and the judgement of a real one, in milliseconds.

No process, no HTTP: what ``tune`` does with a simulated server, without waiting for it. All simulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from dflash_deploy.bench.measurement import Measurement, NotMeasured, RoundFigures, Spread
from dflash_deploy.bench.telemetry import Telemetry
from dflash_deploy.engine.boot import BootFailure, BootRecord, Stage
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import GpuSample
from dflash_deploy.profile.schema import FlagSetting, Profile
from dflash_deploy.simulator.virtual import Ask, Round, VirtualRun, run_virtual
from dflash_deploy.tune.launching import shared_flags, values, variables
from dflash_deploy.tune.records import Proof, TrialRecord
from dflash_deploy.tune.space import key_of
from dflash_deploy.tune.trial import Verdict, degradation, judge

STOP_S = 5.0
"""Between two servers: one is stopped, the next one's process starts."""

_CLOCK_MHZ = 2400.0
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class VirtualCard:
    """A simulated card that a profile is tuned on.

    Attributes:
        output_tokens: of each answer; less than the profile's, where time counts more than short answers do.
        slow: by a trial's number, how many times as long every step takes then: the machine's drift.
        clocks: the card tells that its clocks are as much lower then.
    """

    profile: Profile
    card: str
    seed: int
    output_tokens: int
    memory_mib: int
    slow: Callable[[int], float] = lambda _: 1.0
    clocks: bool = False
    _known: dict[tuple[str, float], TrialRecord] = field(default_factory=dict)
    _held: dict[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared = shared_flags(self.profile, simulated=True)

    def run(
        self, settings: dict[str, FlagSetting], *, number: int = 1, source: str = "search"
    ) -> TrialRecord:
        """What comes of a configuration (the flags of the model are added)."""
        slow = self.slow(number)
        key = key_of(settings), slow
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._run(settings, slow)
        seen = _telemetry(_CLOCK_MHZ / slow) if self.clocks else None
        return known.model_copy(update={"number": number, "source": source, "telemetry": seen})

    def holds(self, settings: dict[str, FlagSetting]) -> bool:
        """Whether it lives through all that was promised: everybody at once with the whole context."""
        free_mib = self._least_free_mib(settings)
        limit = self.profile.objective.constraints.get("free_vram_mib")
        least = limit.min if limit and limit.min is not None else 0.0
        return free_mib is not None and free_mib >= least

    def proven(self, record: TrialRecord, number: int, settings: dict[str, FlagSetting]) -> TrialRecord:
        """A trial that starts another's configuration again, and what its soak came to."""
        problem = (
            None if self.holds(settings) else "died, or left too little memory, with all that was promised"
        )
        proof = Proof(
            seconds=0.0,
            answer_tokens=0,
            context_tokens=0,
            promised_tokens=self.profile.workload.context_tokens,
            free_mib=self._least_free_mib(settings),
            kv_tokens=record.boot.kv_tokens if record.boot else None,
            problem=problem,
        )
        update: dict[str, object] = {"proves": number, "proof": proof}
        if problem is not None:
            update |= {"outcome": "unstable", "feasible": False, "reason": problem}
        return record.model_copy(update=update)

    def _least_free_mib(self, settings: dict[str, FlagSetting]) -> int | None:
        """Memory left under all that was promised; None where it died of it."""
        key = key_of(settings)
        if key not in self._held:
            self._held[key] = self._soaked(settings)
        return self._held[key]

    def _soaked(self, settings: dict[str, FlagSetting]) -> int | None:
        workload, version = self.profile.workload, self.profile.engine.version
        short, full = Ask(60, self.output_tokens), Ask(workload.context_tokens - 96, 24)
        run = run_virtual(
            FlagTable.for_version(version).spell(values({**self.shared, **settings})),
            [[short] * workload.users, [full] * workload.users],
            card=self.card,
            seed=self.seed,
            version=version,
            env={**self.profile.env, **variables(settings)},
        )
        return self.memory_mib - run.vram_used_mib if run.served else None

    def _run(self, settings: dict[str, FlagSetting], slow: float) -> TrialRecord:
        profile = self.profile
        flags = {**self.shared, **settings}
        users, measure = profile.workload.users, profile.measure
        try:
            argv = FlagTable.for_version(profile.engine.version).spell(values(flags))
        except DeployError as error:
            return _record(
                flags, Verdict("failed", f"arguments: {error.message}"), BootRecord(Stage.ARGUMENTS), 0.0
            )
        tasks = _tasks(profile, users * measure.rounds)
        asks = [
            [
                Ask(60, self.output_tokens, tasks[number * users + user], f"{number}-{user}")
                for user in range(users)
            ]
            for number in range(measure.rounds)
        ]
        run = run_virtual(
            argv,
            [asks[0], *asks],
            card=self.card,
            seed=self.seed,
            version=profile.engine.version,
            env={**profile.env, **variables(settings)},
            slow=slow,
        )
        boot = read_boot_log(line for text in run.log for line in text.splitlines())
        served_s = sum(one.seconds for one in run.rounds)
        if run.up is None:
            stage = Stage(run.stage or "imports")
            boot = replace(boot, stage=stage, failure=BootFailure(stage, run.message))
            return _record(flags, Verdict("failed", f"{stage}: {run.message}"), boot, run.boot_s)
        if missing := degradation(boot, users):
            return _record(flags, Verdict("degraded", missing), boot, run.boot_s)
        measured: Measurement | NotMeasured
        if run.served:
            measured = _measurement(run, self.memory_mib, users)
        else:
            boot = replace(boot, failure=BootFailure(Stage.SERVING, run.message))
            measured = NotMeasured("the server died", (), max(0, len(run.rounds) - 1))
        verdict = judge(profile, boot, measured, alive=run.served, last_words=f" ({run.message})")
        return _record(flags, verdict, boot, run.boot_s, served_s)


def _telemetry(clock_mhz: float) -> Telemetry | None:
    return Telemetry.of([GpuSample(round(clock_mhz), None, None, None, None, None)])


def _tasks(profile: Profile, count: int) -> list[str]:
    weights = profile.workload.tasks
    asked = dict.fromkeys(weights, 0)
    tasks: list[str] = []
    for _ in range(count):
        task = max(weights, key=lambda one: weights[one] * (len(tasks) + 1) - asked[one])
        asked[task] += 1
        tasks.append(task)
    return tasks


def _measurement(run: VirtualRun, memory_mib: int, users: int) -> Measurement:
    cold, *rounds = run.rounds
    first = [ttft for one in rounds for ttft in one.ttft_s]
    return Measurement(
        users=users,
        rounds=len(rounds),
        total_tokens_per_s=_spread([one.total_tokens_per_s for one in rounds]),
        user_tokens_per_s=_spread([speed for one in rounds for speed in one.user_tokens_per_s]),
        ttft_s=_spread(first),
        latency_s=_spread([one.seconds for one in rounds]),
        ttft_p95_s=sorted(first)[int(0.95 * (len(first) - 1))],
        cold_ttft_s=cold.median_ttft_s,
        output_tokens=0,
        vram_used_mib=run.vram_used_mib,
        vram_total_mib=memory_mib,
        per_round=tuple(_figures(one) for one in rounds),
    )


def _figures(one: Round) -> RoundFigures:
    return RoundFigures(one.total_tokens_per_s, one.median_tokens_per_s, one.median_ttft_s, one.seconds)


def _spread(values_: list[float]) -> Spread:
    return Spread(statistics.median(values_), min(values_), max(values_))


def _record(
    flags: dict[str, FlagSetting], verdict: Verdict, boot: BootRecord, boot_s: float, served_s: float = 0.0
) -> TrialRecord:
    return TrialRecord(
        number=1,
        source="search",
        flags=flags,
        argv=["simulated"],
        env={},
        outcome=verdict.outcome,
        reason=verdict.reason,
        boot=boot,
        measured=verdict.measured,
        objective=verdict.objective,
        violations=verdict.violations,
        feasible=verdict.outcome == "served",
        started=_STARTED,
        boot_s=boot_s,
        wall_s=boot_s + served_s + STOP_S,
    )
