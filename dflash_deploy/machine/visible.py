"""Which cards ``CUDA_VISIBLE_DEVICES`` leaves to a server. NVML itself always shows all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"


def visible_indices(
    uuids: Sequence[str | None], names: Sequence[str | None], environ: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Cards that a server started in ``environ`` sees, by NVML index, in the order it sees them.

    CUDA reads the list until the first entry that names no card, and a card named twice leaves none. Numbers
    count in CUDA's order, which puts the fastest card first unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Args:
        uuids: of every card, by NVML index.
        names: of every card, by NVML index; cards of one name count in PCI order either way.
        environ: the server's environment.

    Returns:
        None where it cannot be told: numbers that pick some of several unlike cards, in CUDA's own order.
    """
    everything = tuple(range(len(uuids)))
    setting = environ.get(VARIABLE)
    if setting is None:
        return everything
    same_order = environ.get(_ORDER) == "PCI_BUS_ID" or len(set(names)) <= 1
    chosen: list[int] = []
    numbered = False
    for entry in setting.split(","):
        index, by_number = _card(entry.strip(), uuids)
        if index is None:
            break
        if index in chosen:
            return ()
        chosen.append(index)
        numbered |= by_number
    if numbered and not same_order:
        return everything if set(chosen) == set(everything) else None
    return tuple(chosen)


def _card(entry: str, uuids: Sequence[str | None]) -> tuple[int | None, bool]:
    """Index that an entry names, if any, and whether it is a number."""
    number = re.match(r"[+-]?[0-9]{1,9}", entry)
    if number:
        index = int(number[0])
        return (index if 0 <= index < len(uuids) else None), True
    if entry.startswith("GPU-"):
        found = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        return (found[0] if len(found) == 1 else None), False
    mig = re.match(r"MIG-(GPU-[0-9a-fA-F-]{36})/", entry)
    return (uuids.index(mig[1]) if mig and mig[1] in uuids else None), False
