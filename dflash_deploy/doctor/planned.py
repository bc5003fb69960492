"""Checks of a profile against the machine. The memory figures are predicted; nothing is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflash_deploy import calibration
from dflash_deploy.checkpoint.cards import ModelCard, list_model_cards
from dflash_deploy.doctor.finding import Answer, Status, failed, passed, unknown, warned
from dflash_deploy.doctor.gpu import held_by_others_mib, used
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.engine.launch import Flags, FlagValue
from dflash_deploy.engine.sglang import advice as flag_advice
from dflash_deploy.engine.sglang.advice_case import Weight
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.cards import Card, load_card, match_card
from dflash_deploy.machine.gpu import Gpu
from dflash_deploy.plan import advice as plan_advice
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import Question, plan
from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.launching import configured, method_of, values, variables
from dflash_deploy.tune.space import Settings

_TOLD = 3


@dataclass(frozen=True)
class _Machine:
    """The card that is planned for; ``gpu`` is None where it is not here."""

    card: Card | None
    memory_mib: int
    used_mib: int
    gpu: Gpu | None


def card(subject: Subject) -> Answer | None:
    """The card is the one that the profile is for."""
    profile = subject.profile
    if profile is None or profile.card is None:
        return None
    wanted = load_card(profile.card)
    here = [gpu for gpu in used(subject.gpus()) if gpu.name]
    if not here:
        return unknown(f"the profile is for {wanted.name}; no card is here to compare with")
    found = match_card(here[0].name or "", here[0].memory_total_mib)
    if found is not None and found.id == wanted.id:
        return passed(wanted.name)
    own = f"dflash-deploy doctor {found.default_profile}" if found and found.default_profile else None
    return warned(
        f"the profile is for {wanted.name}; here is {here[0].name}, {here[0].memory_total_mib or '?'} MiB",
        own or "dflash-deploy profile list",
    )


def flags(subject: Subject) -> Answer | None:
    """The engine that is installed knows the profile's flags, and can do what they say together."""
    profile = subject.profile
    if profile is None:
        return None
    wanted = profile_flags(profile)
    version = _version(subject)
    # Raises for what the parser would refuse; the message names each flag and the nearest one.
    FlagTable.for_version(version).spell(wanted)
    target, draft = subject.target(), subject.draft()
    model = flag_advice.Model()
    if target is not None and target.card is not None:
        model = flag_advice.Model(
            path=target.place,
            hybrid=target.card.linear is not None,
            vision=target.card.vision,
            lm_head=target.card.lm_head,
            kv_cache_dtype=target.card.kv_cache_dtype,
            state_dtype=target.card.state_dtype,
            draft_dflash2=bool(draft and draft.card and draft.card.architecture == "DFlash2DraftModel"),
            draft_block=draft.card.block_size if draft and draft.card else None,
        )
    machine = _machine(subject)
    case = flag_advice.Case(
        flags=wanted,
        version=version,
        users=profile.workload.users,
        env={**profile.env, **variables(_first_known(profile))},
        model=model,
        card_memory_mib=machine.memory_mib if machine else None,
        compute_capability=machine.card.compute_capability if machine and machine.card else None,
        unified=bool(machine and machine.card and machine.card.unified_memory),
    )
    found = [
        one for one in flag_advice.advise(case) if one.weight in (Weight.REFUSED, Weight.WRONG, Weight.SLOW)
    ]
    if not found:
        return passed(f"SGLang {version} takes them all")
    status = Status.FAIL if found[0].weight in (Weight.REFUSED, Weight.WRONG) else Status.WARN
    return Answer(
        status,
        "; ".join(one.text for one in found[:_TOLD]),
        "; ".join(text for one in found[:_TOLD] if (text := _change(one.flags))) or _plan_command(subject),
        tuple(f"{one.id}: {one.evidence}" for one in found[:_TOLD]),
    )


def budget(subject: Subject) -> Answer | None:
    """The profile fits the card as it is now."""
    profile = subject.profile
    if profile is None:
        return None
    target, draft = subject.target(), subject.draft()
    if target is None or target.card is None:
        return unknown("not planned: nothing is known of the target")
    if draft is not None and draft.card is None:
        return unknown("not planned: nothing is known of the draft")
    machine = _machine(subject)
    if machine is None and subject.on_cpu:
        return None
    if machine is None:
        return unknown(
            "not planned: there is no card here, and the profile names none", "dflash-deploy probe"
        )
    drafting = draft.card if draft is not None else _own_draft(subject)
    version = _version(subject)
    kept = calibration.load(
        calibration.Subject(
            calibration.machine_name(machine.card, machine.memory_mib),
            version,
            target.card.id,
            drafting.id if drafting is not None else None,
        )
    )
    prior = terms_for(machine.memory_mib, machine.card.compute_capability if machine.card else None)
    question = Question(
        card_memory_mib=machine.memory_mib,
        target=target.card,
        draft=drafting,
        flags=profile_flags(profile),
        version=version,
        users=profile.workload.users,
        other_mib=machine.used_mib,
        env={**profile.env, **variables(_first_known(profile))},
        terms=prior if kept is None else kept.corrected(),
    )
    found = plan(question)
    where = f"on GPU {machine.gpu.index} as it is now" if machine.gpu else f"on {_name(machine)}, not here"
    figures = (
        f"{found.predicted_peak_mib:,.0f} of {found.total_mib:,} MiB at the peak, {found.kv_tokens:,} KV "
        f"tokens, {found.max_running_requests} requests at once {where}"
    )
    if machine.used_mib:
        figures += f"; {machine.used_mib:,} MiB are held by others (measured)"
    if kept is not None:
        figures += f"; corrected by {kept.boots} boot log{'s' if kept.boots > 1 else ''} of this machine"
    if not found.fits:
        advice = plan_advice.advise(question, context_tokens=profile.workload.context_tokens)
        at = f" at {found.fails_at}" if found.fails_at else ""
        why = found.failure or f"{-found.headroom_mib:,.0f} MiB too much"
        helps = next((text for one in advice if (text := _change(one.flags))), _plan_command(subject))
        return replace(failed(f"does not fit{at}: {why}; {figures}", helps, *found.unknown), kind="predicted")
    short = _shortfalls(profile, found.max_running_requests, found.context_per_user)
    if short or found.headroom_mib < found.margin_mib:
        text = "; ".join(
            [*short, *([] if short else ["it fits by less than what is not known of it"]), figures]
        )
        return replace(warned(text, _plan_command(subject), *found.warnings), kind="predicted")
    return replace(passed(f"fits: {figures}", *found.warnings), kind="predicted")


def profile_flags(profile: Profile) -> Flags:
    """The flags that the profile would begin with: its own, and those of its first known setting."""
    return values(configured(profile, _first_known(profile), simulated=True))


def _first_known(profile: Profile) -> Settings:
    """The first known setting that drafts as the profile does."""
    own = profile.speculation.method
    return next((one.flags for one in profile.known if method_of(profile, one.flags) == own), {})


def _shortfalls(profile: Profile, requests: int, context: int) -> list[str]:
    work = profile.workload
    found = []
    if requests < work.users:
        found.append(f"{requests} of {work.users} users at once")
    if context < work.context_tokens:
        found.append(f"{context:,} of the {work.context_tokens:,} tokens that each user is to have")
    return found


def _own_draft(subject: Subject) -> ModelCard | None:
    """The head for multi-token prediction inside the target, where the profile drafts with it."""
    target, profile = subject.target(), subject.profile
    if target is None or profile is None or profile.speculation.method != "mtp":
        return None
    if target.checkpoint is not None:
        return target.checkpoint.mtp_card()
    heads = (card for card in list_model_cards() if card.method == "mtp")
    return next((card for card in heads if target.card and target.card.id in card.targets), None)


def _version(subject: Subject) -> str:
    """Of the SGLang that is installed, where there is one; else the profile's."""
    profile = subject.profile
    wanted = profile.engine.version if profile else ""
    try:
        installed = subject.engine().about.sglang
    except DeployError:
        return wanted
    return installed.version if installed else wanted


def _machine(subject: Subject) -> _Machine | None:
    profile = subject.profile
    wanted = load_card(profile.card) if profile and profile.card else None
    gpu = next(iter(used(subject.gpus())), None)
    if gpu is None:
        return None if wanted is None else _Machine(wanted, wanted.memory_mib, 0, None)
    found = match_card(gpu.name, gpu.memory_total_mib) if gpu.name else None
    memory_mib = gpu.memory_total_mib or (found.memory_mib if found else None)
    return None if memory_mib is None else _Machine(found, memory_mib, held_by_others_mib(subject, gpu), gpu)


def _name(machine: _Machine) -> str:
    return machine.card.name if machine.card else f"a card of {machine.memory_mib:,} MiB"


def _change(changed: Mapping[str, FlagValue | None]) -> str:
    """Flags as a profile would be given them on the command line."""
    given = [f"--set flags.{name}={_written(value)}" for name, value in changed.items() if value is not None]
    return " ".join(given + [f"(without {name})" for name, value in changed.items() if value is None])


def _written(value: FlagValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value)


def _plan_command(subject: Subject) -> str:
    return f"dflash-deploy plan {subject.request.profile_name} --explain"
