"""Folders of YAML files that describe known things, one file each, named by its id."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from dflash_deploy import paths, yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.resources import resource_dir

Entry = TypeVar("Entry", bound=BaseModel)


def files(kind: str) -> dict[str, Path]:
    """Files of one kind (``cards``, ``models``) by id.

    A person's own, in ``~/.config/dflash-deploy/<kind>``, take the place of shipped ones of the same id.
    """
    found: dict[str, Path] = {}
    for folder in (resource_dir("profiles") / kind, paths.config_dir() / kind):
        found |= {path.stem: path for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def load(kind: str, entry_id: str, schema: type[Entry]) -> Entry:
    """Read one entry.

    Raises:
        DeployError: no such id (MISSING, with the nearest), or its file is wrong (INVALID_INPUT).
    """
    known = files(kind)
    if entry_id not in known:
        what = kind.removesuffix("s")
        raise DeployError(
            f"unknown {what} {yaml_file.describe(entry_id)}{yaml_file.nearest(entry_id, known)}",
            fix=f"use one of: {', '.join(known)}; or describe it in {paths.config_dir() / kind}/<id>.yaml",
            exit_code=ExitCode.MISSING,
        )
    document = yaml_file.read(known[entry_id])
    entry = yaml_file.validate(document, schema)
    written: object = getattr(entry, "id", None)
    if written != entry_id:
        message = f"expected the file's own name, {entry_id!r}, found {yaml_file.describe(written)}"
        raise yaml_file.InvalidDocument([document.problem(("id",), message)])
    return entry
