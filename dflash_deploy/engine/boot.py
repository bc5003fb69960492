"""What a server said of itself while it started."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """How far a start has come, in the order a start goes through."""

    ARGUMENTS = "arguments"
    IMPORTS = "imports"
    LOAD = "load"
    DRAFT_LOAD = "draft-load"
    SIZING = "sizing"
    POOLS = "pools"
    PREFILL_CAPTURE = "prefill-capture"
    DECODE_CAPTURE = "decode-capture"
    DRAFT_CAPTURE = "draft-capture"
    WARM_UP = "warm-up"
    SERVING = "serving"


@dataclass(frozen=True)
class LoadedWeights:
    """One model in memory. ``memory_gib`` may be negative where the engine measured it so."""

    architecture: str
    memory_gib: float
    elapsed_s: float
    free_after_gib: float


@dataclass(frozen=True)
class StateCache:
    """The recurrent-state cache of a hybrid model; the last two are zero without speculation."""

    slots: int
    conv_gib: float
    ssm_gib: float
    verify_ssm_gib: float = 0.0
    verify_conv_gib: float = 0.0

    @property
    def total_gib(self) -> float:
        """All four parts together."""
        return self.conv_gib + self.ssm_gib + self.verify_ssm_gib + self.verify_conv_gib


@dataclass(frozen=True)
class KvPool:
    """One key/value pool: the target's first, the draft's (or a window pool) after it."""

    tokens: int
    memory_gib: float
    dtype: str | None = None


@dataclass(frozen=True)
class GraphCapture:
    """One set of captured CUDA graphs.

    Attributes:
        role: ``target`` or ``draft``.
        what: ``prefill``, ``decode``, ``verify`` or ``extend``.
        sizes: batch sizes (token counts for prefill), as logged.
    """

    role: str
    what: str
    sizes: tuple[int, ...]
    elapsed_s: float
    memory_gib: float


@dataclass(frozen=True)
class Degradation:
    """The server runs, but without something that was asked for, or that speed depends on."""

    id: str
    text: str


@dataclass(frozen=True)
class BootFailure:
    """Why a start ended: the innermost message the log gives, and the stage it stood in.

    ``certain`` is false for an exception that is the end of a start if the process ends after it, and
    otherwise something that the engine lives through, such as an import that failed.
    """

    stage: Stage
    message: str
    certain: bool = True


@dataclass(frozen=True)
class BootRecord:
    """All that the log of one start tells. GiB is 2**30 bytes; None means that the log did not say."""

    stage: Stage
    version: str | None = None
    free_before_load_gib: float | None = None
    weights: tuple[LoadedWeights, ...] = ()
    multimodal_reserve_gib: float | None = None
    state_cache: StateCache | None = None
    kv_pools: tuple[KvPool, ...] = ()
    free_after_pools_gib: float | None = None
    graphs: tuple[GraphCapture, ...] = ()
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    context_tokens: int | None = None
    chunked_prefill_size: int | None = None
    free_at_ready_gib: float | None = None
    startup_timings_s: tuple[tuple[str, float], ...] = ()
    degradations: tuple[Degradation, ...] = ()
    failure: BootFailure | None = None

    @property
    def ready(self) -> bool:
        """The server said that it takes requests."""
        return self.stage is Stage.SERVING and self.failure is None
