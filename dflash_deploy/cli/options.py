"""What means the same in several commands: options, and how progress is told."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """How the result of measuring is printed."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"


Form = Annotated[Format, typer.Option("--format", help="How to print the result; progress goes to stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json (docs/json.md).")]
ResultOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write a result file too, for `bench compare`.", metavar="FILE"),
]
Python = Annotated[
    Path | None,
    typer.Option(
        help="Interpreter that SGLang is installed in; else the profile's engine.python, "
        "else that of the environment chosen with `env use`."
    ),
]


def tell(text: str) -> None:
    """Say what is going on. Where that cannot be written, what is being measured goes on all the same."""
    try:
        typer.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        pass
