"""``dflash-deploy plan``: what a configuration takes of a card, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_deploy.errors import ExitCode


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROFILE | -- COMMAND…]",
            help="A profile's name, or after -- the command that starts SGLang, as you would type it.",
            show_default=False,
        ),
    ] = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME|MIB",
            help="Card: an id such as rtx-5090, or its memory in MiB [default: the one that is here].",
        ),
    ] = None,
    sglang: Annotated[
        str | None,
        typer.Option(
            "--sglang",
            metavar="VERSION",
            help="SGLang that is meant [default: what the text or profile says, else the newest known].",
        ),
    ] = None,
    free_mib: Annotated[
        float | None,
        typer.Option(
            "--free-mib",
            metavar="N",
            help="Free memory before the weights load, as SGLang logs it ('Load weight begin. avail mem').",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            "--users",
            metavar="N",
            min=1,
            help="People at once [default: the profile's, else --max-running-requests up to 8].",
        ),
    ] = None,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Read the command from a shell script, unit, compose file or manifest; - is standard input.",
        ),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log", metavar="FILE", help="Read the settings from a server's log, and compare with it."
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option("--unit", metavar="NAME", help="Read the command from an existing systemd service."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say how each figure comes about, and what each advice costs."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Predict the VRAM budget of a profile, or of any command that starts SGLang; nothing is run.

    Exits with 0 when the server would start and serve, with 1 when it would not, with 3 when the command or a
    file is wrong, with 4 when the card or the model is not known.
    """
    from dflash_deploy.cli import plan_request, plan_view

    asked = plan_request.Asked(
        words=tuple(words or ()),
        gpu=gpu,
        sglang=sglang,
        free_mib=free_mib,
        users=users,
        from_file=from_file,
        from_log=from_log,
        unit=unit,
    )
    answer = plan_request.answer(asked)
    if json:
        from json import dumps

        typer.echo(dumps(plan_view.as_json(answer), indent=2))
    else:
        for line in plan_view.lines(answer, explain=explain):
            typer.echo(line)
    if not answer.budget.fits:
        raise typer.Exit(ExitCode.FAILED)
