"""One running server, from launch to nothing left behind."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import IO, Self

from dflash_deploy.engine.boot import BootRecord, Stage
from dflash_deploy.engine.launch import Launch
from dflash_deploy.engine.sglang import http
from dflash_deploy.engine.sglang.bootlog import Progress
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.proxy import sparing
from dflash_deploy.server import processes
from dflash_deploy.server.deadlines import Deadlines
from dflash_deploy.server.log import ServerLog
from dflash_deploy.server.orphans import end_orphans
from dflash_deploy.server.outcome import NotServed, Served, StartOutcome, StopReport
from dflash_deploy.server.ports import holder_of, listens, require_free
from dflash_deploy.server.processes import TOKEN_VARIABLE, Identity
from dflash_deploy.server.readiness import wait_until_ready
from dflash_deploy.server.records import ServerRecord, remove_record, write_record
from dflash_deploy.server.shared_memory import held_by, remove_leftovers
from dflash_deploy.server.temp_dir import make_temp_dir, remove_temp_dir
from dflash_deploy.server.vram import CardUse, not_returned, read_use

GRACE_S = 15.0
"""How long a server may drain after SIGTERM. Idle, SGLang takes 1 to 6 s; busy, it has no limit."""

_SHIM = Path(__file__).with_name("exec_shim.py")
_POLL_S = 0.1
_SETTLE_S = 5.0

# A server dies with the *thread* that started it (see exec_shim.py), so all are started by this one, which
# lives as long as the tool.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")


class State(StrEnum):
    """A server goes through these in order, never back; it may skip any but the last."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


class Server:
    """A server that this process owns, as a context manager: it is stopped on leaving, whatever happened.

    The server leads a session of its own, so Ctrl-C in a terminal reaches the tool and not the server; it
    has a temporary folder of its own; and it cannot outlive the tool.
    """

    def __init__(
        self,
        launch: Launch,
        run_dir: Path,
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008  # frozen
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Prepare; nothing is started, checked or written.

        Args:
            launch: what to run.
            run_dir: folder for the log, made when missing; a log of an earlier run is replaced.
            deadlines: limits on the start.
            on_progress: called by ``start`` at each new stage and detail.
        """
        self._launch = launch
        self._run_dir = run_dir.absolute()
        self._deadlines = deadlines
        self._on_progress = on_progress
        self._token = secrets.token_hex(6)
        self._state = State.NEW
        self._stopping = RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._main: Identity | None = None
        self._log: ServerLog | None = None
        self._output: int | None = None
        self._record: ServerRecord | None = None
        self._vram_before: Mapping[int, CardUse] = {}
        self._stage: Stage | None = None
        self._report: StopReport | None = None

    @property
    def state(self) -> State:
        """Where it stands. A server that died by itself keeps its state until it is stopped."""
        return self._state

    @property
    def log_path(self) -> Path:
        """Everything that the server printed; exists from the start on."""
        return self._run_dir / "server.log"

    @property
    def pid(self) -> int | None:
        """The main process's number; None while new."""
        return self._process.pid if self._process else None

    @property
    def boot(self) -> BootRecord | None:
        """What the log tells until now, also of failures while serving; None while new."""
        return self._log.boot if self._log else None

    @property
    def exit_status(self) -> int | None:
        """How the main process ended, negative for a signal.

        None while new and as long as it runs. It does not reap: until ``stop`` has seen to all, the number
        of the main process, and with it the name of its session, must not be given to anyone else.
        """
        if self._process is None:
            return None
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped just now by a stop in another thread
            return self._process.poll()
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    @property
    def alive(self) -> bool:
        """The main process runs. False while new and when ended."""
        return self._process is not None and self.exit_status is None

    def survives(self, within_s: float = _SETTLE_S) -> bool:
        """Whether it goes on serving, to be asked after a load.

        A process that ends closes its sockets first, and is gone only when the memory of its card is given
        back: clients see it fail while it still seems to run. So one that no longer listens, or whose log
        tells of a fatal error, gets ``within_s`` to end before it counts as running. The last words of one
        that has ended are known then.
        """
        deadline = time.monotonic() + within_s
        while self.alive:
            failed = self._log is not None and self._log.boot.failure is not None
            if not failed and listens(self._launch.host, self._launch.port):
                return True
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL_S)
        if self._log is not None:
            self._log.finish(_SETTLE_S)
        return False

    @property
    def log_problem(self) -> DeployError | None:
        """Why the log could not be kept (a full disk); the server was then killed."""
        return self._log.problem if self._log else None

    def start(self) -> StartOutcome:
        """Start it and wait until it takes requests, dies, stalls or runs out of time.

        New: ends orphans of earlier runs, starts, waits. Then it is serving, or, where the outcome is
        ``NotServed`` or an exception passes through (Ctrl-C among them), ended.
        Any other state: an error of the caller.

        Raises:
            DeployError: what a person must fix before any server can start: the port is taken, the program
                is missing, a folder cannot be written, the disk is full.
        """
        if self._state is not State.NEW:
            raise RuntimeError(f"a server starts once; this one is {self._state}")
        self._state = State.STARTING
        try:
            end_orphans()
            _require_program(self._launch)
            require_free(self._launch.host, self._launch.port)
            # Not within the time that the start is told to take.
            http.load()
            outcome = wait_until_ready(
                self._launch,
                self._spawn(),
                self._deadlines,
                exit_status=lambda: self.exit_status,
                stopped=lambda: self._state is not State.STARTING,
                on_progress=self._follow,
            )
            with self._stopping:
                if isinstance(outcome, Served) and self._state is State.STARTING:
                    self._state = State.SERVING
                    self._note_family()
        except BaseException:
            self._give_up()
            raise
        if isinstance(outcome, NotServed):
            self._give_up()
            if self.log_problem:
                raise self.log_problem
        return outcome

    def stop(self, grace_s: float = GRACE_S) -> StopReport:
        """End it with all its processes, and remove what it leaves. It does not raise.

        New: ended, nothing to do. Starting, serving: SIGTERM to the main process alone (its children would
        take it for a crash), SIGKILL to everything after ``grace_s``, or at once where the log tells of a
        fatal error. Dead by itself: what is left is cleaned up. Stopping: from another thread it waits; from
        a signal handler, or after a Ctrl-C that cut a stop short, it does the rest. Ended: the same report
        again.
        """
        with self._stopping:
            if self._report is not None:
                return self._report
            self._state = State.STOPPING
            graceful = False
            try:
                with suppress(DeployError):  # a full disk: the record stays as it was
                    self._note_segments(self._family())
                graceful = self._ask_to_end(grace_s)
            finally:  # a second Ctrl-C ends the patience, not the stop
                leftovers = self._clean_up()
                self._report = self._report or StopReport(graceful, self.exit_status, leftovers)
                self._state = State.ENDED
            return self._report

    def __enter__(self) -> Self:
        """Nothing happens until ``start``."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it, at once if an exception passes through.

        Raises:
            DeployError: the log could not be kept, so the server was killed; only where no other exception
                passes through.
        """
        self.stop(0 if error else GRACE_S)
        if error is None and self.log_problem:
            raise self.log_problem

    def _give_up(self) -> None:
        """End a start, also one that was stopped by somebody before its process came."""
        stopped = self._state is not State.STARTING
        report = self.stop(grace_s=0)
        if stopped:
            leftovers = self._clean_up()
            # One that came after the stop was killed.
            graceful = report.graceful and report.exit_status == self.exit_status
            self._report = StopReport(graceful, self.exit_status, leftovers)

    def _spawn(self) -> ServerLog:
        """Write the record, then start the process, so that no moment leaves a server unknown."""
        self._log = ServerLog(self.log_path)
        tool = processes.identity_of(os.getpid())
        if tool is None:
            raise DeployError(
                "/proc cannot be read, and without it a server's processes cannot be found again to be ended",
                fix="mount -t proc proc /proc",
                exit_code=ExitCode.UNAVAILABLE,
            )
        temp_dir = make_temp_dir(self._token)
        self._record = ServerRecord(
            token=self._token,
            boot_id=processes.boot_id(),
            pid_namespace=processes.pid_namespace(),
            tool=tool,
            command=self._launch.argv,
            host=self._launch.host,
            port=self._launch.port,
            run_dir=self._run_dir,
            temp_dir=temp_dir,
            started_s=time.time(),
        )
        write_record(self._record)
        if not self._launch.simulated:
            self._vram_before = read_use(self._environment())
        starting = _starter.submit(self._run_shim, temp_dir)
        try:
            wait([starting])
        finally:  # after Ctrl-C too: the process comes all the same, and must be known to be stopped
            wait([starting])
        try:
            output = starting.result()
        except OSError as error:
            raise DeployError(
                f"the server cannot be started: {error.strerror}", exit_code=ExitCode.UNAVAILABLE
            ) from error
        self._output = os.fstat(output.fileno()).st_ino
        self._log.follow(output, on_lost=self._kill_main)
        self._update_record(server=self._main)
        return self._log

    def _run_shim(self, temp_dir: Path) -> IO[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *self._launch.argv],
            env=self._environment() | {"TMPDIR": str(temp_dir), TOKEN_VARIABLE: self._token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._main = processes.identity_of(self._process.pid)
        assert self._process.stdout is not None  # noqa: S101  # asked for
        return self._process.stdout

    def _environment(self) -> dict[str, str]:
        launch = self._launch
        inherited = {name: value for name, value in os.environ.items() if name not in launch.without}
        wanted = {"PYTHONUNBUFFERED": "1", **inherited, **launch.env}
        return wanted | sparing(launch.host, wanted)

    def _follow(self, progress: Progress) -> None:
        """Each stage of the start."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._note_segments(self._family())
        if self._on_progress:
            self._on_progress(progress)

    def _note_family(self) -> None:
        """Put those that run now on record; they may not be recognised once the main process is gone."""
        family = self._family()
        self._update_record(children=tuple(child for child in family if child != self._main))
        self._note_segments(family)

    def _family(self) -> tuple[Identity, ...]:
        return processes.members(self._main, self._token, self._printing()) if self._main else ()

    def _note_segments(self, family: tuple[Identity, ...]) -> None:
        """What they hold in shared memory; nothing else tells afterwards that it was theirs."""
        if self._record is None:
            return
        found = {*self._record.segments, *held_by(one.pid for one in family)}
        if len(found) > len(self._record.segments):
            self._update_record(segments=tuple(sorted(found)))

    def _printing(self) -> tuple[Identity, ...]:
        """Those that print where the server does, even if nothing else ties them to it any more."""
        return processes.writers(self._output) if self._output is not None else ()

    def _update_record(self, **changes: object) -> None:
        assert self._record is not None  # noqa: S101  # spawned
        self._record = self._record.model_copy(update=changes)
        write_record(self._record)

    def _kill_main(self) -> None:
        if self._main:
            processes.send(self._main, signal.SIGKILL)

    def _ask_to_end(self, grace_s: float) -> bool:
        """SIGTERM, and time to follow it; whether it did."""
        if self._main is None:
            return True
        hopeless = self._log is not None and self._log.boot.failure is not None
        if grace_s <= 0 or hopeless or not self.alive:
            return False
        processes.send(self._main, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _clean_up(self) -> tuple[str, ...]:
        """Leave nothing behind; what stands all the same, in words. Safe to do again."""
        if self._record is None:
            return ()
        left: tuple[str, ...] = ()
        if self._main and self._process:
            left = processes.end(self._main, self._token, (*self._record.children, *self._printing()))
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SETTLE_S)
        if self._log:
            self._log.finish(_SETTLE_S)
            self._log.close()
        leftovers = (
            *left,
            *(self._taken_port() if self._main else ()),
            *not_returned(self._vram_before, self._environment(), within_s=_SETTLE_S),
            *remove_leftovers(self._record.segments),
            *remove_temp_dir(self._record.temp_dir, self._token),
        )
        if not left:  # else the next run finds it by its record
            remove_record(self._token)
        return leftovers

    def _taken_port(self) -> tuple[str, ...]:
        deadline = time.monotonic() + _SETTLE_S
        while holder := holder_of(self._launch.host, self._launch.port):
            if time.monotonic() > deadline:
                return (f"port {self._launch.port} is still taken by {holder}",)
            time.sleep(_POLL_S)
        return ()


def _require_program(launch: Launch) -> None:
    program = launch.argv[0]
    if shutil.which(program, path=launch.env.get("PATH")) is None:
        there = Path(program).exists()
        raise DeployError(
            f"the server cannot be started: {program} is {'not executable' if there else 'not there'}",
            fix=shlex.join(["chmod", "+x", program])
            if there
            else "give the interpreter that SGLang is installed in",
            exit_code=ExitCode.UNAVAILABLE if there else ExitCode.MISSING,
        )
