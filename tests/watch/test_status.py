from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.engine.boot import Stage
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import Gpu, GpuProcess, GpuReading
from dflash_deploy.machine.view import plain_lines
from dflash_deploy.server.processes import boot_id, identity_of, pid_namespace
from dflash_deploy.server.records import ServerRecord, write_record
from dflash_deploy.watch import places
from dflash_deploy.watch.bounded import within
from dflash_deploy.watch.health.examination import examine
from dflash_deploy.watch.memory import Part
from dflash_deploy.watch.places import Place
from dflash_deploy.watch.recorded import Recorded
from dflash_deploy.watch.status import ServerStatus, Status, _vram, gather
from dflash_deploy.watch.units import UnitState, read_unit
from dflash_deploy.watch.view import as_json, sections

from .engine_server import HEALTHY, serving


def look(place: Place, timeout_s: float = 20.0) -> Status:
    return gather([place], timeout_s=timeout_s)


def unit(**changes: object) -> UnitState:
    given = {"active": "active", "sub": "running", "result": "success", "main_pid": None, "restarts": 0}
    return UnitState(
        name="dflash-sglang-qwen.service", manager="system", enabled=True, **{**given, **changes}
    )


def test_a_healthy_server_tells_model_limits_and_load():
    with serving(HEALTHY) as engine:
        status = look(Place("url", "mine", engine.url))
    (server,) = status.servers
    assert status.healthy
    assert (server.health, server.model, server.version, server.simulated) == (
        "healthy",
        "a-model",
        "0.5.23",
        False,
    )
    assert server.limits.__dict__ == {"max_running_requests": 4, "kv_tokens": 8192, "context_tokens": 4096}
    assert server.load.__dict__ == {
        "running": 3,
        "queued": 1,
        "tokens_per_s": 512.5,
        "kv_usage": 0.5,
        "accept_length": 4.25,
    }
    assert server.pid == os.getpid()
    text = "\n".join(plain_lines(sections(status)))
    for said in (
        "mine: healthy",
        "8,192 KV tokens",
        "3 running, 1 waiting, 512.5 tokens/s",
        "(measured)",
        "4.25",
    ):
        assert said in " ".join(text.split())


def test_a_simulated_server_is_marked_with_every_figure():
    info = {"version": "0.5.23", "simulator": {"card": "rtx-5090", "seed": 0, "time_scale": 10.0}}
    info["simulator"] |= {"vram_used_mib": 29076, "vram_total_mib": 32607}
    with serving({**HEALTHY, "/server_info": (200, json.dumps(info).encode())}) as engine:
        status = look(Place("url", "mine", engine.url))
    (server,) = as_json(status)["servers"]
    assert server["kind"] == "simulated"
    assert server["vram"] == [{"gpu": None, "used_mib": 29076, "total_mib": 32607, "ours_mib": None}]
    lines = " ".join("\n".join(plain_lines(sections(status))).split())
    assert "mine: healthy (simulated)" in lines
    assert "29,076 of 32,607 MiB in use (simulated)" in lines
    assert "tokens/s, KV pool 50% full" in lines
    assert "(measured)" not in lines.split("No GPU")[0]


def test_a_server_that_answers_503_is_unhealthy():
    with serving({**HEALTHY, "/health": (503, b"")}) as engine:
        status = look(Place("url", "mine", engine.url))
    assert (status.servers[0].health, status.healthy) == ("unhealthy", False)


def test_a_server_that_never_answers_does_not_hang_us():
    with serving({}) as engine:
        status = look(Place("url", "mine", engine.url), timeout_s=0.5)
    assert status.servers[0].health == "unhealthy"
    assert "no healthy answer" in status.servers[0].problem


def test_a_healthy_server_that_wants_a_key_is_healthy_and_says_so():
    closed = dict.fromkeys(("/server_info", "/v1/models"), (401, b"{}"))
    with serving({"/health": (200, b""), "/metrics": (404, b""), **closed}) as engine:
        (server,) = look(Place("url", "mine", engine.url)).servers
    assert server.health == "healthy"
    assert "API key" in server.problem


def test_a_key_of_its_own_that_cannot_be_read_is_named():
    closed = dict.fromkeys(("/server_info", "/v1/models", "/generate"), (401, b"{}"))
    with serving({"/health": (200, b""), "/metrics": (404, b""), **closed}) as engine:
        place = Place("url", "mine", engine.url, key_problem="the API key file /k is not there")
        (server,) = look(place).servers
        layers = {layer.name: layer for layer in examine(place, timeout_s=10).layers}
    assert "the API key file /k is not there" in server.problem
    assert "the API key file /k is not there" in layers["generation"].text


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {path: st.tuples(st.sampled_from([200, 404, 500]), st.binary(max_size=200)) for path in HEALTHY}
    )
)
def test_nonsense_is_no_crash_and_prints_no_control_codes(answers):
    with serving({"/get_server_info": (404, b""), **answers}) as engine:
        status = look(Place("url", "mine", engine.url))
    json.dumps(as_json(status))
    assert all(line.isprintable() and len(line) <= 80 for line in plain_lines(sections(status)))


def test_a_model_named_like_an_escape_code_is_shown_harmless():
    evil = json.dumps({"data": [{"id": "\x1b[2Jx" * 30}]}).encode()
    with serving({**HEALTHY, "/v1/models": (200, evil)}) as engine:
        status = look(Place("url", "mine", engine.url))
    assert all(line.isprintable() for line in plain_lines(sections(status)))


def test_the_default_port_is_no_server_when_nothing_listens_there():
    assert look(Place("port", "server", f"http://127.0.0.1:{_closed_port()}")).servers == ()


def test_an_address_that_was_asked_for_is_unhealthy_when_nothing_listens_there():
    (server,) = look(Place("url", "mine", f"http://127.0.0.1:{_closed_port()}")).servers
    assert (server.health, server.problem) == ("unhealthy", "nothing listens there")


@pytest.mark.parametrize(
    ("state", "health", "said"),
    [
        ({"active": "failed", "sub": "failed", "result": "start-limit-hit"}, "unhealthy", "start-limit-hit"),
        (
            {"active": "activating", "sub": "auto-restart", "result": "exit-code"},
            "unhealthy",
            "starts it again",
        ),
        ({"active": "activating", "sub": "start-post"}, "starting", None),
        ({"active": "inactive", "sub": "dead"}, "stopped", "inactive"),
        ({"active": "active", "sub": "running"}, "unhealthy", "port is closed"),
    ],
)
def test_a_unit_without_an_answering_process_says_what_systemd_knows(state, health, said):
    (server,) = look(Place("unit", "qwen", None, unit=unit(**state))).servers
    assert server.health == health
    assert said is None or said in server.problem
    if health == "unhealthy":
        asks_log = state["active"] == "active"
        log = "journalctl -u dflash-sglang-qwen.service -n 50"
        assert server.fix.startswith(log if asks_log else "dflash-deploy diagnose --unit dflash-sglang-qwen")


def test_our_share_is_that_of_the_servers_own_processes():
    def on_card(pid: int, vram_mib: int | None) -> GpuProcess:
        return GpuProcess(pid, "x", None, vram_mib, "compute", desktop=False)

    ours, other = on_card(os.getpid(), 20000), on_card(1, 512)
    card = Gpu(0, "card", memory_used_mib=20700, memory_total_mib=32607, processes=(ours, other))
    (vram,) = _vram(os.getpid(), GpuReading(gpus=(card,)))
    assert (vram.gpu, vram.used_mib, vram.total_mib, vram.ours_mib) == (0, 20700, 32607, 20000)
    unknown = Gpu(1, "card", processes=(on_card(os.getpid(), None),))
    assert _vram(os.getpid(), GpuReading(gpus=(unknown,)))[0].ours_mib is None
    assert _vram(os.getpid(), GpuReading(gpus=(Gpu(2, processes=(other,)),))) == ()


def test_a_server_that_the_tool_runs_right_now_is_found_by_its_record(tmp_path):
    me = identity_of(os.getpid())
    record = ServerRecord(
        token="abc", boot_id=boot_id(), pid_namespace=pid_namespace(), tool=me, server=me, command=("x",),
        host="0.0.0.0", port=31234, run_dir=tmp_path, temp_dir=tmp_path, started_s=time.time(),
    )  # fmt: skip
    write_record(record)
    write_record(record.model_copy(update={"token": "old", "boot_id": "another boot"}))
    (place,) = places.record_places()
    assert (place.found_by, place.base_url, place.pid) == ("record", "http://127.0.0.1:31234", os.getpid())


def test_one_address_found_twice_is_one_server():
    first = Place("unit", "qwen", "http://127.0.0.1:30000", unit=unit())
    stopped = Place("unit", "other", None, unit=unit())
    assert places.merged([first, stopped, Place("port", "server", "http://127.0.0.1:30000")]) == [
        first,
        stopped,
    ]


@pytest.mark.parametrize(
    ("typed", "root"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000/v1/", "http://127.0.0.1:30000"),
        ("gpu-box:8000", "http://gpu-box:8000"),
        ("https://[::1]:8000/llm/v1", "https://[::1]:8000/llm"),
    ],
)
def test_an_address_is_taken_as_people_type_it(typed: str, root: str):
    assert places.checked_url(typed) == root


@pytest.mark.parametrize(
    "typed", ["", "http://", "ftp://x", "file:///etc/passwd", "http://a b", "http://x:99999", "http://[::1"]
)
def test_what_is_no_address_is_refused(typed: str):
    with pytest.raises(DeployError):
        places.checked_url(typed)


@given(
    st.dictionaries(st.sampled_from(["Id", "LoadState", "ActiveState", "MainPID", "NRestarts"]), st.text())
)
def test_whatever_systemctl_prints_is_no_crash(properties: dict[str, str]):
    read_unit(properties, "system")


def test_a_unit_is_read_from_systemctl_show():
    shown = {
        "Id": "dflash-sglang-qwen.service", "LoadState": "loaded", "ActiveState": "failed",
        "SubState": "failed",
        "Result": "exit-code", "MainPID": "0", "NRestarts": "5", "UnitFileState": "enabled",
    }  # fmt: skip
    read = read_unit(shown, "system")
    assert (read.service, read.active, read.restarts, read.main_pid, read.enabled) == (
        "qwen",
        "failed",
        5,
        None,
        True,
    )
    assert read_unit({**shown, "LoadState": "not-found"}, "system") is None


def test_a_call_that_hangs_is_left_behind():
    started = time.monotonic()
    assert within(0.2, [lambda: time.sleep(60), lambda: 7]) == [None, 7]
    assert time.monotonic() - started < 30


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def test_a_start_is_shown_with_its_stage_and_what_was_planned_stands_beside_what_is():
    planned = Recorded(4, False, 29_000, 4.5, (Part("weights", 17_000), Part("KV", 9_000)))
    starting = ServerStatus(
        Place("unit", "qwen", None, unit=unit(active="activating", sub="start-post")),
        "starting",
        pid=1,
        uptime_s=95.0,
        stage=Stage.DECODE_CAPTURE,
        recorded=planned,
    )
    serves = replace(
        starting,
        health="healthy",
        stage=None,
        memory=(Part("weights", 17_100), Part("KV", 8_900), Part("rest", 700)),
    )
    lines = [plain_lines(sections(Status((one,), GpuReading()))) for one in (starting, serves)]
    shown = [" ".join(one) for one in lines]
    assert "stage decode-capture, 1 min 35 s since its process began" in " ".join(shown[0].split())
    assert "planned at most 29,000 MiB: weights 17,000, KV 9,000 MiB" in " ".join(shown[0].split())
    text = " ".join(shown[1].split())
    assert (
        "weights 17,100 [17,000], KV 8,900 [9,000], rest 700 MiB (measured, in brackets: when it was" in text
    )
    assert "up for 1 min 35 s" in text
    assert max(len(line) for one in lines for line in one) <= 80
