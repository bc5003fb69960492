"""What a study came to: for people as lines, for scripts as one JSON object (docs/json.md)."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dflash_deploy.bench.measurement import Measurement, Spread
from dflash_deploy.bench.statistics import Interval
from dflash_deploy.engine.sglang.command import launch_argv
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.profile.schema import FlagSetting, Goal
from dflash_deploy.tune.drift import changed
from dflash_deploy.tune.gain import CONFIDENCE, Gain, gain, interval_of, spread_of
from dflash_deploy.tune.launching import values, variables
from dflash_deploy.tune.limits import figures, limits_of, unchecked
from dflash_deploy.tune.outlook import Ending
from dflash_deploy.tune.reasons import reasons_of
from dflash_deploy.tune.records import Outcome, Predicted, Proof, StudyRecord, TrialRecord
from dflash_deploy.tune.screen import GOAL_UNITS, figure
from dflash_deploy.tune.select import KNOWN, again_of, best_trial, compared, front_of, proof_of


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Objective(_Part):
    """What was optimised, and in which unit its values are."""

    goal: Goal
    unit: str


class Best(_Part):
    """The configuration to take. ``command`` is for a person's shell."""

    trial: int
    source: str
    flags: dict[str, FlagSetting]
    env: dict[str, str]
    command: str
    measured: Measurement | None
    predicted: Predicted | None
    simulated: bool
    objective: float
    spread: Spread
    interval: Interval | None


class Again(_Part):
    """One configuration, started again."""

    trial: int
    objective: float


class Baseline(_Part):
    """A known setting, and by how much the best beats it; ``gain`` is None where it was not measured.

    ``again`` is what the best and it came to when they were started again, where they are compared by that.
    """

    name: str
    source: str
    trial: int
    outcome: Outcome
    reason: str | None
    objective: float | None
    spread: Spread | None
    interval: Interval | None
    gain: Gain | None
    distinguishable: bool | None
    again: tuple[Again, Again] | None


class Trial(_Part):
    """One trial in short."""

    number: int
    source: str
    outcome: Outcome
    reason: str | None
    feasible: bool
    launched: bool
    objective: float | None
    flags: dict[str, FlagSetting]
    violations: dict[str, float]
    boot_s: float | None
    wall_s: float


class Summary(_Part):
    """The object that ``tune --json`` ends with."""

    schema_version: int = 1
    study: str
    folder: Path
    simulated: bool
    card: str | None
    engine_version: str
    objective: Objective
    ended_by: Ending
    best: Best | None
    baselines: list[Baseline]
    trials: list[Trial]
    front: list[int]
    reasons: dict[str, str]
    proof: Proof | None
    repeated: Gain | None
    unchecked_limits: list[str]
    next_command: str | None


def summarize(folder: Path, study: StudyRecord, trials: Sequence[TrialRecord], ending: Ending) -> Summary:
    """Put a study's results together."""
    goal = study.profile.objective.optimize
    best = best_trial(study, trials)
    return Summary(
        study=study.name,
        folder=folder,
        simulated=study.simulated,
        card=study.card,
        engine_version=study.engine_version,
        objective=Objective(goal=goal, unit=GOAL_UNITS[goal]),
        ended_by=ending,
        best=best_of(study, best) if best else None,
        baselines=list(baselines_of(study, trials, best)),
        trials=[short(trial) for trial in trials],
        front=front_of(study.profile, trials),
        reasons=dict(reasons_of(study, best, trials)) if best else {},
        proof=proven.proof if best and (proven := proof_of(best, trials)) else None,
        repeated=repeated(study, trials, best) if best else None,
        unchecked_limits=_unchecked(study, best) if best else [],
        next_command=f"dflash-deploy emit {study.name}" if best else None,
    )


def serving_command(study: StudyRecord, flags: dict[str, FlagSetting]) -> str:
    """The command that serves a configuration, at the service's own address, quoted for a shell."""
    service, engine = study.profile.service, study.profile.engine
    argv = launch_argv(
        engine.python or Path("python"),
        values(flags),
        host=service.host,
        port=service.port,
        table=FlagTable.for_version(study.engine_version),
    )
    env = [f"{name}={value}" for name, value in {**study.profile.env, **variables(flags)}.items()]
    return shlex.join((*(("env", *env) if env else ()), *argv))


def lines(study: StudyRecord, summary: Summary) -> Iterator[str]:
    """The result for a person."""
    best = summary.best
    kind = "simulated" if summary.simulated else "measured"
    yield ""
    yield f"study {summary.study}: {_counts(summary)}; {_ENDINGS[summary.ended_by]}"
    if best is None:
        yield from _nothing_feasible(summary)
        return
    unit = summary.objective.unit
    yield (
        f"best: trial {best.trial} ({best.source}), {best.objective:.2f} {unit} "
        f"({kind}{'; ' if best.interval else ''}{interval_words(best.interval)})"
    )
    if best.measured is not None:
        yield from (f"  {line}" for line in _measured_lines(best.measured, kind))
    for baseline in summary.baselines:
        yield f"  {_against(study, best, baseline)}"
    if summary.unchecked_limits:
        yield f"  could not be checked here: {', '.join(summary.unchecked_limits)}"
    if summary.front:
        yield f"  no other is better in every objective than these: trials {_numbers(summary.front)}"
    yield f"  {proof_line(summary.proof, kind)}"
    if summary.repeated is not None:
        yield f"  {repeated_line(summary.repeated, summary.objective.goal)} ({kind})"
    yield "why each flag that was searched is there:"
    yield from (f"  {flag}: {why}" for flag, why in summary.reasons.items())
    yield "command:"
    yield f"  {best.command}"
    if summary.simulated:
        yield "every figure above is simulated: it says nothing about a real card until measured on one"
    yield f"next: {summary.next_command}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def proof_line(proof: Proof | None, kind: str) -> str:
    """What the best went through when it was started again."""
    if proof is None:
        return "not proven: it was not started again and used for long (give the study more launches)"
    free = "" if proof.free_mib is None else f", {proof.free_mib} MiB free at the least"
    return (
        f"proven: started again with the same KV pool of {proof.kv_tokens} tokens, everybody at once had "
        f"{proof.answer_tokens} tokens in one answer and {proof.context_tokens} of context{free}; "
        f"{_examined(proof)} ({kind})"
    )


def _examined(proof: Proof) -> str:
    return "its answers were not examined" if proof.exam is None else f"then {proof.exam.words}"


_ENDINGS: dict[Ending, str] = {
    "trials": "all launches done",
    "minutes": "the time is up",
    "gain": "nothing left would gain more than the noise",
    "target": "the target was reached",
    "exhausted": "nothing is left to try",
    "interrupted": "stopped by hand, resume with dflash-deploy tune --resume",
}

_ADVICE: dict[Outcome, str] = {
    "failed": "read server.log of one in the study's folder; if memory ran out, search lower values of "
    "mem-fraction-static or max-total-tokens",
    "infeasible": "loosen objective.constraints, ask for fewer users or less context, or search other values "
    "of mem-fraction-static and max-mamba-cache-size",
    "degraded": "search lower values of mem-fraction-static, or more state slots (max-mamba-cache-size)",
    "bad-output": "the answers are wrong: try another quantisation, KV type or draft model",
    "unstable": "the server died or stalled under load: read server.log of one in the study's folder",
}


def _counts(summary: Summary) -> str:
    launched = [trial for trial in summary.trials if trial.launched or trial.outcome == "interrupted"]
    outcomes = Counter(trial.outcome for trial in launched)
    parts = [f"{len(launched)} launches"]
    if launched:
        parts[0] += f" ({', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())})"
    if refused := len(summary.trials) - len(launched):
        parts.append(f"{refused} more refused by the plan")
    return ", ".join(parts)


def _nothing_feasible(summary: Summary) -> Iterator[str]:
    yield "no configuration served within the limits"
    reasons = Counter(
        (trial.outcome, trial.reason or "")
        for trial in summary.trials
        if trial.outcome not in ("served", "interrupted")
    )
    for (outcome, reason), count in reasons.most_common(5):
        yield f"  {count} x {outcome}: {reason}"
    for outcome in dict.fromkeys(outcome for (outcome, _), _ in reasons.most_common()):
        yield f"  what to change ({outcome}): {_ADVICE[outcome]}"
    yield f"  records and logs: {summary.folder}"


def _measured_lines(measured: Measurement, kind: str) -> Iterator[str]:
    total, user = measured.total_tokens_per_s, measured.user_tokens_per_s
    yield (
        f"{total.median:.2f} tokens/s in all, {user.median:.2f} a user (lowest {user.low:.2f}) "
        f"with {measured.users} at once ({kind})"
    )
    yield (
        f"time to first token {1000 * measured.ttft_s.median:.0f} ms, 95th percentile "
        f"{1000 * measured.ttft_p95_s:.0f} ms, cold {1000 * measured.cold_ttft_s:.0f} ms ({kind})"
    )
    if measured.accept_length is not None:
        yield f"accept length {measured.accept_length:.2f} tokens a step ({kind})"
    if measured.vram_used_mib is not None:
        of = f" of {measured.vram_total_mib}" if measured.vram_total_mib is not None else ""
        yield f"VRAM {measured.vram_used_mib}{of} MiB at the peak ({kind})"


def _against(study: StudyRecord, best: Best, baseline: Baseline) -> str:
    name = f"{baseline.name} (trial {baseline.trial}, {figure(study, baseline.objective)})"
    if baseline.gain is None:
        return f"against {name}: {baseline.outcome}, {baseline.reason or 'no figure'}"
    if baseline.trial == best.trial:
        return f"nothing that was tried is distinguishably better than {name}: keep it"
    return f"{versus(baseline.gain, name, study.profile.objective.optimize)}{again_words(baseline)}"


def again_words(baseline: Baseline) -> str:
    """By what a setting and the best were compared, where it is not what they first came to; else empty."""
    if baseline.again is None:
        return ""
    ours, theirs = baseline.again
    return (
        f", both as they were when they were started again (trials {ours.trial} and {theirs.trial}: "
        f"{ours.objective:,.2f} against {theirs.objective:,.2f})"
    )


def best_of(study: StudyRecord, trial: TrialRecord) -> Best:
    """A study's best trial, as it is told."""
    spread = spread_of(trial, study.profile.objective.optimize)
    assert trial.objective is not None  # noqa: S101  (the best has a figure)
    assert spread is not None  # noqa: S101
    return Best(
        trial=trial.number,
        source=trial.source,
        flags=trial.flags,
        env={**study.profile.env, **variables(trial.flags)},
        command=serving_command(study, trial.flags),
        measured=trial.measured,
        predicted=trial.predicted,
        simulated=study.simulated,
        objective=trial.objective,
        spread=spread,
        interval=interval_of(trial, study.profile.objective.optimize),
    )


def baselines_of(
    study: StudyRecord, trials: Sequence[TrialRecord], best: TrialRecord | None
) -> Iterator[Baseline]:
    """Every known setting that was tried, held against the best."""
    goal = study.profile.objective.optimize
    sources = {known.name: known.source for known in study.profile.known}
    for trial in trials:
        name = trial.source.removeprefix(KNOWN)
        if not trial.source.startswith(KNOWN) or trial.outcome == "interrupted":
            continue
        pair = compared(study.profile, best, trial, trials) if best else None
        found = gain(*pair, goal) if pair else None
        anew = pair is not None and pair[0] is not best
        yield Baseline(
            name=name,
            source=sources.get(name, ""),
            trial=trial.number,
            outcome=trial.outcome,
            reason=trial.reason,
            objective=trial.objective,
            spread=spread_of(trial, goal),
            interval=interval_of(trial, goal),
            gain=found,
            distinguishable=found.distinguishable if found else None,
            again=(_again(pair[0]), _again(pair[1])) if pair and anew else None,
        )


def repeated(study: StudyRecord, trials: Sequence[TrialRecord], best: TrialRecord) -> Gain | None:
    """How the best did when it was started again, against the first time; None where it was not."""
    again = again_of(study.profile, trials).get(best.number)
    return gain(again, best, study.profile.objective.optimize) if again else None


def repeated_line(found: Gain, goal: Goal) -> str:
    """The same in words."""
    if not changed(found):
        return f"started again, it was as good as the first time ({_interval(found, goal)})"
    return (
        f"started again, it was {_WORDS[goal][found.median < 0]} by {abs(found.median):.1%} "
        f"({_interval(found, goal)}): the machine changed meanwhile, "
        "so trials of different times compare badly"
    )


def versus(found: Gain, name: str, goal: Goal) -> str:
    """``faster than NAME by 3.1% (95% interval +2.0% to +4.2%)``, or that the two cannot be told apart."""
    if not found.distinguishable and found.low is not None:
        return f"indistinguishable from {name} ({_interval(found, goal)})"
    return (
        f"{_WORDS[goal][found.median < 0]} than {name} by {abs(found.median):.1%} ({_interval(found, goal)})"
    )


_WORDS: dict[Goal, tuple[str, str]] = {
    "total_tokens_per_s": ("faster", "slower"),
    "user_tokens_per_s": ("faster", "slower"),
    "latency_s": ("faster", "slower"),
    "context_tokens": ("longer", "shorter"),
}


def _interval(found: Gain, goal: Goal) -> str:
    """Where the true difference lies."""
    if goal == "context_tokens":
        return "counted, not timed"
    if found.low is None or found.high is None:
        return "in the only round, which tells no interval"
    # Rounded before the sign is told, for there is no -0.0 %.
    low, high = (round(bound, 3) + 0.0 for bound in (found.low, found.high))
    return f"{CONFIDENCE:.0%} interval {low:+.1%} to {high:+.1%}"


def interval_words(interval: Interval | None, digits: int = 2) -> str:
    """``95% interval 101.20 to 103.90``; empty where there is none."""
    if interval is None:
        return ""
    return f"{CONFIDENCE:.0%} interval {interval.low:,.{digits}f} to {interval.high:,.{digits}f}"


def _again(trial: TrialRecord) -> Again:
    assert trial.objective is not None  # noqa: S101  (those without a figure are not compared)
    return Again(trial=trial.number, objective=trial.objective)


def _unchecked(study: StudyRecord, best: TrialRecord) -> list[str]:
    if best.measured is None or best.boot is None:
        return []
    found = figures(best.measured, best.boot, study.profile.workload.users)
    return list(unchecked(found, limits_of(study.profile)))


def short(trial: TrialRecord) -> Trial:
    """A trial as it is listed."""
    return Trial(
        number=trial.number,
        source=trial.source,
        outcome=trial.outcome,
        reason=trial.reason,
        feasible=trial.feasible,
        launched=trial.launched,
        objective=trial.objective,
        flags=trial.flags,
        violations=trial.violations,
        boot_s=trial.boot_s,
        wall_s=trial.wall_s,
    )
