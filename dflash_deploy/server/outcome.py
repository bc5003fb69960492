"""How a start and a stop ended, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_deploy.engine.boot import BootRecord, Stage


@dataclass(frozen=True)
class Served:
    """The server takes requests. ``boot_s`` is in the server's own time."""

    boot: BootRecord
    boot_s: float


@dataclass(frozen=True)
class NotServed:
    """The server died, stalled or ran out of time while starting.

    Attributes:
        boot: what the log told until then.
        stage: where it stood.
        reason: one line for a person: the log's innermost message, or what was waited for.
        exit_status: of the main process (negative: signal), None if it had to be ended by us.
    """

    boot: BootRecord
    stage: Stage
    reason: str
    exit_status: int | None
    boot_s: float


StartOutcome = Served | NotServed


@dataclass(frozen=True)
class StopReport:
    """What a stop found.

    Attributes:
        graceful: the main process ended by itself after SIGTERM within the bound.
        exit_status: of the main process.
        leftovers: what still stands afterwards (a taken port, a child, a shared-memory file, VRAM of a
            process), in words; empty where nothing is left.
    """

    graceful: bool
    exit_status: int | None
    leftovers: tuple[str, ...] = ()
