"""Generations on disk, and changes between them, cut short at every step."""

# ruff: noqa: ARG002 - the stand-in takes what systemd takes

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest

from dflash_deploy.deploy import generations, service
from dflash_deploy.deploy.canary import Canary
from dflash_deploy.deploy.generations import Generation, Store
from dflash_deploy.deploy.service import Service
from dflash_deploy.deploy.timer import timer_of
from dflash_deploy.deploy.versions import Versions
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.paths import state_dir

_UNIT = "[Service]\nExecStart=/bin/serve {}\n"
_TIMER = {"dflash-sglang-health@.service": "[Service]\n", "dflash-sglang-health@.timer": "[Timer]\n"}


class Machine:
    """A systemd that keeps in a file what it was told, so that it outlives the process that told it.

    What runs is the unit's text of the moment it was started. ``steps`` counts down to the process's death.
    """

    manager: Literal["user"] = "user"

    def __init__(self, folder: Path) -> None:
        self.units, self.state = folder / "units", folder / "state.json"
        self.units.mkdir()
        self._write({"running": {}, "loaded": {}})
        self.steps = -1
        self.bad: set[str] = set()
        self.load_state = "loaded"

    def step(self) -> None:
        if self.steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps -= 1

    def read(self) -> dict[str, dict[str, str]]:
        content: dict[str, dict[str, str]] = json.loads(self.state.read_text())
        return content

    def _write(self, state: Mapping[str, object]) -> None:
        self.state.write_text(json.dumps(state))

    def _told(self, **state: object) -> None:
        self.step()
        self._write({**self.read(), **state})
        self.step()

    def reload(self) -> None:
        self._told(loaded={path.name: path.read_text() for path in self.units.iterdir() if path.is_file()})

    def running(self, unit: str) -> str | None:
        return self.read()["running"].get(unit)

    def enabled(self, unit: str) -> bool:
        return self._wanted(unit).exists()

    def _wanted(self, unit: str) -> Path:
        return self.units / "some.target.wants" / unit

    def start(self, unit: str) -> bool:
        loaded = self.read()["loaded"].get(re.sub("@.*[.]", "@.", unit))
        good = loaded is not None and loaded not in self.bad
        self._told(running={**self.read()["running"], unit: loaded if good else None})
        return good

    def stop(self, unit: str) -> None:
        self._told(running={**self.read()["running"], unit: None})

    def enable(self, unit: str) -> None:
        self.step()
        self._wanted(unit).parent.mkdir(exist_ok=True)
        self._wanted(unit).touch()
        self.step()

    def disable(self, unit: str) -> None:
        self.step()
        self._wanted(unit).unlink(missing_ok=True)
        self.step()

    def active(self, unit: str) -> str:
        return "active" if self.running(unit) else "inactive"

    def property(self, unit: str, name: str) -> str:
        known = {"Result": "exit-code", "LoadState": self.load_state}
        return known.get(name, "")

    def last_lines(self, unit: str) -> str:
        return "out of memory"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def box(tmp_path: Path, machine: Machine) -> Service:
    store = Store(tmp_path / "root" / "services" / "box", "box")
    return Service(store, machine, machine.units, lambda _: Canary(None, ()), lambda _: None)


def make(number: int) -> tuple[Generation, str, str | None]:
    unit = _UNIT.format(number)
    generation = Generation(
        service="box", number=number, created=datetime(2026, 1, 2, tzinfo=UTC), tool_version="0",
        manager="system", source="a test", simulated=True, flags={"model-path": "m"},
        argv=("/env/bin/python", "-m", "x"), env={}, host="127.0.0.1", health_host="127.0.0.1", port=1,
        versions=Versions(engine="0.5.23"), unit_sha256="0",
    )  # fmt: skip
    return generation, unit, '{"trial": 1}\n'


def _state(box: Service, machine: Machine) -> tuple[int | None, object, str | None]:
    text = box.unit_path.read_text() if box.unit_path.exists() else None
    return box.store.current(), machine.running(box.unit), text


def _serves(box: Service, machine: Machine, number: int) -> bool:
    text = _UNIT.format(number)
    return _state(box, machine) == (number, text, text) and machine.enabled(box.unit)


def _watched(box: Service, machine: Machine) -> bool | None:
    """A timer checks it, or nothing of one is there; None for anything between."""
    timer = timer_of(box.store.service)
    files = [(box.unit_dir / name).exists() for name in _TIMER]
    if all(files) and machine.enabled(timer) and machine.running(timer):
        return True
    return None if any(files) or machine.enabled(timer) or machine.running(timer) else False


def test_generations_follow_each_other(box: Service, machine: Machine):
    assert service.install(box, make, start=True).problem is None
    assert _serves(box, machine, 1)
    assert service.install(box, make, start=True).generation == 2
    assert _serves(box, machine, 2)
    assert service.rollback(box, None).generation == 1
    assert _serves(box, machine, 1)
    assert service.rollback(box, 2).generation == 2
    assert _serves(box, machine, 2)
    assert [(one.operation, one.generation, one.before) for one in box.store.history()] == [
        ("install", 1, None), ("install", 2, 1), ("rollback", 1, 2), ("rollback", 2, 1)
    ]  # fmt: skip
    assert box.store.evidence(2) == '{"trial": 1}\n'


def test_a_generation_is_never_written_again(box: Service):
    service.install(box, make, start=True)
    files = list(box.store.folder.glob("generations/0001/*"))
    assert len(files) == 3
    assert all(path.stat().st_mode & 0o222 == 0 for path in files)


@pytest.mark.parametrize("how", ["does not start", "answers badly", "cannot be asked"])
def test_one_that_does_not_serve_gives_way_to_the_one_before(box: Service, machine: Machine, how: str):
    service.install(box, make, start=True)

    def check(generation: Generation) -> Canary:
        if how == "cannot be asked":
            raise DeployError("the key cannot be read")
        return Canary("the answer is empty", ()) if how == "answers badly" else Canary(None, ())

    if how == "does not start":
        machine.bad.add(_UNIT.format(2))
    changed = service.install(
        Service(box.store, machine, machine.units, check, lambda _: None), make, start=True
    )
    assert changed.generation == 1
    said = {
        "does not start": "out of memory",
        "answers badly": "the answer is empty",
        "cannot be asked": "cannot be read",
    }
    assert said[how] in str(changed.problem)
    assert _serves(box, machine, 1)
    last = box.store.history()[-1]
    assert (last.generation, last.ok, said[how] in str(last.why)) == (2, False, True)
    # What never served is not gone back to, and its number is not used again.
    assert service.install(box, make, start=True).generation == 3
    assert service.rollback(box, None).generation == 1


def test_a_first_one_that_does_not_serve_leaves_nothing_running(box: Service, machine: Machine):
    machine.bad.add(_UNIT.format(1))
    assert service.install(box, make, start=True).generation is None
    assert _state(box, machine) == (None, None, None)
    with pytest.raises(DeployError, match="no generation that served"):
        service.start(box)
    service.uninstall(box)
    assert not box.store.folder.parent.parent.exists()


def test_written_down_only_it_leaves_alone_what_runs(box: Service, machine: Machine):
    service.install(box, make, start=True)
    service.install(box, make, start=False)
    assert _state(box, machine) == (2, _UNIT.format(1), _UNIT.format(2))


def test_uninstalled_nothing_is_left(box: Service, machine: Machine):
    service.install(box, make, start=True)
    service.uninstall(box)
    assert _state(box, machine) == (None, None, None)
    assert not machine.enabled(box.unit)
    assert not box.store.folder.parent.parent.exists()
    with pytest.raises(DeployError) as caught:
        service.stop(box)
    assert caught.value.exit_code is ExitCode.MISSING


def test_a_unit_that_somebody_else_wrote_is_left_alone(box: Service, machine: Machine):
    box.unit_path.write_text("[Service]\nExecStart=/bin/mine\n")
    with pytest.raises(DeployError, match="no generation of this service has written it"):
        service.install(box, make, start=True)
    assert box.unit_path.read_text() == "[Service]\nExecStart=/bin/mine\n"
    assert not box.store.folder.parent.parent.exists()


def test_what_a_person_put_beside_the_unit_stays_and_is_named(box: Service, machine: Machine):
    service.install(box, make, start=True)
    assert service.kept_changes(box) == ()
    drop_in = box.unit_dir / f"{box.unit}.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.touch()
    mine = box.unit_path.with_name(f"{box.unit}.mine")
    mine.touch()
    service.uninstall(box)
    assert service.kept_changes(box) == (drop_in.parent, mine)


def test_a_unit_that_was_changed_by_hand_is_not_lost_to_a_rollback(box: Service, machine: Machine):
    for _ in range(2):
        service.install(box, make, start=True)
    edited = box.unit_path.read_text() + "# mine\n"
    box.unit_path.write_text(edited)
    for work in (lambda: service.rollback(box, 1), lambda: service.uninstall(box)):
        with pytest.raises(DeployError, match="changed by hand") as caught:
            work()
        assert "systemctl edit dflash-sglang-box.service" in str(caught.value.fix)
    assert box.unit_path.read_text() == edited
    assert machine.running(box.unit)
    # What an older generation has written is ours too.
    box.unit_path.write_text(_UNIT.format(1))
    assert service.rollback(box, 1).problem is None


def _bad_generation(folder: Path) -> None:
    path = folder / "generations" / "0002" / "generation.json"
    path.unlink()
    path.write_text("{")


def _no_generation(folder: Path) -> None:
    shutil.rmtree(folder / "generations" / "0002")


def _endless_link(folder: Path) -> None:
    path = folder / "generations" / "0002" / "generation.json"
    path.unlink()
    path.symlink_to(path.name)


def _endless_current(folder: Path) -> None:
    (folder / "current").unlink()
    (folder / "current").symlink_to("current")


def _folder_as_current(folder: Path) -> None:
    (folder / "current").unlink()
    (folder / "current").mkdir()
    (folder / "current" / "x").touch()


def _bad_change(folder: Path) -> None:
    (folder / "change.json").write_text("{")


_HARM = [_bad_generation, _no_generation, _endless_link, _endless_current, _folder_as_current, _bad_change]


@pytest.mark.parametrize("harm", _HARM)
@pytest.mark.parametrize("way", ["rollback", "install", "uninstall"])
def test_whatever_is_damaged_there_is_a_way_on(box: Service, machine: Machine, harm: Callable, way: str):
    for _ in range(2):
        service.install(box, make, start=True)
    harm(box.store.folder)
    if harm is _no_generation:
        # Nobody knows any more who wrote the unit; this is what a command then says to do.
        box.unit_path.rename(f"{box.unit_path}.mine")
    if way == "rollback":
        assert service.rollback(box, 1).problem is None
        assert _serves(box, machine, 1)
    elif way == "install":
        changed = service.install(box, make, start=True)
        assert changed.problem is None
        assert _serves(box, machine, changed.generation or 0)
    else:
        service.uninstall(box)
        assert _state(box, machine) == (None, None, None)


@pytest.mark.parametrize("harm", [_bad_generation, _no_generation, _endless_link, _bad_change])
def test_damage_takes_down_nothing_that_runs(box: Service, machine: Machine, harm: Callable):
    for _ in range(2):
        service.install(box, make, start=True)
    harm(box.store.folder)
    service.restart(box)
    assert machine.running(box.unit) == _UNIT.format(2)


def test_a_key_that_is_gone_is_told_while_the_old_process_still_serves(
    box: Service, machine: Machine, tmp_path: Path
):
    key = tmp_path / "key.yaml"

    def with_key(number: int) -> tuple[Generation, str, str | None]:
        generation, unit, evidence = make(number)
        return generation.model_copy(update={"api_key_file": str(key)}), unit, evidence

    service.install(box, with_key, start=True)
    service.install(box, make, start=True)
    with pytest.raises(DeployError, match=r"key\.yaml is not there"):
        service.rollback(box, 1)
    assert _serves(box, machine, 2)
    service.install(box, with_key, start=True)
    for work in (service.start, service.restart):
        with pytest.raises(DeployError, match=r"key\.yaml is not there"):
            work(box)
    assert _serves(box, machine, 3)


def test_a_taken_port_is_told_with_its_holder_before_an_engine_is_started(box: Service, machine: Machine):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def on_port(number: int) -> tuple[Generation, str, str | None]:
            generation, unit, evidence = make(number)
            return generation.model_copy(update={"port": port}), unit, evidence

        changed = service.install(box, on_port, start=True)
        assert f"port {port} on 127.0.0.1 is taken by process {os.getpid()}" in str(changed.problem)
        assert "service.port" in str(changed.fix)
        service.install(box, on_port, start=False)
        for work in (service.start, service.restart):
            with pytest.raises(DeployError, match="is taken by process"):
                work(box)
    assert service.start(box).problem is None


@pytest.mark.parametrize(
    ("state", "said"),
    [("masked", "systemctl unmask dflash-sglang-box.service"), ("bad-setting", "bad setting")],
)
def test_a_unit_that_systemd_cannot_start_is_told_as_such(
    box: Service, machine: Machine, state: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    service.install(box, make, start=False)
    monkeypatch.setattr(machine, "manager", "system")
    machine.load_state = state
    machine.bad.add(_UNIT.format(1))
    problem = str(service.start(box).problem)
    assert said in problem
    assert "out of memory" not in problem


def test_one_command_at_a_time(box: Service):
    service.install(box, make, start=True)
    with generations.locked(box.store, make=False), pytest.raises(DeployError, match="another command"):
        service.stop(box)


def _killed_after(box: Service, machine: Machine, steps: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process that is killed after so many steps; False when it came to its end before."""
    pid = os.fork()
    if pid == 0:
        machine.steps = steps
        for name in ("add", "begin", "switch", "end", "remove"):
            _stepping(name, machine)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def _stepping(name: str, machine: Machine) -> None:
    original = getattr(Store, name)

    def stepped(*arguments: object) -> object:
        machine.step()
        done = original(*arguments)
        machine.step()
        return done

    setattr(Store, name, stepped)


def test_a_timer_comes_with_the_service_and_goes_with_it(box: Service, machine: Machine, tmp_path: Path):
    other = replace(box, store=Store(tmp_path / "root" / "services" / "other", "other"))
    for one in (box, other):
        service.install(one, make, start=True, watch=_TIMER)
    left = box.unit_dir / "dflash-sglang-health@.timer.previous"
    assert _watched(box, machine) is True
    assert not left.exists()
    # An older one, or a person's own, is kept beside what takes its place.
    service.install(box, make, start=True, watch={**_TIMER, "dflash-sglang-health@.timer": "[Timer]\n#2\n"})
    assert left.read_text() == "[Timer]\n"
    # Without a timer: this service's goes, the units that the other one needs stay.
    service.install(box, make, start=True, watch=None)
    assert not machine.enabled(timer_of("box"))
    assert _watched(other, machine) is True
    remembered = state_dir() / "health" / "other.json"
    write_atomic(remembered, "{}")
    service.uninstall(other)
    assert _watched(other, machine) is False
    assert not remembered.exists()
    assert _serves(box, machine, 3)


def test_a_rollback_by_itself_is_told_and_a_first_failure_is_not(box: Service, machine: Machine):
    told: list[tuple[str, str]] = []
    box = replace(box, notify=lambda event, why: told.append((event, why)))
    machine.bad |= {_UNIT.format(1), _UNIT.format(3)}
    service.install(box, make, start=True)
    assert told == []
    service.install(box, make, start=True)
    service.install(box, make, start=True)
    ((event, why),) = told
    assert event == "rolled back"
    assert "generation 3 does not serve, back to 2" in why


def test_a_change_is_under_way_while_its_process_lives(box: Service, machine: Machine):
    service.install(box, make, start=True)
    assert box.store.under_way() is None
    child = os.fork()
    if child == 0:
        box.store.begin(service._pending("install", 1, 2, running=True))
        signal.pause()
        os._exit(0)
    try:
        deadline = time.monotonic() + 60
        while (seen := box.store.under_way()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert seen is not None
        assert seen.words == "install of generation 2"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert box.store.under_way() is None
    assert box.store.pending() is not None


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Refuses writes as a full disk does, and needs no disk to fill."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_before_anything_is_stopped(box: Service, machine: Machine):
    def change(work: Callable[[], object]) -> None:
        with (
            _files_of_at_most(100_000),
            pytest.raises(DeployError, match="what runs was left alone") as caught,
        ):
            work()
        assert "the same command again" in str(caught.value.fix)

    change(lambda: service.install(box, make, start=True))
    assert not box.store.folder.exists()
    service.install(box, make, start=True)
    service.install(box, make, start=True)
    change(lambda: service.install(box, make, start=True))
    change(lambda: service.rollback(box, 1))
    assert _serves(box, machine, 2)
    assert (box.store.numbers(), box.store.pending()) == ([1, 2], None)


def test_a_disk_that_fills_up_under_way_costs_no_service(box: Service, machine: Machine, monkeypatch):
    service.install(box, make, start=True)
    service.install(box, make, start=True)

    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(service, "write_atomic", full)
    changed = service.rollback(box, 1)
    assert (changed.generation, "No space left" in str(changed.problem)) == (2, True)
    assert _serves(box, machine, 2)
    monkeypatch.undo()
    assert service.rollback(box, 1).problem is None


def test_a_change_whose_record_finds_no_room_is_done_all_the_same(box: Service, machine: Machine):
    service.install(box, make, start=True)
    service.install(box, make, start=True)
    history = box.store.folder / "history.jsonl"
    # Larger than all else here, and without the end of its last line.
    history.write_text(history.read_text() + " " * (2 << 20) + "{")
    with _files_of_at_most(history.stat().st_size), pytest.raises(OSError, match=r"history\.jsonl"):
        service.rollback(box, 1)
    assert _serves(box, machine, 1)
    # The next command finds nothing that was cut short.
    assert service.start(box).generation == 1
    assert _serves(box, machine, 1)
    assert service.rollback(box, 2).problem is None
    assert [one.operation for one in box.store.history()] == ["install", "install", "rollback"]


def test_whatever_a_failure_was_told_in_its_record_is_read(box: Service):
    box.store.folder.mkdir(parents=True)
    told = generations.event("install", 1, None, ok=False, why="one\u2028two\x85three\nfour")
    box.store.end(told)
    assert box.store.history() == [told]


@pytest.mark.parametrize("operation", ["install", "rollback", "first install", "uninstall"])
def test_killed_at_any_step_the_next_command_mends(tmp_path: Path, operation: str):
    for steps in range(100):
        folder = tmp_path / f"{operation}-{steps}"
        folder.mkdir()
        machine = Machine(folder)
        store = Store(folder / "root" / "services" / "box", "box")
        box = Service(store, machine, machine.units, lambda _: Canary(None, ()), lambda _: None)
        if operation != "first install":
            service.install(box, make, start=True, watch=_TIMER)
        if operation == "rollback":
            service.install(box, make, start=True, watch=_TIMER)
        killed = _killed_after(
            box,
            machine,
            steps,
            {
                "rollback": lambda box=box: service.rollback(box, 1),
                "uninstall": lambda box=box: service.uninstall(box),
            }.get(operation, lambda box=box: service.install(box, make, start=True, watch=_TIMER)),
        )
        try:
            service.start(box)
        except DeployError as error:
            assert error.exit_code is ExitCode.MISSING
        numbers = (1, 2) if operation in ("install", "rollback") else (1,)
        served = any(_serves(box, machine, number) for number in numbers)
        gone = _state(box, machine) == (None, None, None) and not machine.enabled(box.unit)
        assert served or (gone and operation in ("first install", "uninstall")), steps
        # A timer may stay over a service that was taken back, never over one that is gone.
        assert not gone or _watched(box, machine) is False, steps
        if store.folder.exists():
            assert store.pending() is None
            assert not list(store.folder.rglob(".*"))
            assert service.install(box, make, start=True, watch=_TIMER).problem is None
            assert _watched(box, machine) is True
        if not killed:
            assert steps > 5
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("harm", ["{", "", "[]", '{"schema_version": 1}', "\xff"])
def test_a_damaged_record_is_named(box: Service, harm: str):
    service.install(box, make, start=True)
    path = box.store.folder / "generations" / "0001" / "generation.json"
    path.chmod(0o644)
    path.write_bytes(harm.encode("latin-1"))
    with pytest.raises(DeployError, match=r"generation\.json is no record that this tool reads"):
        box.store.generation(1)
