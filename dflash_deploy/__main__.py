"""Where the command begins."""

from __future__ import annotations

import sys

from dflash_deploy.errors import ExitCode


def main() -> None:
    """Run the command line. Ctrl-C counts from the first import on, which take a fifth of a second."""
    try:
        from dflash_deploy.cli import main as run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if not _interrupted(error):
            raise
        sys.exit(ExitCode.INTERRUPTED)


def _interrupted(error: BaseException) -> bool:
    """Ctrl-C while a class was being made, which Python 3.11 wraps in an error of its own."""
    cause = error.__cause__
    return isinstance(cause, KeyboardInterrupt) or (cause is not None and _interrupted(cause))


if __name__ == "__main__":
    main()
