"""How long a start may take, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.engine.boot import Stage

_CHATTER = 3
"""A server that goes on printing gets this many times the limit of a silent one: a download or a compilation
reports itself in words that no grammar knows."""


@dataclass(frozen=True)
class Deadlines:
    """Limits on a start, in seconds of the server's own time (see ``Launch.time_scale``).

    A stage is over its limit when nothing was printed and nothing progressed for that long, or when nothing
    progressed for three times as long although the server went on printing. Progress is a new stage, or a new
    detail of the same stage (the next shard loaded, the next graph captured).

    Attributes:
        imports_s: until the model starts to load: interpreter, arguments, imports.
        load_s: loading the target or the draft; a slow disk reads 17 GiB in about three minutes.
        sizing_s: sizing and allocating the memory pools.
        capture_s: each set of CUDA graphs; the first start of a version compiles kernels here.
        warm_up_s: the first request.
        health_s: from the line that says ready to a healthy answer.
        total_s: the whole start.
        linger_s: clock time that a server gets to end by itself after it printed a fatal error (some wait a
            minute for core dumps).
        least_s: clock time that no limit goes below however fast simulated time runs: starting an
            interpreter on a busy machine is not simulated.
    """

    imports_s: float = 120.0
    load_s: float = 600.0
    sizing_s: float = 120.0
    capture_s: float = 600.0
    warm_up_s: float = 300.0
    health_s: float = 60.0
    total_s: float = 7200.0
    linger_s: float = 10.0
    least_s: float = 20.0

    def silent_s(self, stage: Stage, time_scale: float) -> float:
        """Clock seconds that a server may spend in ``stage`` without a word."""
        return self._on_the_clock(self._limit_s(stage), time_scale)

    def unmoved_s(self, stage: Stage, time_scale: float) -> float:
        """Clock seconds that a server may spend in ``stage`` without progress."""
        return self._on_the_clock(self._limit_s(stage) * _CHATTER, time_scale)

    def whole_s(self, time_scale: float) -> float:
        """Clock seconds that a start may take in all."""
        return self._on_the_clock(self.total_s, time_scale)

    def _on_the_clock(self, limit_s: float, time_scale: float) -> float:
        return max(limit_s / time_scale, self.least_s)

    def _limit_s(self, stage: Stage) -> float:
        match stage:
            case Stage.ARGUMENTS | Stage.IMPORTS:
                return self.imports_s
            case Stage.LOAD | Stage.DRAFT_LOAD:
                return self.load_s
            case Stage.SIZING | Stage.POOLS:
                return self.sizing_s
            case Stage.PREFILL_CAPTURE | Stage.DECODE_CAPTURE | Stage.DRAFT_CAPTURE:
                return self.capture_s
            case Stage.WARM_UP:
                return self.warm_up_s
            case Stage.SERVING:
                return self.health_s
