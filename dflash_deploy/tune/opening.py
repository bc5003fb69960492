"""Opening a study, a new one or one to go on with, with everything checked that can be before a launch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.cards import load_card, match_card
from dflash_deploy.machine.gpu import Gpu, gpu_sample, read_gpus, vram_used_mib
from dflash_deploy.profile.load import find, load_profile
from dflash_deploy.profile.schema import KnownSetting, Profile
from dflash_deploy.server.ports import free_port, require_free
from dflash_deploy.serving_env.current import default_python
from dflash_deploy.tune.fp8 import require_reader, without_broken
from dflash_deploy.tune.launching import (
    Launcher,
    Simulated,
    draft_flags,
    model_flags,
    real_launcher,
    searched_methods,
    simulated_launcher,
    values,
)
from dflash_deploy.tune.records import StudyRecord, read_study
from dflash_deploy.tune.space import space_of
from dflash_deploy.tune.studies import last_study, studies_dir
from dflash_deploy.tune.study import Rig, create_study
from dflash_deploy.tune.trial import Gauge

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Place:
    """Where servers are launched.

    Attributes:
        python: interpreter of the engine, None for the profile's own or that of the chosen environment.
        port: None for a free one each time.
        gpu: number of the card as ``nvidia-smi`` counts, None for what the engine takes by itself.
    """

    python: Path | None
    host: str
    port: int | None
    gpu: int | None = None


@dataclass(frozen=True)
class Opened:
    """A study that is ready to run; ``notes`` are what a person should know of it before it does."""

    folder: Path
    study: StudyRecord
    rig: Rig
    notes: tuple[str, ...] = ()


def open_new(
    profile_name: str | None,
    *,
    overrides: Sequence[str],
    simulate: str | None,
    time_scale: float,
    seed: int,
    name: str | None,
    place: Place,
    default_too: bool = False,
) -> Opened:
    """Make a study.

    Args:
        profile_name: name or path; None for the simulated card's own profile.
        overrides: ``key=value`` settings on top of the profile.
        simulate: card to simulate, None for the real one.
        time_scale: simulated seconds in one second of the clock.
        seed: of the search and of the simulated card.
        name: the study's, None for one made of profile, date and number.
        place: where servers are launched.
        default_too: launch what nobody has tuned as well, to hold the best against.

    Raises:
        DeployError: the profile, the card, the engine or the name is wrong; nothing has been launched.
    """
    if name is not None:
        _require_name(name)
    if profile_name is None:
        profile_name = default_profile(simulate, "tune")
    profile = load_profile(profile_name, overrides=overrides)
    if default_too:
        profile = _with_default(profile)
    notes: tuple[str, ...] = ()
    if simulate:
        card: str | None = load_card(simulate).id
        rig = simulated_rig(profile, Simulated(simulate, seed, time_scale), place)
    else:
        python = place.python.expanduser().absolute() if place.python else None
        python = python or profile.engine.python or default_python()
        profile = profile.model_copy(update={"engine": profile.engine.model_copy(update={"python": python})})
        rig = real_rig(profile, place)
        profile, notes = without_broken(profile, rig.launcher.python)
        card = card_here(profile, place.gpu)
    _require_flags(profile, rig.launcher, simulated=simulate is not None)
    _require_address(place)
    folder, study = create_study(
        name,
        profile,
        profile_name=find(profile_name).stem,
        simulated=simulate is not None,
        card=card,
        engine_version=rig.launcher.table.version,
        time_scale=time_scale if simulate else 1.0,
        seed=seed,
        driver=None if simulate else read_gpus().driver_version,
    )
    return Opened(folder, study, rig, notes)


def open_again(name: str | None, place: Place) -> Opened:
    """Open a study that there is, with the profile it was begun with.

    Args:
        name: the study's, None for the last one made.
        place: where servers are launched.

    Raises:
        DeployError: there is none, or its engine is gone.
    """
    if name is not None:
        _require_name(name)
    folder = last_study() if name is None else studies_dir() / name
    study = read_study(folder)
    if study.simulated:
        simulated = Simulated(study.card or "", study.seed, study.time_scale)
        return Opened(folder, study, simulated_rig(study.profile, simulated, place))
    rig = real_rig(study.profile, place)
    require_reader(study.profile, rig.launcher.python)
    if rig.launcher.table.version != study.engine_version:
        raise DeployError(
            f"study {study.name} was measured on SGLang {study.engine_version}; "
            f"{rig.launcher.table.version} is installed now, and the two do not compare",
            fix="start a new study, or give the interpreter of the old one with --python",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return Opened(folder, study, rig)


def default_profile(simulate: str | None, command: str) -> str:
    """The profile of a card to simulate.

    Args:
        simulate: the card, None for none.
        command: as one writes it in front of a profile's name, for the error.

    Raises:
        DeployError: there is no such card, it has none, or none is simulated.
    """
    if simulate is None:
        raise DeployError(
            "which profile? None was given",
            fix=f"dflash-deploy profile list, then dflash-deploy {command} PROFILE "
            f"(or try without a GPU: dflash-deploy {command.split(maxsplit=1)[0]} --simulate rtx-5090)",
            exit_code=ExitCode.USAGE,
        )
    card = load_card(simulate)
    if card.default_profile is None:
        raise DeployError(
            f"card {card.id} has no profile of its own",
            fix=f"dflash-deploy profile list, then dflash-deploy {command} PROFILE --simulate {card.id}",
            exit_code=ExitCode.USAGE,
        )
    return card.default_profile


def simulated_rig(profile: Profile, simulated: Simulated, place: Place) -> Rig:
    """The simulator as the profile's engine, on a simulated card."""
    card = load_card(simulated.card)
    named = replace(simulated, card=card.id)
    return Rig(simulated_launcher(profile, named, host=place.host, port=place.port), card.memory_mib, None)


def real_rig(profile: Profile, place: Place) -> Rig:
    """The installed engine on the card that a server started here takes.

    Raises:
        DeployError: there is no engine, or no model where the profile says.
    """
    launcher = real_launcher(profile, place.python, host=place.host, port=place.port)
    launcher = replace(launcher, env={**launcher.env, **_choice(place.gpu)})
    gpu = _gpu_here(profile, place.gpu)
    if gpu is None:
        return Rig(launcher, None, None)
    index = gpu.index
    gauge = Gauge(lambda: vram_used_mib(index), gpu.memory_total_mib, lambda: gpu_sample(index))
    return Rig(launcher, gpu.memory_total_mib, gauge, card=gpu.uuid or f"GPU {index}", index=index)


def _with_default(profile: Profile) -> Profile:
    """With a last known setting that leaves everything to the engine that the profile does not fix."""
    if any(not known.flags for known in profile.known):
        return profile
    taken = {known.name for known in profile.known}
    name = "default" if "default" not in taken else "engine-default"
    source = "what SGLang chooses by itself, with the profile's fixed flags"
    default = KnownSetting(name=name, source=source, flags={})
    return profile.model_copy(update={"known": [*profile.known, default]})


def _choice(gpu: int | None) -> dict[str, str]:
    """Variables that show a server the chosen card alone."""
    if gpu is None:
        return {}
    # CUDA counts the fastest card first unless it is told otherwise.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}


def _gpu_here(profile: Profile, wanted: int | None) -> Gpu | None:
    """The card that a server started here would take first."""
    reading = read_gpus({**os.environ, **profile.env, **_choice(wanted)})
    visible = reading.visible if reading.visible is not None else tuple(gpu.index for gpu in reading.gpus)
    by_index = {gpu.index: gpu for gpu in reading.readable}
    if wanted is not None and wanted not in by_index:
        there = ", ".join(map(str, sorted(by_index))) or "none"
        raise DeployError(
            f"there is no card {wanted} that can be read here (there: {there})",
            fix="dflash-deploy probe",
            exit_code=ExitCode.MISSING,
        )
    return next((by_index[index] for index in visible if index in by_index), None)


def card_here(profile: Profile, gpu: int | None = None) -> str | None:
    """Id of that card, as far as it is known."""
    found = _gpu_here(profile, gpu)
    card = match_card(found.name, found.memory_total_mib) if found and found.name else None
    return card.id if card else profile.card


def _require_flags(profile: Profile, launcher: Launcher, *, simulated: bool) -> None:
    """Every value that could be launched is one that this engine takes."""
    launcher.table.spell(values({**model_flags(profile, simulated=simulated), **profile.flags}))
    for known in profile.known:
        launcher.table.spell(values(known.flags))
    for method in searched_methods(profile):
        launcher.table.spell(values(draft_flags(profile, method, simulated=simulated)))
    for dimension in space_of(profile, simulated=simulated).dimensions:
        for value in dimension.values:
            if value is not None:
                launcher.table.spell(values({dimension.flag: value}))


def _require_address(place: Place) -> None:
    """A server could listen there now; whether it can later is seen at each start."""
    if place.port is None:
        free_port(place.host)
    else:
        require_free(place.host, place.port)


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise DeployError(
            f"{name!r} cannot name a study: letters a to z, digits, dots, dashes and underscores can",
            exit_code=ExitCode.USAGE,
        )
