"""``dflash-deploy status``: what serves here, how it is, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli import given
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.profile.schema import Profile
    from dflash_deploy.watch.places import Place

_DEFAULT_URL = "http://127.0.0.1:30000"
_NOTHING = "No server is found here: no unit of this tool, no trial that runs, nothing on port 30000."
_NOTHING_SO_CALLED = (
    "No server is found for {}: no unit is called so, and no profile that says where it listens, or nothing "
    "listens there.\n  fix: dflash-deploy status (all that is found); dflash-deploy profile list"
)


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="A service or profile to look for; without it, everything that is found."),
    ] = None,
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Ask the server at this address alone, http://HOST:PORT."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            parser=given.path,
            help="YAML file with the line `api-key: ...`, sent to the server of NAME or --url "
            "[default: the profile's].",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=0.5, max=600, help="Longest wait for a server's answer."),
    ] = 5.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Show what serves here: health, model, limits, load, VRAM.

    Exits with 0 when one is healthy, with 1 when some are found and none is, with 4 when none is found.
    """
    from dflash_deploy.watch.status import gather
    from dflash_deploy.watch.view import as_json, sections

    if api_key_file and name is None and url is None:
        raise DeployError(
            "--api-key-file goes with one server: a key is not sent to whatever is found",
            fix="name the service, or give --url",
            exit_code=ExitCode.USAGE,
        )
    found = gather(places_sought(name, url, api_key_file), timeout_s=timeout_s)
    if json:
        from json import dumps

        typer.echo(dumps(as_json(found), indent=2))
    else:
        from rich.console import Console

        from dflash_deploy.machine.text import printable
        from dflash_deploy.machine.view import plain_lines, print_tables

        blocks = sections(found)
        console = Console()
        if not found.servers:
            typer.echo(_NOTHING if name is None else _NOTHING_SO_CALLED.format(printable(name)))
            typer.echo()
        if console.is_terminal:
            print_tables(blocks, console)
        else:
            typer.echo("\n".join(plain_lines(blocks)))
    if not found.servers:
        raise typer.Exit(ExitCode.MISSING)
    if not found.healthy:
        raise typer.Exit(ExitCode.FAILED)


def places_sought(name: str | None, url: str | None, api_key_file: Path | None) -> list[Place]:
    """Where servers may be, from what a person named."""
    from dflash_deploy.watch import places
    from dflash_deploy.watch.units import read_units

    key = places.read_api_key(api_key_file) if api_key_file else None
    if url is not None:
        address = places.checked_url(url)
        return [places.Place("url", name or address, address, api_key=key)]
    if name is None:
        units, records = places.unit_places(read_units()), places.record_places()
        return places.merged([*units, *records, places.Place("port", "server", _DEFAULT_URL)])
    profile = _profile(name)
    service = profile.service.name if profile else name
    found = [place for place in places.unit_places(read_units()) if place.answers_to(service)]
    if profile is not None:
        key_file = profile.service.api_key_file
        if key is None and key_file is not None:
            key = places.read_api_key(key_file)
        address = places.address(profile.service.host, profile.service.port)
        found.append(places.Place("port", service, address))
    return places.merged([replace(place, api_key=key) for place in found])


def _profile(name: str) -> Profile | None:
    """The profile of that name; None where the name is a service's alone."""
    from dflash_deploy.profile.load import is_path, load_profile

    try:
        return load_profile(name)
    except DeployError as error:
        if error.exit_code is ExitCode.MISSING and not is_path(name):
            return None
        raise
