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
