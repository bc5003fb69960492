"""Cards as the stand-in driver library shows them, and the kernel's log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.machine.gpu import Gpu, GpuReading
from dflash_deploy.watch.health import gpu, kernel_log
from dflash_deploy.watch.health.kernel_log import Xid
from dflash_deploy.watch.health.verdict import Verdict
from tests.machine.conftest import on_cards, run_python, stub_library  # noqa: F401 - a fixture
from tests.machine.nvml_stub import NOT_SUPPORTED, StubCard, stub_env
from tests.tool import run_tool
from tests.watch.engine_server import HEALTHY, serving

TOKEN = (200, b'{"meta_info": {"completion_tokens": 1}}')
CARD = Gpu(0, "card")


def health(library: Path, *cards: StubCard, options: tuple[str, ...] = ()) -> tuple[int, dict]:
    with serving({**HEALTHY, "/generate": TOKEN}) as engine:
        variables = on_cards(stub_env(library, *cards))
        done = run_tool("health", "--url", engine.url, "--json", *options, env=variables)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    return done.returncode, {layer["name"]: layer for layer in found["layers"]}


def test_two_cool_cards_with_room_are_well(stub_library):  # noqa: F811
    code, layers = health(stub_library, StubCard(), StubCard())
    assert code == 0
    assert layers["VRAM"]["verdict"] == "ok"
    assert layers["GPU errors"]["verdict"] == "ok"
    assert {figure["gpu"] for figure in layers["VRAM"]["figures"]} == {0, 1}


def test_memory_that_runs_out_is_told_before_it_has(stub_library):  # noqa: F811
    full = StubCard(used_mib=32607 - 483 - 200)
    assert health(stub_library, full)[0] == 1
    code, layers = health(stub_library, full, options=("--vram-critical", "250"))
    assert (code, layers["VRAM"]["verdict"]) == (2, "critical")


def test_a_card_that_fell_off_the_bus_is_critical(stub_library):  # noqa: F811
    code, layers = health(stub_library, StubCard(), StubCard(lost_after=3))
    assert code == 2
    assert "GPU 1" in layers["GPU errors"]["text"]
    assert "reboot" in layers["GPU errors"]["fix"]


def test_heat_and_power_brakes_warn_and_a_power_cap_does_not(stub_library):  # noqa: F811
    code, layers = health(stub_library, StubCard(numbers={"reasons": 0x40, "temperature": 92}))
    assert (code, layers["throttling"]["verdict"]) == (1, "warning")
    assert "hardware thermal slowdown" in layers["throttling"]["text"]
    assert health(stub_library, StubCard(numbers={"reasons": 0x4}))[0] == 0


def test_a_card_without_memory_of_its_own_is_unknown_and_no_failure(stub_library):  # noqa: F811
    errors = {"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    code, layers = health(stub_library, StubCard(name="NVIDIA GB10", errors=errors))
    assert (code, layers["VRAM"]["verdict"]) == (0, "unknown")


def test_without_a_driver_the_cards_are_unknown_and_the_rest_is_checked(stub_library):  # noqa: F811
    with serving({**HEALTHY, "/generate": TOKEN}) as engine:
        variables = on_cards(stub_env(stub_library, init_code=9))
        done = run_tool("health", "--url", engine.url, env=variables)
    assert done.returncode == 0
    assert done.stdout.startswith("DFLASH OK - ")


@pytest.mark.parametrize(
    ("errors", "xids", "verdict"),
    [
        (gpu.CardErrors(0), (), Verdict.OK),
        (gpu.CardErrors(0, 0, 12), (), Verdict.OK),
        (gpu.CardErrors(0, 1), (), Verdict.CRITICAL),
        (gpu.CardErrors(0, 0, 0, remap_pending=True), (), Verdict.WARNING),
        (gpu.CardErrors(0, 0, 0, remap_failed=True), (), Verdict.CRITICAL),
        (gpu.CardErrors(0), (Xid(31, "PCI:0000:01:00", 1.0),), Verdict.WARNING),
        (gpu.CardErrors(0), (Xid(79, "PCI:0000:01:00", 1.0),), Verdict.CRITICAL),
        (gpu.CardErrors(0), (Xid(999, "PCI:0000:01:00", 1.0),), Verdict.WARNING),
        (gpu.CardErrors(0), None, Verdict.OK),
    ],
)
def test_errors_are_judged_by_what_they_mean(errors, xids, verdict):
    layer = gpu.errors_layer(GpuReading(gpus=(CARD,)), (errors,), xids)
    assert layer.verdict is verdict
    assert (layer.fix is None) is (verdict is Verdict.OK)


_LOG = (
    "6,1,100,-;Linux version 6.18\n"
    "4,900,61000000,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
    " SUBSYSTEM=pci\n"
    "4,901,61000100,-;NVRM: Xid (PCI:0000:01:00): 31, pid='<unknown>', MMU Fault\n"
    "4,902,61000200,-;somebody prints NVRM: Xid (PCI:0000:01:00): 48, in the middle of a line\n"
)


def test_xid_messages_are_read_from_the_kernels_log(tmp_path: Path):
    log = tmp_path / "kmsg"
    log.write_text(_LOG)
    assert kernel_log.read_xids(log) == (
        Xid(79, "PCI:0000:01:00", 61.0),
        Xid(31, "PCI:0000:01:00", 61.0001),
    )
    assert kernel_log.read_xids(tmp_path / "absent") is None


_ON_LOG = """
import sys
from pathlib import Path
from dflash_deploy.watch.health import kernel_log
kernel_log.read_xids.__defaults__ = (Path(sys.argv.pop(1)),)
from dflash_deploy.cli import main
main()
"""


def test_an_xid_of_the_last_hour_is_critical_and_an_older_one_is_past(stub_library, tmp_path: Path):  # noqa: F811
    now_us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    # A machine that was booted within the hour has nothing older.
    for age_s, code in ((60, 2), (3 * 3600, 0)):
        log = tmp_path / f"kmsg-{age_s}"
        at_us = now_us - age_s * 1_000_000
        log.write_text(
            f"4,900,{max(0, at_us)},-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
        )
        if at_us < 0:
            continue
        with serving({**HEALTHY, "/generate": TOKEN}) as engine:
            arguments = ["-c", _ON_LOG, str(log), "health", "--url", engine.url]
            done = run_python(arguments, stub_env(stub_library, StubCard(), StubCard()))
        assert done.returncode == code, done.stdout + done.stderr
        assert ("Xid 79, fallen off the bus" in done.stdout) is (code == 2)


@given(st.text(max_size=2000))
def test_whatever_the_log_holds_is_no_crash(text: str):
    kernel_log.parse(text)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's log is Linux's")
def test_the_kernels_own_log_is_read_to_its_end():
    found = kernel_log.read_xids()
    assert found is None or isinstance(found, tuple)
