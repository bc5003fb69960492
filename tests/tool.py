"""``dflash-deploy`` run as a process, where its words, files and status matter and not its start.

Starting Python and importing the tool takes up to a second of processor time, which was half of what the
tests took. Here each command is a process forked from one that has imported the tool and done nothing else.
What is to be killed, limited, or looked at from a terminal is started with ``python -m dflash_deploy``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import IO

TIMEOUT_S = 100
_READY = b"ready"
_READ_AT_THE_START = re.compile("LD_|LANG$|LC_|PYTHON").match
"""Names of variables that a process reads before it runs any of ours."""


def run_tool(
    *arguments: object, text: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        arguments: after ``dflash-deploy``.
        text: for its standard input.
        env: all its variables; those of the test where it is None.
        cwd: its folder; that of the test where it is None.

    Raises:
        subprocess.TimeoutExpired: it takes longer than ``TIMEOUT_S``, and was killed.
    """
    words = [str(argument) for argument in arguments]
    variables = dict(os.environ if env is None else env)
    request = {"arguments": words, "env": variables, "cwd": str(cwd or Path.cwd())}
    parent = _parent(tuple(pair for pair in variables.items() if _READ_AT_THE_START(pair[0])))
    with _file(json.dumps(request)) as asked, _file(text) as given, _file() as out, _file() as err:
        socket.send_fds(parent, [b"?"], [file.fileno() for file in (asked, given, out, err)])
        child = int(parent.recv(64))
        parent.settimeout(TIMEOUT_S)
        try:
            status = int(parent.recv(64))
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            parent.settimeout(None)
            parent.recv(64)
            raise subprocess.TimeoutExpired(words, TIMEOUT_S) from None
        parent.settimeout(None)
        return subprocess.CompletedProcess(words, status, _content(out), _content(err))


def _file(content: str = "") -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    file.write(content.encode())
    file.seek(0)
    return file


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")


@cache
def _parent(environment: tuple[tuple[str, str], ...]) -> socket.socket:
    """To a process that has imported the tool; it ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env={**dict(environment), "PATH": os.environ["PATH"], "HOME": "/nonexistent"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
    if ours.recv(64) != _READY:
        raise RuntimeError("the tool cannot be imported: see standard error")
    return ours


def _answer(channel: socket.socket) -> None:
    import dflash_deploy

    for module in pkgutil.walk_packages(dflash_deploy.__path__, "dflash_deploy."):
        # Those run within SGLang's interpreter, and that one as a program.
        if ".inside" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    _load_the_late()
    gc.freeze()
    channel.send(_READY)
    while True:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 4)
        if not descriptors:
            return
        child = os.fork()
        if not child:
            channel.close()
            _become(*descriptors)
            os._exit(_status_of(dflash_deploy.cli.main))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(b"%d" % child)
        _, status = os.waitpid(child, 0)
        channel.send(b"%d" % os.waitstatus_to_exitcode(status))


def _load_the_late() -> None:
    """What libraries load only when the first storage is opened and the first question asked."""
    import optuna

    optuna.logging.disable_default_handler()
    optuna.create_study(storage="sqlite://")
    optuna.logging.enable_default_handler()
    for name in ("anyio._backends._asyncio", "h11", "httpcore", "numpy.random", "stringprep"):
        importlib.import_module(name)


def _status_of(main: Callable[[], None]) -> int:
    """Of the whole command; that Python then takes its modules apart, for a tenth of a second, is left."""
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001  (as Python itself would)
        traceback.print_exc()
        status = 1
    else:
        status = 0
    # As Python itself does at its end: pools are told that nothing more comes, and threads are waited for.
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _become(asked: int, *streams: int) -> None:
    with open(asked, encoding="utf-8") as file:
        request = json.load(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["dflash-deploy", *request["arguments"]]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


if __name__ == "__main__":
    _answer(socket.socket(fileno=int(sys.argv[1])))
