"""What other parts ask of the cards while they work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .nvml_stub import GPU_IS_LOST, NOT_SUPPORTED, StubCard, StubProcess

SAMPLE = "from dflash_deploy.machine.gpu import vram_used_mib, gpu_processes\n"


def test_vram_is_sampled_by_index_and_by_uuid(on_stub: Callable[..., str]):
    code = SAMPLE + "print([vram_used_mib(0) for _ in range(4)], vram_used_mib('GPU-b'))"
    cards = StubCard(used_mib=[100, 20_000, 31_211]), StubCard(uuid="GPU-b", used_mib=7)
    assert on_stub(code, *cards) == "[100, 20000, 31211, 31211] 7"


def test_sampling_opens_nvml_once_and_closes_it(on_stub: Callable[..., str], tmp_path: Path):
    log = tmp_path / "log"
    on_stub(SAMPLE + "for _ in range(50): vram_used_mib(0)", StubCard(), log=log)
    assert log.read_text().split() == ["open", "close"]


def test_sampling_what_is_not_there_gives_none(on_stub: Callable[..., str]):
    code = SAMPLE + "print([vram_used_mib(gpu) for gpu in (1, -1, 'GPU-x', '\\udcff')], gpu_processes(5))"
    assert on_stub(code, StubCard()) == "[None, None, None, None] None"


def test_sampling_without_a_driver_gives_none(on_stub: Callable[..., str]):
    assert on_stub(SAMPLE + "print(vram_used_mib(0), gpu_processes(0))", init_code=9) == "None None"


def test_sampling_a_card_that_is_lost_gives_none(on_stub: Callable[..., str]):
    code = SAMPLE + "print([vram_used_mib(0) for _ in range(3)])"
    assert on_stub(code, StubCard(used_mib=5, lost_after=4)) == "[5, 5, None]"


def test_sampling_a_card_without_memory_figures_gives_none(on_stub: Callable[..., str]):
    errors = {"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    assert on_stub(SAMPLE + "print(vram_used_mib(0))", StubCard(errors=errors)) == "None"


LOOK = "from dflash_deploy.machine.gpu import gpu_sample\n"


def test_a_look_at_a_working_card(on_stub: Callable[..., str]):
    numbers = {"sm": 2800, "mem": 14_001, "draw": 560_250, "temperature": 71, "reasons": 0x24}
    said = on_stub(LOOK + "print(gpu_sample(0))", StubCard(used_mib=31_000, numbers=numbers))
    assert said == (
        "GpuSample(clock_sm_mhz=2800, clock_memory_mhz=14001, power_w=560.25, temperature_c=71, "
        "clock_reasons=('software power cap', 'software thermal slowdown'), vram_used_mib=31000)"
    )


def test_a_look_at_what_does_not_answer(on_stub: Callable[..., str]):
    assert on_stub(LOOK + "print(gpu_sample(3), gpu_sample('GPU-x'))", StubCard()) == "None None"
    errors = {"nvmlDeviceGetPowerUsage": NOT_SUPPORTED, "nvmlDeviceGetClockInfo": NOT_SUPPORTED}
    code = LOOK + "look = gpu_sample(0); print(look.power_w, look.clock_sm_mhz, look.vram_used_mib)"
    assert on_stub(code, StubCard(errors=errors)) == "None None 2"


def test_processes_of_one_card(on_stub: Callable[..., str]):
    code = SAMPLE + "print([(p.pid, p.vram_mib) for p in gpu_processes(1)])"
    cards = StubCard(), StubCard(processes=[StubProcess(os.getpid(), 512)])
    assert on_stub(code, *cards) == f"[({os.getpid()}, 512)]"


def test_processes_that_the_driver_does_not_list(on_stub: Callable[..., str]):
    errors = {
        f"nvmlDeviceGet{kind}RunningProcesses_{version}": GPU_IS_LOST
        for kind in ("Compute", "Graphics")
        for version in ("v2", "v3")
    }
    assert on_stub(SAMPLE + "print(gpu_processes(0))", StubCard(errors=errors)) == "None"
