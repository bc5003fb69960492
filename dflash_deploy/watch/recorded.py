"""What is recorded of an installed service: its generation, and what was measured when it was chosen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.deploy.below import versions_now
from dflash_deploy.deploy.generations import Generation, Store, root_of
from dflash_deploy.deploy.versions import staleness
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.errors import DeployError
from dflash_deploy.watch.memory import Part, split
from dflash_deploy.watch.units import UnitState

_STALE_EVERY_S = 60.0


@dataclass(frozen=True)
class Recorded:
    """The current generation of a service.

    Attributes:
        simulated: its figures below were simulated.
        expected_mib: what the card held at most when its configuration was measured.
        accept_length: tokens a verify step gave then.
        memory: what the card's memory was used for then; empty where that was not recorded.
        stale: what has changed below it since, a sentence each.
        router: it is no engine, but the router in front of some.
    """

    generation: int
    simulated: bool
    expected_mib: int | None = None
    accept_length: float | None = None
    memory: tuple[Part, ...] = ()
    stale: tuple[str, ...] = ()
    router: bool = False


class _Measured(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    accept_length: float | None = None


class _Evidence(BaseModel):
    """As much of a trial's record as is looked at here."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    measured: _Measured | None = None
    boot: BootRecord | None = None


def installed(unit: UnitState) -> Generation | None:
    """The current generation of a unit's service; None where there is none, or it cannot be read."""
    try:
        store = _store(unit)
        number = store.current()
        return None if number is None else store.generation(number)
    except (DeployError, OSError):
        return None


def recorded(unit: UnitState) -> Recorded | None:
    """What there is of a unit; None where it was not installed as a generation, or that cannot be read."""
    generation = installed(unit)
    if generation is None:
        return None
    try:
        text = _store(unit).evidence(generation.number)
        evidence = _Evidence.model_validate_json(text) if text else _Evidence()
    except (OSError, ValidationError):
        return None
    return Recorded(
        generation.number,
        generation.simulated,
        generation.vram_expected_mib,
        evidence.measured.accept_length if evidence.measured else None,
        split(None, evidence.boot, used_mib=generation.vram_expected_mib, others_mib=None),
        _stale(generation.model_dump_json(), int(time.monotonic() / _STALE_EVERY_S)),
        generation.role == "router",
    )


def _store(unit: UnitState) -> Store:
    return Store(root_of(unit.manager) / unit.service, unit.service)


@lru_cache(maxsize=16)
def _stale(generation: str, _moment: int) -> tuple[str, ...]:
    """What has changed below a generation; its patches are read for that, so not at every look."""
    known = Generation.model_validate_json(generation)
    return staleness(known.versions, versions_now(known))
