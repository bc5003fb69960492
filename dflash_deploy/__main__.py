"""Where the command begins."""

from __future__ import annotations

import sys

from dflash_deploy.errors import ExitCode


def main() -> None:
    """Run the command line. Ctrl-C counts from the first import on, which take a fifth of a second."""
    try:
        from dflash_deploy.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
