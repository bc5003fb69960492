"""``dflash-deploy profile``: what is to be served, as files that can be listed, shown, begun and checked."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli import given
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_deploy.profile.load import ProfileEntry

app = typer.Typer(no_args_is_help=True, help="List, show, begin and check service profiles.")

_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value, such as workload.users=4. It is read as YAML; null takes the key out. May be "
        "repeated.",
    ),
]


@app.command("list")
def list_profiles(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """List the profiles there are.

    They are shipped ones, and your own in ~/.config/dflash-deploy/profiles. One that is "hidden" is not used:
    a profile of your own has its name.
    """
    from dataclasses import asdict

    from dflash_deploy.profile import load, render

    entries = load.list_profiles()
    if json:
        _print_json(
            {"schema_version": render.SCHEMA_VERSION, "profiles": [asdict(entry) for entry in entries]}
        )
        return
    rows = [
        (entry.name, entry.layer if entry.shadowed_by is None else "hidden", _about(entry))
        for entry in entries
    ]
    _print_table(("profile", "from", "for"), rows)


def _about(entry: ProfileEntry) -> str:
    from dflash_deploy.machine.text import printable

    about = entry.summary if entry.problem is None else f"wrong: {entry.problem.splitlines()[0]}"
    return printable(about, longest=4096)


@app.command("show")
def show(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="Name of a profile, or path of a profile file.")
    ],
    settings: _Settings = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Print a profile with its layers and defaults in place.

    What is printed is a profile itself.
    """
    from dflash_deploy.profile import load, render

    resolved = load.resolve(profile, overrides=settings or ())
    if json:
        _print_json(render.as_json(resolved))
    else:
        typer.echo(render.as_yaml(resolved.profile), nl=False)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new profile.")],
    base: Annotated[
        str, typer.Option("--from", metavar="PROFILE", help="Profile to begin from: a name or a path.")
    ] = "rtx5090-single-user",
    settings: _Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=given.path,
            help="File to write; without it, one among your own profiles.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there already.")] = False,
) -> None:
    """Write a commented profile to begin with."""
    from dflash_deploy.files import write_atomic
    from dflash_deploy.profile import load, render

    load.require_name(name)
    resolved = load.resolve(base, overrides=settings or ())
    path = out or load.user_dir() / f"{name}.yaml"
    if os.path.lexists(path) and not force:
        raise DeployError(
            f"{path} is there already",
            fix="give another name, --out FILE, or --force to replace it",
            exit_code=ExitCode.UNAVAILABLE,
        )
    try:
        write_atomic(path, render.starting_file(resolved.profile, name=name, origin=resolved.name))
    except OSError as error:
        raise DeployError(
            f"{path} cannot be written: {error.strerror or error}",
            fix="give a place that can be written to: --out FILE",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    typer.echo(f"wrote {path}")
    named = shlex.quote(str(path)) if out else name
    typer.echo(f"check it after every change: dflash-deploy profile validate {named}")


@app.command("validate")
def validate(
    profiles: Annotated[
        list[str], typer.Argument(help="Names of profiles, or paths of profile files.", metavar="PROFILE")
    ],
    settings: _Settings = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Check profiles and tell every mistake with its place.

    Nothing is started. Exits with 0 when all are right, 3 when one is wrong, 4 when one is not there.
    """
    from dflash_deploy.profile import load, render

    results: list[dict[str, object]] = []
    worst = ExitCode.OK
    for profile in profiles:
        error: DeployError | None = None
        try:
            load.resolve(profile, overrides=settings or ())
        except DeployError as caught:
            error = caught
            worst = caught.exit_code if worst in (ExitCode.OK, ExitCode.MISSING) else worst
        results.append(render.verdict(profile, error))
        if not json:
            typer.echo(_verdict(profile, error))
    if json:
        _print_json({"schema_version": render.SCHEMA_VERSION, "profiles": results})
    if worst != ExitCode.OK:
        raise typer.Exit(worst)


def _verdict(profile: str, error: DeployError | None) -> str:
    from dflash_deploy.machine.text import printable

    if error is None:
        said = f"{profile}: right"
    elif error.exit_code is ExitCode.MISSING and error.fix:
        said = f"{error.message}\n  fix: {error.fix}"
    else:
        said = error.message
    return "\n".join(printable(line, longest=4096) for line in said.split("\n"))


def _print_json(content: dict[str, object]) -> None:
    from json import dumps

    typer.echo(dumps(content, indent=2, default=str))


def _print_table(heads: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> None:
    """A table on a terminal; without one, tab-separated lines that no width cuts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
