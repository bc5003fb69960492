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

from dflash_deploy.bench.record import ENDED_EARLY
from dflash_deploy.bench.results import Failure, Machine, Quality, ResultFile, Run

_Setting = bool | int | float | str | list[int] | list[float] | list[str]

_SECRET = re.compile(r"key|token-file|(^|-)token$|password|secret|auth", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:sk|hf|pk|gsk|nvapi|ghp|glpat|npm|github_pat|xox[a-z])[-_][\w-]{3,}|\bAKIA\w{8,}|\beyJ[\w-]+(?:\.[\w-]*)*"
    r"|\bbearer\s+\S+|\b[\w-]*(?:key|token|password|passwd|secret)['\"]?\s*[=:]\s*\S+|\b[\w-]{32,}\b",
    re.IGNORECASE,
)
_PATH_PART = r"[^\s/\\'\",:;()\[\]]+"
_PATH = re.compile(
    rf"(?<![\w<])(?:~[\w-]*|\.{{1,2}}|[A-Za-z]:)?[/\\]+{_PATH_PART}"
    # Words after a blank belong to it where a further part follows them.
    rf"(?:(?: {_PATH_PART}){{0,4}}[/\\]+{_PATH_PART})*[/\\]*"
)
_IPV6 = r"(?<![\w:.])(?=[0-9a-f]*:[0-9a-f:.]*[0-9a-f:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f.]*(?:%\w+)?(?![\w:])"
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://\S+|[\w.+-]+@[\w.-]+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"
    rf"|\[{_IPV6}\](?::\d+)?|{_IPV6}"
    r"|\b(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?\b|\blocalhost(?::\d+)?\b",
    re.IGNORECASE,
)
_PLACE_OF_A_HOST = re.compile(r"(^|-)(host|addr|address|url|ip|endpoint|server|bind)$", re.IGNORECASE)
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
            "notes": [_scrubbed(_without_words(note)) for note in run.notes],
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


def _without_words(note: str) -> str:
    """A note of ours, without the words of the server that ended it all."""
    if not note.startswith(ENDED_EARLY):
        return note
    where, _, why = note.removeprefix(ENDED_EARLY).partition(": ")
    status = _STATUS.match(why)
    return f"{ENDED_EARLY}{where}" + (f": {status.group()}" if status else "")


def _setting(name: str, value: _Setting) -> _Setting:
    if _SECRET.search(name):
        return "<secret>"
    if _PLACE_OF_A_HOST.search(name):
        return "<address>"
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
        (_TOKEN, "<secret>"),
        (_ADDRESS, "<address>"),
        (_PATH, "<path>"),
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
