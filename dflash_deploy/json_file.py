"""JSON files with a schema: what is wrong with one, in words."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from dflash_deploy.errors import DeployError, ExitCode

_LONGEST_KEY = 60
"""Keys of a file that anybody may have written are shown no longer than this."""


def first_mistake(error: ValidationError) -> str:
    """The first thing that is wrong, where it stands, and how many more there are."""
    first, more = error.errors(include_url=False)[0], error.error_count() - 1
    at = ".".join(str(part)[:_LONGEST_KEY] for part in first["loc"])
    why = ": ".join(part for part in (at, first["msg"]) if part)
    return f"{why} (and {more} more)" if more else why


def refuse_newer(path: Path, written: bytes, *, reads: int, what: str, fix: str) -> None:
    """See that a file is of no later ``schema_version`` than this tool reads.

    Args:
        path: the file, to name it.
        written: its content.
        reads: the latest version that is read.
        what: such files, to name them.
        fix: what helps.

    Raises:
        DeployError: a later version of the tool wrote it.
    """
    try:
        content = json.loads(written)
    except (ValueError, RecursionError):
        return
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > reads:
        raise DeployError(
            f"{path} was written by a newer dflash-deploy ({what} of version {version}; "
            f"this one reads {reads})",
            fix=fix,
            exit_code=ExitCode.INVALID_INPUT,
        )
