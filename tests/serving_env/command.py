"""``dflash-deploy`` as a process of its own, by a fork: what this one has imported need not be again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import dflash_deploy.serving_env.patches.view
import dflash_deploy.serving_env.view  # noqa: F401 - loaded once, for every fork
from dflash_deploy.cli import main

_CAPABILITY_VERSION_3 = 0x20080522


def like_another_account() -> None:
    """Give up root's right to every file, so that this process is refused what another account would be."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run(*words: str | Path, before: Callable[[], object] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end.

    Args:
        words: the arguments.
        before: called first, in the new process.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _become(list(map(str, words)), output.fileno(), errors.fileno(), before)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(["dflash-deploy", *words], status, *said)


def _become(words: list[str], output: int, errors: int, before: Callable[[], object] | None) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        # Not the test runner's own, which would go on to its report.
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["dflash-deploy", *words]
        if before is not None:
            before()
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter itself would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
