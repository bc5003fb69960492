"""TCP ports: is one free, who holds it, which one could be had."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

import psutil

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.server.processes import name_of

_CONNECT_S = 1.0


def require_free(host: str, port: int) -> None:
    """Make sure that a server could listen on ``host:port``.

    An engine that finds its port taken may find it only after loading the model, and then hang for ever.

    Raises:
        DeployError: the port is taken (with its holder where that can be seen), not permitted, or the address
            is not one of this machine.
    """
    error = _bind_error(host, port)
    if error is None:
        return
    match error.errno:
        case errno.EADDRINUSE:
            pid, holder = _holder(port)
            raise DeployError(
                f"port {port} on {host} is taken by {holder}",
                fix=(f"end process {pid}, or choose" if pid else "choose")
                + " another port in the profile's service settings",
                exit_code=ExitCode.UNAVAILABLE,
            )
        case errno.EACCES:
            raise DeployError(
                f"port {port} may not be used: ports below 1024 are for root",
                fix="choose a port above 1023 in the profile's service settings",
                exit_code=ExitCode.UNAVAILABLE,
            )
        case _:
            raise DeployError(
                f"a server cannot listen on {host}, port {port}: {error.strerror or error}",
                fix="use an address of this machine, such as 127.0.0.1, and a port from 1 to 65535",
                exit_code=ExitCode.UNAVAILABLE,
            )


def free_port(host: str) -> int:
    """A port that is free on ``host`` now, and that a server may have.

    For a minute the system gives it to nobody who wants any port, as another server that starts does: a
    connection of it is still closing. Nothing keeps it from who wants this very one.

    Raises:
        DeployError: the address is not one of this machine.
    """
    try:
        family, address = _resolve(host, 0)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            own = probe.getsockname()
            with suppress(OSError), socket.create_connection(own[:2], timeout=_CONNECT_S):
                probe.accept()[0].close()  # the side that closes first is the one that waits
            return int(own[1])
    except OSError as error:
        raise DeployError(
            f"a server cannot listen on {host}: {error.strerror or error}",
            fix="use an address of this machine, such as 127.0.0.1 or 0.0.0.0",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


def listens(host: str, port: int) -> bool:
    """Whether anyone keeps a server from listening on ``host:port``."""
    error = _bind_error(host, port)
    return error is not None and error.errno == errno.EADDRINUSE


def holder_of(host: str, port: int) -> str | None:
    """Who keeps a server from listening on ``host:port``, in words; None if nobody does."""
    return _holder(port)[1] if listens(host, port) else None


def _bind_error(host: str, port: int) -> OSError | None:
    if not 0 < port < 1 << 16:  # the resolver would take it modulo 65536
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    try:
        family, address = _resolve(host, port)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: connections that are still closing do not count, a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _resolve(
    host: str, port: int
) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, address  # type: ignore[return-value]  # typeshed also allows a packet socket's address


def _holder(port: int) -> tuple[int | None, str]:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            pid, listens = connection.pid, connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr and connection.laddr[1] == port and pid is not None:
                return pid, f"process {pid} ({name_of(pid)})"
    return None, "a process of another user (its name cannot be seen from here)"
