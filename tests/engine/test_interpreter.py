from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_deploy.engine.interpreter import ask, owner_besides_root
from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.describe import describe

MIB = 1 << 20


def python(code: str, **more: object):  # type: ignore[no-untyped-def]
    return ask([sys.executable, "-c", code], **({"timeout_s": 60} | more))  # type: ignore[arg-type]


def test_an_answer_has_both_outputs_and_the_status(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); sys.stderr.write('why'); sys.exit(3)"
    answer = python(code, errors="kept", folder=tmp_path)
    assert (answer.status, answer.output, answer.errors) == (3, f"{tmp_path}\n".encode(), b"why")
    assert python(code).errors == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is warned")
def test_root_is_told_whose_program_it_runs(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    assert owner_besides_root(program) is None
    os.chown(program, 4242, 4242)
    assert owner_besides_root(program) == "user 4242"
    code = (
        "from dflash_deploy.engine.interpreter import ask\n"
        f"for _ in range(2): print(ask(['{program}', '-c', 'print(7)'], timeout_s=60).output)"
    )
    done = python(code, errors="kept")
    assert done.output == b"b'7\\n'\nb'7\\n'\n"
    assert done.errors.count(b"belongs to user 4242 and is run as root") == 1


def test_of_a_flood_the_end_is_kept() -> None:
    answer = python(f"import sys\nfor _ in range(40): sys.stdout.write('x' * {MIB})\nprint('end')")
    assert answer.status == 0
    assert answer.output.endswith(b"xend\n")
    assert len(answer.output) == 8 * MIB


def test_what_never_ends_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
    )
    for timeout_s in (3, 10, 30):  # a busy machine may not have come so far at first
        slow = python(f"{code}time.sleep(600)", timeout_s=timeout_s)
        assert slow.status is None
        if slow.output:
            break
    quick = python(code)
    assert quick.status == 0
    for answer in (slow, quick):
        gone_by = time.monotonic() + 60
        while runs(int(answer.output)):
            assert time.monotonic() < gone_by
            time.sleep(0.05)


def runs(pid: int) -> bool:
    """Not when it has ended and is not yet reaped by its new parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_interrupted_question_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def interrupt(process: object, *_more: object) -> bool:
        started.append(process.pid)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_deploy.engine.interpreter._read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        python("import time; time.sleep(600)")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.parametrize(
    "said",
    [
        "yes | head -c 30000000",
        'printf \'DFLASH-DEPLOY-ENVIRONMENT {"python": "\\033[31m"}\\n\'',
        "printf 'DFLASH-DEPLOY-ENVIRONMENT %s\\n' \"$(head -c 100000 /dev/zero | tr '\\0' '[')\"",
        "sleep 600 & printf 'DFLASH-DEPLOY-ENVIRONMENT []\\n'",
    ],
)
def test_an_interpreter_that_is_none_is_told_of(said: str, tmp_path: Path) -> None:
    liar = tmp_path / "python"
    liar.write_text(f"#!/bin/sh\n{said}\n")
    liar.chmod(0o755)
    with pytest.raises(DeployError, match="does not say what it has"):
        describe(liar, imports=False)
