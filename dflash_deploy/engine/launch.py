"""What is started: a command, its environment, and where it will answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FlagValue = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""A flag's value. ``True`` sets a switch, ``False`` leaves it out; a tuple is a flag of several values."""

Flags = Mapping[str, FlagValue]
"""Engine flags by full name without dashes in front, as the newest engine version spells them:
``{"mem-fraction-static": 0.85, "disable-radix-cache": True}``."""


@dataclass(frozen=True)
class Launch:
    """One command to run.

    Attributes:
        argv: the whole command, interpreter first. It never holds a secret.
        env: variables set on top of the tool's own environment; ``without`` are those that it is not to pass
            on.
        host: address the server will listen on.
        port: TCP port the server will listen on.
        time_scale: simulated seconds that pass in one second of the clock; 1 for a real server.
        simulated: the command is the simulator, so every figure it gives is simulated.
    """

    argv: tuple[str, ...]
    host: str
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    time_scale: float = 1.0
    simulated: bool = False
    without: frozenset[str] = frozenset()

    @property
    def base_url(self) -> str:
        """Root of the HTTP interface, without a slash at the end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
