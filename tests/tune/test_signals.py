import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path, PosixPath

import pytest
from pydantic import BaseModel

from dflash_deploy.tune.signals import stop_once


@pytest.fixture(autouse=True)
def _own_handlers():
    """Who asked to stop would be deaf from then on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupting(PosixPath):
    def __str__(self):
        signal.raise_signal(signal.SIGINT)
        return "/x"


class Record(BaseModel):
    place: Path


def test_an_interruption_within_a_writer_that_swallows_it_comes_a_moment_later():
    record = Record.model_construct(place=Interrupting("/x"))
    with stop_once(), pytest.raises(KeyboardInterrupt):
        assert record.model_dump_json() == '{"place":"/x"}'
        time.sleep(60)


def test_an_interruption_while_a_loop_is_made_comes_when_it_is_there():
    made = []

    def make():
        signal.raise_signal(signal.SIGINT)
        made.append(asyncio.new_event_loop())
        return made[0]

    with stop_once(), pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=make) as runner:
        runner.run(asyncio.sleep(60))
    assert made[0].is_closed()


LATE = """
import os, signal, sys
from dflash_deploy.tune.signals import stop_once

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        for number in (2, 15, 1):
            kill(pid, number)

late = Late()
try:
    with stop_once():
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGINT)
    print("told", flush=True)
    sys.exit(130)
"""


def test_impatience_does_not_change_how_it_ends():
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "told\n", "")
