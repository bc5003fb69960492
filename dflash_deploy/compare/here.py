"""What this machine is, as far as a result file tells it: nothing that names its owner."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from dflash_deploy.bench.results import Machine
from dflash_deploy.machine.cards import load_card, match_card
from dflash_deploy.machine.gpu import GpuSample, gpu_sample, read_gpus
from dflash_deploy.machine.host import read_host


def look_here(env: Mapping[str, str] | None = None) -> Callable[[], GpuSample | None] | None:
    """How one looks at the card that a server started here takes first; None without one.

    Args:
        env: variables that the server gets besides.
    """
    reading = read_gpus({**os.environ, **(env or {})})
    visible = reading.visible or tuple(gpu.index for gpu in reading.gpus)
    if not reading.readable or not visible:
        return None
    index = visible[0]
    return lambda: gpu_sample(index)


def machine_here(simulated_card: str | None = None) -> Machine:
    """The card that a server started here takes first, or the simulated one, and the host.

    Raises:
        DeployError: there is no such card to simulate.
    """
    host = read_host()
    machine = Machine(cpu=host.cpu_model, ram_mib=host.memory_total_mib, kernel=host.kernel)
    if simulated_card is not None:
        card = load_card(simulated_card)
        return machine.model_copy(update={"card": card.id, "memory_mib": card.memory_mib})
    reading = read_gpus()
    visible = reading.visible or tuple(gpu.index for gpu in reading.gpus)
    gpu = next((one for one in reading.readable if one.index in visible[:1]), None)
    if gpu is None:
        return machine
    known = match_card(gpu.name, gpu.memory_total_mib) if gpu.name else None
    return machine.model_copy(
        update={
            "card": known.id if known else None,
            "gpu": gpu.name,
            "memory_mib": gpu.memory_total_mib,
            "driver": reading.driver_version,
        }
    )
