"""From what was asked of ``plan`` to its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_deploy import calibration
from dflash_deploy.calibration import CalibrationRecord, Subject, machine_name
from dflash_deploy.checkpoint.cards import ModelCard
from dflash_deploy.cli.plan_advice import advice_on, with_refusals
from dflash_deploy.cli.plan_facts import PlannedCard, asked_card, planned_card, planned_models
from dflash_deploy.cli.plan_source import Asked, Configuration, configuration_of, log_of
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.launch import Flags
from dflash_deploy.engine.sglang.advice import Advice
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.engine.sglang.versions import nearest
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.calibration import Calibrated, calibrate
from dflash_deploy.plan.speed import Speed, estimate
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import Question, plan

_FEW = 8
_TYPICAL_CONTEXT = 2048
"""Tokens of a request, on average, that speed is told for."""
_LEAST_CONTEXT_MIB = 200.0
"""What a server takes before it loads anything is more than this."""


@dataclass(frozen=True)
class Correction:
    """What logs of this machine changed in a plan.

    Attributes:
        record: what they taught.
        without: the budget as it would be without it.
    """

    record: CalibrationRecord
    without: Budget


@dataclass(frozen=True)
class Answer:
    """A budget with all that is said about it.

    Attributes:
        question: what was planned.
        speed: predicted, for all users together and ``alone`` for one of them; None where the card is not
            known or nothing is served.
        correction: what earlier logs changed, None where none is kept.
        observed: what a log says of the same start, None without a log.
        calibrated: how far the plan is from that log, and would be once corrected by it.
        kept: that correction is used from now on.
    """

    configuration: Configuration
    question: Question
    card: PlannedCard
    target: ModelCard
    draft: ModelCard | None
    users: int
    budget: Budget
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    speed: Speed | None = None
    alone: Speed | None = None
    correction: Correction | None = None
    observed: BootRecord | None = None
    calibrated: Calibrated | None = None
    kept: bool = False


def answer(asked: Asked) -> Answer:
    """Plan what was asked for; with ``keep``, what the log teaches is kept for later plans.

    Raises:
        DeployError: what was asked cannot be read, or the card or the model is not known.
    """
    log = log_of(asked)
    configuration = configuration_of(asked, log)
    observed = read_boot_log(log.splitlines()) if log is not None else None
    card = planned_card(
        asked.gpu,
        own=configuration.card_id,
        env=configuration.env,
        on_cpu=configuration.flags.get("device") == "cpu",
    )
    target, draft, notes = planned_models(configuration.flags)
    subject = Subject(
        machine_name(card.card, card.memory_mib),
        configuration.version,
        target.id,
        draft.id if draft else None,
    )
    prior = Question(
        card_memory_mib=card.memory_mib,
        target=target,
        draft=draft,
        flags=configuration.flags,
        version=configuration.version,
        users=asked.users or configuration.users or _few_requests(configuration.flags),
        other_mib=card.used_mib,
        env=configuration.env,
        terms=terms_for(card.memory_mib, card.card.compute_capability if card.card else None),
    )
    meant = nearest(configuration.version)
    notes = (*notes, *([meant.note] if meant.note else []))
    record = calibration.load(subject)
    question = prior if record is None else replace(prior, terms=record.corrected())
    calibrated = None
    if observed is not None:
        calibrated = _learnt(question, observed, asked.free_mib)
    free_mib = asked.free_mib
    if free_mib is None and observed is not None and observed.free_before_load_gib:
        free_mib = observed.free_before_load_gib * 1024
        notes = (*notes, f"{free_mib:,.0f} MiB were free before the load, says the log: planned with that")
    if free_mib is not None:
        prior, question = (replace(one, other_mib=0.0, free_mib=free_mib) for one in (prior, question))
    budget = plan(question)
    correction = None if record is None else Correction(record, plan(prior))
    if asked.keep and calibrated is not None:
        _keep(subject, calibrated, record, log=str(asked.from_log or f"unit {asked.unit}"))
    advice = advice_on(question, budget, configuration, card)
    budget = with_refusals(budget, advice, configuration)
    speed, alone = _speeds(question, card, budget, configuration)
    return Answer(
        configuration=configuration,
        question=question,
        card=card,
        target=target,
        draft=draft,
        users=question.users,
        budget=budget,
        advice=advice,
        notes=(*configuration.notes, *notes, *_cards_meant(question), *_shortfall(budget, configuration)),
        speed=speed,
        alone=alone,
        correction=correction,
        observed=observed,
        calibrated=calibrated,
        kept=asked.keep and calibrated is not None,
    )


def kept_records(gpu: str | None) -> tuple[CalibrationRecord, ...]:
    """What logs taught, of one card or of all.

    Raises:
        DeployError: the card is not known.
    """
    machine = None if gpu is None else _machine(gpu)
    return tuple(one for one in calibration.records() if machine in (None, one.machine))


def forget(gpu: str | None) -> int:
    """Drop what logs taught, of one card or of all; how many records are gone.

    Raises:
        DeployError: the card is not known, or a record cannot be removed.
    """
    return calibration.reset(machine=None if gpu is None else _machine(gpu))


def _machine(gpu: str) -> str:
    card = asked_card(gpu)
    return machine_name(card.card, card.memory_mib)


def _learnt(question: Question, observed: BootRecord, free_mib: float | None) -> Calibrated:
    """What a log teaches; what is in use on the card now is taken for what was then, where it can be."""
    if free_mib is not None:
        return calibrate(replace(question, other_mib=0.0, free_mib=free_mib), observed)
    free = observed.free_before_load_gib
    room_mib = question.card_memory_mib - (free or 0.0) * 1024 - question.other_mib
    if free is not None and room_mib < _LEAST_CONTEXT_MIB:
        question = replace(question, other_mib=0.0)
    return calibrate(question, observed)


def _keep(subject: Subject, calibrated: Calibrated, earlier: CalibrationRecord | None, *, log: str) -> None:
    if not calibrated.agrees:
        raise DeployError(
            f"{log}: the server of this log serves, and planned with what the log tells this configuration "
            "would not: the log is of another one",
            fix="give the command that the log is of after --, or leave --keep out",
            exit_code=ExitCode.INVALID_INPUT,
        )
    if calibrated.learnt:
        calibration.keep(subject, calibrated)
    elif earlier is None:
        raise DeployError(
            f"{log}: this log teaches nothing that later plans could be corrected by",
            fix="give the log of a start that came at least as far as loading the model",
            exit_code=ExitCode.INVALID_INPUT,
        )


def _speeds(
    question: Question, card: PlannedCard, budget: Budget, configuration: Configuration
) -> tuple[Speed | None, Speed | None]:
    """For all users that are served at once, and for one alone."""
    if card.card is None or not budget.fits:
        return None, None
    users = max(1, min(question.users, budget.max_running_requests))
    tokens = min(budget.context_per_user, _TYPICAL_CONTEXT)
    together, alone = (
        estimate(replace(question, users=count), card.card, context_tokens=tokens, tasks=configuration.tasks)
        for count in (users, 1)
    )
    return together, alone


def _cards_meant(question: Question) -> tuple[str, ...]:
    """How many cards the command wants, where it is more than one."""
    sharing, copies = question.settings().gpus, question.flags.get("dp-size", 1)
    if not isinstance(copies, int) or copies < 1:
        copies = 1
    if sharing * copies == 1:
        return ()
    return (
        f"the command wants {sharing * copies} cards like this one ("
        + (f"{copies} copies of the model" if copies > 1 else "")
        + (", each " if sharing > 1 and copies > 1 else "")
        + (f"shared by {sharing}" if sharing > 1 else "")
        + "): memory is told of one card, tokens and requests of one copy",
    )


def _shortfall(budget: Budget, configuration: Configuration) -> tuple[str, ...]:
    """What a profile promises and this setting of it does not give."""
    promised = configuration.context_tokens
    if promised is None or not budget.fits or budget.context_per_user >= promised:
        return ()
    return (
        f"each user has {budget.context_per_user:,} tokens, and the profile promises {promised:,}: longer "
        "requests are refused",
    )


def _few_requests(flags: Flags) -> int:
    """A small limit of running requests says how many people are meant; a large one says nothing."""
    limit = flags.get("max-running-requests")
    return limit if isinstance(limit, int) and 1 <= limit <= _FEW else 1
