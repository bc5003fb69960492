"""Which trial is the best."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from dflash_deploy.profile.schema import Goal, Profile
from dflash_deploy.tune.drift import excuse, unlike
from dflash_deploy.tune.gain import NOISE, better_by, gain
from dflash_deploy.tune.limits import LESS_IS_BETTER, objective_value
from dflash_deploy.tune.records import StudyRecord, TrialRecord
from dflash_deploy.tune.space import key_of
from dflash_deploy.tune.steady import Growth, growth_of, kind_of

KNOWN = "known:"

_PLAIN = 0.015
"""More than this is better, though few rounds may not prove it."""

_MOST_AGAIN = 3
"""Launches to compare with the best anew where the machine was not the same."""


def best_trial(study: StudyRecord, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """``best_of`` a study."""
    return best_of(study.profile, trials)


def best_of(profile: Profile, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The best feasible trial, or None where there is none.

    A configuration that failed when it was started again is out. Of those that nothing is distinguishably
    better than, one that somebody already knows is taken, else the one with the fewest flags to give, and of
    these the one that leaves the most memory. Where the machine was not the same for all, those that were
    started again are compared by what they came to then.
    """
    trials = list(trials)
    held = holding(profile, trials)
    favourite = _favourite(profile, held)
    if favourite is None:
        return None
    again = again_of(profile, trials)
    goal = profile.objective.optimize
    if favourite.number not in again or not any(
        unlike(trial, favourite, again[favourite.number], goal)
        for trial in held
        if trial.number in again and trial is not favourite
    ):
        return favourite
    anew = [
        again[trial.number].model_copy(update={"number": trial.number, "source": trial.source})
        for trial in held
        if trial.number in again
    ]
    top = _favourite(profile, anew)
    return next(trial for trial in held if top is not None and trial.number == top.number)


def again_of(profile: Profile, trials: Iterable[TrialRecord]) -> Mapping[int, TrialRecord]:
    """By number of the trial, what its configuration came to when it was started again and held."""
    trials = list(trials)
    goal = profile.objective.optimize
    found = {}
    for trial in holding(profile, trials):
        proof = proof_of(trial, trials)
        if proof is not None and proof.feasible and gain(proof, trial, goal) is not None:
            found[trial.number] = proof
    return found


def doubtful(profile: Profile, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The trial to start again next because the machine was not the same; None where there is none to.

    First those that may be better than the best, and at the last a setting that somebody knew, for what is
    said of it is told most.
    """
    trials = list(trials)
    held = holding(profile, trials)
    goal = profile.objective.optimize
    best, again = _favourite(profile, held), again_of(profile, trials)
    if best is None or best.number not in again or len(again) > _MOST_AGAIN:
        return None
    proof = again[best.number]
    others = [trial for trial in held if trial.number not in again and trial is not best]
    hopes: dict[int, float] = {}
    for trial in others:
        excused = excuse(trial, best, proof, goal)
        hope = excused + math.log1p(better_by(trial.objective or 0.0, best.objective or 0.0, goal))
        if excused and hope > NOISE:
            hopes[trial.number] = hope
    known = [trial for trial in others if trial.source.startswith(KNOWN) and unlike(trial, best, proof, goal)]
    last = len(again) == _MOST_AGAIN
    if known and (last or not hopes):
        return known[0]
    return max(
        (trial for trial in others if trial.number in hopes),
        key=lambda trial: hopes[trial.number],
        default=None,
    )


def compared(
    profile: Profile, trial: TrialRecord, over: TrialRecord, trials: Iterable[TrialRecord]
) -> tuple[TrialRecord, TrialRecord]:
    """The measurements of two trials to compare: of the same time, where both were started again."""
    again = again_of(profile, trials)
    if trial.number in again and over.number in again:
        return again[trial.number], again[over.number]
    return trial, over


def _favourite(profile: Profile, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """By one measurement of each."""
    if not trials:
        return None
    goal, searched = profile.objective.optimize, profile.search.keys()
    top = max(trials, key=lambda trial: (_score(trial, goal), -trial.number))
    level = [trial for trial in trials if not _beats(top, trial, goal)]
    return max(level, key=lambda trial: _simplicity(trial, searched, goal), default=top)


def front_of(profile: Profile, trials: Iterable[TrialRecord]) -> list[int]:
    """Numbers of the trials that no other is better than in one objective and as good as in the others.

    Empty where the profile has one objective only.
    """
    goals = [profile.objective.optimize, *profile.objective.also]
    if len(goals) < 2:
        return []
    users = profile.workload.users
    points = []
    for trial in holding(profile, list(trials)):
        if trial.measured is None or trial.boot is None:
            continue
        values = [objective_value(goal, trial.measured, trial.boot, users) for goal in goals]
        if None not in values:
            signs = [-1 if goal in LESS_IS_BETTER else 1 for goal in goals]
            points.append((trial.number, [s * (v or 0.0) for s, v in zip(signs, values, strict=True)]))
    return [
        number
        for number, point in points
        if not any(
            other != point and all(a >= b for a, b in zip(other, point, strict=True)) for _, other in points
        )
    ]


def proof_of(trial: TrialRecord, trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The last time that a trial's configuration was started again to see whether it holds."""
    key = key_of(trial.flags)
    proofs = [one for one in trials if one.proof is not None and key_of(one.flags) == key]
    return proofs[-1] if proofs else None


def holding(profile: Profile, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Those that can be the best: they kept every limit, and nothing says that they would not hold."""
    fell = [one for one in trials if one.proves is not None and _fell(one)]
    failed = {key_of(one.flags) for one in fell}
    limit = profile.objective.constraints.get("free_vram_mib")
    least_mib = (limit.min if limit else None) or 0.0
    starved = [growth for one in fell if _starved(one, least_mib) and (growth := growth_of(one)) is not None]
    return [
        trial
        for trial in trials
        if trial.feasible
        and trial.objective is not None
        and trial.proves is None
        and key_of(trial.flags) not in failed
        and not any(_goes_the_same_way(trial, growth, least_mib) for growth in starved)
    ]


def _starved(proof: TrialRecord, least_mib: float) -> bool:
    """It had enough memory while it was measured, and too little for all that was promised."""
    free = proof.proof.free_mib if proof.proof else None
    return proof.ran_out or (proof.outcome != "bad-output" and free is not None and free < least_mib)


def _goes_the_same_way(trial: TrialRecord, growth: Growth, least_mib: float) -> bool:
    """It would come to as much memory as what then had too little of it, or leave less than is wanted."""
    measured = trial.measured
    if measured is None or measured.vram_used_mib is None or kind_of(trial.flags) != growth.kind:
        return False
    peak = measured.vram_used_mib + growth.of(trial.flags)
    total = math.inf if measured.vram_total_mib is None else measured.vram_total_mib
    return peak >= growth.peak_mib or peak > total - least_mib


def _fell(proof: TrialRecord) -> bool:
    return not proof.feasible and proof.outcome != "interrupted"


def _beats(trial: TrialRecord, over: TrialRecord, goal: Goal) -> bool:
    found = gain(trial, over, goal)
    if found is None:
        return True
    whole = better_by(trial.objective or 0.0, over.objective or 0.0, goal)
    return max(found.median, whole) > _PLAIN or (found.distinguishable and found.median > NOISE)


def _simplicity(
    trial: TrialRecord, searched: Collection[str], goal: Goal
) -> tuple[bool, int, int, float, int]:
    given = sum(flag in searched for flag in trial.flags)
    measured = trial.measured
    used = measured.vram_used_mib if measured else None
    room = -used if used is not None else 0
    return trial.source.startswith(KNOWN), -given, room, _score(trial, goal), -trial.number


def _score(trial: TrialRecord, goal: Goal) -> float:
    value = trial.objective
    assert value is not None  # noqa: S101  (only trials with a figure are compared)
    return -value if goal in LESS_IS_BETTER else value
