import os
import socket

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.server.ports import free_port, holder_of, require_free


def test_a_free_port_is_free():
    port = free_port("127.0.0.1")
    require_free("127.0.0.1", port)
    assert holder_of("127.0.0.1", port) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_free_port_is_given_to_nobody_else_meanwhile(host):
    # Of 14,000 that there are: by chance, one of them would come twice.
    ports = [free_port(host) for _ in range(400)]
    assert len(set(ports)) == len(ports)
    for port in ports[:20]:
        require_free(host, port)


@pytest.mark.parametrize(
    ("taken", "wanted"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")]
)
def test_a_taken_port_is_told_with_its_holder(taken, wanted):
    with socket.create_server((taken, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            DeployError, match=f"port {port} on {wanted} is taken by process {os.getpid()}"
        ) as caught:
            require_free(wanted, port)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert str(os.getpid()) in (caught.value.fix or "")


def test_connections_that_are_closing_do_not_count():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, so it is the one that stays in TIME_WAIT
        client.close()
    require_free("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 3000), ("127.0.0.1", 70000), ("127.0.0.1", -1)])
def test_an_address_or_port_that_cannot_be(host, port):
    with pytest.raises(DeployError, match="cannot listen"):
        require_free(host, port)


def test_free_port_of_a_foreign_address():
    with pytest.raises(DeployError, match="cannot listen"):
        free_port("192.0.2.1")


def test_a_port_for_root():
    try:
        socket.create_server(("127.0.0.1", 80)).close()
    except PermissionError:
        pass
    else:
        pytest.skip("this system lets us use every port")
    with pytest.raises(DeployError, match="ports below 1024"):
        require_free("127.0.0.1", 80)
