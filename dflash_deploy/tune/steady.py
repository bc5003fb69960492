"""How much more memory long use takes than the few short questions of a measurement: told by proofs.

Most of it is what a whole chunk of a long prompt takes on its way through the model, so that it hangs on the
size of a chunk, and not on how the memory is divided.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_deploy.profile.schema import METHOD, VARIABLE
from dflash_deploy.tune.records import TrialRecord

if TYPE_CHECKING:
    from dflash_deploy.tune.space import Settings

_CHUNK = "chunked-prefill-size"
_ALIKE = (METHOD, "disable-prefill-cuda-graph", f"{VARIABLE}PYTORCH_CUDA_ALLOC_CONF")
"""Settings on which it hangs besides, in an order that nobody knows: a draft reads the prompt too, and graphs
have the memory of their chunks from the start."""


@dataclass(frozen=True)
class Growth:
    """What came to the memory in use while a configuration was proven.

    Attributes:
        kind: of the configuration; one of another kind may grow less.
        chunk_tokens: of a long prompt in one pass, None where the log did not tell.
        mib: more than while it was measured, which was ``measured_mib``.
    """

    kind: Hashable
    chunk_tokens: int | None
    mib: float
    measured_mib: float

    @property
    def peak_mib(self) -> float:
        """The most that was in use."""
        return self.measured_mib + self.mib

    def of(self, settings: Settings) -> float:
        """What comes to another configuration at the least, in MiB; nothing where that cannot be told."""
        if kind_of(settings) != self.kind:
            return 0.0
        chunk = settings.get(_CHUNK)
        # Smaller chunks take their share; of larger ones no more is sure.
        share = chunk / self.chunk_tokens if isinstance(chunk, int) and self.chunk_tokens else 1.0
        return self.mib * min(share, 1.0)


def growth_of(proof: TrialRecord) -> Growth | None:
    """What a proof tells; None where it is none, or nobody could read the memory."""
    measured, free = proof.measured, proof.proof.free_mib if proof.proof else None
    if measured is None or measured.vram_used_mib is None or free is None:
        return None
    used = float(measured.vram_used_mib)
    grown = 0.0 if measured.vram_total_mib is None else max(measured.vram_total_mib - free - used, 0.0)
    chunk = proof.boot.chunked_prefill_size if proof.boot else None
    return Growth(kind_of(proof.flags), chunk, grown, used)


def kind_of(settings: Settings) -> Hashable:
    """Equal for configurations whose growth can be compared."""
    return tuple(str(settings.get(name)) for name in _ALIKE)
