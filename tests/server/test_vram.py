import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.nvml_stub import StubCard, StubProcess, stub_env, stub_folder

CODE = """
import os, threading
from dflash_deploy.server.vram import not_returned, read_use
def change(): os.environ["NVML_STUB_SCENARIO"] = os.environ["AFTER"]
before = read_use(os.environ)
print(sorted(before))
os.environ["NVML_STUB_SCENARIO"] = os.environ["MEANWHILE"]
threading.Timer(0.3, change).start()
comes_back = os.environ["AFTER"] != os.environ["MEANWHILE"]
print(*not_returned(before, os.environ, within_s=60 if comes_back else 1.5), sep="\\n")
"""


@pytest.fixture(scope="module")
def library() -> Path:
    return stub_folder()


@pytest.fixture
def told(library):
    """Runs the check in a process of its own, which finds the stand-in driver library."""

    def told(
        before: list[StubCard], meanwhile: list[StubCard], after: list[StubCard], **environ: str
    ) -> list[str]:
        scenarios = [stub_env(library, *cards) for cards in (before, meanwhile, after)]
        names = [scenario["NVML_STUB_SCENARIO"] for scenario in scenarios]
        result = subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, **scenarios[0], "MEANWHILE": names[1], "AFTER": names[2], **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return told


FREE = StubCard(used_mib=100, processes=[StubProcess(1, 50)])
FULL = StubCard(used_mib=20_100, processes=[StubProcess(1, 50), StubProcess(4_000_000, 20_000)])


def test_memory_that_comes_back_after_a_moment(told):
    assert told([FREE], [FULL], [FREE]) == ["[0]", ""]


def test_memory_that_stays_is_told_with_the_card_and_who_is_new_there(told):
    first, second = told([FREE, FREE], [FREE, FULL], [FREE, FULL])
    assert first == "[0, 1]"
    assert second.startswith("GPU 1 holds 20000 MiB more than before the start (measured): process 4000000 (")


def test_memory_of_no_process_that_can_be_seen(told):
    full = StubCard(used_mib=20_100)
    assert told([FREE], [full], [full])[1].endswith("no new process is seen on it")


def test_a_card_that_the_server_does_not_see_does_not_count(told):
    cards = [FREE, FREE], [FREE, FULL], [FREE, FULL]
    assert told(*cards, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["[0]", ""]


def test_a_card_that_falls_off_the_bus(told):
    lost = StubCard(lost_after=0)
    assert told([FREE], [lost], [lost]) == ["[0]", ""]
    assert told([lost], [FULL], [FULL]) == ["[]", ""]


def test_no_card(told):
    assert told([], [], []) == ["[]", ""]
