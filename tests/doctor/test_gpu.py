from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from dflash_deploy.doctor import environment, planned
from dflash_deploy.doctor import gpu as checks
from dflash_deploy.doctor.finding import Status
from dflash_deploy.machine import nvml
from dflash_deploy.machine.gpu import Gpu
from dflash_deploy.watch.units import UnitState

from .builders import engine, gpu, host, process, reading, subject


def test_a_driver_that_answers_passes():
    answer = checks.driver(subject(gpu()))
    assert answer.status is Status.PASS
    assert "610.43.02" in answer.text


def test_no_driver_fails_with_its_fix():
    answer = checks.driver(subject())
    assert (answer.status, answer.text, answer.fix) == (Status.FAIL, "no driver", "install it")


def test_one_card_of_two_that_is_lost_warns():
    lost = Gpu(index=1, failed="it fell off the bus")
    answer = checks.driver(subject(gpus=reading(gpu(), lost, problem="GPU 1 is lost", fix="sudo reboot")))
    assert (answer.status, answer.fix) == (Status.WARN, "sudo reboot")


@pytest.mark.parametrize(("visible", "status"), [((), Status.FAIL), (None, Status.WARN), ((0,), Status.PASS)])
def test_cards_hidden_by_a_variable(visible, status):
    answer = checks.visible(subject(gpus=reading(gpu(), cuda_visible_devices="7", visible=visible)))
    assert answer is not None
    assert answer.status is status


def test_nothing_is_said_of_a_variable_that_is_not_set():
    assert checks.visible(subject(gpu())) is None


def test_free_memory_passes_with_its_figure():
    answer = checks.vram(subject(gpu()))
    assert answer is not None
    assert answer.status is Status.PASS
    assert "32,122 of 32,607 MiB free" in answer.text


def test_memory_of_another_program_is_told_with_its_holder():
    answer = checks.vram(subject(gpu(memory_used_mib=9000, processes=(process(4242, 8998, "blender"),))))
    assert answer is not None
    assert answer.status is Status.WARN
    assert "blender (pid 4242, alice, 8,998 MiB)" in answer.text
    assert answer.fix is not None
    assert answer.fix.endswith("kill 4242")


def test_of_several_cards_the_held_one_is_named_and_the_free_one_offered():
    held = {"memory_used_mib": 9000, "processes": (process(4242, 8998, "blender"),)}
    answer = checks.vram(subject(gpu(), gpu(index=1, **held)))
    assert answer is not None
    assert "of GPU 1" in answer.text
    assert answer.fix is not None
    assert answer.fix.endswith("CUDA_VISIBLE_DEVICES=0")
    alone = checks.vram(subject(gpu(**held)))
    assert alone is not None
    assert "GPU 0" not in alone.text
    assert "CUDA_VISIBLE_DEVICES" not in (alone.fix or "")
    both = checks.vram(subject(gpu(**held), gpu(index=1, **held)))
    assert both is not None
    assert "CUDA_VISIBLE_DEVICES" not in (both.fix or "")


def test_a_desktop_is_told_as_one():
    card = gpu(memory_used_mib=900, processes=(process(77, 898, "gnome-shell", desktop=True),))
    answer = checks.vram(subject(card))
    assert answer is not None
    assert answer.status is Status.WARN
    assert "desktop" in answer.text
    assert "kill" not in (answer.fix or "")


def test_memory_without_a_holder_in_sight_warns():
    answer = checks.vram(subject(gpu(memory_used_mib=5000, processes=None)))
    assert answer is not None
    assert answer.status is Status.WARN
    assert "5,000 MiB of GPU 0" in answer.text


def test_memory_of_an_own_service_is_no_trouble():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        unit = UnitState(
            "dflash-sglang-a.service", "system", "active", "running", "success", True, 0, os.getpid()
        )
        card = gpu(memory_used_mib=30_000, processes=(process(child.pid, 29_998),))
        answer = checks.vram(subject(card, units=(unit,)))
        assert answer is not None
        assert answer.status is Status.PASS
        assert "a server of this tool" in answer.text
        assert checks.held_by_others_mib(subject(card, units=(unit,)), card) == 2
        assert checks.held_by_others_mib(subject(card), card) == 30_000
    finally:
        child.kill()
        child.wait()


def test_a_card_without_memory_of_its_own_tells_the_hosts():
    card = gpu(memory_total_mib=None, memory_used_mib=None, memory_free_mib=None)
    answer = checks.vram(subject(card))
    assert answer is not None
    assert answer.status is Status.PASS
    assert "60,000 of 65,536" in answer.text


@pytest.mark.parametrize(
    ("check", "bad", "words", "fix"),
    [
        (
            checks.clocks,
            {"clock_reasons": ("hardware thermal slowdown",), "temperature_c": 93},
            "93 °C",
            "nvidia-smi",
        ),
        (checks.power, {"power_limit_w": 400.0}, "400 W of 575 W", "sudo nvidia-smi -i 0 -pl 575"),
        (checks.pcie, {"pcie_width": 4}, "x4 of x16", "lspci -s 0000:01:00.0"),
        (checks.persistence, {"persistence_mode": False}, "off on GPU 0", "sudo nvidia-smi -i 0 -pm 1"),
    ],
)
def test_each_setting_of_a_card_passes_warns_and_may_be_unknown(check, bad, words, fix):
    assert check(subject(gpu())).status is Status.PASS
    answer = check(subject(gpu(**bad)))
    assert answer.status is Status.WARN
    assert words in answer.text
    assert fix in answer.fix
    nothing = dict.fromkeys(bad)
    assert check(subject(gpu(**nothing))).status is Status.UNKNOWN
    assert check(subject()) is None


def test_only_cards_that_a_server_would_see_are_judged():
    narrow = gpu(index=1, pcie_width=1)
    both = reading(gpu(), narrow, cuda_visible_devices="0", visible=(0,))
    answer = checks.pcie(subject(gpus=both))
    assert answer is not None
    assert answer.status is Status.PASS


def test_a_power_cap_that_is_reached_is_no_brake():
    answer = checks.clocks(subject(gpu(clock_reasons=("software power cap",))))
    assert answer is not None
    assert answer.status is Status.PASS


def test_windows_keeps_persistence_itself():
    assert checks.persistence(subject(gpu(persistence_mode=False), host=host(wsl=2))) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="persistence mode is root's to set")
def test_persistence_is_set_by_the_drivers_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = checks.persistence(subject(gpu(persistence_mode=False)))
    assert answer is not None
    assert answer.repair is not None
    assert not (tmp_path / "calls").exists()
    assert "is on" in answer.repair.run()
    assert (tmp_path / "calls").read_text() == "-i 0 -pm 1\n"


def test_without_the_drivers_tool_nothing_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("nvidia-smi") is None
    answer = checks.persistence(subject(gpu(persistence_mode=False)))
    assert answer is not None
    assert answer.repair is None


@pytest.mark.parametrize("code", [9, 17, 18, 999])
def test_a_driver_that_windows_keeps_back_is_mended_there(code: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml.system, "container", lambda: None)
    monkeypatch.setattr(nvml.system, "wsl", lambda: 2)
    problem = nvml.start_problem(pynvml.NVMLError(code))
    assert "of Windows" in problem.message
    assert "wsl --update" in problem.fix
    monkeypatch.setattr(nvml.system, "wsl", lambda: None)
    assert "Windows" not in nvml.start_problem(pynvml.NVMLError(code)).message


def test_a_profile_for_the_processor_needs_no_card():
    found = subject(profile="sglang-cpu-smoke", engine=engine())
    assert checks.driver(found).status is Status.PASS
    assert environment.cuda(found) is None
    assert planned.budget(found) is None
