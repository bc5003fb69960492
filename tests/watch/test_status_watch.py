"""``status --watch``, what memory is used for, and cards as the stand-in driver library shows them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.boot import BootRecord, GraphCapture, KvPool, LoadedWeights, Stage, StateCache
from dflash_deploy.engine.sglang.http import MemoryUsage
from dflash_deploy.watch.memory import Part, split
from tests.machine.conftest import on_cards, stub_library  # noqa: F401 - a fixture
from tests.machine.nvml_stub import NOT_SUPPORTED, StubCard, StubProcess, stub_env
from tests.simulator.conftest import FOUR_USERS, launch  # noqa: F401 - a fixture
from tests.tool import run_tool

from .engine_server import HEALTHY, serving

_STATUS = [sys.executable, "-m", "dflash_deploy", "status"]


def test_a_pipe_gets_one_plain_block_after_another():
    with serving(HEALTHY) as engine:
        command = [*_STATUS, "--url", engine.url, "--watch", "--every", "0.5", "--times", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("healthy") == 2
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_one_object_a_line():
    with serving(HEALTHY) as engine:
        watch = ("--watch", "--every", "0.5", "--times", "2")
        done = run_tool("status", "--url", engine.url, "--json", *watch)
    assert [json.loads(line)["healthy"] for line in done.stdout.splitlines()] == [True, True]


def test_it_goes_on_without_a_server_and_without_a_card():
    done = run_tool("status", "no-such-service", "--watch", "--every", "0.5", "--times", "2")
    assert done.returncode == 0
    assert done.stdout.count("No server is found for no-such-service") == 2


def test_how_often_is_about_a_watch_alone():
    done = run_tool("status", "--times", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "add --watch" in done.stderr


def test_ctrl_c_ends_it_without_a_word():
    with serving(HEALTHY) as engine:
        command = [*_STATUS, "--url", engine.url, "--watch", "--every", "0.5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                while "healthy" not in process.stdout.readline():
                    assert process.poll() is None
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=60)
            finally:
                process.kill()
    assert (process.returncode, said) == (0, "")


def test_on_a_terminal_of_80_columns_one_screen_is_drawn_anew():
    with serving(HEALTHY) as engine:
        primary, secondary = pty.openpty()
        os.set_blocking(primary, False)
        process = subprocess.Popen(
            [*_STATUS, "--url", engine.url, "--watch", "--every", "0.5"],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(secondary)
        seen = b""
        try:
            deadline = time.monotonic() + 60
            while seen.count(b"healthy") < 2 and time.monotonic() < deadline:
                if select.select([primary], [], [], 1.0)[0]:
                    seen += os.read(primary, 65536)
            process.send_signal(signal.SIGINT)
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([primary], [], [], 0.2)[0]:
                    try:
                        seen += os.read(primary, 65536)
                    except OSError:
                        break
            process.wait(60)
        finally:
            process.kill()
            os.close(primary)
    assert process.returncode == 0
    # The cursor goes up to draw over what stands there, and is shown again at the end.
    assert b"\x1b[1A" in seen
    assert seen.rstrip().endswith(b"\x1b[?25h")
    assert b"Traceback" not in seen


def test_cards_tell_power_heat_clocks_and_what_holds_them_back(stub_library):  # noqa: F811
    numbers = {"draw": 431_000, "temperature": 78, "sm": 2610, "reasons": 0x44}
    with serving(HEALTHY) as engine:
        pid = os.getpid()
        card = StubCard(
            numbers=numbers,
            used_mib=31_900,
            processes=(StubProcess(pid, 31_000), StubProcess(1, 400, "graphics")),
        )
        variables = on_cards(stub_env(stub_library, card))
        done = run_tool("status", "--url", engine.url, env=variables)
        as_json = run_tool("status", "--url", engine.url, "--json", env=variables)
    text = " ".join(done.stdout.split())
    assert "431 of 575 W, 78 °C, SM 2610 MHz" in text
    assert "hardware thermal slowdown" in text
    assert "GPU 0 is slowed down" in text
    (server,) = json.loads(as_json.stdout)["servers"]
    assert server["vram"][0]["ours_mib"] == 31_000
    assert server["uptime_s"] > 0
    assert {"slowed" in warned["text"] for warned in server["warnings"]} == {True, False}
    assert all(warned["fix"] for warned in server["warnings"])


def test_two_cards_and_a_desktop_on_one_of_them(stub_library):  # noqa: F811
    with serving(HEALTHY) as engine:
        cards = (
            StubCard(used_mib=1_400, processes=(StubProcess(1, 900, "graphics"),)),
            StubCard(used_mib=30_000, processes=(StubProcess(os.getpid(), 29_500),)),
        )
        variables = on_cards(stub_env(stub_library, *cards))
        done = run_tool("status", "--url", engine.url, "--json", env=variables)
        shown = run_tool("status", "--url", engine.url, env=variables)
    found = json.loads(done.stdout)
    # The server's share is on the second card alone; both cards are shown.
    ((vram,),) = [server["vram"] for server in found["servers"]]
    assert (vram["gpu"], vram["ours_mib"]) == (1, 29_500)
    assert [gpu["memory_used_mib"] for gpu in found["gpus"]] == [1_400, 30_000]
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_a_card_without_memory_of_its_own_is_shown(stub_library):  # noqa: F811
    errors = {"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}
    variables = on_cards(stub_env(stub_library, StubCard(name="NVIDIA GB10", errors=errors)))
    done = run_tool("status", "--url", "127.0.0.1:1", env=variables)
    assert "tells no memory of its own" in " ".join(done.stdout.split())
    assert done.returncode == 1


def test_a_card_lost_while_watching_is_told_and_the_watch_goes_on(stub_library):  # noqa: F811
    variables = on_cards(stub_env(stub_library, StubCard(lost_after=3)))
    watch = ("--watch", "--every", "0.5", "--times", "2")
    done = run_tool("status", "--url", "127.0.0.1:1", *watch, env=variables)
    assert done.returncode == 0
    assert done.stdout.count("has fallen off the bus") >= 2


def test_a_simulated_servers_memory_is_split_and_marked(launch):  # noqa: F811
    server = launch(f"{FOUR_USERS} --enable-metrics")
    done = run_tool("status", "--url", f"http://127.0.0.1:{server.port}", "--json")
    (found,) = json.loads(done.stdout)["servers"]
    assert found["kind"] == "simulated"
    parts = {part["name"]: part["mib"] for part in found["memory"]}
    usage = server.info()["internal_states"][0]["memory_usage"]
    assert parts["weights"] == pytest.approx(usage["weight"] * 1024, abs=2)
    assert parts["KV"] == pytest.approx(usage["kvcache"] * 1024, abs=2)
    assert sum(parts.values()) == found["vram"][0]["used_mib"]


_BOOT = BootRecord(
    Stage.SERVING,
    weights=(LoadedWeights("Target", 17.0, 5, 14), LoadedWeights("Draft", 3.0, 1, 11)),
    state_cache=StateCache(4, 0.1, 0.4),
    kv_pools=(KvPool(8192, 0.5), KvPool(8192, 0.1)),
    graphs=(
        GraphCapture("target", "verify", (1, 2), 3, 0.25),
        GraphCapture("draft", "decode", (1,), 1, 0.25),
    ),
)


def test_the_log_tells_of_the_draft_and_the_states_which_the_engine_does_not():
    usage = MemoryUsage(weights_gib=17.5, kv_gib=0.5, graphs_gib=0.5)
    parts = split(usage, _BOOT, used_mib=24 * 1024, others_mib=512)
    assert parts == (
        Part("weights", 17920),
        Part("draft", 3072),
        Part("state", 512),
        Part("KV", 512),
        Part("draft KV", 102),
        Part("graphs", 512),
        Part("other processes", 512),
        Part("rest", 24 * 1024 - 17920 - 3072 - 512 - 512 - 102 - 512 - 512),
    )
    assert split(None, _BOOT, used_mib=None, others_mib=None)[0] == Part("weights", 17408)
    assert split(None, None, used_mib=1000, others_mib=5) == ()


@given(
    st.builds(MemoryUsage, *[st.none() | st.floats(0, 1e6)] * 4),
    st.none() | st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
)
def test_parts_are_never_negative_and_never_more_than_what_is_used(usage, used_mib, others_mib):
    parts = split(usage, None, used_mib=used_mib, others_mib=others_mib)
    assert all(part.mib >= 0 for part in parts)
    if used_mib is not None and any(part.name == "rest" for part in parts):
        assert sum(part.mib for part in parts) == used_mib


def test_every_new_key_is_documented():
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("## status --json")[1]
    for key in (
        "memory",
        "uptime_s",
        "generation",
        "expected_mib",
        "warnings",
        "temperature_c",
        "clock_reasons",
    ):
        assert f"`{key}`" in documented.split("## profile show")[0]
