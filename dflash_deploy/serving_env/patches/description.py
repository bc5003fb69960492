"""What a patch is: ``patches/<name>/patch.yaml``, read and checked."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dflash_deploy import yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.resources import resource_dir
from dflash_deploy.serving_env.patches.syntax import capture_names, parameter_names, parse_pattern

WHOLE = "whole"
"""The name by which a replacement takes in all that its pattern matched."""


def _pattern(text: str) -> str:
    parse_pattern(text)
    return text


def _beside(text: str) -> str:
    if PurePosixPath(text).name != text:
        raise ValueError(f"expected the name of a file beside the description, found {text!r}")
    return text


def _inside_package(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        raise ValueError(f"expected the path of a .py file below the site-packages folder, found {text!r}")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Upstream(_Part):
    """What SGLang itself did about the symptom."""

    references: tuple[str, ...] = Field(strict=False)
    """Pull requests and issues."""
    since: str | None = None
    """First release with a fix of its own, or nothing where there is none."""
    note: str


class VersionNote(_Part):
    """Something to know about a range of releases, both ends in it."""

    first: str
    last: str
    text: str


class Parameter(_Part):
    """A value that is chosen when the patch is applied."""

    summary: str
    choices: tuple[str, ...] = Field(strict=False, min_length=1)
    variable: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")] | None = None
    """Environment variable by which one server takes another of the choices than the one applied."""


class Subject(_Part):
    """What must be in the file for the patch to have anything to say about it."""

    defines: tuple[str, ...] = Field(strict=False, min_length=1)
    """Qualified names, any one of which is enough."""
    absent: str
    """What it means that there is none, in words."""


class Form(_Part):
    """Code known by its parts: one function that has all of ``all`` and none of ``none``."""

    means: str
    all: tuple[Pattern, ...] = Field(strict=False, min_length=1)
    none: tuple[Pattern, ...] = Field(strict=False, default=())


class Way(_Part):
    """One spelling of the place to change, and what to write there.

    ``replace`` may name the pattern's parts (``$name``), all that it matched (``$whole``), what ``bind`` of
    the patch found (``$name`` too), and parameters (``${name}``).
    """

    find: Pattern
    where: dict[str, str] = Field(default_factory=dict)
    """For a named part the source that it must equal."""
    part: str = WHOLE
    """The named part that is replaced."""
    replace: str


class Edit(_Part):
    """A place to change: the first way that fits a node is taken, at every such node."""

    what: str
    required: bool = True
    ways: tuple[Way, ...] = Field(strict=False, min_length=1)


class Patch(_Part):
    """One change to one module of SGLang."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    summary: str
    symptom: str
    upstream: Upstream
    versions: str
    """Releases and commits that it is for, in words; the content of the file decides."""
    notes: tuple[VersionNote, ...] = Field(strict=False, default=())
    limits: tuple[str, ...] = Field(strict=False)
    advice: tuple[str, ...] = Field(strict=False, default=())
    """Entries of ``serving_env.advice`` that are told beside the verdict, where they hold."""
    drop_when: str
    file: Annotated[str, AfterValidator(_inside_package)]
    functions: tuple[str, ...] = Field(strict=False, min_length=1)
    """Qualified names of the functions to look in; ``*`` stands for any part of one."""
    subject: Subject
    fixed: tuple[Form, ...] = Field(strict=False, min_length=1)
    """Forms that need nothing done."""
    refused: tuple[Form, ...] = Field(strict=False, default=())
    """Forms that are neither fixed nor safe to change."""
    bind: tuple[Pattern, ...] = Field(strict=False, default=())
    """Patterns whose named parts the edits of a function may use; the first that fits is taken."""
    edits: tuple[Edit, ...] = Field(strict=False, min_length=1)
    insert: Annotated[str, AfterValidator(_beside)] | None = None
    """File beside the description whose lines are put in before the first changed definition; it may name
    parameters (``${name}``)."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    decided_by: Literal["bmm_probe"] | None = None
    """The measurement that says whether the patch is needed; without one, the code itself says it."""
    check: Literal["check_lm_head", "check_bmm_backend"]
    """Script in ``inside/`` by which the serving interpreter tries the installed result."""


def patches_dir() -> Path:
    """The shipped patches."""
    return resource_dir("patches")


def patch_names() -> tuple[str, ...]:
    """Names of the shipped patches."""
    return tuple(sorted(path.parent.name for path in patches_dir().glob("*/patch.yaml")))


def load_patch(name: str) -> Patch:
    """Read a shipped patch.

    Raises:
        DeployError: there is none of that name, or its description is wrong.
    """
    known = patch_names()
    if name not in known:
        raise DeployError(
            f"no patch is named {yaml_file.describe(name)}{yaml_file.nearest(name, known)}",
            fix=f"use one of: {', '.join(known)}",
            exit_code=ExitCode.USAGE,
        )
    return read_patch(patches_dir() / name / "patch.yaml")


def read_patch(path: Path) -> Patch:
    """Read a description.

    Raises:
        DeployError: it is wrong; every mistake is named with its line.
    """
    document = yaml_file.read(path)
    patch = yaml_file.validate(document, Patch)
    problems = [document.problem(("name",), f"expected the folder's name, {path.parent.name!r}")]
    problems = [] if patch.name == path.parent.name else problems
    bound = {name for pattern in patch.bind for name in capture_names(pattern)}
    for number, edit in enumerate(patch.edits):
        for way_number, way in enumerate(edit.ways):
            here = ("edits", number, "ways", way_number)
            parts = capture_names(way.find)
            unknown = capture_names(way.replace) - parts - bound - {WHOLE}
            if unknown:
                problems.append(document.problem((*here, "replace"), f"no part is named {sorted(unknown)}"))
            if way.part != WHOLE and way.part not in parts:
                problems.append(document.problem((*here, "part"), f"the pattern has no part ${way.part}"))
            if named := parameter_names(way.replace) - patch.parameters.keys():
                problems.append(
                    document.problem((*here, "replace"), f"no parameter is named {sorted(named)}")
                )
    if patch.insert is not None:
        try:
            named = parameter_names((path.parent / patch.insert).read_text(encoding="utf-8"))
        except OSError:
            problems.append(document.problem(("insert",), f"there is no file {patch.insert} beside it"))
        else:
            if named := named - patch.parameters.keys():
                problems.append(document.problem(("insert",), f"no parameter is named {sorted(named)}"))
    if problems:
        raise yaml_file.InvalidDocument(problems)
    return patch
