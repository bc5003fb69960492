"""What is recorded of an installed service: its generation, and what was measured when it was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.deploy.generations import Store, root_of
from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.errors import DeployError
from dflash_deploy.watch.memory import Part, split
from dflash_deploy.watch.units import UnitState


@dataclass(frozen=True)
class Recorded:
    """The current generation of a service.

    Attributes:
        simulated: its figures below were simulated.
        expected_mib: what the card held at most when its configuration was measured.
        accept_length: tokens a verify step gave then.
        memory: what the card's memory was used for then; empty where that was not recorded.
    """

    generation: int
    simulated: bool
    expected_mib: int | None = None
    accept_length: float | None = None
    memory: tuple[Part, ...] = ()


class _Measured(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    accept_length: float | None = None


class _Evidence(BaseModel):
    """As much of a trial's record as is looked at here."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    measured: _Measured | None = None
    boot: BootRecord | None = None


def recorded(unit: UnitState) -> Recorded | None:
    """What there is of a unit; None where it was not installed as a generation, or that cannot be read."""
    try:
        store = Store(root_of(unit.manager) / unit.service, unit.service)
        number = store.current()
        if number is None:
            return None
        generation = store.generation(number)
        text = store.evidence(number)
        evidence = _Evidence.model_validate_json(text) if text else _Evidence()
    except (DeployError, OSError, ValidationError):
        return None
    return Recorded(
        number,
        generation.simulated,
        generation.vram_expected_mib,
        evidence.measured.accept_length if evidence.measured else None,
        split(None, evidence.boot, used_mib=generation.vram_expected_mib, others_mib=None),
    )
