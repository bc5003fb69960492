import asyncio
import signal
import time
from pathlib import Path, PosixPath

import pytest
from pydantic import BaseModel

from dflash_deploy.tune.signals import stop_once


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
