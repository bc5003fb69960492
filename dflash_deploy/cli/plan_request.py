"""From what was asked of ``plan`` to its answer: which command, which card, which model."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_deploy.checkpoint.cards import ModelCard, find_model_card, list_model_cards
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.launch import Flags
from dflash_deploy.engine.sglang.advice import Advice, Case, Model, Weight, advise
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.engine.sglang.flags import FlagProblem, FlagTable
from dflash_deploy.engine.sglang.pasted.command import PastedCommand, read_text, read_words
from dflash_deploy.engine.sglang.pasted.service import unit_text
from dflash_deploy.engine.sglang.pasted.text import decoded
from dflash_deploy.engine.sglang.versions import order
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.cards import Card, card_ids, list_cards, load_card, match_card
from dflash_deploy.plan import advice as plan_advice
from dflash_deploy.plan.budget import Advice as PlannedChange
from dflash_deploy.plan.budget import Budget
from dflash_deploy.plan.calibration import Calibrated, calibrate
from dflash_deploy.plan.terms import terms_for
from dflash_deploy.plan.vram import Question, plan

_MAX_FILE_BYTES = 1 << 20
_MAX_LOG_BYTES = 16 << 20
_MOST_MIB = 1 << 22
_FEW = 8


@dataclass(frozen=True)
class Asked:
    """The command line of ``plan``."""

    words: tuple[str, ...] = ()
    gpu: str | None = None
    sglang: str | None = None
    free_mib: float | None = None
    users: int | None = None
    from_file: str | None = None
    from_log: Path | None = None
    unit: str | None = None


@dataclass(frozen=True)
class PlannedCard:
    """The card that is planned for.

    Attributes:
        card: what is known of it, None for a bare number of MiB.
        memory_mib: its total memory.
        used_mib: memory in use now, where it is the card in this machine.
        how: where it comes from, in words.
    """

    card: Card | None
    memory_mib: int
    used_mib: float
    how: str

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.card.name if self.card else f"a card of {self.memory_mib} MiB"


@dataclass(frozen=True)
class Configuration:
    """What is to be served, wherever it was read.

    Attributes:
        version_from: what says which SGLang is meant.
        card_id: the card that a profile is for.
    """

    flags: Flags
    version: str
    version_from: str
    source: str
    users: int | None = None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    problems: tuple[FlagProblem, ...] = ()
    notes: tuple[str, ...] = ()
    card_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """A budget with all that is said about it.

    Attributes:
        observed: what a log says of the same start, None without a log.
        calibrated: how far the plan is from that log, and would be once corrected by it.
    """

    configuration: Configuration
    card: PlannedCard
    target: ModelCard
    draft: ModelCard | None
    users: int
    budget: Budget
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    observed: BootRecord | None = None
    calibrated: Calibrated | None = None


def answer(asked: Asked) -> Answer:
    """Plan what was asked for.

    Raises:
        DeployError: what was asked cannot be read, or the card or the model is not known.
    """
    log = _read_file(asked.from_log, _MAX_LOG_BYTES) if asked.from_log else None
    configuration = _configuration(asked, log)
    observed = read_boot_log(log.splitlines()) if log is not None else None
    card = _card(asked.gpu, configuration)
    target, draft, notes = _models(configuration.flags)
    users = asked.users or configuration.users or _few_requests(configuration.flags)
    free_mib = asked.free_mib
    if free_mib is None and observed is not None and observed.free_before_load_gib:
        free_mib = observed.free_before_load_gib * 1024
        notes = (*notes, f"{free_mib:,.0f} MiB were free before the load, says the log: planned with that")
    question = Question(
        card_memory_mib=card.memory_mib,
        target=target,
        draft=draft,
        flags=configuration.flags,
        version=configuration.version,
        users=users,
        other_mib=card.used_mib if free_mib is None else 0.0,
        free_mib=free_mib,
        env=configuration.env,
        terms=terms_for(card.memory_mib, card.card.compute_capability if card.card else None),
    )
    budget = plan(question)
    advice = _merged(
        advise(_case(configuration, card, target, draft, users), configuration.problems),
        plan_advice.advise(question),
        fits=budget.fits,
    )
    return Answer(
        configuration=configuration,
        card=card,
        target=target,
        draft=draft,
        users=users,
        budget=_with_refusals(budget, advice, configuration),
        advice=advice,
        notes=(*configuration.notes, *notes),
        observed=observed,
        calibrated=calibrate(question, observed) if observed is not None else None,
    )


# The command ----------------------------------------------------------------------


def _configuration(asked: Asked, log: str | None) -> Configuration:
    if asked.sglang is not None and order(asked.sglang) == (0,):
        raise DeployError(
            f"{asked.sglang!r} is no SGLang version",
            fix="give one such as --sglang 0.5.23",
            exit_code=ExitCode.INVALID_INPUT,
        )
    sources = [bool(asked.words), asked.from_file is not None, asked.unit is not None]
    if sum(sources) > 1 or (log is not None and (sources[1] or sources[2])):
        raise DeployError(
            "more than one thing to plan was given",
            fix="give one of: a profile, -- COMMAND, --from FILE, --from-log FILE, --unit NAME",
            exit_code=ExitCode.USAGE,
        )
    if asked.words:
        return _of_words(asked)
    if asked.from_file is not None:
        return _of_text(asked.from_file, asked.sglang)
    if asked.unit is not None:
        text = unit_text(asked.unit)
        return _pasted(read_text(text, source=f"unit {asked.unit}", version=asked.sglang))
    if log is not None:
        return _pasted(read_text(log, source=str(asked.from_log), version=asked.sglang))
    raise DeployError(
        "nothing to plan was given",
        fix="dflash-deploy plan PROFILE (dflash-deploy profile list), or "
        "dflash-deploy plan -- python -m sglang.launch_server --model-path …",
        exit_code=ExitCode.USAGE,
    )


def _of_words(asked: Asked) -> Configuration:
    words = asked.words
    if words[0].startswith("-") and not any("sglang" in word or word.startswith("--model") for word in words):
        raise DeployError(
            f"no such option: {words[0][:60]}", fix="dflash-deploy plan --help", exit_code=ExitCode.USAGE
        )
    if len(words) == 1 and not re.search(r"\s", words[0]) and not words[0].startswith("-"):
        return _of_profile(words[0], asked.sglang)
    return _pasted(read_words(words, version=asked.sglang))


def _of_text(place: str, version: str | None) -> Configuration:
    if place == "-":
        text = decoded(sys.stdin.buffer.read(_MAX_FILE_BYTES))
        return _pasted(read_text(text, source="standard input", version=version))
    path = Path(place)
    text = _read_file(path, _MAX_FILE_BYTES)
    return _pasted(read_text(text, source=place, folder=path.parent, version=version))


def _of_profile(name: str, version: str | None) -> Configuration:
    from dflash_deploy.profile.load import load_profile
    from dflash_deploy.tune.launching import model_flags, values

    profile = load_profile(name)
    flags = {**model_flags(profile, simulated=True), **profile.flags}
    notes: tuple[str, ...] = ()
    if profile.known:
        known = profile.known[0]
        flags |= known.flags
        notes = (f"the profile's known setting {known.name!r} is planned; tune tries others",)
    meant = version or profile.engine.version
    argv = FlagTable.for_version(meant).spell(values(flags))
    return Configuration(
        flags=values(flags),
        version=meant,
        version_from="given" if version else "profile",
        source=f"profile {name}",
        users=profile.workload.users,
        argv=argv,
        env=profile.env,
        notes=notes,
        card_id=profile.card,
    )


def _pasted(command: PastedCommand) -> Configuration:
    return Configuration(
        flags=command.flags,
        version=command.version,
        version_from=command.version_from,
        source=command.source,
        argv=command.argv,
        env=command.env,
        problems=command.problems,
        notes=command.notes,
    )


def _read_file(path: Path, most_bytes: int) -> str:
    try:
        # Opening a FIFO that nobody writes would wait for ever without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
                raise DeployError(f"{path}: expected a file", exit_code=ExitCode.INVALID_INPUT)
            os.set_blocking(descriptor, True)
            return decoded(file.read(most_bytes))
    except FileNotFoundError as error:
        raise DeployError(f"{path}: no such file", exit_code=ExitCode.MISSING) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DeployError(f"{path}: cannot be read: {reason}", exit_code=ExitCode.INVALID_INPUT) from error


# The card ----------------------------------------------------------------------


def _card(asked: str | None, configuration: Configuration) -> PlannedCard:
    if asked is not None:
        return _asked_card(asked)
    here = _card_here(configuration.env)
    if here is not None:
        return here
    if configuration.card_id is not None:
        card = load_card(configuration.card_id)
        return PlannedCard(card, card.memory_mib, 0.0, "the profile's card")
    raise DeployError(
        "there is no GPU here to plan for",
        fix=f"say which card is meant: --gpu {' | '.join(card_ids())} | its memory in MiB",
        exit_code=ExitCode.MISSING,
    )


def _asked_card(asked: str) -> PlannedCard:
    number = re.fullmatch(r"([0-9]{1,7})(?:\s?MiB)?", asked.strip(), re.IGNORECASE)
    if number:
        memory_mib = int(number[1])
        if not 1024 <= memory_mib <= _MOST_MIB:
            raise DeployError(
                f"--gpu {asked}: a card has between 1,024 and {_MOST_MIB:,} MiB",
                fix="give its memory in MiB, such as --gpu 32607",
                exit_code=ExitCode.INVALID_INPUT,
            )
        card = next((one for one in list_cards() if one.memory_mib == memory_mib), None)
        return PlannedCard(card, memory_mib, 0.0, "by its memory")
    card = match_card(asked, None) or load_card(asked.strip().casefold().replace(" ", "-"))
    return PlannedCard(card, card.memory_mib, 0.0, "asked for")


def _card_here(env: Mapping[str, str]) -> PlannedCard | None:
    from dflash_deploy.machine.gpu import read_gpus

    visible = {name: env[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in env}
    reading = read_gpus({**os.environ, **visible})
    indices = reading.visible if reading.visible is not None else tuple(gpu.index for gpu in reading.gpus)
    by_index = {gpu.index: gpu for gpu in reading.readable}
    gpu = next((by_index[index] for index in indices if index in by_index), None)
    if gpu is None:
        return None
    card = match_card(gpu.name, gpu.memory_total_mib) if gpu.name else None
    memory_mib = gpu.memory_total_mib or (card.memory_mib if card else None)
    if memory_mib is None:
        return None
    return PlannedCard(card, memory_mib, float(gpu.memory_used_mib or 0), f"GPU {gpu.index} of this machine")


# The model ----------------------------------------------------------------------


def _models(flags: Flags) -> tuple[ModelCard, ModelCard | None, tuple[str, ...]]:
    place = flags.get("model-path")
    if not isinstance(place, str) or not place:
        raise DeployError(
            "the command names no model (--model-path)",
            fix="add --model-path with a folder or a hub name",
            exit_code=ExitCode.INVALID_INPUT,
        )
    target, notes = _model(place, flags.get("revision"))
    algorithm = str(flags.get("speculative-algorithm", "")).upper()
    if not algorithm or algorithm == "NGRAM":
        return target, None, notes
    draft_place = flags.get("speculative-draft-model-path")
    if isinstance(draft_place, str) and draft_place:
        draft, more = _model(draft_place, flags.get("speculative-draft-model-revision"))
        return target, draft, (*notes, *more)
    wanted = "dspark" if algorithm == "DSPARK" else "mtp"
    if algorithm == "DFLASH":
        return target, None, notes
    draft_card = next(
        (card for card in list_model_cards() if card.method == wanted and target.id in card.targets), None
    )
    return target, draft_card, notes


def _model(place: str, revision: object) -> tuple[ModelCard, tuple[str, ...]]:
    """Facts of a folder or hub name: a folder is read, a known name has its card, others are looked for."""
    from dflash_deploy.checkpoint import read_checkpoint

    path = place.replace("${HOME}", "~").replace("$HOME", "~")
    folder = Path(path).expanduser() if path.startswith(("/", "./", "../", "~/")) else Path(path)
    known = find_model_card(path)
    is_folder = folder.is_dir()
    if known is not None and not is_folder:
        where = "" if path in (known.id, known.path) else f"{place} is taken for {known.path or known.id}"
        return known, (where,) if where else ()
    try:
        checkpoint = read_checkpoint(
            str(folder) if is_folder else path, revision=revision if isinstance(revision, str) else None
        )
    except DeployError as error:
        if known is not None:
            return known, (f"{place} cannot be read ({error.message}); taken for {known.path or known.id}",)
        raise DeployError(
            f"the model {place[:200]!r} is not known: {error.message}",
            fix=error.fix or "give a folder that has it, or one of: dflash-deploy profile list",
            exit_code=error.exit_code if error.exit_code is not ExitCode.USAGE else ExitCode.INVALID_INPUT,
        ) from error
    return checkpoint.model_card(), (*checkpoint.notes, *checkpoint.unknown)


# What is said about it ----------------------------------------------------------------------


def _case(
    configuration: Configuration, card: PlannedCard, target: ModelCard, draft: ModelCard | None, users: int
) -> Case:
    return Case(
        flags=configuration.flags,
        version=configuration.version,
        users=users,
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


def _few_requests(flags: Flags) -> int:
    """A small limit of running requests says how many people are meant; a large one says nothing."""
    limit = flags.get("max-running-requests")
    return limit if isinstance(limit, int) and 1 <= limit <= _FEW else 1


def _merged(
    known: tuple[Advice, ...], planned: tuple[PlannedChange, ...], *, fits: bool
) -> tuple[Advice, ...]:
    """What is known of flags, and changes that were planned; one that is both is told once."""
    found = list(known)
    weight = Weight.MEMORY if fits else Weight.FITS
    for one in planned:
        same = next((at for at, other in enumerate(found) if dict(other.flags) == dict(one.flags)), None)
        if same is not None:
            both = f"{found[same].text}; {one.text}"
            found[same] = replace(found[same], text=both, weight=min(found[same].weight, weight))
            continue
        found.append(Advice(one.id, one.text, one.flags, one.cost, "this plan's own arithmetic", weight))
    return tuple(sorted(found, key=lambda advice: advice.weight))


def _with_refusals(budget: Budget, advice: tuple[Advice, ...], configuration: Configuration) -> Budget:
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
