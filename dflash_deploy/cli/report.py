"""``dflash-deploy report``: a study as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_deploy.cli import given


def report(
    study: Annotated[
        str | None,
        typer.Argument(help="Name or folder of a study; without it, the latest one.", show_default=False),
    ] = None,
    *,
    form: Annotated[
        Literal["html", "md", "json", "csv"],
        typer.Option(
            "--format",
            help="A web page that needs nothing but itself; Markdown; one JSON object (docs/json.md); or a "
            "table with a row a trial.",
        ),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write it there, or into that folder; - prints it [default: beside the study].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write what a study came to: the verdict, the command, the evidence.

    Works on a study that is running or was cut short too, with what had ended until then. The page holds all
    it shows and loads nothing, so it can be kept, mailed and opened anywhere.
    """
    from dflash_deploy.files import write_atomic
    from dflash_deploy.tune.studies import find_study

    if study is not None:
        given.path(study)
    folder = find_study(study)
    # Most of a second, which nobody need wait for to hear that there is no study.
    from dflash_deploy.report.contents import read_report
    from dflash_deploy.report.data import render_json
    from dflash_deploy.report.markdown import render_markdown
    from dflash_deploy.report.page import render_page
    from dflash_deploy.report.table import render_csv

    found = read_report(folder)
    render = {"html": render_page, "md": render_markdown, "json": render_json, "csv": render_csv}[form]
    text = render(found)
    if out is not None and str(out) == "-":
        # As bytes: a page is UTF-8 whatever the terminal's encoding is.
        typer.echo(text.encode(), nl=False)
        return
    name = f"report.{form}"
    path = found.folder / name if out is None else out / name if out.is_dir() else out
    write_atomic(path, text)
    typer.echo(path)
