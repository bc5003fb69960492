"""The serving environment of the real lane: SGLang 0.5.23 on a CPU, made once, outside the checkout.

``python tests/real/environment.py`` makes it (some minutes, about 1.5 GB) and prints its interpreter. The
tool's own environment never holds it: as on a real machine, the server runs under another interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).resolve().parent
STUBS = HERE / "stubs"
REQUIREMENTS = HERE / "requirements-sglang-cpu.txt"
TINY_MODEL = HERE / "tiny_model.py"
LICENSE = HERE.parents[1] / "LICENSE"
SGLANG_VERSION = "0.5.23"
TORCH = "torch==2.13.0"
"""Not the version that SGLang pins: the server runs with it, and CPU builds of it are easy to get."""

_NEWEST_GLIBC_NEEDED = (2, 34)


class EnvironmentMissingError(Exception):
    """The environment cannot be made or is not there; the message says what to do."""


@dataclass(frozen=True)
class ServingEnvironment:
    """Where the server's interpreter is, and what it needs to run on a CPU."""

    folder: Path

    @property
    def python(self) -> Path:
        """Interpreter that has SGLang."""
        return self.folder / "bin" / "python"

    @property
    def complete(self) -> bool:
        """False while it is being made, and after a making that was cut short."""
        return self._stamp.is_file()

    @property
    def _stamp(self) -> Path:
        return self.folder / ".complete"

    def variables(self) -> dict[str, str]:
        """Environment variables to start the server with."""
        return {
            "PYTHONPATH": str(STUBS),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            # More would wait for one another in turns when the machine is busy, a hundred times slower.
            "OMP_NUM_THREADS": "1",
        }


def cache_root() -> Path:
    """Folder of what the lane makes and keeps: ``DFLASH_CI_CACHE``, else one under the user's cache."""
    given = os.environ.get("DFLASH_CI_CACHE")
    if given:
        return Path(given).expanduser().resolve()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "dflash-deploy-ci"


def serving_environment() -> ServingEnvironment:
    """The environment of the requirements as they stand now, made or not."""
    wanted = REQUIREMENTS.read_bytes() + TORCH.encode()
    return ServingEnvironment(
        cache_root() / f"sglang-cpu-{SGLANG_VERSION}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    )


def make() -> ServingEnvironment:
    """Make the environment if it is not there; a second maker waits for the first.

    ``DFLASH_CI_PIP_ARGS`` holds further arguments for pip when it installs torch, such as an index of
    CPU builds.

    Raises:
        EnvironmentMissingError: this machine lacks something, or an installation failed.
    """
    environment = serving_environment()
    with _only_one_maker(environment.folder):
        if environment.complete:
            return environment
        _check_machine()
        started = time.monotonic()
        _say(f"making {environment.folder} (once; about 1.5 GB and a few minutes)")
        # Interpreters hold absolute paths, so it is made in place; what lies there is a making cut short.
        shutil.rmtree(environment.folder, ignore_errors=True)
        _run("virtual environment", _python_3_11(), "-m", "venv", str(environment.folder))
        pip = [str(environment.python), "-m", "pip", "install", "--no-cache-dir", "--quiet"]
        _run(f"{TORCH}", *pip, *shlex.split(os.environ.get("DFLASH_CI_PIP_ARGS", "")), TORCH)
        _run(f"SGLang {SGLANG_VERSION}", *pip, "--no-deps", "-r", str(REQUIREMENTS))
        _run(
            "first import",
            *(str(environment.python), "-c", "import sglang.srt.server_args, torch"),
            variables=environment.variables(),
        )
        environment._stamp.touch()
        _say(f"made in {time.monotonic() - started:.0f} s")
    return environment


def make_tiny_model(environment: ServingEnvironment) -> Path:
    """Folder of the model that the lane serves, made by the serving interpreter if it is not there.

    Raises:
        EnvironmentMissingError: it could not be made.
    """
    sources = TINY_MODEL.read_bytes() + LICENSE.read_bytes()
    folder = environment.folder.parent / f"tiny-model-{hashlib.sha256(sources).hexdigest()[:12]}"
    with _only_one_maker(folder):
        if not folder.is_dir():
            half_made = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(half_made, ignore_errors=True)
            _run(
                "tiny model",
                *(str(environment.python), str(TINY_MODEL), str(half_made)),
                variables=environment.variables(),
            )
            half_made.rename(folder)
    return folder


@contextmanager
def _only_one_maker(folder: Path) -> Iterator[None]:
    """Hold the lock beside ``folder``, waiting for whoever is making it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_machine() -> None:
    libc, version = platform.libc_ver()
    if platform.machine() != "x86_64" or libc != "glibc":
        raise EnvironmentMissingError("the SGLang wheel is for Linux on x86-64 with glibc")
    if tuple(int(part) for part in version.split(".")[:2]) < _NEWEST_GLIBC_NEEDED:
        raise EnvironmentMissingError(f"the SGLang wheel needs glibc 2.34 or newer, and this is {version}")
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        raise EnvironmentMissingError(
            f"SGLang compiles its n-gram corpus: {' and '.join(missing)} not found"
            " (Debian and Ubuntu: apt-get install g++ ninja-build)"
        )


def _python_3_11() -> str:
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise EnvironmentMissingError("the SGLang wheel is for Python 3.11: no python3.11 on the PATH")
    return found


def _run(what: str, *command: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    _say(f"{what} …")
    try:
        subprocess.run(command, check=True, env={**os.environ, **variables})
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentMissingError(f"{what}: {error}") from error


def _say(text: str) -> None:
    print(f"real lane: {text}", file=sys.stderr, flush=True)  # noqa: T201  # a script


if __name__ == "__main__":
    try:
        made = make()
        make_tiny_model(made)
        print(made.python)  # noqa: T201  # a script
    except EnvironmentMissingError as error:
        sys.exit(f"real lane: {error}")
