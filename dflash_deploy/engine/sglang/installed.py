"""The SGLang of an interpreter, asked itself: its version and the options of its own parser."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.engine.interpreter import ask
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.options import READERS, Kind, Option
from dflash_deploy.engine.sglang.versions import NEWEST
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.paths import cache_dir

_SCRIPT = Path(__file__).parents[2] / "inside" / "sglang_flags.py"
_MARK = b"DFLASH-DEPLOY-SGLANG "
_REMEMBERED_LIMIT_BYTES = 8 << 20
_KINDS: Mapping[str, Kind] = {
    "_StoreAction": "value",
    "_StoreTrueAction": "switch",
    "BooleanOptionalAction": "toggle",
    "LoRAPathAction": "lora",
    "DeprecatedAliasStoreAction": "old-value",
    "DeprecatedStoreTrueAction": "old-switch",
    "DeprecatedStoreConstAction": "old-const",
    "DeprecatedAction": "old-nothing",
}
_TYPES: Mapping[str | None, str] = {
    "int": "int",
    "float": "float",
    "human_readable_int": "size",
    "loads": "json",
    "json_list_type": "json-list",
    "nullable_str": "nullable",
    "parse_cuda_graph_backend_arg": "graph-backend",
    "parse_cuda_graph_config_arg": "graph-config",
}

_Word = Annotated[str, Field(max_length=400)]


class _Action(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    names: list[_Word] = Field(min_length=1, max_length=20)
    action: _Word
    type: _Word | None = None
    nargs: int | _Word | None = None
    choices: list[_Word] | None = Field(default=None, max_length=500)
    default: object = None
    dest: _Word
    instead: _Word | None = None
    refused: bool = False


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    version: _Word | None
    torch: _Word | None = None
    options: list[_Action] | None = Field(default=None, max_length=5000)
    error: Annotated[str, Field(max_length=4000)] | None = None


@dataclass(frozen=True)
class Installation:
    """An SGLang that can be started.

    ``flag_table`` comes from its own parser; where that could not be asked, from the release nearest to it,
    and the table's note says why.
    """

    python: Path
    version: str
    torch_version: str | None
    flag_table: FlagTable


_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


def inspect(
    python: Path, *, env: Mapping[str, str] = _NO_ENVIRONMENT, timeout_s: float = 180.0
) -> Installation:
    """Ask the SGLang of ``python``; remembered until another one is installed there.

    Args:
        python: that has it.
        env: environment variables that the server will have besides: modules may be found by them alone.
        timeout_s: longest wait for its answer.

    Raises:
        DeployError: there is no such interpreter, it has no SGLang, or it does not answer.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise DeployError(
            f"{python} is no Python interpreter",
            fix="give --python the interpreter of SGLang's environment, or set engine.python",
            exit_code=ExitCode.MISSING,
        )
    remembered = _remembered_at(python, env)
    report = _recall(remembered) if remembered is not None else None
    if report is None:
        answer = _ask(python, env, timeout_s)
        report = _read(answer)
        if report is None:
            raise DeployError(
                f"{python} does not say which SGLang it has",
                fix=f"{python} {_SCRIPT}",
                exit_code=ExitCode.FAILED,
            )
        if remembered is not None and report.version and report.options:
            # A cache that cannot be written costs time only.
            with suppress(OSError):
                write_atomic(remembered, answer)
    if not report.version:
        raise DeployError(
            f"SGLang is not installed for {python}",
            fix=f"{python} -m pip install sglang=={NEWEST}",
            exit_code=ExitCode.MISSING,
        )
    return Installation(python, report.version, report.torch, _table(report, report.version))


def _table(report: _Report, version: str) -> FlagTable:
    if not report.options:
        known = FlagTable.for_version(version)
        why = f"its own parser could not be asked ({report.error or 'no options'})"
        return FlagTable(version, known.options, note=f"{why}; {known.note or 'the shipped table is used'}")
    options = (_option(action) for action in report.options if action.action != "_HelpAction")
    return FlagTable(version, tuple(option for option in options if option is not None))


def _option(action: _Action) -> Option | None:
    kind = "old-error" if action.refused else _KINDS.get(action.action)
    names = [name[2:] for name in action.names if name.startswith("--")]
    if kind == "toggle":
        names = [name for name in names if not name.startswith("no-")]
    if not names:
        return None
    if kind is None:
        # An action that is new to us: what matters is whether it takes a value.
        kind = "switch" if action.nargs == 0 else "value"
    type_ = _TYPES.get(action.type, "text")
    nargs = action.nargs if isinstance(action.nargs, str) else ""
    if kind == "old-const" and action.nargs != 0:
        nargs = "one"
    choices = tuple(action.choices or ())
    if any(not _readable(type_, choice) for choice in choices):
        type_ = "text"
    return Option(
        names=tuple(names),
        kind=kind,
        type=type_,
        nargs=nargs if nargs in ("+", "*", "?", "one") else "",
        default=action.default,
        choices=choices,
        dest=action.dest,
        instead=_instead(action.instead),
    )


def _readable(type_: str, choice: str) -> bool:
    try:
        READERS[type_](choice)
    except Exception:  # noqa: BLE001 -- readers raise argparse's errors as well as plain ones
        return False
    return True


def _instead(text: str | None) -> str:
    """``--a=b`` or ``--x-{one,two}=v`` as ``Option.instead`` has it; words for people are left out."""
    if not text or not text.startswith("--"):
        return ""
    text = text[2:].split(" ", maxsplit=1)[0]
    head, brace, rest = text.partition("{")
    if not brace:
        return text
    inner, _, tail = rest.partition("}")
    return " ".join(f"{head}{one}{tail}" for one in inner.split(","))


def _remembered_at(python: Path, env: Mapping[str, str]) -> Path | None:
    """Where the answer is kept: by interpreter, variables, and name and time of SGLang's metadata folder."""
    found = sorted(python.absolute().parent.parent.glob("lib/python3*/site-packages/sglang-*.dist-info"))
    if len(found) != 1:
        return None
    with suppress(OSError):
        stamp = found[0].stat().st_mtime_ns
        key = "\0".join(
            (
                str(python.absolute()),
                str(python.resolve()),
                found[0].name,
                str(stamp),
                str(_SCRIPT.stat().st_mtime_ns),
                os.environ.get("PYTHONPATH", ""),
                *(f"{name}={value}" for name, value in sorted(env.items())),
            )
        )
        return (
            cache_dir() / "engine" / f"{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:32]}.json"
        )
    return None


def _recall(path: Path) -> _Report | None:
    try:
        with path.open("rb") as file:
            report = _read(file.read(_REMEMBERED_LIMIT_BYTES))
    except OSError:
        return None
    return report if report is not None and report.version and report.options else None


def _read(output: bytes) -> _Report | None:
    """The report in what the script printed, past whatever noise imports made."""
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            try:
                return _Report.model_validate_json(line[len(_MARK) :])
            except ValidationError:
                return None
    return None


def _ask(python: Path, env: Mapping[str, str], timeout_s: float) -> bytes:
    try:
        answer = ask([python, _SCRIPT], timeout_s=timeout_s, env=env)
    except OSError as error:
        raise DeployError(
            f"{python} cannot be started: {error}",
            fix="give --python the interpreter of SGLang's environment, or set engine.python",
            exit_code=ExitCode.MISSING,
        ) from error
    if answer.status is None:
        raise DeployError(
            f"{python} did not say within {timeout_s:.0f} s which SGLang it has",
            fix=f"{python} -c 'import sglang.srt.server_args'",
            exit_code=ExitCode.FAILED,
        )
    return answer.output
