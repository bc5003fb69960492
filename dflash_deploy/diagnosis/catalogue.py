"""The catalogue of failures: YAML files beside this module, read and checked. A new entry needs no code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash_deploy.diagnosis.entry import Entry, Example, FixRule, Role, Severity
from dflash_deploy.diagnosis.expression import ExpressionError, Template, parse, parse_template
from dflash_deploy.diagnosis.pattern import Pattern, PatternError, parse_pattern
from dflash_deploy.diagnosis.stage import CAPTURES, Stage
from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.errors import DeployError, ExitCode

FOLDER = Path(__file__).with_name("catalogue")

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_GROUPS = {"captures": CAPTURES, "any-capture": CAPTURES | {Stage.PREFILL_CAPTURE}}


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


_Texts = Annotated[list[str], BeforeValidator(_listed)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _FixInFile(_Model):
    when: str | None = None
    text: str
    flags: dict[str, str | int | float | bool | None] = {}


class _ExampleInFile(_Model):
    log: str
    fix_holds: str | None = None


class _EntryInFile(_Model):
    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    engine: str = "any"
    stage: str
    severity: Severity = "error"
    role: Role = "cause"
    patterns: _Texts
    at: _Texts = []
    needs: _Texts = []
    unless: _Texts = []
    when: str | None = None
    cause: _Texts
    fix: Annotated[list[str | _FixInFile], BeforeValidator(_listed)] = []
    evidence: _Texts
    versions: str = ""
    examples: Annotated[list[str | _ExampleInFile], BeforeValidator(_listed)]
    lookalikes: _Texts = []


@cache
def load_catalogue() -> tuple[Entry, ...]:
    """Every entry that is shipped, in the order of the files.

    Raises:
        DeployError: a file is damaged; it says which entry and how.
    """
    return tuple(entry for path in sorted(FOLDER.glob("*.yaml")) for entry in read_entries(path))


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The entries of one file.

    Raises:
        DeployError: it cannot be read, or an entry in it is wrong.
    """
    try:
        listed = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506  (a safe loader, either way)
    except (OSError, yaml.YAMLError) as error:
        raise _damaged(path, "", error) from error
    if not isinstance(listed, list):
        raise _damaged(path, "", "no list of entries")
    found = []
    for number, raw in enumerate(listed, 1):
        name = raw.get("id", f"number {number}") if isinstance(raw, dict) else f"number {number}"
        try:
            found.append(_entry(_EntryInFile.model_validate(raw)))
        except (ValidationError, PatternError, ExpressionError, ValueError) as error:
            raise _damaged(path, f", entry {name}", error) from error
    return tuple(found)


def _damaged(path: Path, where: str, why: object) -> DeployError:
    return DeployError(
        f"catalogue {path.name}{where}: {why}",
        fix="mend the file, then: dflash-deploy diagnose --selftest",
        exit_code=ExitCode.INVALID_INPUT,
    )


def _entry(raw: _EntryInFile) -> Entry:
    return Entry(
        id=raw.id,
        engine=raw.engine,
        stage=Stage.UNKNOWN if raw.stage == "as-logged" else Stage(raw.stage),
        severity=raw.severity,
        role=raw.role,
        patterns=_patterns(raw.patterns),
        at=frozenset(stage for name in raw.at for stage in _GROUPS.get(name) or {Stage(name)}),
        needs=_patterns(raw.needs),
        unless=_patterns(raw.unless),
        when=parse(raw.when) if raw.when else None,
        causes=tuple(parse_template(_flat(text)) for text in raw.cause),
        fixes=tuple(_fix(fix) for fix in raw.fix),
        evidence=tuple(raw.evidence),
        versions=raw.versions,
        examples=tuple(
            Example(example) if isinstance(example, str) else Example(example.log, example.fix_holds)
            for example in raw.examples
        ),
        lookalikes=tuple(raw.lookalikes),
    )


def _patterns(texts: Sequence[str]) -> tuple[Pattern, ...]:
    return tuple(parse_pattern(text) for text in texts)


def _fix(raw: str | _FixInFile) -> FixRule:
    if isinstance(raw, str):
        return FixRule(None, parse_template(_flat(raw)), {})
    return FixRule(
        parse(raw.when) if raw.when else None,
        parse_template(_flat(raw.text)),
        {name: _flag(value) for name, value in raw.flags.items()},
    )


def _flag(value: FlagValue | None) -> Template | FlagValue | None:
    return parse_template(value) if isinstance(value, str) and "{" in value else value


def _flat(text: str) -> str:
    return " ".join(text.split())
