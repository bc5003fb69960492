"""The two short programs that a unit runs around the engine, by the serving interpreter's ``-c``.

They stand in the unit itself, a line of Python an argument: the unit then needs neither this tool nor curl on
the machine that it runs on, and whoever reads the unit sees all that it does.
"""

from __future__ import annotations

from dflash_deploy.deploy.escape import command_word, executable

_RUN_ARGUMENTS = r"import sys; exec('\n'.join(sys.argv[3:]))"

_PORT_CHECK = """\
import socket
host, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ':' in host else socket.AF_INET
try:
    socket.create_server((host, port), family=family).close()
except OSError as error:
    sys.exit(f'{host} port {port} cannot be listened on: {error.strerror}')
"""

# The engine answers /health with 200 only after it has generated a token. The main process is watched because
# systemd waits for this program even when the engine has died.
_READY_WAIT = """\
import http.client, os, time
host, port = sys.argv[1], int(sys.argv[2])
while True:
    try:
        os.kill(int(os.environ['MAINPID']), 0)
    except ProcessLookupError:
        sys.exit('the engine ended before it answered: its own lines above say why')
    try:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request('GET', '/health')
        if connection.getresponse().status == 200:
            break
    except (OSError, http.client.HTTPException):
        pass
    time.sleep(1)
"""

# Where a server that listens on every address is reached from the machine itself.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound


def port_check(python: str, host: str, port: int) -> str:
    """The ``ExecStartPre=`` value that ends in failure when the port cannot be listened on."""
    return _program(python, host, port, _PORT_CHECK)


def ready_wait(python: str, host: str, port: int) -> str:
    """The ``ExecStartPost=`` value that ends when the engine answers, or fails when the engine has ended."""
    return _program(python, _LOOPBACK.get(host, host), port, _READY_WAIT)


def _program(python: str, host: str, port: int, source: str) -> str:
    first = " ".join([executable(python), *map(command_word, ("-c", _RUN_ARGUMENTS, host, str(port)))])
    return " \\\n  ".join([first, *map(command_word, source.splitlines())])
