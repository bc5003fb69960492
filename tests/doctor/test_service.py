from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.doctor import service as checks
from dflash_deploy.doctor.finding import NotCheckedError, Status
from dflash_deploy.server.processes import TOKEN_VARIABLE, Identity, boot_id, identity_of, pid_namespace
from dflash_deploy.server.records import ServerRecord, read_records, write_record
from dflash_deploy.server.temp_dir import make_temp_dir
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.watch.recorded import Recorded
from dflash_deploy.watch.units import UnitState
from tests.serving_env.patches.trees import DFLASH, FIXED, METHOD, install

from .builders import gpu, subject

SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def on_port(number: int) -> tuple[str, ...]:
    return (f"service.port={number}",)


def test_a_free_port_passes_and_a_taken_one_fails_with_its_holder(listener: socket.socket):
    number = listener.getsockname()[1]
    taken = subject(gpu(), profile="rtx5090-single-user", overrides=on_port(number))
    answer = checks.port(taken)
    assert answer.status is Status.FAIL
    assert f"process {os.getpid()}" in answer.text
    assert str(os.getpid()) in (answer.fix or "")
    listener.close()
    assert checks.port(taken).status is Status.PASS


def test_an_address_that_is_not_of_this_machine_fails():
    away = ("service.host=192.0.2.1", "service.api_key_file=/etc/key.yaml")
    elsewhere = subject(gpu(), profile="rtx5090-single-user", overrides=away)
    assert checks.port(elsewhere).status is Status.FAIL


def test_a_port_that_an_own_server_uses_is_no_trouble(listener: socket.socket, tmp_path: Path):
    number = listener.getsockname()[1]
    me = identity_of(os.getpid())
    assert me is not None
    write_record(record(tmp_path, tool=me, server=me, port=number))
    answer = checks.port(subject(gpu(), profile="rtx5090-single-user", overrides=on_port(number)))
    assert answer.status is Status.PASS
    assert "a server of this tool" in answer.text


def unit(
    active: str = "active", *, sub: str = "running", restarts: int = 0, result: str = "success"
) -> UnitState:
    return UnitState("dflash-sglang-a.service", "system", active, sub, result, True, restarts, None)


@pytest.mark.parametrize(
    ("units", "status"),
    [
        ((), Status.PASS),
        ((unit(),), Status.PASS),
        ((unit("inactive"),), Status.PASS),
        ((unit(), unit("failed", result="exit-code")), Status.FAIL),
        ((unit("activating", sub="auto-restart", result="exit-code"),), Status.FAIL),
        ((unit(restarts=7),), Status.WARN),
    ],
)
def test_states_of_services(units, status):
    answer = checks.judge_units(units)
    assert answer.status is status
    if status is not Status.PASS:
        assert answer.fix == "dflash-deploy diagnose --unit dflash-sglang-a.service"


def test_without_systemd_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.units(subject()) is None
    (tmp_path / "systemctl").touch(mode=0o755)
    answer = checks.units(subject(units=(unit("failed", result="timeout"),)))
    assert answer is not None
    assert answer.status is Status.FAIL


def test_a_service_whose_environment_is_gone_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/systemctl")
    stale = ("SGLang is not there any more: the next start will fail", "the draft model has changed")
    monkeypatch.setattr(checks, "recorded", lambda _: Recorded(1, simulated=False, stale=stale))
    answer = checks.units(subject(units=(unit(),)))
    assert answer is not None
    assert answer.status is Status.WARN
    assert answer.text == f"dflash-sglang-a.service: {stale[0]}"
    monkeypatch.setattr(checks, "recorded", lambda _: Recorded(1, simulated=False, stale=stale[1:]))
    answer = checks.units(subject(units=(unit(),)))
    assert answer is not None
    assert answer.status is Status.PASS


def record(
    tmp_path: Path, *, tool: Identity, server: Identity | None, port: int = 1, boot: str | None = None
) -> ServerRecord:
    token = secrets.token_hex(6)
    return ServerRecord(
        token=token,
        boot_id=boot or boot_id(),
        pid_namespace=pid_namespace(),
        tool=tool,
        server=server,
        command=("python",),
        host="127.0.0.1",
        port=port,
        run_dir=tmp_path,
        temp_dir=make_temp_dir(token),
        started_s=0.0,
    )


def ended() -> Identity:
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    identity = identity_of(process.pid)
    process.kill()
    process.communicate()
    assert identity
    return identity


def test_nothing_is_left_behind():
    assert checks.left_behind(subject()).status is Status.PASS


def test_a_server_of_a_command_that_runs_is_left_alone(tmp_path: Path):
    me = identity_of(os.getpid())
    assert me is not None
    write_record(record(tmp_path, tool=me, server=me))
    answer = checks.left_behind(subject())
    assert answer.status is Status.PASS
    assert answer.repair is None


@pytest.mark.parametrize("boot", [None, "another-boot"])
def test_records_of_servers_that_are_gone_are_removed(tmp_path: Path, boot: str | None):
    stale = record(tmp_path, tool=ended(), server=ended(), boot=boot)
    write_record(stale)
    answer = checks.left_behind(subject())
    assert answer.status is Status.WARN
    assert "1 record of servers that are gone" in answer.text
    assert answer.repair is not None
    answer.repair.run()
    assert list(read_records()) == []
    assert not stale.temp_dir.exists()


def test_a_server_whose_command_is_gone_is_told_and_ended(tmp_path: Path):
    token = secrets.token_hex(6)
    process = subprocess.Popen(
        SLEEP, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, TOKEN_VARIABLE: token}
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        server = identity_of(process.pid)
        orphan = record(tmp_path, tool=ended(), server=server, port=4711).model_copy(update={"token": token})
        write_record(orphan)
        answer = checks.left_behind(subject())
        assert answer.status is Status.WARN
        assert f"port 4711 (process {process.pid})" in answer.text
        assert process.poll() is None
        assert answer.repair is not None
        assert "end the server on port 4711" in answer.repair.what
        assert "ended a server" in answer.repair.run()
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


def test_patches_wait_for_an_environment():
    with pytest.raises(NotCheckedError):
        checks.patches(subject(gpu()))


def test_a_patch_that_is_needed_warns_and_fails_for_a_pair_that_is_refused_without_it(tmp_path: Path):
    tree = find_tree(install(tmp_path / "site-packages", version="0.5.18"))
    answer = checks.patches(subject(gpu(), tree=tree))
    assert answer.status is Status.WARN
    assert "nvfp4-lm-head is needed" in answer.text
    assert "dflash-deploy patch apply nvfp4-lm-head" in (answer.fix or "")
    packed = ("model={target: qwen3.8-27b-nvfp4}", "speculation={method: dflash, draft: qwen3.8-27b-dflash2}")
    refused = subject(gpu(), tree=tree, profile="rtx5090-single-user", overrides=packed)
    assert refused.target() is not None
    card = refused.target().card  # type: ignore[union-attr]
    assert card is not None
    wanted = Status.FAIL if card.lm_head == "fp4" else Status.WARN
    assert checks.patches(refused).status is wanted
    apply(load_patch("nvfp4-lm-head"), tree, {})
    assert checks.patches(refused).status is Status.PASS


def test_code_that_a_patch_does_not_know_warns(tmp_path: Path):
    other = METHOD.replace("is_dense_head_weight(weight)", "dense(weight)").replace(
        'raise RuntimeError("the selector requires a dense target lm_head")', "pass"
    )
    tree = find_tree(install(tmp_path / "site-packages", files={DFLASH: other}))
    answer = checks.patches(subject(gpu(), tree=tree))
    assert answer.status is Status.WARN
    assert "drifted" in answer.text


def test_code_that_is_mended_upstream_passes(tmp_path: Path):
    tree = find_tree(install(tmp_path / "site-packages", version="0.5.23", files={DFLASH: FIXED}))
    assert checks.patches(subject(gpu(), tree=tree)).status is Status.PASS
