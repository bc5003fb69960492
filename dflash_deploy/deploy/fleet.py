"""One profile on several cards: an engine for each, and a router in front of them when that is wanted.

An engine of a fleet is a service of its own, ``NAME-gpu0``, with generations of its own; so is the router,
``NAME-router``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_deploy.deploy.generations import stores
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.deploy.configuration import Configuration
    from dflash_deploy.machine.gpu import GpuReading

_WIDE = ("tensor-parallel-size", "tp-size", "pipeline-parallel-size", "data-parallel-size")
_MEMBER = r"{}-(gpu\d{{1,3}}|router)"


@dataclass(frozen=True)
class Seat:
    """A card for one engine.

    Attributes:
        index: NVML's, in PCI order, as nvidia-smi counts.
        env: what makes CUDA see that card alone.
    """

    index: int
    env: dict[str, str]


def seats(text: str, reading: GpuReading) -> tuple[Seat, ...]:
    """The cards of ``--gpus``, by UUID where the driver tells it.

    Raises:
        DeployError: it is no list of numbers, or names a card that is not there.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,3}", word) for word in words) or len(set(map(int, words))) < len(words):
        raise DeployError(
            f"--gpus {text!r}: expected numbers of cards, each once, such as 0,1",
            fix="dflash-deploy probe (their numbers)",
            exit_code=ExitCode.USAGE,
        )
    known = {gpu.index: gpu for gpu in reading.gpus}
    found = []
    for index in map(int, words):
        if known and index not in known:
            raise DeployError(
                f"there is no GPU {index} here: they are {', '.join(map(str, known))}",
                fix="dflash-deploy probe",
                exit_code=ExitCode.MISSING,
            )
        uuid = known[index].uuid if known else None
        env = {"CUDA_VISIBLE_DEVICES": uuid or str(index)}
        if uuid is None:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        found.append(Seat(index, env))
    return tuple(found)


def on_one_card(
    configuration: Configuration, name: str, seat: Seat, port: int, *, behind: bool
) -> Configuration:
    """The same configuration for one engine of a fleet.

    Args:
        configuration: of the whole.
        name: of the fleet.
        seat: its card.
        port: its own.
        behind: a router stands in front of it, so that it listens for this machine alone.

    Raises:
        DeployError: it is for more than one card.
    """
    wide = [flag for flag in _WIDE if configuration.flags.get(flag, 1) != 1]
    if wide:
        raise DeployError(
            f"this configuration spreads one engine over several cards ({', '.join(wide)})",
            fix="leave out --gpus, or tune for one card",
            exit_code=ExitCode.USAGE,
        )
    profile = configuration.profile
    service = profile.service.model_copy(
        update={
            "name": f"{name}-gpu{seat.index}",
            "port": port,
            **({"host": "127.0.0.1"} if behind else {}),
        }
    )
    changed = profile.model_copy(update={"service": service, "env": {**profile.env, **seat.env}})
    return replace(configuration, profile=changed)


def members(root: Path, name: str) -> tuple[str, ...]:
    """The services of a fleet that are installed, engines first."""
    return tuple(store.service for store in stores(root) if is_member(store.service, name))


def is_member(service: str, name: str) -> bool:
    """A service is called as one of the fleet of that name."""
    return re.fullmatch(_MEMBER.format(re.escape(name)), service) is not None
