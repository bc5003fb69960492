import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.launch import Launch
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.server import process
from dflash_deploy.server.deadlines import Deadlines
from dflash_deploy.server.outcome import NotServed, Served
from dflash_deploy.server.process import Server, State
from tests.recording_proxy import recording_proxy
from tests.server.conftest import TOOL

SHORT = Deadlines(imports_s=60, load_s=2, health_s=2, linger_s=1, least_s=0)
PATIENT = Deadlines()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, what: str, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.05)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def records(state_home: Path) -> list[Path]:
    return list((state_home / "dflash-deploy/servers").glob("*"))


class TestServing:
    def test_goes_through_its_states_and_leaves_nothing(self, launch, tmp_path, state_home):
        seen = []
        wanted = launch()
        with Server(wanted, tmp_path / "run", on_progress=seen.append) as server:
            assert (server.state, server.alive, server.pid, server.exit_status) == (
                State.NEW,
                False,
                None,
                None,
            )
            outcome = server.start()
            assert isinstance(outcome, Served)
            assert outcome.boot.kv_tokens == 8192
            assert outcome.boot_s > 0
            assert (server.state, server.alive, server.exit_status) == (State.SERVING, True, None)
            assert listening(wanted.port)
            assert len(records(state_home)) == 1
            report = server.stop()
        assert (report.graceful, report.exit_status, report.leftovers) == (True, 0, ())
        assert (server.state, server.alive, server.exit_status) == (State.ENDED, False, 0)
        assert not listening(wanted.port)
        assert gone(server.pid)
        assert records(state_home) == []
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["server.log"]
        assert "fired up" in server.log_path.read_text()
        assert seen[-1].stage is Stage.SERVING

    def test_reaches_itself_past_the_proxy_of_the_environment(self, launch, tmp_path, notes, monkeypatch):
        with recording_proxy() as (proxy, seen):
            monkeypatch.setenv("HTTP_PROXY", proxy)
            monkeypatch.setenv("no_proxy", ".corp")
            with Server(launch("asks-itself"), tmp_path / "run") as server:
                assert isinstance(server.start(), Served)
        assert seen == []
        environ = (notes / "environ").read_text().splitlines()
        assert f"HTTP_PROXY={proxy}" in environ
        assert "no_proxy=.corp,127.0.0.1,localhost" in environ
        assert "NO_PROXY=.corp,127.0.0.1,localhost" in environ

    def test_has_a_session_a_temporary_folder_and_no_input_of_its_own(self, launch, tmp_path, notes):
        with Server(launch(env={"EXTRA": "yes"}), tmp_path / "run") as server:
            server.start()
            environ = dict(
                line.split("=", 1) for line in (notes / "environ").read_text().splitlines() if "=" in line
            )
            assert environ["EXTRA"] == "yes"
            assert Path(environ["TMPDIR"]).is_dir()
            assert Path(environ["TMPDIR"]).stat().st_mode & 0o077 == 0
            assert os.getsid(server.pid) == server.pid == int((notes / "pid").read_text())
            assert Path(f"/proc/{server.pid}/fd/0").readlink() == Path(os.devnull)
        assert not Path(environ["TMPDIR"]).exists()

    def test_temporary_folder_fits_a_socket_however_long_ours_is(self, launch, tmp_path, notes, monkeypatch):
        (tmp_path / ("long-" * 30)).mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long-" * 30)))
        with Server(launch(), tmp_path / "run") as server:
            server.start()
            environ = dict(
                line.split("=", 1) for line in (notes / "environ").read_text().splitlines() if "=" in line
            )
            assert len(environ["TMPDIR"]) < 60
        assert not Path(environ["TMPDIR"]).exists()

    def test_starts_once(self, launch, tmp_path):
        with Server(launch(), tmp_path / "run") as server:
            server.start()
            with pytest.raises(RuntimeError, match="starts once"):
                server.start()

    def test_one_that_is_still_ending_does_not_survive(self, launch, tmp_path):
        wanted = launch("slow-death")
        with Server(wanted, tmp_path / "run") as server:
            server.start()
            assert server.survives()
            os.kill(server.pid, signal.SIGUSR1)
            wait_until(lambda: not listening(wanted.port), "a closed port")
            assert server.survives(within_s=0.2), "it does not listen, and does not end either"
            os.kill(server.pid, signal.SIGUSR1)
            assert not server.survives(within_s=60)
        assert server.exit_status == -signal.SIGKILL

    def test_what_one_said_last_is_known_with_its_end(self, launch, tmp_path):
        with Server(launch("last-words"), tmp_path / "run") as server:
            server.start()
            held, ended = threading.Event(), threading.Event()

            def hold() -> None:
                """Keep the log from being read, as a busy machine may."""
                with server._log._changed:
                    held.set()
                    ended.wait(60)

            threading.Thread(target=hold).start()
            held.wait(60)
            os.kill(server.pid, signal.SIGUSR1)
            wait_until(lambda: not server.alive, "the death")
            threading.Timer(0.3, ended.set).start()
            assert not server.survives()
            assert "Not enough memory" in server.log_path.read_text()
            assert "Not enough memory" in server.boot.failure.message

    def test_boot_time_is_in_the_servers_own_time(self, launch, tmp_path):
        with Server(launch(time_scale=1000.0), tmp_path / "run") as server:
            outcome = server.start()
        assert isinstance(outcome, Served)
        assert outcome.boot_s > 10


class TestNotServed:
    def start(self, launch: Launch, run_dir: Path, deadlines: Deadlines = SHORT) -> NotServed:
        with Server(launch, run_dir, deadlines=deadlines) as server:
            outcome = server.start()
            assert server.state is State.ENDED
        assert isinstance(outcome, NotServed)
        assert gone(server.pid)
        return outcome

    def test_death_with_a_traceback(self, launch, tmp_path):
        outcome = self.start(launch("die-loading"), tmp_path / "run", PATIENT)
        assert outcome.exit_status == -signal.SIGKILL
        assert "Not enough memory" in outcome.reason
        assert outcome.boot.failure is not None

    def test_death_without_a_message_that_is_known(self, launch, tmp_path):
        outcome = self.start(launch("exit-3"), tmp_path / "run", PATIENT)
        assert (outcome.exit_status, outcome.stage) == (3, Stage.LOAD)
        assert "status 3" in outcome.reason
        assert "something went wrong" in outcome.reason

    def test_fatal_message_and_a_main_process_that_lingers(self, launch, tmp_path):
        outcome = self.start(launch("linger"), tmp_path / "run", Deadlines(linger_s=1))
        assert outcome.exit_status is None
        assert "Not enough memory" in outcome.reason

    def test_port_lost_to_another_while_loading(self, launch, tmp_path):
        outcome = self.start(launch("lost-port"), tmp_path / "run", Deadlines(linger_s=1))
        assert "address already in use" in outcome.reason

    def test_stall(self, launch, tmp_path):
        outcome = self.start(launch("silent"), tmp_path / "run")
        assert (outcome.stage, outcome.exit_status) == (Stage.LOAD, None)
        assert "stalled" in outcome.reason

    def test_deadline_of_a_server_that_only_talks(self, launch, tmp_path):
        outcome = self.start(launch("chatter"), tmp_path / "run")
        assert outcome.stage is Stage.LOAD
        assert "no progress" in outcome.reason

    def test_deadlines_are_in_the_servers_own_time(self, launch, tmp_path):
        deadlines = Deadlines(load_s=2000, least_s=0)
        outcome = self.start(launch("silent", time_scale=1000.0), tmp_path / "run", deadlines)
        assert "stalled" in outcome.reason

    def test_deadline_of_the_whole_start(self, launch, tmp_path):
        outcome = self.start(launch("chatter"), tmp_path / "run", Deadlines(total_s=1, least_s=0))
        assert "not ready after 1 s" in outcome.reason

    def test_ready_line_but_never_healthy(self, launch, tmp_path):
        outcome = self.start(launch("unhealthy"), tmp_path / "run")
        assert outcome.stage is Stage.SERVING
        assert "/health" in outcome.reason

    def test_program_that_the_system_cannot_run(self, tmp_path, launch):
        program = tmp_path / "program"
        program.write_bytes(b"\x7fELF nothing")
        program.chmod(0o755)
        wanted = launch()
        outcome = self.start(
            Launch(argv=(str(program),), host=wanted.host, port=wanted.port), tmp_path / "run", PATIENT
        )
        assert outcome.exit_status == 126
        assert "cannot run" in outcome.reason

    def test_stopped_by_another_thread_while_it_starts(self, launch, tmp_path, notes):
        def stop() -> None:
            wait_until((notes / "pid").exists, "the start")
            server.stop(grace_s=0)

        with Server(launch("silent"), tmp_path / "run") as server:
            threading.Thread(target=stop).start()
            outcome = server.start()
        assert isinstance(outcome, NotServed)
        assert "stopped while" in outcome.reason


class TestCannotStart:
    def test_taken_port(self, launch, tmp_path):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            server = Server(launch(port=other.getsockname()[1]), tmp_path / "run")
            with server, pytest.raises(DeployError, match=f"taken by process {os.getpid()}") as caught:
                server.start()
        assert caught.value.exit_code is ExitCode.UNAVAILABLE
        assert not server.log_path.exists()

    def test_missing_program(self, tmp_path):
        server = Server(Launch(argv=("/nowhere/python",), host="127.0.0.1", port=1), tmp_path / "run")
        with server, pytest.raises(DeployError, match="/nowhere/python is not there") as caught:
            server.start()
        assert caught.value.exit_code is ExitCode.MISSING

    def test_program_that_is_not_executable(self, tmp_path):
        program = tmp_path / "a program"
        program.write_text("#!/bin/sh\n")
        server = Server(Launch(argv=(str(program),), host="127.0.0.1", port=1), tmp_path / "run")
        with server, pytest.raises(DeployError, match="not executable") as caught:
            server.start()
        assert caught.value.fix == f"chmod +x '{program}'"

    def test_run_dir_that_cannot_be_made(self, launch, tmp_path, state_home):
        (tmp_path / "file").touch()
        server = Server(launch(), tmp_path / "file/run")
        with server, pytest.raises(DeployError, match=r"server\.log cannot be written") as caught:
            server.start()
        assert caught.value.exit_code is ExitCode.UNAVAILABLE
        assert records(state_home) == []

    def test_state_folder_that_cannot_be_written(self, launch, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        server = Server(launch(), tmp_path / "run")
        with server, pytest.raises(DeployError, match="record of the server cannot be written"):
            server.start()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["server.log"]

    def test_command_too_long_for_the_system(self, launch, tmp_path):
        wanted = launch()
        server = Server(
            Launch(argv=(*wanted.argv, "x" * 3_000_000), host=wanted.host, port=wanted.port), tmp_path / "run"
        )
        with server, pytest.raises(DeployError, match="Argument list too long"):
            server.start()


class TestStop:
    def test_new(self, launch, tmp_path):
        server = Server(launch(), tmp_path / "run")
        report = server.stop()
        assert (report.exit_status, report.leftovers, server.state) == (None, (), State.ENDED)

    def test_twice(self, launch, tmp_path):
        with Server(launch(), tmp_path / "run") as server:
            server.start()
            assert server.stop() is server.stop()

    def test_server_that_ignores_sigterm(self, launch, tmp_path):
        with Server(launch("ignore-sigterm"), tmp_path / "run") as server:
            server.start()
            report = server.stop(grace_s=0.5)
        assert (report.graceful, report.exit_status, report.leftovers) == (False, -signal.SIGKILL, ())

    def test_server_that_failed_is_not_waited_for(self, launch, tmp_path):
        with Server(launch("fail-later"), tmp_path / "run") as server:
            assert isinstance(server.start(), Served)
            os.kill(server.pid, signal.SIGUSR1)
            wait_until(lambda: server.boot.failure, "the failure")
            assert server.alive
            report = server.stop(grace_s=100_000)
        assert (report.graceful, report.leftovers) == (False, ())
        assert "Not enough memory" in server.boot.failure.message

    def test_server_that_is_already_dead(self, launch, tmp_path, state_home):
        with Server(launch(), tmp_path / "run") as server:
            server.start()
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.alive, "the death")
            assert (server.state, server.exit_status) == (State.SERVING, -signal.SIGKILL)
            report = server.stop()
        assert (report.graceful, report.exit_status, report.leftovers) == (False, -signal.SIGKILL, ())
        assert records(state_home) == []

    @pytest.mark.parametrize("dead_already", [False, True])
    def test_children_and_grandchildren_go_with_it(self, launch, tmp_path, notes, dead_already):
        with Server(launch("family"), tmp_path / "run") as server:
            server.start()
            family = [int(pid) for pid in (notes / "family").read_text().split()]
            assert not any(gone(pid) for pid in family)
            if dead_already:
                os.kill(server.pid, signal.SIGKILL)
                wait_until(lambda: not server.alive, "the death")
            report = server.stop()
        assert report.leftovers == ()
        assert all(gone(pid) for pid in family)

    def test_stopped_process_is_ended_too(self, launch, tmp_path):
        with Server(launch(), tmp_path / "run") as server:
            server.start()
            os.kill(server.pid, signal.SIGSTOP)
            report = server.stop(grace_s=0.5)
        assert (report.graceful, report.exit_status) == (False, -signal.SIGKILL)

    def test_shared_memory_of_the_server_is_removed_and_only_that(self, launch, tmp_path, own_shared_memory):
        older = own_shared_memory / "sglang_loads_older_test_0.shm"
        held = own_shared_memory / "sglang_loads_held_test_0.shm"
        # Of a second server that is about to open it.
        starting = own_shared_memory / "sglang_loads_starting_test_0.shm"
        one = launch("shared-memory")
        one = replace(one, argv=(*one.argv, "--shared-memory", str(own_shared_memory)))
        older.touch()
        try:
            time.sleep(0.1)
            with Server(one, tmp_path / "run") as server, held.open("w") as held_file:
                server.start()
                held_file.write("somebody else's")
                held_file.flush()
                starting.touch()
                ours = list(own_shared_memory.glob(f"sglang_loads_{server.pid:012x}_*"))
                assert len(ours) == 1
                assert server.stop().leftovers == ()
                assert held.exists()
            assert not ours[0].exists()
            assert older.exists()
            assert starting.exists()
        finally:
            older.unlink()
            held.unlink()
            starting.unlink()

    def test_also_that_of_a_server_that_died_by_itself(self, launch, tmp_path, own_shared_memory):
        one = launch("shared-memory")
        one = replace(one, argv=(*one.argv, "--shared-memory", str(own_shared_memory)))
        with Server(one, tmp_path / "run") as server:
            server.start()
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.alive, "the death")
            assert len(list(own_shared_memory.iterdir())) == 1
        assert list(own_shared_memory.iterdir()) == []

    def test_port_that_another_process_took_is_told(self, launch, tmp_path):
        wanted = launch()
        with Server(wanted, tmp_path / "run") as server:
            server.start()
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.alive, "the death")
            with socket.create_server(("127.0.0.1", wanted.port)):
                report = server.stop()
        assert len(report.leftovers) == 1
        assert f"port {wanted.port} is still taken by process {os.getpid()}" in report.leftovers[0]

    def test_exception_in_the_body_stops_it(self, launch, tmp_path):
        with pytest.raises(ZeroDivisionError), Server(launch(), tmp_path / "run") as server:
            server.start()
            1 / 0  # noqa: B018
        assert gone(server.pid)

    def test_thread_that_started_it_may_end(self, launch, tmp_path):
        with Server(launch(), tmp_path / "run") as server:
            thread = threading.Thread(target=server.start)
            thread.start()
            thread.join()
            time.sleep(0.5)
            assert server.alive

    def test_ctrl_c_while_it_drains_ends_the_patience_and_not_the_stop(self, launch, tmp_path, state_home):
        server = Server(launch("ignore-sigterm"), tmp_path / "run")
        server.start()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            server.stop(grace_s=600)
        assert gone(server.pid)
        assert (server.state, records(state_home)) == (State.ENDED, [])

    def test_stop_from_a_signal_handler_while_it_starts(self, launch, tmp_path, notes, state_home):
        def interrupt() -> None:
            wait_until((notes / "pid").exists, "the start")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

        server = Server(launch("silent"), tmp_path / "run")
        signal.signal(signal.SIGALRM, lambda *_: server.stop(grace_s=0) and None)
        threading.Thread(target=interrupt).start()
        outcome = server.start()
        assert isinstance(outcome, NotServed)
        assert "stopped while" in outcome.reason
        assert gone(server.pid)
        assert (server.state, records(state_home)) == (State.ENDED, [])

    @pytest.mark.parametrize("step", ["require_free", "write_record"])
    def test_stop_before_there_is_a_process(self, launch, tmp_path, state_home, monkeypatch, step):
        """As from a signal handler that comes just then."""
        take = getattr(process, step)

        def stopped_then(*arguments: object) -> None:
            server.stop(grace_s=0)
            take(*arguments)

        monkeypatch.setattr(process, step, stopped_then)
        server = Server(launch("silent"), tmp_path / "run")
        outcome = server.start()
        assert isinstance(outcome, NotServed)
        assert "stopped while" in outcome.reason
        assert gone(server.pid)
        report = server.stop()
        assert (report.graceful, report.exit_status, report.leftovers) == (False, -signal.SIGKILL, ())
        assert (server.state, records(state_home)) == (State.ENDED, [])


class TestLog:
    def test_odd_bytes_and_very_long_lines_are_kept_as_they_came(self, launch, tmp_path):
        with Server(launch("odd-bytes"), tmp_path / "run") as server:
            assert isinstance(server.start(), Served)
        content = server.log_path.read_bytes()
        assert b"\xff\xfe not text \x00\n" + b"x" * 3_000_000 + b"\n\xc3\r\n\n" in content

    def test_megabytes_before_it_is_ready(self, launch, tmp_path):
        with Server(launch("megabytes"), tmp_path / "run") as server:
            assert isinstance(server.start(), Served)
        assert b"039999 " in server.log_path.read_bytes()

    def test_log_is_for_its_owner_alone(self, launch, tmp_path):
        with Server(launch("exit-3"), tmp_path / "run") as server:
            server.start()
        assert server.log_path.stat().st_mode & 0o077 == 0


class TestToolEnds:
    def run_tool(self, launch, tmp_path, notes, *trouble: str) -> tuple[subprocess.Popen[str], int]:
        port = launch().port
        tool = subprocess.Popen(
            [sys.executable, str(TOOL), str(tmp_path / "run"), str(port), str(notes), *trouble],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert tool.stdout
        return tool, int(tool.stdout.readline())

    def test_kill_of_the_tool_leaves_no_server(self, launch, tmp_path, notes, state_home):
        tool, server = self.run_tool(launch, tmp_path, notes, "family")
        family = [int(pid) for pid in (notes / "family").read_text().split()]
        tool.kill()
        tool.communicate()
        wait_until(lambda: gone(server), "the server's end")
        assert len(records(state_home)) == 1
        # What does not die with its parent is found by the next start.
        with Server(launch(), tmp_path / "next") as other:
            other.start()
            assert all(gone(pid) for pid in family)
            assert len(records(state_home)) == 1
        assert records(state_home) == []
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["server.log"]

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signal_to_the_tools_process_group(self, launch, tmp_path, notes, state_home, signum):
        tool, server = self.run_tool(launch, tmp_path, notes)
        os.killpg(tool.pid, signum)
        tool.communicate()
        assert tool.returncode == ExitCode.INTERRUPTED
        assert gone(server)
        assert records(state_home) == []

    def test_signal_while_it_starts(self, launch, tmp_path, notes, state_home):
        command = [sys.executable, str(TOOL), str(tmp_path / "run"), str(launch().port), str(notes), "silent"]
        tool = subprocess.Popen(command, start_new_session=True)
        wait_until((notes / "pid").exists, "the start")
        os.killpg(tool.pid, signal.SIGINT)
        assert tool.wait(60) == ExitCode.INTERRUPTED
        assert records(state_home) == []

    def test_file_size_limit_stops_the_server_and_is_told(self, launch, tmp_path, notes):
        tool, server = self.run_tool(launch, tmp_path, notes, "print-for-ever")
        output, _ = tool.communicate()
        assert tool.returncode == ExitCode.UNAVAILABLE
        assert "server.log cannot be written: File too large" in output
        assert gone(server)

    def test_full_disk_stops_the_server_and_is_told(self, launch, tmp_path, notes):
        (tmp_path / "run").mkdir()
        mount = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs -o size=300k tmpfs "$1" && shift && exec "$@"',
            "sh",
        ]
        probe = [*mount, str(tmp_path / "run"), "true"]
        if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
            pytest.skip("mounting a small disk needs root and unshare")
        fill = f'dd if=/dev/zero of={tmp_path}/run/filler bs=1k count=250 2>/dev/null; exec "$@"'
        tool = [sys.executable, str(TOOL), str(tmp_path / "run"), str(launch().port), str(notes), "megabytes"]
        result = subprocess.run(
            [*mount, str(tmp_path / "run"), "sh", "-c", fill, "sh", *tool],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert result.returncode == ExitCode.UNAVAILABLE
        assert "server.log cannot be written: No space left on device" in result.stdout
        assert gone(int((notes / "pid").read_text()))
