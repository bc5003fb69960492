"""The real lane: when it runs, and the real SGLang server that its tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_deploy.engine.launch import Flags, Launch
from dflash_deploy.engine.sglang.bootlog import Progress
from dflash_deploy.engine.sglang.command import launch_argv, speculation_flags
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.profile.load import load_profile
from dflash_deploy.server.outcome import Served
from dflash_deploy.server.ports import free_port
from dflash_deploy.server.process import Server

from .environment import SGLANG_VERSION, ServingEnvironment, make_tiny_model, serving_environment

HOST = "127.0.0.1"
SLEEPING: dict[str, str | int | float | bool] = {"sleep-on-idle": True}
"""Flags of a server that others wait beside: without work SGLang keeps a core busy with asking for some."""

HOW_TO_RUN = "a real lane: run it with DFLASH_REAL=1 (CONTRIBUTING.md)"

# Looked up here, before the tests' own folders take the place of the person's.
_ENVIRONMENT = serving_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the lanes out of an ordinary run: they take minutes and want programs of their own."""
    if os.environ.get("DFLASH_REAL") == "1":
        return
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=HOW_TO_RUN))


@dataclass(frozen=True)
class RealSglang:
    """What it takes to start the real server with the tiny model."""

    environment: ServingEnvironment
    model: Path

    def settings(self) -> list[str]:
        """Options that give a command of the tool this environment and this model."""
        values = {
            "engine.python": str(self.environment.python),
            "model.path": str(self.model),
            **{f"env.{name}": json.dumps(value) for name, value in self.environment.variables().items()},
        }
        return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]

    def launch(self, flags: Flags, *, model: Path | None = None) -> Launch:
        """The command of a server on a free port."""
        port = free_port(HOST)
        argv = launch_argv(
            self.environment.python,
            {"model-path": str(model or self.model), **flags},
            host=HOST,
            port=port,
            table=FlagTable.for_version(SGLANG_VERSION),
        )
        return Launch(argv, HOST, port, self.environment.variables())


@dataclass(frozen=True)
class Running:
    """A server that serves, how it came to, and what it told on the way."""

    server: Server
    launch: Launch
    served: Served
    progress: tuple[Progress, ...]


@pytest.fixture(scope="session")
def sglang() -> RealSglang:
    """The serving environment and the model; it is an error if they are not there."""
    if not _ENVIRONMENT.complete:
        pytest.fail("the serving environment is not there; make it with: python tests/real/environment.py")
    return RealSglang(_ENVIRONMENT, make_tiny_model(_ENVIRONMENT))


@pytest.fixture(scope="session")
def smoke_flags() -> Mapping[str, object]:
    """Flags of the profile ``sglang-cpu-smoke``, with its first known setting."""
    profile = load_profile("sglang-cpu-smoke")
    return {**profile.flags, **profile.known[0].flags}


def run(launch: Launch, folder: Path) -> Iterator[Running]:
    """Start, hand out, stop."""
    seen: list[Progress] = []
    with Server(launch, folder, on_progress=seen.append) as server:
        outcome = server.start()
        assert isinstance(outcome, Served), f"{outcome.reason}\n{server.log_path.read_text()[-3000:]}"
        yield Running(server, launch, outcome, tuple(seen))


@pytest.fixture(scope="session")
def speculating(
    sglang: RealSglang, smoke_flags: Flags, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server with n-gram speculation of eight draft tokens, shared by modules: a start takes a while."""
    flags = {
        **smoke_flags,
        **speculation_flags("ngram"),
        "served-model-name": "tiny-random",
        "enable-metrics": True,
        **SLEEPING,
    }
    yield from run(sglang.launch(flags), tmp_path_factory.mktemp("speculating"))


@pytest.fixture(scope="session")
def plain(
    sglang: RealSglang, smoke_flags: Flags, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server without speculation."""
    flags = {
        name: value for name, value in smoke_flags.items() if not name.startswith("speculative-")
    } | SLEEPING
    yield from run(sglang.launch(flags), tmp_path_factory.mktemp("plain"))
