import os
import signal
import subprocess
import sys
from pathlib import Path

from dflash_deploy.server import exec_shim

SHIM = [sys.executable, "-I", "-S", str(Path(exec_shim.__file__))]


def test_becomes_the_command():
    command = [*SHIM, str(os.getpid()), "sh", "-c", "echo $$ $1; exit 5", "sh", "an argument"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert output == f"{process.pid} an argument\n"
    assert process.returncode == 5


def test_runs_nothing_if_the_parent_has_already_died():
    result = subprocess.run([*SHIM, "1", "echo", "ran"], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("", 1)
    assert "has ended" in result.stderr


def test_command_that_cannot_be_run():
    result = subprocess.run(
        [*SHIM, str(os.getpid()), "/nowhere"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 127
    assert result.stderr == "cannot run /nowhere: No such file or directory\n"


def test_leaves_no_signal_ignored():
    result = subprocess.run(
        [*SHIM, str(os.getpid()), "grep", "SigIgn", "/proc/self/status"],
        capture_output=True,
        text=True,
        check=True,
    )
    ignored = int(result.stdout.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
