"""Find a profile, lay its layers over one another, and check it.

From the bottom up: the profiles shipped with the tool, a person's own in
``~/.config/dflash-deploy/profiles``, a file given by its path, ``--set key=value``. A profile replaces one of
the same name below it; with ``extends: NAME`` it is laid over that profile instead (``layers`` says how), and
``NAME`` may be its own name. A known setting from below that the layers above rule out is left out.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_deploy import paths, yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile import layers
from dflash_deploy.profile.checks import problems_of, ruled_out
from dflash_deploy.profile.schema import Profile
from dflash_deploy.resources import resource_dir
from dflash_deploy.yaml_file import Document, InvalidDocument

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class ResolvedProfile:
    """A checked profile and where it comes from.

    Attributes:
        name: of the file, without its suffix.
        files: that it was read from, the topmost first.
        document: all layers in one, before defaults.
    """

    name: str
    profile: Profile
    files: tuple[Path, ...]
    document: Document


@dataclass(frozen=True)
class ProfileEntry:
    """One profile that there is.

    Attributes:
        layer: where it lies.
        summary: its own words, empty where it is wrong.
        shadowed_by: file of the same name that is taken instead.
        problem: why it cannot be used, or None.
    """

    name: str
    path: Path
    layer: Literal["shipped", "user"]
    summary: str = ""
    card: str | None = None
    shadowed_by: Path | None = None
    problem: str | None = None


def load_profile(name_or_path: str, *, overrides: Sequence[str] = ()) -> Profile:
    """The profile of this name or file, with ``--set key=value`` settings on top.

    Raises:
        DeployError: no such profile (MISSING), or every mistake in it (INVALID_INPUT).
    """
    return resolve(name_or_path, overrides=overrides).profile


def resolve(name_or_path: str, *, overrides: Sequence[str] = ()) -> ResolvedProfile:
    """As ``load_profile``, with the files and places that the profile comes from."""
    return _resolve_file(find(name_or_path), overrides)


def find(name_or_path: str) -> Path:
    """The file of a profile: a path is taken as it is, a name is looked up, a person's own first.

    Raises:
        DeployError: there is none of this name.
    """
    if is_path(name_or_path):
        return Path(name_or_path)
    return _look_up(name_or_path, ())


def is_path(name_or_path: str) -> bool:
    """Whether a file is meant, and not a name to look up."""
    return os.sep in name_or_path or name_or_path.endswith(_SUFFIXES)


def list_profiles() -> list[ProfileEntry]:
    """All profiles by name, those that another hides or that are wrong among them."""
    entries: list[ProfileEntry] = []
    taken: dict[str, Path] = {}
    folders: list[tuple[Literal["shipped", "user"], Path]] = [
        ("user", user_dir()),
        ("shipped", _shipped_dir()),
    ]
    for layer, folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            name = path.stem
            try:
                profile = _resolve_file(path, ()).profile
            except DeployError as error:
                entry = ProfileEntry(name, path, layer, problem=error.message, shadowed_by=taken.get(name))
            else:
                entry = ProfileEntry(
                    name, path, layer, profile.summary, profile.card, shadowed_by=taken.get(name)
                )
            entries.append(entry)
            taken.setdefault(name, path)
    return sorted(entries, key=lambda entry: (entry.name, entry.layer != "user"))


def user_dir() -> Path:
    """Folder of a person's own profiles."""
    return paths.config_dir() / "profiles"


def require_name(name: str) -> None:
    """Make sure that a profile can be called so.

    Raises:
        DeployError: it cannot.
    """
    if not _NAME.fullmatch(name) or name.endswith(_SUFFIXES):
        raise DeployError(
            f"{yaml_file.describe(name)} cannot be a profile's name",
            fix="use letters a to z, digits, dots, dashes and underscores, at most 64, and no file suffix",
            exit_code=ExitCode.USAGE,
        )


def _shipped_dir() -> Path:
    return resource_dir("profiles") / "services"


def _look_up(name: str, visited: Sequence[Path]) -> Path:
    candidates = [folder / f"{name}.yaml" for folder in (user_dir(), _shipped_dir())]
    if _NAME.fullmatch(name):
        for path in candidates:
            if path not in visited and path.exists():
                return path
    known = {path.stem for folder in (user_dir(), _shipped_dir()) for path in folder.glob("*.yaml")}
    raise DeployError(
        f"there is no profile {yaml_file.describe(name)}{yaml_file.nearest(name, sorted(known))}",
        fix="dflash-deploy profile list",
        exit_code=ExitCode.MISSING,
    )


def _resolve_file(path: Path, overrides: Sequence[str]) -> ResolvedProfile:
    document, files = _read_layers(path, ())
    for setting in overrides:
        document = layers.override(document, setting)
    own = None if overrides else str(path)
    left_out = {index for index in ruled_out(document) if document.origin(("known", index)).source != own}
    document = layers.without_items(document, "known", left_out)
    problems = problems_of(document)
    if problems:
        typed = all(problem.origin.source.startswith(layers.SETTING) for problem in problems)
        mend = f"mend the profile, then: dflash-deploy profile validate {shlex.quote(str(path))}"
        raise InvalidDocument(problems, fix="correct what is given with --set" if typed else mend)
    return ResolvedProfile(path.stem, yaml_file.validate(document, Profile), files, document)


def _read_layers(path: Path, above: tuple[Path, ...]) -> tuple[Document, tuple[Path, ...]]:
    document = yaml_file.read(path)
    if not isinstance(document.value, dict) or "extends" not in document.value:
        return document, (path,)
    below = document.value["extends"]
    visited = (*above, path)
    if not isinstance(below, str):
        message = f"expected the name of a profile, found {yaml_file.describe(below)}"
        raise InvalidDocument([document.problem(("extends",), message)])
    try:
        next_path = _look_up(below, visited)
    except DeployError as error:
        names = [one.stem for one in visited]
        said = f"goes in a circle ({' -> '.join([*names, below])})" if below in names else error.message
        raise InvalidDocument([document.problem(("extends",), said)]) from error
    base, files = _read_layers(next_path, visited)
    own = Document(
        {name: value for name, value in document.value.items() if name != "extends"}, document.origins
    )
    return layers.merge(base, own), (path, *files)
