"""From a profile and a configuration to the command that serves it, real or simulated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint.cards import find_model_card
from dflash_deploy.engine.launch import Flags, FlagValue, Launch
from dflash_deploy.engine.sglang.command import launch_argv, speculation_flags
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import FlagSetting, Profile, flag_value
from dflash_deploy.tune.space import Settings


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
    """

    python: Path
    table: FlagTable
    host: str
    port: int | None
    env: Mapping[str, str]
    simulated: Simulated | None = None

    def launch(self, flags: Settings, port: int) -> Launch:
        """The command for one configuration.

        Raises:
            DeployError: a flag that this engine does not have.
        """
        argv = launch_argv(self.python, values(flags), host=self.host, port=port, table=self.table)
        if self.simulated is None:
            return Launch(argv, self.host, port, self.env)
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
            {**self.env, **simulation},
            self.simulated.time_scale,
            simulated=True,
        )


def simulated_launcher(profile: Profile, simulated: Simulated, *, host: str, port: int | None) -> Launcher:
    """Launch the simulator, in the tool's own interpreter and as the profile's engine version."""
    table = FlagTable.for_version(profile.engine.version)
    return Launcher(Path(sys.executable), table, host, port, profile.env, simulated)


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
            "or dflash-deploy tune … --python /path/to/venv/bin/python "
            "(or try without a GPU: dflash-deploy tune --simulate rtx-5090)",
            exit_code=ExitCode.MISSING,
        )
    installation = inspect(interpreter, env=profile.env)
    for flag in ("model-path", "speculative-draft-model-path"):
        path = model_flags(profile, simulated=False).get(flag)
        if isinstance(path, str) and path.startswith(("/", "./", "../", "~")):
            _require_model(Path(path).expanduser())
    return Launcher(interpreter, installation.flag_table, host, port, profile.env)


def model_flags(profile: Profile, *, simulated: bool) -> dict[str, FlagSetting]:
    """Flags that say what is served and how its tokens are drafted.

    Raises:
        DeployError: the profile names a model that everyone makes for themselves, and not where it is.
    """
    model, speculation = profile.model, profile.speculation
    draft = speculation.draft_path
    if draft is None and speculation.draft is not None:
        draft = _place_of(speculation.draft, "speculation.draft_path", simulated=simulated)
    flags: dict[str, FlagSetting] = {
        "model-path": model.path or _place_of(model.target, "model.path", simulated=simulated)
    }
    if model.served_name is not None:
        flags["served-model-name"] = model.served_name
    if model.quantization is not None:
        flags["quantization"] = model.quantization
    return flags | settings(speculation_flags(speculation.method, draft))


def values(flags: Settings) -> dict[str, FlagValue]:
    """Flags as the engine's commands take them."""
    return {name: flag_value(setting) for name, setting in flags.items()}


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


def _require_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        missing = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
        raise DeployError(
            f"no model in {folder}: {missing}",
            fix="download it there, or correct model.path in the profile",
            exit_code=ExitCode.MISSING,
        )
