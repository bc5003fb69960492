"""Reading what a person typed, where the command line's own types do not."""

from __future__ import annotations

from pathlib import Path

import typer


def path(text: str) -> Path:
    """A path, ``~`` read as a home folder.

    Raises:
        typer.BadParameter: it is empty, as an unset variable leaves it, or has no such home folder.
    """
    if not text:
        raise typer.BadParameter("expected a path, found nothing")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"there is no such home folder: {text!r}") from None
