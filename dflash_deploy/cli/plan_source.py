"""The configuration that ``plan`` is asked about, wherever it is written: profile, command, file or log."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.engine.launch import Flags
from dflash_deploy.engine.sglang.flags import FlagProblem, FlagTable
from dflash_deploy.engine.sglang.pasted.command import PastedCommand, read_text, read_words
from dflash_deploy.engine.sglang.pasted.service import unit_text
from dflash_deploy.engine.sglang.pasted.text import decoded
from dflash_deploy.engine.sglang.pasted.words import MAX_CHARS, shown
from dflash_deploy.errors import DeployError, ExitCode

_MAX_FILE_BYTES = 1 << 20
_MAX_LOG_BYTES = 16 << 20
_VERSION = re.compile(r"v?\d{1,6}(?:\.\w{1,20}){1,5}(?:[+-][\w.-]{1,80})?")


@dataclass(frozen=True)
class Asked:
    """The command line of ``plan``."""

    words: tuple[str, ...] = ()
    gpu: str | None = None
    sglang: str | None = None
    free_mib: float | None = None
    users: int | None = None
    from_file: str | None = None
    from_log: Path | None = None
    unit: str | None = None
    keep: bool = False


@dataclass(frozen=True)
class Configuration:
    """What is to be served, wherever it was read.

    Attributes:
        version_from: what says which SGLang is meant.
        card_id: the card that a profile is for.
        context_tokens: what a profile promises each user; ``output_tokens`` and ``tasks`` are its load.
    """

    flags: Flags
    version: str
    version_from: str
    source: str
    users: int | None = None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    problems: tuple[FlagProblem, ...] = ()
    notes: tuple[str, ...] = ()
    card_id: str | None = None
    context_tokens: int | None = None
    output_tokens: int | None = None
    tasks: Mapping[str, float] | None = None


def log_of(asked: Asked) -> str | None:
    """The text of the log that was given, or is to be kept of a unit; None without one.

    Raises:
        DeployError: it cannot be read.
    """
    if asked.unit is not None and asked.keep and asked.from_log is None:
        from dflash_deploy.watch.journal import unit_log

        with unit_log(asked.unit) as journal:
            return decoded(journal.read(_MAX_LOG_BYTES))
    return _read_file(asked.from_log, _MAX_LOG_BYTES) if asked.from_log else None


def configuration_of(asked: Asked, log: str | None) -> Configuration:
    """What is to be planned.

    Raises:
        DeployError: nothing, or more than one thing, was given, or it cannot be read.
    """
    if asked.sglang is not None and not _VERSION.fullmatch(asked.sglang.strip()):
        raise DeployError(
            f"{shown(asked.sglang)!r} is no SGLang version",
            fix="give one such as --sglang 0.5.23",
            exit_code=ExitCode.INVALID_INPUT,
        )
    if asked.keep and log is None:
        raise DeployError(
            "--keep keeps what a log teaches, and no log was given",
            fix="dflash-deploy plan --from-log FILE --keep, or --unit NAME --keep",
            exit_code=ExitCode.USAGE,
        )
    sources = [bool(asked.words), asked.from_file is not None, asked.unit is not None]
    if sum(sources) > 1 or (asked.from_log is not None and (sources[1] or sources[2])):
        raise DeployError(
            "more than one thing to plan was given",
            fix="give one of: a profile, -- COMMAND, --from FILE, --from-log FILE, --unit NAME",
            exit_code=ExitCode.USAGE,
        )
    if asked.words:
        return _of_words(asked)
    if asked.from_file is not None:
        return _of_text(asked.from_file, asked.sglang)
    if asked.unit is not None:
        text = unit_text(asked.unit)
        return _pasted(read_text(text, source=f"unit {asked.unit}", version=asked.sglang))
    if log is not None:
        # A server that has run for days has written more than a command can be; its settings come first.
        return _pasted(read_text(log[:MAX_CHARS], source=str(asked.from_log), version=asked.sglang))
    raise DeployError(
        "nothing to plan was given",
        fix="dflash-deploy plan PROFILE (dflash-deploy profile list), or "
        "dflash-deploy plan -- python -m sglang.launch_server --model-path …",
        exit_code=ExitCode.USAGE,
    )


def _of_words(asked: Asked) -> Configuration:
    words = asked.words
    if words[0].startswith("-") and not any("sglang" in word or word.startswith("--model") for word in words):
        raise DeployError(
            f"no such option: {words[0][:60]}", fix="dflash-deploy plan --help", exit_code=ExitCode.USAGE
        )
    if len(words) == 1 and not re.search(r"\s", words[0]) and not words[0].startswith("-"):
        return _of_profile(words[0], asked.sglang)
    return _pasted(read_words(words, version=asked.sglang))


def _of_text(place: str, version: str | None) -> Configuration:
    if place == "-":
        text = decoded(sys.stdin.buffer.read(_MAX_FILE_BYTES))
        return _pasted(read_text(text, source="standard input", version=version))
    path = Path(place)
    text = _read_file(path, _MAX_FILE_BYTES)
    return _pasted(read_text(text, source=place, folder=path.parent, version=version))


def _of_profile(name: str, version: str | None) -> Configuration:
    from dflash_deploy.profile.load import load_profile
    from dflash_deploy.tune.launching import configured, values, variables

    profile = load_profile(name)
    notes: tuple[str, ...] = ()
    known = profile.known[0] if profile.known else None
    if known is not None:
        notes = (f"the profile's known setting {known.name!r} is planned; tune tries others",)
    flags = configured(profile, known.flags if known else {}, simulated=True)
    meant = version or profile.engine.version
    argv = FlagTable.for_version(meant).spell(values(flags))
    return Configuration(
        flags=values(flags),
        version=meant,
        version_from="given" if version else "profile",
        source=f"profile {name}",
        users=profile.workload.users,
        argv=argv,
        env={**profile.env, **variables(flags)},
        notes=notes,
        card_id=profile.card,
        context_tokens=profile.workload.context_tokens,
        output_tokens=profile.workload.output_tokens,
        tasks={str(task): share for task, share in profile.workload.tasks.items()},
    )


def _pasted(command: PastedCommand) -> Configuration:
    return Configuration(
        flags=command.flags,
        version=command.version,
        version_from=command.version_from,
        source=command.source,
        argv=command.argv,
        env=command.env,
        problems=command.problems,
        notes=command.notes,
    )


def _read_file(path: Path, most_bytes: int) -> str:
    if path == Path():
        raise DeployError("expected a file, found an empty name", exit_code=ExitCode.INVALID_INPUT)
    named = shown(str(path), longest=200)
    try:
        # Opening a FIFO that nobody writes would wait for ever without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
                raise DeployError(f"{named}: expected a file", exit_code=ExitCode.INVALID_INPUT)
            os.set_blocking(descriptor, True)
            return decoded(file.read(most_bytes))
    except FileNotFoundError as error:
        raise DeployError(f"{named}: no such file", exit_code=ExitCode.MISSING) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DeployError(f"{named}: cannot be read: {reason}", exit_code=ExitCode.INVALID_INPUT) from error
