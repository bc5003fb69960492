"""``dflash-deploy probe``: what cards, driver and memory are here, and who is on them."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_deploy.errors import ExitCode


def probe(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Show this machine's GPUs, driver and host, measured now.

    Exits with 0 when a GPU was read, with 4 when there is none or no driver.
    """
    from dflash_deploy.machine.cards import match_card
    from dflash_deploy.machine.gpu import read_gpus
    from dflash_deploy.machine.host import read_host
    from dflash_deploy.machine.view import as_json, plain_lines, print_tables, sections

    reading, host = read_gpus(), read_host()
    matches = {gpu.index: match_card(gpu.name, gpu.memory_total_mib) for gpu in reading.gpus if gpu.name}
    cards = {index: card for index, card in matches.items() if card is not None}
    if json:
        from json import dumps

        typer.echo(dumps(as_json(reading, host, cards), indent=2))
    else:
        from rich.console import Console

        blocks = sections(reading, host, cards)
        console = Console()
        if console.is_terminal:
            print_tables(blocks, console)
        else:
            for line in plain_lines(blocks):
                typer.echo(line)
        for message, fix in zip(
            (reading.problem or "").splitlines(), (reading.fix or "").splitlines(), strict=True
        ):
            typer.echo(f"problem: {message}\n    fix: {fix}", err=True)
    if not reading.readable:
        raise typer.Exit(ExitCode.MISSING)
