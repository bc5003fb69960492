"""Result files as a stranger may see them.

What this tool says itself stays, but for names, addresses and paths in it. What a server says goes: it may
hold anything.
"""

from __future__ import annotations

import re
from functools import cache
from getpass import getuser
from pathlib import Path
from platform import node

from dflash_deploy.bench.results import Failure, Machine, Quality, ResultFile, Run

_Setting = bool | int | float | str | list[int] | list[float] | list[str]

_SECRET = re.compile(r"key|token-file|(^|-)token$|password|secret|auth", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:sk|hf|pk|gsk|nvapi|ghp|xox[a-z])[-_][\w-]{3,}|\bbearer\s+\S+|\b[\w-]{32,}\b", re.IGNORECASE
)
_PATH = re.compile(r"(?<![\w<])(?:~[\w-]*|\.{1,2}|[A-Za-z]:)?[/\\](?:[^\s'\",:;()\[\]]+)")
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://\S+|[\w.+-]+@[\w.-]+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"
    r"|\[[0-9a-f:]{2,}\](?::\d+)?|\b(?:[0-9a-f]{1,4}:){2,7}[0-9a-f]{0,4}|(?<!\w)::[0-9a-f]{1,4}\b"
    r"|\b(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?\b|\blocalhost(?::\d+)?\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|“[^”]*”")
_PLAIN_PLACE = re.compile(r"[\w./\\:@~+-]+")
_STATUS = re.compile(r"HTTP \d{3}")
_NOBODYS_NAMES = frozenset({"root", "user", "ubuntu", "localhost", "localhost.localdomain"})
_LEAST_NAME = 3


def redacted(result: ResultFile) -> ResultFile:
    """Without host names, addresses, paths, keys, and anything of prompts and answers but their digests."""
    machine = None if result.machine is None else _machine(result.machine)
    runs = [_run(run) for run in result.runs]
    return result.model_copy(update={"redacted": True, "machine": machine, "runs": runs})


def _machine(machine: Machine) -> Machine:
    # A kernel that somebody built is called as they like.
    kernel = re.match(r"\d+(?:\.\d+)*", machine.kernel or "")
    return machine.model_copy(update={"kernel": kernel.group() if kernel else None})


def _run(run: Run) -> Run:
    failed = run.outcome == "unstable" and bool(run.failures)
    reason = None if run.reason is None else _scrubbed(_without_example(run.reason))
    return run.model_copy(
        update={
            "url": None if run.url is None else "<url>",
            "model": None if run.model is None else _last_part(run.model),
            "engine_version": None if run.engine_version is None else _scrubbed(run.engine_version),
            "reason": _outline(run.failures[0]) if failed else reason,
            "flags": None
            if run.flags is None
            else {name: _setting(name, value) for name, value in run.flags.items()},
            "quality": None if run.quality is None else _quality(run.quality),
            "failures": [one.model_copy(update={"example": _outline(one)}) for one in run.failures],
            "notes": [_note(note, run) for note in run.notes],
        }
    )


def _quality(quality: Quality) -> Quality:
    return quality.model_copy(
        update={
            "missed": dict.fromkeys(quality.missed, "<answer>"),
            "faults": [_scrubbed(_without_example(fault)) for fault in quality.faults],
        }
    )


def _outline(failure: Failure) -> str:
    """Of a server's own words none, for they may be those of the prompt."""
    status = _STATUS.match(failure.example)
    return status.group() if status else failure.kind


def _note(note: str, run: Run) -> str:
    for failure in run.failures:
        note = note.replace(failure.example, _outline(failure))
    return _scrubbed(note)


def _setting(name: str, value: _Setting) -> _Setting:
    if _SECRET.search(name):
        return "<secret>"
    if isinstance(value, list):
        return [_place(one) if isinstance(one, str) else one for one in value]  # type: ignore[return-value]
    return _place(value) if isinstance(value, str) else value


def _place(text: str) -> str:
    """A path or hub name without whose it is; of a text like JSON what is harmless."""
    if "/" not in text and "\\" not in text:
        return _scrubbed(text)
    return _last_part(text) if _PLAIN_PLACE.fullmatch(text) else "<text>"


def _last_part(place: str) -> str:
    """Of a folder or a hub name: the name of the model, without whose it is or where."""
    last = re.split(r"[/\\]", place.rstrip("/\\"))[-1]
    # A version has dots, as an address has.
    return _scrubbed(last) if "://" in place else _nameless(_TOKEN.sub("<secret>", last))


def _without_example(fault: str) -> str:
    return fault.split(", for example", 1)[0]


def _scrubbed(text: str) -> str:
    for pattern, stand_in in (
        (_QUOTED, "<text>"),
        (_ADDRESS, "<address>"),
        (_PATH, "<path>"),
        (_TOKEN, "<secret>"),
    ):
        text = pattern.sub(stand_in, text)
    return _nameless(text)


def _nameless(text: str) -> str:
    names = _names_here()
    return re.sub(rf"\b(?:{'|'.join(names)})\b", "<name>", text, flags=re.IGNORECASE) if names else text


@cache
def _names_here() -> tuple[str, ...]:
    """Of this machine and who works on it, longest first."""
    try:
        user = getuser()
    except (KeyError, OSError):
        user = ""
    names = {user, Path.home().name, node(), node().split(".")[0]}
    known = {name for name in names if len(name) >= _LEAST_NAME and name.lower() not in _NOBODYS_NAMES}
    return tuple(re.escape(name) for name in sorted(known, key=len, reverse=True))
