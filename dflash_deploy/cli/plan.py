"""``dflash-deploy plan``: what a configuration takes of a card, before anything is launched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash_deploy.errors import DeployError, ExitCode

SETTINGS = {"context_settings": {"ignore_unknown_options": True}}
"""How typer is to make it."""


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
            max=100_000,
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
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="With --from-log, or --unit and its journal: correct later plans for this card, SGLang and "
            "model by the log.",
        ),
    ] = False,
    show_calibration: Annotated[
        bool, typer.Option("--calibration", help="Show what logs taught, and plan nothing.")
    ] = False,
    reset_calibration: Annotated[
        bool,
        typer.Option("--reset-calibration", help="Forget what logs taught, of all cards or of --gpu."),
    ] = False,
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
    import shutil
    from json import dumps

    from dflash_deploy.cli import plan_request, plan_source, plan_view

    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    if show_calibration or reset_calibration:
        if words or from_file or from_log or unit or (show_calibration and reset_calibration):
            raise DeployError(
                "--calibration and --reset-calibration stand alone, or with --gpu",
                fix="dflash-deploy plan --calibration",
                exit_code=ExitCode.USAGE,
            )
        if reset_calibration:
            gone = plan_request.forget(gpu)
            typer.echo(dumps({"removed": gone}) if json else f"{gone} removed; plans are as they come again.")
            return
        records = plan_request.kept_records(gpu)
        if json:
            typer.echo(dumps(plan_view.records_json(records), indent=2))
        else:
            for line in plan_view.record_lines(records, width):
                typer.echo(line)
        return
    asked = plan_source.Asked(
        words=tuple(words or ()),
        gpu=gpu,
        sglang=sglang,
        free_mib=free_mib,
        users=users,
        from_file=from_file,
        from_log=from_log,
        unit=unit,
        keep=keep,
    )
    answer = plan_request.answer(asked)
    if json:
        typer.echo(dumps(plan_view.as_json(answer), indent=2))
    else:
        for line in plan_view.lines(answer, explain=explain, width=width):
            typer.echo(line)
    if not answer.budget.fits:
        raise typer.Exit(ExitCode.FAILED)
