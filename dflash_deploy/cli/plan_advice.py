"""All advice on one configuration: what is known of its flags, changes that were planned, speculation."""

from __future__ import annotations

from dataclasses import replace

from dflash_deploy.cli.plan_facts import PlannedCard
from dflash_deploy.cli.plan_source import Configuration
from dflash_deploy.engine.sglang.advice import Advice, Case, Model, Weight, advise
from dflash_deploy.engine.sglang.flags import FlagProblem
from dflash_deploy.plan import advice as plan_advice
from dflash_deploy.plan.budget import Advice as PlannedChange
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.speed import speculation_advice
from dflash_deploy.plan.vram import Question
from dflash_deploy.serving_env import advice as release_advice
from dflash_deploy.serving_env.advice import DENSE_HEADS

_TIGHT_MIB = 1024.0
_OF_RELEASE = frozenset({"padded-vocabulary", "quantised-head-tensor-parallel", "fp8-bmm-cublas"})
"""Told of environments, too; the others are told of the flags behind them, or need the interpreter."""
_OWN_ARITHMETIC = "this plan's own arithmetic"


def advice_on(
    question: Question, budget: Budget, configuration: Configuration, card: PlannedCard
) -> tuple[Advice, ...]:
    """What matters most first."""
    return _merged(
        question,
        (*advise(_case(configuration, card, question), configuration.problems), *_of_release(question, card)),
        plan_advice.advise(question, context_tokens=configuration.context_tokens),
        speculation_advice(question, output_tokens=configuration.output_tokens, tasks=configuration.tasks),
        budget,
    )


def _case(configuration: Configuration, card: PlannedCard, question: Question) -> Case:
    target, draft = question.target, question.draft
    return Case(
        flags=configuration.flags,
        version=configuration.version,
        users=question.users,
        argv=configuration.argv,
        env=configuration.env,
        model=Model(
            path=target.path or target.id,
            hybrid=target.linear is not None,
            vision=target.vision,
            lm_head=target.lm_head,
            kv_cache_dtype=target.kv_cache_dtype,
            state_dtype=target.state_dtype,
            draft_dflash2=draft is not None and draft.architecture == "DFlash2DraftModel",
            draft_block=draft.block_size if draft else None,
        ),
        card_memory_mib=card.memory_mib,
        compute_capability=card.card.compute_capability if card.card else None,
        unified=card.card.unified_memory if card.card else False,
    )


def _of_release(question: Question, card: PlannedCard) -> tuple[Advice, ...]:
    """What is known of the release's code on this card with these models, beside its flags."""
    draft, lm_head = question.draft, question.target.lm_head
    case = release_advice.Case(
        version=question.version,
        capabilities=(card.card.compute_capability,) if card.card else (),
        quantised_head=None if lm_head is None else lm_head not in DENSE_HEADS,
        dflash2=draft is not None and draft.architecture == "DFlash2DraftModel",
        tensor_parallel=question.settings().gpus,
    )
    return tuple(
        Advice(one.id, one.text, {}, one.fix or "nothing", one.evidence, one.weight)
        for one in release_advice.named(_OF_RELEASE, case)
    )


def _merged(
    question: Question,
    known: tuple[Advice, ...],
    planned: tuple[PlannedChange, ...],
    of_speculation: tuple[PlannedChange, ...],
    budget: Budget,
) -> tuple[Advice, ...]:
    """What is known of flags, and changes that were planned; one that is both is told once."""
    found = [_weighed(question, budget, one) if one.weight is Weight.MEMORY else one for one in known]
    for one in planned:
        if any(_against(other, one) for other in known):
            continue
        weight = Weight.FITS if one.makes_fit else Weight.MEMORY
        if budget.fits and one.last_resort:
            weight = Weight.NOTE
        same = next((at for at, other in enumerate(known) if _alike(other, one)), None)
        if same is None:
            found.append(Advice(one.id, one.text, one.flags, one.cost, _OWN_ARITHMETIC, weight))
            continue
        text = f"{known[same].text}; {one.text}"
        found[same] = replace(known[same], text=text, flags=one.flags, weight=min(known[same].weight, weight))
    for one in of_speculation:
        if any(dict(other.flags) == dict(one.flags) for other in known if other.flags):
            continue
        # The reason is worth more than the bare arithmetic of the same change.
        found = [other for other in found if dict(other.flags) != dict(one.flags)]
        weight = Weight.NOTE if one.id == "draft-tokens-start" else Weight.SLOW
        found.append(Advice(one.id, one.text, one.flags, one.cost, "published comparisons", weight))
    return tuple(sorted(found, key=lambda advice: advice.weight))


def _alike(known: Advice, planned: PlannedChange) -> bool:
    """Both change the same flags, if not to the same values; the plan's are worked out for this card."""
    told = known.weight in (Weight.MEMORY, Weight.SLOW, Weight.REFUSED)
    return told and bool(known.flags) and set(known.flags) == set(planned.flags)


def _against(known: Advice, planned: PlannedChange) -> bool:
    """What is known to go wrong with a flag is not to be undone by the plan's arithmetic."""
    return known.weight is Weight.WRONG and bool(set(known.flags) & set(planned.flags))


def _weighed(question: Question, budget: Budget, advice: Advice) -> Advice:
    """Advice on memory with what it brings here; where that is next to nothing, it is a note."""
    if not advice.flags:
        tight = not budget.fits or budget.headroom_mib < _TIGHT_MIB
        return advice if tight else replace(advice, weight=Weight.NOTE)
    gain = plan_advice.effect(question, advice.flags)
    if gain is None:
        return replace(advice, weight=Weight.NOTE)
    weight = advice.weight if budget.fits else Weight.FITS
    return replace(advice, text=f"{advice.text}; without that: {gain}", weight=weight)


def with_refusals(budget: Budget, advice: tuple[Advice, ...], configuration: Configuration) -> Budget:
    """The budget, failed where the engine would refuse the command before, or besides, any arithmetic."""
    problem = next((one for one in configuration.problems if not one.warning), None)
    if problem is not None:
        return replace(
            budget,
            fails_at=next(one.stage for one in advice if one.stage is not None),
            failure=_refusal_words(problem),
            certain=True,
        )
    refused = next((one for one in advice if one.stage is not None), None)
    if budget.fails_at is None and refused is not None:
        return replace(budget, fails_at=refused.stage, failure=refused.text, certain=False)
    return budget


def _refusal_words(problem: FlagProblem) -> str:
    """What the parser prints, as far as its words are known."""
    if problem.kind in ("unknown", "removed"):
        return f"error: unrecognized arguments: {problem.flag}"
    if problem.kind == "ambiguous":
        return f"error: ambiguous option: {problem.flag} could match several"
    return f"error: argument {problem.flag}: {problem.message}"
