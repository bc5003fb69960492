"""Studies that outlive the terminal: leave it, look at them again, stop them.

Plain processes and files: no service manager and no special right is needed. A tuner that leaves its terminal
is the leader of a session of its own, so nothing that happens to the terminal reaches it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable
from dflash_deploy.server.processes import identity_of, send
from dflash_deploy.tune.journal import Begun, Ended, Event, Noted, Over, Reader, Staged, Tuner, tuner_of
from dflash_deploy.tune.outlook import Ending
from dflash_deploy.tune.records import StudyRecord, read_trials
from dflash_deploy.tune.screen import Screen, screen_for
from dflash_deploy.tune.studies import last_study, studies_dir

LOG = "tune.log"
"""In the study's folder: what a detached tuner says."""

_POLL_S = 0.25
_START_S = 60.0
_LAST_LINES = 12


def leave_terminal(folder: Path) -> Tuner | None:
    """Go on as a process of its own, in a session without a terminal.

    To be called while there is one thread. Returns twice: None in the new process, whose output goes to the
    study's log from now on; and in the old one, once the new one works on the study, who that is.

    Raises:
        DeployError: in the old process: the new one ended at once, and what it said.
    """
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        # A shell may tell all that it has started to hang up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, instead in enumerate((nothing, log, log)):
            os.dup2(instead, number)
        return None
    os.close(log)
    return _wait_for(child, folder)


def _wait_for(child: int, folder: Path) -> Tuner:
    identity = identity_of(child)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        tuner = tuner_of(folder)
        if tuner is not None and tuner.process == identity:
            return tuner
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code in (ExitCode.OK, ExitCode.FAILED):  # over before we looked
                return Tuner.model_construct(process=identity)
            raise DeployError(
                f"the detached tuner ended at once (exit status {code}): {_last_words(folder)}",
                fix=f"read {folder / LOG}",
                exit_code=ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED,
            )
        time.sleep(0.05)
    raise DeployError(
        f"the detached tuner (process {child}) has not begun within {_START_S:.0f} s",
        fix=f"read {folder / LOG}",
        exit_code=ExitCode.UNAVAILABLE,
    )


def _last_words(folder: Path) -> str:
    try:
        lines = (folder / LOG).read_text(errors="replace").splitlines()
    except OSError:
        return "it left no word"
    return " / ".join(printable(line, longest=300) for line in lines[-_LAST_LINES:]) or "it left no word"


def study_at_work() -> Path:
    """The one study that a tuner works on now, or the last one made where there is none, or more than one."""
    running = [path.parent for path in studies_dir().glob("*/tuner.json") if tuner_of(path.parent)]
    return running[0] if len(running) == 1 else last_study()


def require_tuner(folder: Path) -> Tuner:
    """Who works on a study now.

    Raises:
        DeployError: nobody that can be seen from here.
    """
    tuner = tuner_of(folder)
    if tuner is None:
        raise DeployError(
            f"no tuner works on {folder.name} now",
            fix=f"dflash-deploy report {folder.name} shows what there is; dflash-deploy tune --resume "
            f"{folder.name} goes on",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return tuner


def stop(folder: Path) -> Tuner:
    """Ask the tuner of a study to stop, as Ctrl-C in its terminal would.

    Raises:
        DeployError: nobody works on it.
    """
    tuner = require_tuner(folder)
    send(tuner.process, signal.SIGINT)
    return tuner


def watch(folder: Path, study: StudyRecord, stream: TextIO) -> Ending | None:
    """Show a study until its run has ended.

    The tuner knows nothing of it: whatever happens to who watches, the study goes on.

    Returns:
        Why the run went no further; None where its tuner ended without a word.
    """
    reader = Reader(folder)
    past = list(reader.new())
    with screen_for(stream, study, read_trials(folder)) as screen:
        screen.note(f"study {study.name} in {folder}; Ctrl-C leaves it running")
        _catch_up(screen, past)
        return _follow(folder, reader, screen)


def _follow(folder: Path, reader: Reader, screen: Screen) -> Ending | None:
    while True:
        # Asked first: what it wrote before its end is shown all the same.
        working = tuner_of(folder) is not None
        for event in reader.new():
            if isinstance(event, Over):
                return event.ending
            _show(screen, folder, event)
        if not working:
            return None
        time.sleep(_POLL_S)


def _catch_up(screen: Screen, past: list[Event]) -> None:
    """Show the trial that is being tried, and nothing of those that have ended."""
    begun = [place for place, event in enumerate(past) if isinstance(event, Begun)]
    if not begun:
        return
    running = past[begun[-1] :]
    if any(isinstance(event, Ended) for event in running):
        return
    for event in (running[0], *[event for event in running if isinstance(event, Staged)][-1:]):
        _show(screen, Path(), event)


def _show(screen: Screen, folder: Path, event: Event) -> None:
    match event:
        case Noted():
            screen.note(event.text)
        case Begun():
            screen.begun(event.candidate, event.outlook)
        case Staged():
            screen.stage(event.text)
        case Ended():
            for record in read_trials(folder):
                if record.number == event.number:
                    screen.ended(record)
        case Over():
            pass


def how_to_look(study: StudyRecord, tuner: Tuner) -> list[str]:
    """What a person can do with a study that goes on without them."""
    return [
        f"study {study.name} goes on without this terminal (process {tuner.process.pid})",
        f"look at it: dflash-deploy tune --attach {study.name}",
        f"stop it:    dflash-deploy tune --stop {study.name}",
    ]
