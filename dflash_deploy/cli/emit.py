"""``dflash-deploy emit``: a study's best configuration as a unit, a script, or for a container."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_deploy.cli import given
from dflash_deploy.errors import DeployError, ExitCode


def emit(
    study: Annotated[
        str | None, typer.Argument(help="Name or folder of a study; without it, the latest one.")
    ] = None,
    *,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Take this trial instead of the best one.")
    ] = None,
    form: Annotated[
        Literal["systemd", "quadlet", "compose", "shell", "command"],
        typer.Option(
            "--format",
            help="A systemd unit; a podman quadlet or a compose file, which need --image; a shell script; or "
            "one command line.",
        ),
    ] = "systemd",
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Container image, for quadlet and compose.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=given.path,
            help="Write it there, or into that folder, instead of printing it.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --out: show what would change, and write nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --out: replace a different file, which is kept as FILE.previous."),
    ] = False,
    allow_simulated: Annotated[
        bool,
        typer.Option(
            "--allow-simulated", help="With --out: write it even though its study was only simulated."
        ),
    ] = False,
    system: Annotated[
        bool,
        typer.Option(
            "--system/--user",
            help="Unit for the machine's systemd, which root installs, or for your own (systemctl --user).",
        ),
    ] = True,
    run_as: Annotated[
        str | None,
        typer.Option(
            metavar="ACCOUNT",
            help="Account that runs it, with --system [default: the profile's, else one that systemd makes].",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="PATH",
            parser=given.path,
            help="Interpreter of the serving environment [default: the profile's, the study's, the one "
            "chosen with `env use`, else /opt/dflash-deploy/env/bin/python].",
        ),
    ] = None,
) -> None:
    """Print or write a tuned service as a systemd unit, or in another form.

    A unit is the file that makes systemd start a service and keep it running: here with the best
    configuration of a study, or with that of --trial. It starts the real engine, also when the study was
    simulated; a comment at its top says so then, and how it is installed.
    """
    from dflash_deploy.deploy import change, configuration
    from dflash_deploy.deploy.formats import render

    if out is None and (dry_run or force):
        raise DeployError(
            "--dry-run and --force are about a file, and none is named",
            fix="add --out FILE",
            exit_code=ExitCode.USAGE,
        )
    if run_as is not None and not system:
        raise DeployError(
            "a unit of your own manager runs as you",
            fix="leave out --run-as or --user",
            exit_code=ExitCode.USAGE,
        )
    if study is not None:
        given.path(study)
    chosen = configuration.of_study(study, trial)
    interpreter = chosen.python(python)
    spec = configuration.unit_spec(
        chosen,
        python=interpreter,
        manager="system" if system else "user",
        user=run_as,
        seal=configuration.seal_if_there(interpreter),
    )
    rendered = render(spec, form, image=image)
    if out is None:
        # As bytes: a unit is UTF-8 whatever the terminal's encoding is.
        typer.echo(rendered.text.encode(), nl=False)
        return
    planned = change.change_of(out, rendered.text, name_in_folder=rendered.name)
    if dry_run:
        typer.echo(planned.diff(), nl=False)
        return
    if chosen.simulated and not allow_simulated:
        raise DeployError(
            f"{chosen.source} was simulated: no figure of it was measured on a card",
            fix="tune on the real card, or add --allow-simulated to write the unit all the same",
            exit_code=ExitCode.USAGE,
        )
    change.apply(planned, replace=force)
    typer.echo(f"{planned.path}: {'as it was' if planned.empty else 'written'}", err=True)
