"""An engine for each card, and the router in front of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.deploy import fleet, installation, service
from dflash_deploy.deploy.configuration import Configuration
from dflash_deploy.deploy.router import RouterSpec, render_router
from dflash_deploy.deploy.service import Service
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import Gpu, GpuReading
from dflash_deploy.profile.load import load_profile

from . import systemd_syntax as systemd
from .test_generations import _TIMER, Machine, box, machine, make  # noqa: F401 - fixtures

_SPEC = RouterSpec(
    "qwen-router",
    Path("/usr/bin/python3"),
    "1.13.0",
    {"qwen-gpu0": "http://127.0.0.1:30001", "qwen-gpu1": "http://127.0.0.1:30002"},
    "127.0.0.1",
    30000,
    30003,
)
_KEYED = replace(_SPEC, host="0.0.0.0", api_key_file="/etc/k.yaml")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
@pytest.mark.parametrize("spec", [_SPEC, _KEYED, replace(_KEYED, manager="user")])
def test_systemd_takes_the_unit_and_a_machines_is_confined(tmp_path: Path, spec: RouterSpec):
    unit = tmp_path / "dflash-sglang-qwen-router.service"
    unit.write_text(render_router(spec))
    command = ["systemd-analyze", f"--{spec.manager}", "verify", "--recursive-errors=no", "--man=no", unit]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    if spec.manager == "system":
        command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", "--no-pager", unit]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_router_starts_after_its_engines_with_their_addresses_and_no_key():
    unit = systemd.settings(render_router(_KEYED))
    command = systemd.command(unit["ExecStart"][0])
    urls = command[command.index("--worker-urls") + 1 :][:2]
    assert urls == ["http://127.0.0.1:30001", "http://127.0.0.1:30002"]
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert "--api-key" not in command
    assert command[-2:] == ["--config", "<d>/engine.yaml"]
    assert "dflash-sglang-qwen-gpu1.service" in unit["After"][0]
    started = systemd.engine(systemd.command(systemd.settings(render_router(_SPEC))["ExecStart"][0]))
    assert started[:3] == ["/usr/bin/python3", "-m", "smg.launch_router"]
    with pytest.raises(DeployError, match="without a key"):
        render_router(replace(_SPEC, host="0.0.0.0"))


def test_cards_are_named_by_what_never_changes():
    reading = GpuReading(gpus=(Gpu(0, uuid="GPU-a"), Gpu(1, uuid="GPU-b"), Gpu(2)))
    assert [seat.env for seat in fleet.seats("1, 2", reading)] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-b"},
        {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ]
    # Without a driver to ask, as told.
    assert fleet.seats("7", GpuReading())[0].env["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize("text", ["", "a", "0,", "0,0", "-1", "0 1", "0,3"])
def test_a_list_that_names_no_cards_is_refused(text: str):
    with pytest.raises(DeployError):
        fleet.seats(text, GpuReading(gpus=(Gpu(0), Gpu(1))))


def test_one_configuration_becomes_one_for_each_card():
    profile = load_profile("rtx5090-single-user", overrides=("service.host=127.0.0.9",))
    whole = Configuration("s", profile, {"model-path": "m"}, False, "0.5.23", None, ())
    (seat,) = fleet.seats("1", GpuReading())
    one = fleet.on_one_card(whole, "qwen", seat, 30001, behind=True).profile
    assert (one.service.name, one.service.port, one.service.host) == ("qwen-gpu1", 30001, "127.0.0.1")
    assert one.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert fleet.on_one_card(whole, "qwen", seat, 1, behind=False).profile.service.host == "127.0.0.9"
    wide = replace(whole, flags={"tensor-parallel-size": 2})
    with pytest.raises(DeployError, match="several cards"):
        fleet.on_one_card(wide, "qwen", seat, 1, behind=False)


def _fleet(box: Service) -> tuple[list[installation.Step], dict[str, Service]]:  # noqa: F811
    names = ("box-gpu0", "box-gpu1", "box-router")
    services = {
        name: replace(box, store=replace(box.store, folder=box.store.folder.with_name(name), service=name))
        for name in names
    }
    return [installation.Step(name, 1, make) for name in names], services


def _install(box: Service, **bad: bool) -> list[tuple[Service, service.Changed]]:  # noqa: F811
    steps, services = _fleet(box)
    return installation.install(
        steps, services.__getitem__, lambda one, made: service.install(one, made, start=True, watch=_TIMER)
    )


def test_when_one_does_not_serve_those_before_it_go_back(box: Service, machine: Machine):  # noqa: F811
    assert [changed.problem for _, changed in _install(box)] == [None] * 3
    checked = machine.start

    def start(unit: str) -> bool:
        loaded = machine.read()["loaded"].get(unit, "")
        return False if "gpu1" in unit and loaded.endswith("2\n") else checked(unit)

    machine.start = start  # type: ignore[method-assign]
    done = _install(box)
    assert [(one.store.service, changed.generation) for one, changed in done] == [
        ("box-gpu0", 1), ("box-gpu1", 1),
    ]  # fmt: skip
    assert "taken back, since box-gpu1 does not serve" in str(done[0][1].problem)
    assert "did not start" in str(done[1][1].problem)
    assert [one.store.current() for one in _fleet(box)[1].values()] == [1, 1, 1]
    assert fleet.members(box.store.folder.parent, "box") == ("box-gpu0", "box-gpu1", "box-router")


def test_killed_at_any_step_each_serves_one_or_the_other(tmp_path: Path):
    for steps in range(0, 400, 7):
        folder = tmp_path / str(steps)
        folder.mkdir()
        machine = Machine(folder)  # noqa: F811
        one = Service(
            service.Store(folder / "root" / "services" / "box", "box"),
            machine, machine.units, lambda _: service.canary.Canary(None, ()), lambda _: None,
        )  # fmt: skip
        _install(one)
        pid = os.fork()
        if pid == 0:
            machine.steps = steps
            try:
                _install(one)
            finally:
                os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        for member in _fleet(one)[1].values():
            service.start(member)
            number = member.store.current()
            assert number in (1, 2)
            assert machine.running(member.unit) == member.store.unit_text(number)
            assert member.store.pending() is None
        if not killed:
            assert steps > 30
            return
    pytest.fail("it never came to its end")
