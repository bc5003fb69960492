import errno
import os
import signal
import subprocess
import sys

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


BUSY = """
import os, sys, threading
os.dup2(1, 100)
os.close(1)
def turn_over():
    while True:
        for number in [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]:
            os.close(number)
for _ in range(2):
    threading.Thread(target=turn_over).start()
print("ready", file=sys.stderr, flush=True)
"""


def test_files_that_are_closed_meanwhile_hide_no_other():
    command = [sys.executable, "-S", "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        inode = os.fstat(process.stdout.fileno()).st_ino
        process.stderr.readline()
        try:
            seen = [f"pipe:[{inode}]" in processes.open_files(process.pid) for _ in range(100)]
        finally:
            process.kill()
    assert all(seen)
