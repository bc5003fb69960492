"""The command on the real pynvml, against a stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tool import run_tool

from .conftest import RunProbe, on_cards, run_python
from .nvml_stub import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_POWER,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SOURCE,
    StubCard,
    StubProcess,
    build_stub,
    stub_env,
)

CARD_3090 = StubCard(name="NVIDIA GeForce RTX 3090", total_mib=24576, numbers={"major": 8, "minor": 6})
MEMORY_KEYS = ("memory_total_mib", "memory_used_mib", "memory_free_mib", "memory_reserved_mib")


def read(result: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(result.stdout)


@contextmanager
def running(folder: Path, name: str | bytes) -> Iterator[int]:
    """A process whose program file bears ``name``."""
    program = folder / os.fsdecode(name)
    shutil.copy(shutil.which("sleep"), program)
    child = subprocess.Popen([program, "600"])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def test_every_figure_of_a_card(probe: RunProbe):
    numbers = {"gen": 4, "gen_max": 5, "width": 8, "draw": 431_500, "limit": 500_000, "temperature": 71}
    numbers |= {"sm": 2400, "mem": 13_801, "reasons": 0x4 | 0x20, "ecc": 1, "mig": 0, "persistence": 0}
    result = probe(StubCard(used_mib=29_076, numbers=numbers, uuid="GPU-abc", bus="00000000:41:00.0"))
    reading = read(result)
    assert result.returncode == 0
    assert reading["driver_version"] == "610.43.02"
    assert reading["cuda_version"] == "13.3"
    assert reading["kind"] == "measured"
    assert reading["problem"] is None
    assert reading["gpus"] == [
        {
            "index": 0,
            "name": "NVIDIA GeForce RTX 5090",
            "card": "rtx-5090",
            "uuid": "GPU-abc",
            "pci_bus_id": "00000000:41:00.0",
            "pcie_gen": 4,
            "pcie_gen_max": 5,
            "pcie_width": 8,
            "pcie_width_max": 16,
            "compute_capability": "12.0",
            "memory_total_mib": 32607,
            "memory_used_mib": 29076,
            "memory_free_mib": 32607 - 483 - 29076,
            "memory_reserved_mib": 483,
            "power_draw_w": 431.5,
            "power_limit_w": 500.0,
            "power_limit_default_w": 575.0,
            "clock_sm_mhz": 2400,
            "clock_sm_max_mhz": 3090,
            "clock_memory_mhz": 13801,
            "clock_memory_max_mhz": 14001,
            "clock_reasons": ["software power cap", "software thermal slowdown"],
            "temperature_c": 71,
            "ecc": True,
            "mig": False,
            "persistence_mode": False,
            "processes": [],
            "unknown": {},
            "failed": None,
        }
    ]


def test_json_keys_are_those_documented(probe: RunProbe):
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = documented.split("## probe --json")[1].split("\n## ")[0]
    reading = read(probe(StubCard(processes=[StubProcess(os.getpid(), 10)])))
    gpu, host = reading["gpus"][0], reading["host"]
    for keys in (reading, gpu, gpu["processes"][0], host, host["disks"][0]):
        missing = [key for key in keys if f"`{key}`" not in section]
        assert not missing


def test_several_cards_of_which_one_is_not_known(probe: RunProbe):
    reading = read(probe(StubCard(), CARD_3090, StubCard(name="NVIDIA Something 9999", total_mib=1000)))
    assert [gpu["card"] for gpu in reading["gpus"]] == ["rtx-5090", "rtx-3090", None]
    assert [gpu["memory_total_mib"] for gpu in reading["gpus"]] == [32607, 24576, 1000]
    assert [gpu["compute_capability"] for gpu in reading["gpus"]] == ["12.0", "8.6", "12.0"]


def test_old_driver_without_memory_v2(probe: RunProbe):
    card = StubCard(used_mib=1000, errors={"nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND})
    gpu = read(probe(card))["gpus"][0]
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"]) == (32607, 1483)
    assert gpu["memory_reserved_mib"] is None
    assert "memory_reserved_mib" in gpu["unknown"]


def test_older_names_of_questions_are_tried(probe: RunProbe):
    newest = ("CurrentClocksEventReasons", "TemperatureV", "EnforcedPowerLimit")
    newest += ("ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3")
    card = StubCard(
        errors={f"nvmlDeviceGet{question}": FUNCTION_NOT_FOUND for question in newest},
        processes=[StubProcess(os.getpid(), 64, "graphics")],
    )
    gpu = read(probe(card))["gpus"][0]
    assert gpu["unknown"] == {}
    assert (gpu["clock_reasons"], gpu["temperature_c"], gpu["power_limit_w"]) == (["idle"], 34, 575.0)
    assert [process["vram_mib"] for process in gpu["processes"]] == [64]


def test_card_without_memory_of_its_own(probe: RunProbe):
    """A GB10 shares the host's memory and answers NOT_SUPPORTED."""
    unsupported = {
        "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED,
        "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED,
        "nvmlDeviceGetEnforcedPowerLimit": NOT_SUPPORTED,
        "nvmlDeviceGetPowerManagementLimit": NOT_SUPPORTED,
        "nvmlDeviceGetEccMode": NOT_SUPPORTED,
    }
    card = StubCard(name="NVIDIA GB10", numbers={"minor": 1}, errors=unsupported)
    result = probe(card)
    gpu = read(result)["gpus"][0]
    assert result.returncode == 0
    assert gpu["card"] == "dgx-spark"
    assert [gpu[key] for key in MEMORY_KEYS] == [None] * 4
    assert "not supported" in gpu["unknown"]["memory"]
    assert gpu["power_limit_w"] is None
    assert "power_limit_w" in gpu["unknown"]
    assert gpu["temperature_c"] == 34
    assert "the host's, shared" in probe(card, options=()).stdout


def test_permission_denied_for_one_question(probe: RunProbe):
    card = StubCard(errors={"nvmlDeviceGetPowerUsage": NO_PERMISSION, "nvmlDeviceGetMigMode": NOT_SUPPORTED})
    gpu = read(probe(card))["gpus"][0]
    assert gpu["power_draw_w"] is None
    assert gpu["unknown"] == {
        "power_draw_w": "no permission",
        "mig": "not supported by this card or driver",
    }


def test_every_question_unanswered(probe: RunProbe):
    questions = re.findall(r"nvmlDeviceGet(?!Handle|Count)\w+", SOURCE.read_text())
    errors = dict.fromkeys(questions, NOT_SUPPORTED)
    result = probe(StubCard(errors=errors))
    gpu = read(result)["gpus"][0]
    assert result.returncode == 0
    answered = {key for key, value in gpu.items() if value is not None} - {"index", "unknown"}
    assert not answered
    assert "unknown" in probe(StubCard(errors=errors), options=()).stdout


@pytest.mark.parametrize("questions", range(0, 30, 3))
def test_card_that_falls_off_the_bus_midway(probe: RunProbe, questions: int):
    result = probe(StubCard(), StubCard(lost_after=questions), CARD_3090)
    reading = read(result)
    assert result.returncode == 0
    first, lost, last = reading["gpus"]
    if questions < 24:
        assert lost["failed"] == "the card has fallen off the bus"
        assert "GPU 1" in reading["problem"]
        assert "fallen off the bus" in reading["problem"]
        assert "dmesg" in reading["fix"]
    assert first["failed"] is last["failed"] is None
    assert first["unknown"] == last["unknown"] == {}
    assert last["memory_total_mib"] == 24576


def test_only_card_is_lost(probe: RunProbe):
    result = probe(StubCard(lost_after=0), options=())
    assert result.returncode == 4
    assert "GPU 0 has fallen off the bus" in result.stderr
    assert "fix:" in result.stderr
    assert "Host" in result.stdout


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        (DRIVER_NOT_LOADED, "", ""),
        (LIB_RM_VERSION_MISMATCH, "version", ""),
        (NO_PERMISSION, "/dev/nvidiactl", "usermod"),
        (INSUFFICIENT_POWER, "power cable", "power cable"),
        (FUNCTION_NOT_FOUND, "too old", "ldconfig"),
        (999, "999", "nvidia-smi"),
        (12345, "12345", "nvidia-smi"),
    ],
)
def test_driver_that_cannot_be_opened(probe: RunProbe, code: int, words: str, fix: str):
    result = probe(init_code=code)
    reading = read(result)
    assert result.returncode == 4
    assert reading["gpus"] == []
    assert words in reading["problem"]
    assert reading["fix"]
    assert fix in reading["fix"]
    assert reading["host"]["memory_total_mib"] > 0


def test_driver_without_a_card(probe: RunProbe):
    result = probe()
    assert result.returncode == 4
    assert "sees no card" in read(result)["problem"]


def test_counting_refused(probe: RunProbe):
    result = probe(StubCard(), fails={"nvmlDeviceGetCount_v2": NO_PERMISSION})
    assert result.returncode == 4
    assert "/dev/nvidiactl" in read(result)["problem"]


def test_no_driver_at_all():
    result = run_tool("probe", env=on_cards({}))
    if result.returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    assert result.returncode == 4
    assert "Traceback" not in result.stderr
    assert "problem:" in result.stderr
    assert "fix:" in result.stderr
    assert "Host  (measured)" in result.stdout


def test_library_outside_the_loaders_path(stub_library: Path):
    """As in WSL, where the library lies in a folder of its own."""
    code = (
        "import pathlib, pynvml\n"
        "from dflash_deploy.machine import nvml\n"
        f"with nvml.session((pathlib.Path('/nowhere'), pathlib.Path({str(stub_library)!r}))):\n"
        "    print(pynvml.nvmlDeviceGetCount())\n"
    )
    variables = stub_env(stub_library, StubCard(), StubCard())
    del variables["LD_LIBRARY_PATH"]
    result = run_python(["-c", code], variables)
    if result.stdout == "" and "LibraryNotFound" not in result.stderr:
        pytest.skip("this machine has an NVIDIA driver")
    assert result.stdout.strip() == "2"


def test_processes_with_a_desktop_among_them(probe: RunProbe, tmp_path: Path):
    with running(tmp_path, "gnome-shell") as shell, running(tmp_path, "llama-server") as server:
        card = StubCard(
            processes=[
                StubProcess(shell, 300, "graphics"),
                StubProcess(server, 21_000),
                StubProcess(server, 21_000, "graphics"),
            ]
        )
        found = read(probe(card))["gpus"][0]["processes"]
        shown = probe(card, options=()).stdout
    assert [(p["name"], p["vram_mib"], p["kind"], p["desktop"]) for p in found] == [
        ("llama-server", 21_000, "both", False),
        ("gnome-shell", 300, "graphics", True),
    ]
    assert [p["pid"] for p in found] == [server, shell]
    assert f"gnome-shell (pid {shell}" in shown
    assert "desktop" in shown


@pytest.mark.parametrize(
    "name",
    ["\x1b[31mred", b"\xff\xfe\x9b1m", "two\nlines", "[bold]markup", "\u202eright-to-left", "tab\tbed"],
)
def test_names_cannot_reach_the_terminal(probe: RunProbe, tmp_path: Path, name: str | bytes):
    with running(tmp_path, name) as pid:
        card = StubCard(processes=[StubProcess(pid, 5)])
        process = read(probe(card))["gpus"][0]["processes"][0]
        shown = probe(card, options=()).stdout
    assert process["name"].isprintable()
    assert all(line.isprintable() for line in shown.splitlines())
    assert process["name"] in shown.replace("\n", "")


def test_process_that_is_gone(probe: RunProbe):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = read(probe(StubCard(processes=[StubProcess(ended.pid, None)])))["gpus"][0]["processes"][0]
    assert process["name"] == f"pid {ended.pid}"
    assert (process["vram_mib"], process["user"]) == (None, None)


def test_process_list_that_grows_while_it_is_read(probe: RunProbe):
    processes = [StubProcess(os.getpid(), 7)]
    gpu = read(probe(StubCard(processes=processes, list_grows=3)))["gpus"][0]
    assert [process["pid"] for process in gpu["processes"]] == [os.getpid()]


def test_process_list_that_never_stops_growing(probe: RunProbe):
    gpu = read(probe(StubCard(processes=[StubProcess(os.getpid(), 7)], list_grows=1000)))["gpus"][0]
    assert "growing" in gpu["unknown"]["compute_processes"]
    assert gpu["processes"] == []


def test_text_from_the_driver_that_is_not_text(probe: RunProbe):
    result = probe(StubCard(name=b"\xff\xfeRTX"), StubCard(name="RTX\x1b[2J"))
    broken, hostile = read(result)["gpus"]
    assert broken["name"] is None
    assert "not text" in broken["unknown"]["name"]
    assert hostile["name"] == "RTX?[2J"


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-00000000-0000-0000-0000-000000000001", [1]),
        ("GPU-", []),
        ("NoDevFiles", []),
    ],
)
def test_cards_visible_to_a_server(probe: RunProbe, setting: str | None, visible: list[int]):
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    reading = read(probe(StubCard(), StubCard(), environ=environ))
    assert len(reading["gpus"]) == 2
    assert reading["visible"] == visible
    assert reading["cuda_visible_devices"] == setting


def test_numbers_are_no_answer_among_unlike_cards(probe: RunProbe):
    cards = (StubCard(), CARD_3090)
    unordered = {"CUDA_VISIBLE_DEVICES": "0"}
    assert read(probe(*cards, environ=unordered))["visible"] is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in probe(*cards, options=(), environ=unordered).stdout
    assert read(probe(*cards, environ={**unordered, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))["visible"] == [0]


def test_table_fits_80_columns_and_has_no_colour(probe: RunProbe, tmp_path: Path):
    with running(tmp_path, "a-process-with-quite-a-long-name-of-its-own-" + "x" * 60) as pid:
        shown = probe(StubCard(processes=[StubProcess(pid, 5)]), CARD_3090, options=()).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "2 of 32,607 MiB used" in shown
    assert "rtx-5090" in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_that_lacks_letters(probe: RunProbe, encoding: str):
    for options in ((), ("--json",)):
        result = probe(StubCard(name="カード"), options=options, environ={"PYTHONIOENCODING": encoding})
        assert result.returncode == 0
        assert "memory" in result.stdout


def test_table_on_a_terminal(stub_library: Path):
    """A process may be named like rich's markup, and is shown as it is."""
    code = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'dflash_deploy', 'probe']) >> 8)"
    result = run_python(
        ["-c", code], {**stub_env(stub_library, StubCard(name="[red]RTX[/red]")), "TERM": "xterm"}
    )
    assert result.returncode == 0
    assert "[red]RTX[/red]" in result.stdout


def test_nvml_is_closed_as_often_as_opened(probe: RunProbe, tmp_path: Path):
    log = tmp_path / "log"
    probe(StubCard(), StubCard(lost_after=5), log=log)
    assert log.read_text().split() == ["open", "close"]


def test_stub_builds_anywhere(tmp_path: Path):
    assert (build_stub(tmp_path / "new" / "folder") / "libnvidia-ml.so.1").is_file()
