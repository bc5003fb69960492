"""Diagnose a log: the one function that commands, trials and services call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from io import BufferedIOBase
from pathlib import Path

from dflash_deploy.diagnosis.catalogue import load_catalogue
from dflash_deploy.diagnosis.scan import Index, Scanner
from dflash_deploy.diagnosis.source import Source, blocks_of, open_log
from dflash_deploy.diagnosis.verdict import Diagnosis, judge
from dflash_deploy.engine.launch import FlagValue

_LOADING = threading.Lock()


def diagnose(
    log: Path | BufferedIOBase | Iterable[str],
    *,
    exit_status: int | None = None,
    flags: Mapping[str, FlagValue] | None = None,
    index: Index | None = None,
) -> Diagnosis:
    """What a log says of a failure.

    Args:
        log: a file (gzip, bz2 and xz too), an open one, or lines.
        exit_status: of the server's main process, negative for a signal, where it is known.
        flags: engine flags it ran with, where they are known better than the log tells.
        index: a catalogue other than the one that is shipped.

    Raises:
        DeployError: the file is not there or cannot be read.
    """
    if isinstance(log, Path):
        with open_log(log) as file:
            return diagnose(file, exit_status=exit_status, flags=flags, index=index)
    scanner = Scanner(index or _index())
    damaged = None
    if isinstance(log, BufferedIOBase):
        source = Source(log)
        for block in source.blocks():
            scanner.feed(block)
        damaged = source.damaged
    else:
        for block in blocks_of(log):
            scanner.feed(block)
    scanner.finish()
    # SGLang's main process ends itself by SIGKILL once a child has died: no news where that is logged.
    if exit_status and not scanner.start.told_its_end:
        scanner.say(_words(exit_status))
    known = {
        name.replace("-", "_"): value
        for name, value in (flags or {}).items()
        if isinstance(value, bool | int | float | str)
    }
    return judge(scanner, known, exit_status=exit_status, damaged=damaged)


def _index() -> Index:
    """The catalogue that is shipped, loaded once however many threads ask for it at once."""
    # Python 3.11's parser, which reads the catalogue's expressions, fails at times in two threads at once.
    with _LOADING:
        return _shipped()


@cache
def _shipped() -> Index:
    return Index(load_catalogue())


def _words(exit_status: int) -> str:
    """An exit status as a line of a log, so that the catalogue can speak of it."""
    number = -exit_status if exit_status < 0 else exit_status - 128 if 128 < exit_status < 160 else 0
    name = signal.Signals(number).name if number in set(signal.Signals) else None
    return f"the process ended with exit status {exit_status}" + (f" by signal {name}" if name else "")
