"""What is looked at: the machine, one serving environment, and a profile. Each fact is asked for once."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from dflash_deploy.checkpoint import Checkpoint, read_checkpoint
from dflash_deploy.checkpoint.cards import ModelCard, find_model_card, home_made
from dflash_deploy.doctor.engine import Engine, read_engine
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.gpu import GpuReading, read_gpus
from dflash_deploy.machine.host import Host, read_host
from dflash_deploy.machine.system import nvidia_module_version
from dflash_deploy.profile.schema import Profile
from dflash_deploy.serving_env.current import default_python
from dflash_deploy.serving_env.patches.tree import Tree, find_tree
from dflash_deploy.watch.units import UnitState, read_units

T = TypeVar("T")
Fact = Callable[[], T]


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        python: the interpreter to look at instead of the profile's or the chosen environment's.
        deep: import torch and what else runs on the card, which takes long.
        hashes: read every byte of the checkpoints.
    """

    profile: Profile | None = None
    profile_name: str | None = None
    overrides: tuple[str, ...] = ()
    python: Path | None = None
    deep: bool = False
    hashes: bool = False

    @property
    def command(self) -> str:
        """The command that asks this again, without its options."""
        words = ["dflash-deploy", "doctor", *([self.profile_name] if self.profile_name else [])]
        words += [word for setting in self.overrides for word in ("--set", setting)]
        return shlex.join([*words, *(["--python", str(self.python)] if self.python else [])])


@dataclass(frozen=True)
class Model:
    """A target or a draft of a profile.

    Attributes:
        place: what the engine would be given: a folder or a hub name.
        checkpoint: its files, None where they are not on this machine.
        card: its facts, from the files or else from the shipped card; None where neither is there.
        problem: why the files cannot be read.
    """

    place: str
    checkpoint: Checkpoint | None
    card: ModelCard | None
    problem: DeployError | None = None

    @property
    def is_folder(self) -> bool:
        """It is given as a folder, so that the engine cannot download it."""
        return self.place.startswith(("/", "./", "../", "~"))

    @property
    def is_nowhere(self) -> bool:
        """Everybody makes it for themselves, and it is not said where."""
        return not self.is_folder and self.checkpoint is None and home_made(self.card)


class Once(Generic[T]):
    """A fact that is asked for when it is first wanted; other checks wait for the same answer."""

    def __init__(self, ask: Fact[T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: list[T] = []
        self._error: Exception | None = None

    def __call__(self) -> T:
        """The answer; raises what kept it from being had, each time."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._answer:
                try:
                    self._answer.append(self._ask())
                except Exception as error:
                    self._error = error
                    raise
            return self._answer[0]


@dataclass(frozen=True)
class Subject:
    """Everything that checks look at. Asking for a fact may raise what kept it from being known."""

    request: Request
    gpus: Fact[GpuReading]
    host: Fact[Host]
    engine: Fact[Engine]
    tree: Fact[Tree]
    units: Fact[tuple[UnitState, ...]]
    target: Fact[Model | None]
    draft: Fact[Model | None]

    @property
    def profile(self) -> Profile | None:
        """The profile, None where the machine alone is looked at."""
        return self.request.profile

    @property
    def on_cpu(self) -> bool:
        """The profile's server runs on the processor, and needs no card."""
        return self.profile is not None and self.profile.flags.get("device") == "cpu"


def look_at(request: Request) -> Subject:
    """This machine, with what was asked for."""
    gpus = Once(partial(read_gpus, _seen_by_the_server(request.profile)))

    def python() -> Path:
        return interpreter(request)

    def engine() -> Engine:
        return read_engine(python(), driver_version=nvidia_module_version(), deep=request.deep)

    return Subject(
        request=request,
        gpus=gpus,
        host=Once(_host),
        engine=Once(engine),
        tree=Once(lambda: find_tree(python())),
        units=Once(read_units),
        target=Once(lambda: _target(request.profile)),
        draft=Once(lambda: _draft(request.profile)),
    )


def interpreter(request: Request) -> Path:
    """The interpreter that would serve.

    Raises:
        DeployError: none is chosen, or it is not there.
    """
    python = request.python or (request.profile.engine.python if request.profile else None)
    python = python or default_python()
    if python is None:
        raise DeployError(
            "no serving environment is chosen: there is nothing to run SGLang with",
            fix="dflash-deploy env create sglang-0.5.23 && dflash-deploy env use sglang-0.5.23",
            exit_code=ExitCode.MISSING,
        )
    python = python.expanduser().absolute()
    if not os.access(python, os.X_OK) or not python.is_file():
        raise DeployError(
            f"{python} is no interpreter that can be run",
            fix="dflash-deploy env list",
            exit_code=ExitCode.MISSING,
        )
    return python


def _host() -> Host:
    try:
        return read_host()
    except OSError as error:
        raise DeployError(
            f"{error.filename or '/proc'} cannot be read: {error.strerror or error}",
            fix="mount -t proc proc /proc   (a container: start it without hiding /proc)",
            exit_code=ExitCode.MISSING,
        ) from error


def _seen_by_the_server(profile: Profile | None) -> Mapping[str, str]:
    env = profile.env if profile else {}
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {**os.environ, **{name: env[name] for name in names if name in env}}


def _target(profile: Profile | None) -> Model | None:
    return None if profile is None else _model(profile.model.target, profile.model.path)


def _draft(profile: Profile | None) -> Model | None:
    if profile is None or profile.speculation.method not in ("dflash", "dspark"):
        return None
    named, path = profile.speculation.draft, profile.speculation.draft_path
    return None if named is None and path is None else _model(named or path or "", path)


def _model(named: str, path: str | None) -> Model:
    known = find_model_card(named)
    place = path or (known.path or known.id if known else named)
    try:
        checkpoint = read_checkpoint(place, offline=True)
    except DeployError as error:
        return Model(place, None, known or find_model_card(place), error)
    return Model(place, checkpoint, checkpoint.model_card())
