"""``dflash-deploy status``: what serves here, how it is, and what it holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli.sought import ApiKeyFile, Url, places_sought
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_deploy.watch.status import Status

_EVERY_S = 2.0
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
    url: Url = None,
    api_key_file: ApiKeyFile = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=0.5, max=600, help="Longest wait for a server's answer."),
    ] = 5.0,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C (see --every).")
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--every", metavar="S", min=0.5, max=3600, help="With --watch: look every S seconds [default: 2]."
        ),
    ] = None,
    times: Annotated[
        int | None, typer.Option("--times", metavar="N", min=1, help="With --watch: end after N looks.")
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object instead, with --watch one a line (docs/json.md lists its keys).",
        ),
    ] = False,
) -> None:
    """Show what serves here: health, model, limits, load, VRAM and what it is used for, heat, warnings.

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
    if not watch and (every_s is not None or times is not None):
        raise DeployError(
            "--every and --times are about looking again and again",
            fix="add --watch",
            exit_code=ExitCode.USAGE,
        )
    if watch:
        _watch(
            lambda: gather(places_sought(name, url, api_key_file), timeout_s=timeout_s, keep=True),
            name,
            _EVERY_S if every_s is None else every_s,
            times,
            json,
        )
        return
    found = gather(places_sought(name, url, api_key_file), timeout_s=timeout_s)
    if json:
        from json import dumps

        typer.echo(dumps(as_json(found), indent=2))
    else:
        from rich.console import Console

        from dflash_deploy.machine.view import plain_lines, print_tables

        blocks = sections(found)
        console = Console()
        if not found.servers:
            typer.echo(_nothing(name))
            typer.echo()
        if console.is_terminal:
            print_tables(blocks, console)
        else:
            typer.echo("\n".join(plain_lines(blocks)))
    if not found.servers:
        raise typer.Exit(ExitCode.MISSING)
    if not found.healthy:
        raise typer.Exit(ExitCode.FAILED)


def _watch(
    look: Callable[[], Status], name: str | None, every_s: float, times: int | None, as_lines_of_json: bool
) -> None:
    """Look again and again: one screen on a terminal, one block (or line of JSON) after another in a pipe."""
    import time
    from contextlib import nullcontext, suppress
    from itertools import count, islice
    from json import dumps

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from dflash_deploy.watch.view import as_json

    console = Console()
    live = console.is_terminal and not as_lines_of_json
    screen = (
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") if live else nullcontext()
    )
    # Ctrl-C is how a person ends it: no failure.
    with suppress(KeyboardInterrupt), screen as shown:
        due = time.monotonic()
        for number in islice(count(), times):
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + every_s
            found = look()
            if as_lines_of_json:
                typer.echo(dumps(as_json(found)))
            elif shown is not None:
                shown.update(Text(_block(found, name, console.width)), refresh=True)
            else:
                typer.echo(("\n" if number else "") + _block(found, name, 80))
            sys.stdout.flush()


def _block(found: Status, name: str | None, width: int) -> str:
    from datetime import datetime

    from dflash_deploy.machine.view import plain_lines
    from dflash_deploy.watch.view import sections

    nothing = [] if found.servers else [_nothing(name), ""]
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "\n".join([now, *nothing, *plain_lines(sections(found), width=max(40, width))])


def _nothing(name: str | None) -> str:
    from dflash_deploy.machine.text import printable

    return _NOTHING if name is None else _NOTHING_SO_CALLED.format(printable(name))
