"""From a profile and a configuration to the command that serves it, real or simulated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dflash_deploy.checkpoint.cards import find_model_card
from dflash_deploy.engine.launch import Flags, FlagValue, Launch
from dflash_deploy.engine.sglang.command import Method, launch_argv, speculation_flags
from dflash_deploy.engine.sglang.drafting import PREFIX, drafting
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.drafts import no_draft, speculation_of
from dflash_deploy.profile.schema import METHOD, VARIABLE, Choices, FlagSetting, Profile, flag_value

if TYPE_CHECKING:
    from dflash_deploy.tune.space import Settings

METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Simulated:
    """The stand-in server on a simulated card; ``seed`` draws what no planner can know of it."""

    card: str
    seed: int
    time_scale: float


@dataclass(frozen=True)
class Launcher:
    """How trials of a study are launched.

    Attributes:
        python: interpreter that the engine is installed in.
        table: the flags of that engine.
        port: to listen on, None for a free one each time.
        env: variables of every server; ``searched`` are those that a configuration alone decides on.
    """

    python: Path
    table: FlagTable
    host: str
    port: int | None
    env: Mapping[str, str]
    simulated: Simulated | None = None
    searched: frozenset[str] = frozenset()

    def launch(self, flags: Settings, port: int) -> Launch:
        """The command for one configuration.

        Raises:
            DeployError: a flag that this engine does not have.
        """
        argv = launch_argv(self.python, values(flags), host=self.host, port=port, table=self.table)
        env = {**self.env, **variables(flags)}
        if self.simulated is None:
            return Launch(argv, self.host, port, env, without=self.searched)
        simulation = {
            "DFLASH_SIM_CARD": self.simulated.card,
            "DFLASH_SIM_SEED": str(self.simulated.seed),
            "DFLASH_SIM_TIME_SCALE": str(self.simulated.time_scale),
            "DFLASH_SIM_VERSION": self.table.version,
            # Else `python -m` would take a module from the folder that the person happens to stand in.
            "PYTHONSAFEPATH": "1",
        }
        return Launch(
            (*argv[:2], "dflash_deploy.simulator", *argv[3:]),
            self.host,
            port,
            {**env, **simulation},
            self.simulated.time_scale,
            simulated=True,
            without=self.searched,
        )


def simulated_launcher(profile: Profile, simulated: Simulated, *, host: str, port: int | None) -> Launcher:
    """Launch the simulator, in the tool's own interpreter and as the profile's engine version."""
    table = FlagTable.for_version(profile.engine.version)
    return Launcher(
        Path(sys.executable), table, host, port, profile.env, simulated, searched=searched_variables(profile)
    )


def real_launcher(profile: Profile, python: Path | None, *, host: str, port: int | None) -> Launcher:
    """Launch the installed engine, whose own parser says which flags it has.

    Raises:
        DeployError: there is no engine, or no model where the profile says.
    """
    from dflash_deploy.engine.sglang.installed import inspect  # noqa: PLC0415  (not for a simulation)

    interpreter = python or profile.engine.python
    if interpreter is None:
        raise DeployError(
            "no interpreter is given that SGLang is installed in",
            fix="dflash-deploy env create sglang-0.5.23, then dflash-deploy env use sglang-0.5.23; "
            "or add --python /path/to/venv/bin/python (or try without a GPU: --simulate rtx-5090)",
            exit_code=ExitCode.MISSING,
        )
    installation = inspect(interpreter, env=profile.env)
    for path in _places(profile):
        if path.startswith(("/", "./", "../", "~")):
            _require_model(Path(path).expanduser())
    table = installation.flag_table
    return Launcher(interpreter, table, host, port, profile.env, searched=searched_variables(profile))


def searched_variables(profile: Profile) -> frozenset[str]:
    """Variables of the server that the search decides on: none of them is inherited."""
    return frozenset(name.removeprefix(VARIABLE) for name in profile.search if name.startswith(VARIABLE))


def searched_methods(profile: Profile) -> tuple[Method, ...]:
    """Ways to make draft tokens that the search decides on; none where the profile's own is fixed."""
    bounds = profile.search.get(METHOD)
    choices = bounds.choices if isinstance(bounds, Choices) else []
    return tuple(method for choice in choices for method in METHODS if method == choice)


def model_flags(profile: Profile, *, simulated: bool) -> dict[str, FlagSetting]:
    """Flags that say what is served and how its tokens are drafted, by the profile's own method.

    Raises:
        DeployError: the profile names a model that everyone makes for themselves, and not where it is.
    """
    own = draft_flags(profile, profile.speculation.method, simulated=simulated)
    return target_flags(profile, simulated=simulated) | own


def shared_flags(profile: Profile, *, simulated: bool) -> dict[str, FlagSetting]:
    """Those of them that every configuration of a search has.

    Raises:
        DeployError: as ``model_flags``.
    """
    if searched_methods(profile):
        return target_flags(profile, simulated=simulated)
    return model_flags(profile, simulated=simulated)


def target_flags(profile: Profile, *, simulated: bool) -> dict[str, FlagSetting]:
    """Flags that say what is served.

    Raises:
        DeployError: as ``model_flags``.
    """
    model = profile.model
    flags: dict[str, FlagSetting] = {
        "model-path": model.path or _place_of(model.target, "model.path", simulated=simulated)
    }
    if model.served_name is not None:
        flags["served-model-name"] = model.served_name
    if model.quantization is not None:
        flags["quantization"] = model.quantization
    return flags


def draft_flags(
    profile: Profile, method: Method, *, simulated: bool, named: str | None = None
) -> dict[str, FlagSetting]:
    """Flags that say how tokens are drafted by a method; ``named`` is a draft before any other.

    Raises:
        DeployError: the method needs a draft model and none is known, or nobody says where it is.
    """
    speculation = speculation_of(profile, method, named)
    if speculation is None:
        raise DeployError(
            no_draft(profile, method),
            fix=f"name one: --draft {method}=FOLDER-OR-HUB-NAME, or speculation.drafts.{method} in the "
            f"profile; or leave {method} out",
            exit_code=ExitCode.MISSING,
        )
    draft = speculation.draft_path
    if draft is None and speculation.draft is not None and method != "mtp":
        own = method == profile.speculation.method
        setting = "speculation.draft_path" if own else f"speculation.drafts.{method}"
        draft = _place_of(speculation.draft, setting, simulated=simulated)
    return settings(speculation_flags(method, draft))


def configured(profile: Profile, flags: Settings, *, simulated: bool) -> dict[str, FlagSetting]:
    """Everything that a server of this profile is launched with, given what a setting adds to it.

    Raises:
        DeployError: as ``model_flags``.
    """
    method = method_of(profile, flags)
    return {
        **target_flags(profile, simulated=simulated),
        **draft_flags(profile, method, simulated=simulated),
        **profile.flags,
        **flags,
    }


def method_of(profile: Profile, flags: Settings) -> Method:
    """How a configuration makes its draft tokens: as it says, else as the profile does."""
    named = flags.get(METHOD)
    return next((method for method in METHODS if method == named), profile.speculation.method)


def values(flags: Settings) -> dict[str, FlagValue]:
    """Flags as the engine's commands take them: those of a method that is named, and no variables."""
    given = {
        name: flag_value(setting)
        for name, setting in flags.items()
        if name != METHOD and not name.startswith(VARIABLE)
    }
    method = next((method for method in METHODS if method == flags.get(METHOD)), None)
    if method is None:
        return given
    others = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
    return others | drafting(method, {name: given[name] for name in given.keys() - others.keys()})


def variables(flags: Settings) -> dict[str, str]:
    """The variables of the server's environment among the settings of a configuration."""
    return {
        name.removeprefix(VARIABLE): str(value) for name, value in flags.items() if name.startswith(VARIABLE)
    }


def settings(flags: Flags) -> dict[str, FlagSetting]:
    """Flags as profiles and records write them."""
    written: dict[str, FlagSetting] = {}
    for name, value in flags.items():
        written[name] = list(value) if isinstance(value, tuple) else value  # type: ignore[assignment]  # of one kind
    return written


def _place_of(name: str, setting: str, *, simulated: bool) -> str:
    card = find_model_card(name)
    if card is None:
        return name
    if card.path is not None:
        return card.path
    if simulated:
        return card.id
    raise DeployError(
        f"{card.id} is a model that everyone makes for themselves: say where yours is",
        fix=f"dflash-deploy tune … --set {setting}=/path/to/model",
        exit_code=ExitCode.MISSING,
    )


def _places(profile: Profile) -> list[str]:
    """Where the models are that any configuration loads."""
    methods = searched_methods(profile) or (profile.speculation.method,)
    flags = [target_flags(profile, simulated=False)]
    flags += [draft_flags(profile, method, simulated=False) for method in methods]
    named = [one.get(flag) for one in flags for flag in ("model-path", "speculative-draft-model-path")]
    return [place for place in named if isinstance(place, str)]


def _require_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        missing = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
        raise DeployError(
            f"no model in {folder}: {missing}",
            fix="download it there, or correct model.path in the profile",
            exit_code=ExitCode.MISSING,
        )
