"""``dflash-deploy compare``: plain, DSpark, MTP and DFlash decoding side by side on one card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dflash_deploy.cli.options import AsJson, Form, Format, Python, ResultOut, tell
from dflash_deploy.errors import DeployError, ExitCode

_SIMULATED_SPEED = 100.0


def compare(
    *,
    methods: Annotated[
        str,
        typer.Option(help="What to compare, by comma: none, ngram, mtp, dspark, dflash.", metavar="METHODS"),
    ] = "none,mtp,dspark,dflash",
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            help="The service: a name (dflash-deploy profile list) or the path of a file. With --simulate, "
            "the card's own when left out.",
            metavar="PROFILE",
            show_default=False,
        ),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(help="Compare on a simulated card, such as rtx-5090.", metavar="CARD"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Rounds of each launch; else the profile's.")
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            max=100,
            help="Launches of each method, every other time in turned order. From three on, launches are "
            "compared and not rounds, so that what differs between two starts is in the interval.",
        ),
    ] = 1,
    users: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Requests at once; else the profile's.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each answer; else the profile's.")
    ] = None,
    exam: Annotated[
        bool,
        typer.Option(
            help="Ask questions with known answers, and compare texts with plain decoding's; "
            "else measure speed alone."
        ),
    ] = True,
    drafts: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            help="Draft model of a method, where the known one is not wanted. May be repeated.",
            metavar="METHOD=PLACE",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value of the profile. May be repeated.", metavar="KEY=VALUE"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the comparison; else PROFILE-DATE-NUMBER.", metavar="NAME")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with a comparison that was cut short: the last one, or that of --name."
        ),
    ] = False,
    python: Python = None,
    host: Annotated[str, typer.Option(help="Address that the servers listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the servers; else a free one each.")
    ] = None,
    form: Form = Format.TEXT,
    json: AsJson = False,
    out: ResultOut = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Leave names, addresses, paths, keys and texts out of what is printed and written.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulated card.")] = 0,
    time_scale: Annotated[float, typer.Option(min=0.01, max=10_000, hidden=True)] = _SIMULATED_SPEED,
) -> None:
    """Launch one method of drafting after the other on the same card; measure, examine and compare them.

    Every method gets the profile's flags, but for those of drafting, and the very same questions. A method
    that does not start, or whose answers are wrong, is a result too. Ctrl-C stops the server and keeps what
    has ended; --resume goes on from there.
    """
    from dflash_deploy.bench.redaction import redacted
    from dflash_deploy.bench.results import check_writable, write_result
    from dflash_deploy.compare.methods import read_drafts, read_methods
    from dflash_deploy.compare.records import find, locked, read_comparison
    from dflash_deploy.compare.running import Wanted, begin, result_of, rig_again, run_all
    from dflash_deploy.compare.tables import as_csv, as_json, as_markdown, as_text, shown
    from dflash_deploy.server.orphans import end_orphans
    from dflash_deploy.tune.launching import Simulated
    from dflash_deploy.tune.opening import Place, default_profile
    from dflash_deploy.tune.signals import stop_once

    if resume and (simulate or settings or drafts or profile):
        raise typer.BadParameter(
            "a comparison keeps its profile, card and methods: give its --name alone", param_hint="--resume"
        )
    if out is not None:
        check_writable(out)
    place = Place(python, host, port)
    with stop_once() as asked:
        for sentence in end_orphans():
            typer.echo(sentence, err=True)
        if resume:
            folder = find(name)
            record = read_comparison(folder)
            rig = rig_again(record, place)
        else:
            wanted = Wanted(
                profile=profile or default_profile(simulate, "compare --profile"),
                methods=read_methods(methods),
                overrides=settings or (),
                drafts=read_drafts(drafts or ()),
                simulate=Simulated(simulate, seed, time_scale) if simulate else None,
                users=users,
                output_tokens=output_tokens,
                rounds=rounds,
                repeats=repeats,
                examine=exam,
                name=name,
            )
            folder, record, rig = begin(wanted, place)
        tell(f"comparison {record.name} in {folder}")
        with _resumable(record.name):
            ending: KeyboardInterrupt | DeployError | None = None
            with locked(folder):
                try:
                    run_all(folder, record, rig, lambda text: tell(shown(text)), asked)
                except (KeyboardInterrupt, DeployError) as stopped:
                    ending = stopped
                result = result_of(folder, record)
            if isinstance(ending, DeployError) and not result.runs:
                raise ending
            if redact:
                result = redacted(result)
            render = {Format.JSON: as_json, Format.MARKDOWN: as_markdown, Format.CSV: as_csv}
            text = render.get(Format.JSON if json else form, as_text)(result)
            try:
                if out is not None and result.runs:
                    write_result(out, result)
            finally:
                # A disk that is full takes the file, and not what is seen.
                typer.echo(text.rstrip("\n"))
            if ending is not None:
                raise ending
    if all(run.outcome != "served" for run in result.runs):
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _resumable(name: str) -> Iterator[None]:
    """Ctrl-C within says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"go on with it: dflash-deploy compare --resume --name {name}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
