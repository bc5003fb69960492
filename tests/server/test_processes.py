import errno
import os
import signal
import subprocess

import pytest

from dflash_deploy.server import processes


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_signal_goes_out_where_the_kernel_has_no_descriptors_of_processes(monkeypatch, sleeper, number):
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    identity = processes.identity_of(sleeper.pid)
    processes.send(processes.Identity(identity.pid, identity.start_ticks - 1), signal.SIGKILL)
    assert processes.alive(identity)
    processes.send(identity, signal.SIGTERM)
    assert sleeper.wait(30) == -signal.SIGTERM
    processes.send(identity, signal.SIGTERM)


def test_writers_of_a_pipe_are_others_that_have_it_open():
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as process:
        inode = os.fstat(process.stdout.fileno()).st_ino
        assert processes.writers(inode) == (processes.identity_of(process.pid),)
        process.kill()
        process.wait(30)
        assert processes.writers(inode) == ()
