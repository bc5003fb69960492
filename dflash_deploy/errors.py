"""What a person must fix: one exception with what happened, why, and the command that helps."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit statuses of every command (listed in the README)."""

    OK = 0
    FAILED = 1
    """The command ran, and what it was asked for could not be had (for example: no configuration served)."""
    USAGE = 2
    """The command line itself is wrong."""
    INVALID_INPUT = 3
    """A profile, card, model, log or record is unreadable or wrong."""
    MISSING = 4
    """Something needed is not there: driver, SGLang, model files, a study."""
    UNAVAILABLE = 5
    """Something needed is there but cannot be had now: port taken, no permission, disk full, locked."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; everything finished until then is kept."""


class DeployError(Exception):
    """An error for a person to fix.

    Attributes:
        message: what happened and why, one or more lines without a traceback.
        fix: the command or change that helps, or None where there is none to give.
        exit_code: status that the process ends with.
    """

    def __init__(
        self, message: str, *, fix: str | None = None, exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.exit_code = exit_code

    def then(self, command: str) -> DeployError:
        """The same error, whose fix ends with the command that goes on from there."""
        fix = f"{self.fix}, then {command}" if self.fix else command
        return DeployError(self.message, fix=fix, exit_code=self.exit_code)
