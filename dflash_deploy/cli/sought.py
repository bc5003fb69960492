"""The server that a command is about: options that name it, and where it is looked for."""

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

DEFAULT_URL = "http://127.0.0.1:30000"

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Ask the server at this address alone, http://HOST:PORT."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        parser=given.path,
        help="YAML file with the line `api-key: ...`, sent to the server that is named alone [default: the "
        "installed service's own, else the profile's].",
    ),
]


def places_sought(name: str | None, url: str | None, api_key_file: Path | None) -> list[Place]:
    """Where servers may be, from what a person named, each with its key as far as it may be read."""
    return [_with_own_key(place) for place in _sought(name, url, api_key_file)]


def _with_own_key(place: Place) -> Place:
    """A unit's own key is sent to that unit alone; who may not read it asks without."""
    from dflash_deploy.deploy.key_file import read_api_key
    from dflash_deploy.watch import units
    from dflash_deploy.watch.recorded import installed

    if place.unit is None or place.api_key is not None:
        return place
    known = installed(place.unit)
    file = units.api_key_file(place.unit) if known is None else known.api_key_file
    try:
        return place if file is None else replace(place, api_key=read_api_key(Path(file)))
    except DeployError as error:
        return replace(place, key_problem=error.message)


def _sought(name: str | None, url: str | None, api_key_file: Path | None) -> list[Place]:
    from dflash_deploy.deploy.fleet import is_member
    from dflash_deploy.deploy.key_file import read_api_key
    from dflash_deploy.watch import places
    from dflash_deploy.watch.units import read_units

    key = read_api_key(api_key_file) if api_key_file else None
    if url is not None:
        address = places.checked_url(url)
        return [places.Place("url", name or address, address, api_key=key)]
    if name is None:
        units, records = places.unit_places(read_units()), places.record_places()
        return places.merged([*units, *records, places.Place("port", "server", DEFAULT_URL)])
    profile = _profile(name)
    service = profile.service.name if profile else name
    units = places.unit_places(read_units())
    found = [place for place in units if place.answers_to(service)]
    if not found:
        # What was installed on several cards under this name.
        found = [place for place in units if is_member(place.name, service)]
    if profile is not None:
        key_file = profile.service.api_key_file
        if key is None and key_file is not None:
            key = read_api_key(key_file)
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
