"""The installer, uv or pip: an interpreter found, a virtual environment made, packages put into it."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable
from dflash_deploy.server import exec_shim
from dflash_deploy.serving_env import trees
from dflash_deploy.serving_env.pins import EnginePin, whole_path

Say = Callable[[str], None]
Tool = Literal["uv", "pip"]

_SHOWN = re.compile(
    r"\s*(?:Downloading |Downloaded |Collecting |Building |Built |Cloning |Resolved |Prepared |Installing "
    r"|Installed |Updating |Successfully |Using Python |Creating virtual environment )"
)
_QUIET_S = 20.0
_ASK_S = 30.0
_TAIL_LINES = 15
_CAUSES: tuple[tuple[re.Pattern[str], str, ExitCode], ...] = (
    (
        re.compile(r"No space left on device|os error 28|Disk quota exceeded", re.IGNORECASE),
        "the disk is full",
        ExitCode.UNAVAILABLE,
    ),
    # pip says of an index that it could not reach that it has no version either.
    (
        re.compile(
            r"Temporary failure in name resolution|Connection refused|Network is unreachable|dns error"
            r"|Connection timed out|Read timed out|Failed to fetch|error sending request"
            r"|connection broken by",
            re.IGNORECASE,
        ),
        "the package index cannot be reached",
        ExitCode.UNAVAILABLE,
    ),
    (
        re.compile(r"No matching distribution|No solution found|unsatisfiable|ResolutionImpossible"),
        "the wanted versions cannot be had together, or not for this interpreter",
        ExitCode.INVALID_INPUT,
    ),
    (
        re.compile(r"THESE PACKAGES DO NOT MATCH THE HASHES|Hash mismatch", re.IGNORECASE),
        "a file is not the one that the pin names: its SHA-256 differs",
        ExitCode.INVALID_INPUT,
    ),
)
_FIXES = {
    ExitCode.UNAVAILABLE: "mend that and run the same command again: what was downloaded is kept",
    ExitCode.INVALID_INPUT: "correct the pin (dflash-deploy env create --help), then run it again",
}


@dataclass(frozen=True)
class Installer:
    """The program that fills environments."""

    tool: Tool
    version: str
    uv: str | None = None

    def __str__(self) -> str:
        return f"{self.tool} {self.version}"


@dataclass(frozen=True)
class Job:
    """One environment's making: who does it, where its output goes, and the lock that it holds.

    Attributes:
        lock: descriptor that every program started holds open too.
    """

    installer: Installer
    log: IO[bytes]
    log_path: Path
    say: Say
    lock: int


def find_installer(wanted: Tool | None) -> Installer:
    """The uv that is there, else the pip of the new environment itself.

    Raises:
        DeployError: uv was asked for and is not there.
    """
    uv = shutil.which("uv") if wanted != "pip" else None
    if uv is not None:
        said = _ask(uv, "--version")
        if said is not None:
            return Installer("uv", said.removeprefix("uv ").split(" ", maxsplit=1)[0], uv)
    if wanted == "uv":
        raise DeployError(
            "uv is not on the PATH, or does not start",
            fix="install it (https://docs.astral.sh/uv), or leave --installer out to use pip",
            exit_code=ExitCode.MISSING,
        )
    return Installer("pip", "of the environment")


def find_python(version: str, installer: Installer) -> str:
    """What to make the environment from: a path, or a version that uv looks for and downloads if it must.

    Raises:
        DeployError: pip is to be used, and there is no interpreter of that version.
    """
    candidates = [sys.executable, shutil.which(f"python{version}"), shutil.which("python3")]
    for candidate in candidates:
        if (
            candidate
            and _ask(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version
        ):
            return candidate
    if installer.tool == "uv":
        return version
    raise DeployError(
        f"there is no Python {version} here: no python{version} on the PATH that starts",
        fix=f"install Python {version} with its venv module, or install uv, which downloads it",
        exit_code=ExitCode.MISSING,
    )


def make_venv(folder: Path, python: str, job: Job) -> None:
    """An empty virtual environment where nothing is yet.

    Raises:
        DeployError: it cannot be made.
    """
    if job.installer.uv is not None:
        command = [job.installer.uv, "venv", "--no-project", "--python", python, str(folder)]
    else:
        command = [python, "-m", "venv", str(folder)]
    _run(command, job)


def install(folder: Path, pin: EnginePin, constraints: Path | None, job: Job) -> None:
    """Install what the pin names.

    Raises:
        DeployError: it cannot be had; the message ends with what the installer said last.
    """
    options: list[str] = []
    for url in pin.extra_index_urls:
        options += ["--extra-index-url", url]
    for link in pin.find_links:
        options += ["--find-links", link if "://" in link else str(whole_path(link))]
    if constraints is not None:
        options += ["--constraint", str(constraints)]
    install_packages(folder, pin.requirements(), job, options=options)


def install_packages(
    folder: Path, requirements: Sequence[str], job: Job, *, options: Sequence[str] = ()
) -> None:
    """Install these packages, with options that uv and pip both know.

    Raises:
        DeployError: as above.
    """
    python = folder / "bin" / "python"
    if job.installer.uv is not None:
        # uv's own choice is to link files from its cache: whoever then edits one in place, changes the cache
        # and every other environment too. Blocks shared until one side is written are as good as a copy.
        link_mode = "clone" if trees.can_share_blocks(folder) else "copy"
        command = [job.installer.uv, "pip", "install", "--python", str(python), "--link-mode", link_mode]
    else:
        command = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        command.append("--disable-pip-version-check")
    _run([*command, *options, *requirements], job)


def _run(command: Sequence[str], job: Job) -> None:
    """Run to the end, its output into the log and the telling lines to the person.

    The command dies with this process; until it does, it holds the environment's lock.
    """
    log = job.log
    log.write(f"$ {' '.join(command)}\n".encode(errors="replace"))
    log.flush()
    began = log.tell()
    shim = [sys.executable, "-I", "-S", exec_shim.__file__, str(os.getpid()), *command]
    process = subprocess.Popen(
        shim,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(job.lock,),
        env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        _follow(process, log, job.say)
        status = process.wait()
    except BaseException:
        # Not yet reaped, so the group is still the one that this command leads.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status != 0:
        raise _failure(command, status, job.log_path, began)


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], say: Say) -> None:
    output = process.stdout
    assert output is not None  # noqa: S101 - asked for above
    descriptor = output.fileno()
    started = said_at = time.monotonic()
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], _QUIET_S)
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            log.write(chunk)
            log.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if _SHOWN.match(text):
                    say(f"  {printable(text.strip(), longest=120)}")
                    said_at = time.monotonic()
            rest = rest[-(1 << 16) :]
        if time.monotonic() - said_at > _QUIET_S:
            said_at = time.monotonic()
            say(f"  still at work after {said_at - started:.0f} s")
    output.close()


def _failure(command: Sequence[str], status: int, log_path: Path, began: int) -> DeployError:
    with log_path.open("rb") as written:
        written.seek(max(began, written.seek(0, os.SEEK_END) - (64 << 10)))
        text = written.read().decode(errors="replace")
    tail = [printable(line, longest=200) for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
    why, code = f"it ended with status {status}", ExitCode.FAILED
    for pattern, cause, exit_code in _CAUSES:
        if pattern.search(text):
            why, code = cause, exit_code
            break
    name = Path(command[0]).name
    return DeployError(
        "\n".join([f"{name} could not do it: {why}", *(f"    {line}" for line in tail)]),
        fix=f"{_FIXES.get(code, 'see the whole log')} (log: {log_path})",
        exit_code=code,
    )


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()[:200]
