"""Why each flag of a configuration is there: what was measured without it, or what the plan says.

A searched flag whose absence changes nothing is left out: one launch tries the configuration without all such
flags, and where that is slower, a few more try it without one each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.machine.cards import load_card
from dflash_deploy.profile.schema import METHOD, FlagSetting, Goal
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.gain import NOISE, gain
from dflash_deploy.tune.launching import draft_flags, method_of, searched_methods, shared_flags
from dflash_deploy.tune.records import StudyRecord, TrialRecord
from dflash_deploy.tune.space import Settings, key_of, tidy

WITHOUT = "without:"
"""How the source of a trial begins that goes without some flags of the best one."""

_LEAST_CHANCE = 0.5
_ROOM_MIB = 64.0
"""Memory that a simpler command may cost."""


@dataclass(frozen=True)
class Judge:
    """What the plan thinks of leaving flags out.

    Attributes:
        shared: flags of the model.
        searched: flags that may be left out.
    """

    forecaster: Forecaster
    rate: Callable[[Settings], float | None]
    goal: Goal
    shared: Settings
    searched: Sequence[str]

    def needed(self, settings: Settings, without: Settings) -> str | None:
        """Why the plan would not have the flags left out; None where it has nothing to say against it."""
        before = self.forecaster.prospect({**self.shared, **settings})
        after = self.forecaster.prospect({**self.shared, **without})
        if before is None or after is None:
            return None
        if after.chance < _LEAST_CHANCE:
            return "without it the plan sees no server that holds (predicted)"
        if self.goal == "context_tokens" and after.context < (1 - NOISE) * before.context:
            return (
                f"without it a user has {after.context} tokens of context, not {before.context} (predicted)"
            )
        if after.headroom_mib < before.headroom_mib - _ROOM_MIB:
            room = before.headroom_mib - after.headroom_mib
            return f"it leaves {room:.0f} MiB more free (predicted)"
        return self._slower(settings, without)

    def droppable(self, best: TrialRecord) -> list[str]:
        """Searched flags of a trial that the plan sees no reason for."""
        settings = self.own(best.flags)
        # Drafting is no flag of many, and what it gives the search knows from the start.
        given = [flag for flag in self.searched if flag in settings and flag != METHOD]
        return [flag for flag in given if self.needed(settings, left_out(settings, [flag])) is None]

    def own(self, flags: Settings) -> dict[str, FlagSetting]:
        """Flags less those of the model."""
        return {flag: value for flag, value in flags.items() if flag not in self.shared}

    def _slower(self, settings: Settings, without: Settings) -> str | None:
        before = self.rate({**self.shared, **settings})
        after = self.rate({**self.shared, **without})
        if not before or not after or math.log(after / before) > -2 * NOISE:
            return None
        return f"without it speed falls by {1 - after / before:.1%} (predicted)"


def reasons_of(study: StudyRecord, best: TrialRecord, trials: Sequence[TrialRecord]) -> Mapping[str, str]:
    """``reasons`` for a study's best trial, by the plan as the study's own logs correct it."""
    card = load_card(study.card) if study.card else None
    memory_mib = best.measured.vram_total_mib if best.measured else None
    forecaster = Forecaster(study.profile, study.engine_version, memory_mib)
    for trial in trials:
        forecaster = forecaster.after(trial)
    judge = Judge(
        forecaster,
        lambda flags: forecaster.rate(flags, card) if card else None,
        study.profile.objective.optimize,
        shared_flags(study.profile, simulated=study.simulated),
        list(study.profile.search),
    )
    return reasons(best, trials, judge)


def left_out(settings: Settings, flags: Sequence[str]) -> dict[str, FlagSetting]:
    """A configuration without some of its flags."""
    return tidy({flag: value for flag, value in settings.items() if flag not in flags})


def reasons(best: TrialRecord, trials: Sequence[TrialRecord], judge: Judge) -> Mapping[str, str]:
    """By searched flag of the best configuration, why it is given as it is."""
    return {flag: _reason(flag, best, trials, judge) for flag in judge.searched if flag in best.flags}


def _reason(flag: str, best: TrialRecord, trials: Sequence[TrialRecord], judge: Judge) -> str:
    if flag == METHOD:
        return "; ".join(_of_other_methods(best, trials, judge)) or "no other one was to be tried"
    settings = judge.own(best.flags)
    measured = list(_measured_without(flag, best, trials, judge))
    if measured:
        return measured[0]
    planned = judge.needed(settings, left_out(settings, [flag]))
    if planned is not None:
        return planned
    compared = _compared(flag, best, trials, judge.goal)
    if compared is not None:
        return compared
    return "as it was found; leaving it out was not tried"


def _measured_without(
    flag: str, best: TrialRecord, trials: Sequence[TrialRecord], judge: Judge
) -> Iterator[str]:
    wanted = key_of({**judge.shared, **left_out(judge.own(best.flags), [flag])})
    for trial in trials:
        if key_of(trial.flags) != wanted:
            continue
        found = gain(best, trial, judge.goal)
        if not trial.feasible:
            yield f"without it: {trial.reason or trial.outcome} (trial {trial.number})"
        elif found is not None:
            yield f"without it {_change(-found.median)} (trial {trial.number})"


def _of_other_methods(best: TrialRecord, trials: Sequence[TrialRecord], judge: Judge) -> Iterator[str]:
    """What came of the other ways to make draft tokens, each at its best."""
    for method in searched_methods(judge.forecaster.profile):
        if method == best.flags.get(METHOD):
            continue
        tried = [trial for trial in trials if trial.flags.get(METHOD) == method and trial.proves is None]
        gains = [
            (found.median, trial)
            for trial in tried
            if trial.feasible and (found := gain(trial, best, judge.goal)) is not None
        ]
        if gains:
            most, trial = max(gains, key=lambda one: one[0])
            yield f"with {method} {_change(most)} (trial {trial.number})"
        elif tried:
            yield f"with {method}: {tried[0].reason or tried[0].outcome} (trial {tried[0].number})"
        else:
            refusal = _refusal(best.flags, method, judge.forecaster)
            yield f"{method} was not tried" + (f": {refusal} (predicted)" if refusal else "")


def _refusal(flags: Settings, method: Method, forecaster: Forecaster) -> str | None:
    """What the plan has against the same configuration with another way to make draft tokens."""
    profile = forecaster.profile
    own = draft_flags(profile, method_of(profile, flags), simulated=True)
    kept = {flag: value for flag, value in flags.items() if flag not in own}
    return forecaster.forecast(
        {**kept, **draft_flags(profile, method, simulated=True), METHOD: method}
    ).refusal


def _compared(flag: str, best: TrialRecord, trials: Sequence[TrialRecord], goal: Goal) -> str | None:
    """The best other value of the flag that was measured with all else equal."""
    rest = key_of({name: value for name, value in best.flags.items() if name != flag})
    for trial in trials:
        others = {name: value for name, value in trial.flags.items() if name != flag}
        if flag not in trial.flags or trial.number == best.number or key_of(others) != rest:
            continue
        found = gain(trial, best, goal)
        if found is not None and trial.flags[flag] != best.flags[flag]:
            return f"with {trial.flags[flag]} {_change(found.median)} (trial {trial.number})"
    return None


def _change(share: float) -> str:
    if abs(share) <= NOISE:
        return "nothing changes"
    return f"the objective is {abs(share):.1%} {'better' if share > 0 else 'worse'}"
