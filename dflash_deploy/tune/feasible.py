"""What is refused before a launch: minutes are saved on a configuration that cannot serve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

from dflash_deploy.calibration import Subject, machine_name
from dflash_deploy.checkpoint.cards import ModelCard, find_model_card
from dflash_deploy.engine.launch import Flags
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.cards import Card
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.calibration import Calibrated, calibrate
from dflash_deploy.plan.speed import relative_rate
from dflash_deploy.plan.terms import Terms, terms_for
from dflash_deploy.plan.vram import Planner, Question, plan
from dflash_deploy.profile.drafts import draft_card
from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.launching import method_of, values, variables
from dflash_deploy.tune.records import Predicted, TrialRecord
from dflash_deploy.tune.space import Settings
from dflash_deploy.tune.steady import Growth, growth_of

_Task = TypeVar("_Task", bound=str)

_DOUBT_MIB = 400.0
"""The plan's empirical parts may be too high by this much at the sizing: a refusal needs more."""
_CERTAIN_MIB = 1024.0
"""With so much more memory it is refused all the same: nobody has run it."""

_UNSURE_MIB, _SURE_MIB = 260.0, 90.0
"""Standard deviation of the predicted peak before and after the first log of this card and model (the largest
differences seen on the simulator were 600 and 150)."""

_NO_CHANCE = 0.02
SHORT = 0.1
"""Most chance of what by the plan has fewer users or less context than was promised."""
_LEAST_HEADROOM_MIB = -1024.0
_LEAST_CONTEXT = 0.9


@dataclass(frozen=True)
class Forecast:
    """What is known of a configuration before its launch. Figures are predicted.

    Attributes:
        refusal: why it is not worth a launch, or None.
        certain: it is refused by the engine's own arithmetic, which nobody's experience gets around.
        predicted: the plan's figures, None where the plan knows nothing of the card or the model.
    """

    refusal: str | None = None
    certain: bool = False
    predicted: Predicted | None = None


class Prospect(NamedTuple):
    """How likely a configuration is to serve as the plan has it. Figures are predicted.

    Attributes:
        chance: that it comes up with all it should have, and within the profile's limits on memory.
        context: tokens for each user.
        headroom_mib: left at the peak; ``ready_mib`` when the server is ready.
    """

    chance: float
    context: int
    headroom_mib: float
    ready_mib: float


class _DraftTerms(NamedTuple):
    """What a draft takes, of ``plan.terms.Terms``."""

    draft_weights: float | None
    after_load: float


@dataclass(frozen=True)
class Forecaster:
    """The plan for one profile on one card.

    Attributes:
        memory_mib: None where there is no card, or none that tells its memory.
        other_mib: what others held on the card before any server was started.
        terms: as logs of this card corrected them, None for the usual ones.
        boots: how many logs that were.
        drafts: of the terms, those that belong to a draft, by each method that a log was seen of.
        growths: what proofs told of the memory that long use takes beyond a measurement.
    """

    profile: Profile
    version: str
    memory_mib: int | None
    other_mib: float = 0.0
    terms: Terms | None = None
    boots: int = 0
    drafts: Mapping[Method, _DraftTerms] = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()

    def forecast(self, flags: Settings) -> Forecast:
        """Judge a configuration without launching it."""
        users = self.profile.workload.users
        running = flags.get("max-running-requests")
        if isinstance(running, int) and running < users:
            return Forecast(f"max-running-requests {running} is below the {users} users", certain=True)
        planned = self.budget(flags)
        hopeful = self._plan(flags, self.other_mib - _DOUBT_MIB)
        if planned is None or hopeful is None:
            return Forecast()
        predicted = Predicted(
            peak_mib=round(planned.predicted_peak_mib, 1),
            kv_tokens=planned.kv_tokens,
            max_running_requests=planned.max_running_requests,
            fits=planned.fits,
            calibrated_by=self.boots,
        )
        refusal = self._refusal(hopeful, users)
        roomy = self._plan(flags, self.other_mib - _CERTAIN_MIB) if refusal and hopeful.certain else None
        return Forecast(refusal, roomy is not None and roomy.certain, predicted)

    def _refusal(self, budget: Budget, users: int) -> str | None:
        promised = self.profile.workload.context_tokens
        if budget.fails_at is not None:
            return f"the plan ends at {budget.fails_at}: {budget.failure}"
        if budget.max_running_requests < users:
            return f"by the plan it serves {budget.max_running_requests} at once, {users} are wanted"
        if budget.context_per_user < _LEAST_CONTEXT * promised:
            return f"by the plan each user has {budget.context_per_user} tokens, {promised} are promised"
        if budget.headroom_mib < _LEAST_HEADROOM_MIB:
            return f"by the plan {-budget.headroom_mib:.0f} MiB are missing"
        return None

    def prospect(self, flags: Settings) -> Prospect | None:
        """How likely a configuration is to serve; None where nothing is planned."""
        budget = self.budget(flags)
        if budget is None:
            return None
        doubt_mib = self._doubt_mib(flags)
        grown_mib = max((growth.of(flags) for growth in self.growths), default=0.0)
        chance = self._fitting(budget, grown_mib, doubt_mib)
        if chance >= _NO_CHANCE:
            # What hangs on steps, and not on a peak: asked again with less memory, and with more.
            wary = self._holds(self._plan(flags, self.other_mib + doubt_mib))
            plain = wary or self._holds(budget)
            hopeful = plain or self._holds(self._plan(flags, self.other_mib - 2 * doubt_mib))
            chance *= 1.0 if wary else 0.6 if plain else SHORT if hopeful else 0.0
        return Prospect(chance, budget.context_per_user, budget.headroom_mib, budget.ready_free_mib)

    def most_users(self, flags: Settings) -> int:
        """How many the state cache of a configuration serves at once; all where nothing limits it."""
        question = self.question(flags, self.other_mib)
        if question is None or question.target.linear is None:
            return self.profile.workload.users
        try:
            asked = question.settings()
        except DeployError:
            return self.profile.workload.users
        if asked.state_slots is None:
            return self.profile.workload.users
        return asked.state_slots // max(asked.slots_per_request, 1)

    def _doubt_mib(self, flags: Settings) -> float:
        """Standard deviation of a predicted peak."""
        return _SURE_MIB if method_of(self.profile, flags) in self.drafts else _UNSURE_MIB

    def _fitting(self, budget: Budget, grown_mib: float, doubt_mib: float) -> float:
        free = self.profile.objective.constraints.get("free_vram_mib")
        slack = budget.headroom_mib
        if free is not None and free.min is not None:
            # The driver's own part counts as free to the tools that the limit is held against.
            slack = min(slack, budget.total_mib - budget.predicted_peak_mib - free.min)
        return 0.5 * (1 + math.erf((slack - grown_mib) / doubt_mib / math.sqrt(2)))

    def _holds(self, budget: Budget | None) -> bool:
        workload = self.profile.workload
        return (
            budget is not None
            and budget.max_running_requests >= workload.users
            and budget.context_per_user >= workload.context_tokens
            and not _draft_graphs_lost(budget)
        )

    def subject(self, card: Card | None, method: Method | None = None) -> Subject | None:
        """What logs of a method on a card teach something of; None where nothing is planned.

        Args:
            card: None for one that is not known.
            method: None for the profile's own.
        """
        target, draft = self._models(method or self.profile.speculation.method)
        if self.memory_mib is None or target is None:
            return None
        machine = machine_name(card, self.memory_mib)
        return Subject(machine, self.version, target.id, draft.id if draft else None)

    def lesson(self, record: TrialRecord) -> Calibrated | None:
        """What the log of a trial's server teaches.

        None where it did not come to serve, or where the plan, corrected by it, would still not let it: then
        figures were held against those of a start that ends early.
        """
        question = self.question(record.flags, self.other_mib)
        if question is None or record.boot is None or record.boot.free_at_ready_gib is None:
            return None
        used_mib = record.measured.vram_used_mib if record.measured else None
        try:
            lesson = calibrate(question, record.boot, used_mib=used_mib)
            served = plan(replace(question, terms=lesson.terms)).fails_at is None
        except DeployError:
            return None
        return lesson if served else None

    def budget(self, flags: Settings) -> Budget | None:
        """The plan of a configuration; None where nothing is planned."""
        return self._plan(flags, self.other_mib)

    def after(self, record: TrialRecord) -> Forecaster:
        """The same with what the log of a trial's server teaches, if it does."""
        lesson = self.lesson(record)
        return self if lesson is None else self.corrected(lesson.terms, method_of(self.profile, record.flags))

    def grown(self, record: TrialRecord) -> Forecaster:
        """The same with what a proof tells of long use, if it is one."""
        growth = growth_of(record)
        return self if growth is None else replace(self, growths=(*self.growths, growth))

    def corrected(self, terms: Terms, method: Method | None = None, *, boots: int = 1) -> Forecaster:
        """The same with the terms that some more logs taught.

        Args:
            terms: of the machine; what a draft takes of them holds for the logs' method alone.
            method: of the logs, None for the profile's own.
            boots: how many logs.
        """
        own = {method or self.profile.speculation.method: _DraftTerms(terms.draft_weights, terms.after_load)}
        return replace(self, terms=terms, boots=self.boots + boots, drafts={**self.drafts, **own})

    def _terms_of(self, method: Method) -> Terms | None:
        if self.terms is None or self.memory_mib is None:
            return self.terms
        usual = _DraftTerms(None, terms_for(self.memory_mib).after_load)
        return replace(self.terms, **self.drafts.get(method, usual)._asdict())

    def _plan(self, flags: Settings, other_mib: float) -> Budget | None:
        planner = self._planner(flags, other_mib)
        if planner is None:
            return None
        try:
            return planner.plan(values(flags))
        except DeployError:
            # What cannot be planned for can still be launched.
            return None

    def _planner(self, flags: Settings, other_mib: float) -> Planner | None:
        """For all that no flag says: the draft, the environment and the free memory."""
        method, env = method_of(self.profile, flags), variables(flags)
        key = (method, tuple(sorted(env.items())), other_mib)
        if key not in self._planners:
            question = self._asked(method, env, {}, other_mib)
            self._planners[key] = None if question is None else Planner(question)
        return self._planners[key]

    @cached_property
    def _planners(self) -> dict[tuple[Method, tuple[tuple[str, str], ...], float], Planner | None]:
        return {}

    def rate(self, flags: Settings, card: Card) -> float | None:
        """Expected tokens/s of one user, to compare configurations by; None where nothing is planned."""
        question = self.question(flags, self.other_mib)
        workload = self.profile.workload
        if question is None:
            return None
        # A round begins with next to no context and ends with the answer's length.
        context = min(workload.context_tokens, 64 + workload.output_tokens // 2)
        try:
            return relative_rate(question, card, context_tokens=context, tasks=_by_name(workload.tasks))
        except DeployError:
            return None

    def question(self, flags: Settings, other_mib: float) -> Question | None:
        """What the plan is asked; None where it knows nothing of the card or the model."""
        return self._asked(method_of(self.profile, flags), variables(flags), values(flags), other_mib)

    def _asked(
        self, method: Method, env: Mapping[str, str], flags: Flags, other_mib: float
    ) -> Question | None:
        target, draft = self._models(method)
        if self.memory_mib is None or target is None:
            return None
        return Question(
            card_memory_mib=self.memory_mib,
            target=target,
            draft=draft,
            flags=flags,
            version=self.version,
            users=self.profile.workload.users,
            other_mib=other_mib,
            env={**self.profile.env, **env},
            terms=self._terms_of(method),
        )

    def _models(self, method: Method) -> tuple[ModelCard | None, ModelCard | None]:
        draft = draft_card(self.profile, method)
        if draft is None and method in ("mtp", "dspark", "dflash"):
            return None, None
        return _card(self.profile.model.target), draft


def _draft_graphs_lost(budget: Budget) -> bool:
    verified = {"verify graphs", "draft weights"} <= budget.sizes.keys()
    return verified and "draft graphs" not in budget.sizes


def _by_name(tasks: Mapping[_Task, float]) -> dict[str, float]:
    return {str(task): weight for task, weight in tasks.items()}


_card = cache(find_model_card)
"""A search asks for the same two a thousand times."""
