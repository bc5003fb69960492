"""Become the server, tied to the life of the tool.

``python -I -S exec_shim.py PARENT_PID COMMAND [ARGUMENT ...]``

The kernel sends SIGKILL to this process, whatever it has become by then, as soon as the thread that started
it ends; so not even ``kill -9`` of the tool leaves a server behind. A standalone script: it runs before the
server's own program, must start quickly, and imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 126
_NOT_FOUND = 127


def main() -> None:
    """Ask for the death signal, then replace this process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie the server to its parent: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the request: then no signal will ever come.
    if os.getppid() != parent:
        sys.exit("the tool that started this server has ended")
    # Python ignores these two, and what is ignored stays so in the next program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN)


if __name__ == "__main__":
    main()
