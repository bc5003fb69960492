"""``dflash-deploy doctor``: what is wrong here, and the command that mends each thing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_deploy.doctor.finding import Finding
    from dflash_deploy.doctor.repair import Done
    from dflash_deploy.doctor.subject import Request

_COLOURS = {"fail": "bold red", "warn": "yellow", "unknown": "cyan", "pass": "green"}


def doctor(
    profile: Annotated[
        str | None,
        typer.Argument(
            help="Also look at this profile's model, draft, plan and port: a name or the path of a file.",
            show_default=False,
        ),
    ] = None,
    *,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Interpreter that SGLang is installed in [default: the profile's, else that of `env use`].",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value of the profile. May be repeated.", metavar="KEY=VALUE"),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Import torch and what else runs on the card (up to a minute); remembered afterwards.",
        ),
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Read every byte of the profile's checkpoints (minutes).")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what can be mended safely; each change is asked for.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show each check that passes, and what all was told from.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Check driver, environment, machine, hub, services and a profile before anything is launched.

    Asks no network, and takes about a second. Exits with 0 when nothing fails (warnings may), with 1 when
    something does, with 4 when nothing could be checked.
    """
    import time
    from dataclasses import replace

    from dflash_deploy.doctor.examination import examine, exit_code
    from dflash_deploy.doctor.repair import repair
    from dflash_deploy.doctor.subject import Request, look_at
    from dflash_deploy.doctor.view import as_json
    from dflash_deploy.profile.load import load_profile

    _check_options(profile, settings, fix=fix, yes=yes, hashes=hashes, json=json)
    overrides = tuple(settings or ())
    loaded = load_profile(profile, overrides=overrides) if profile is not None else None
    request = Request(loaded, profile, overrides, python, deep, hashes)
    began = time.monotonic()
    findings = examine(look_at(request))
    took_s = time.monotonic() - began
    if not json:
        _print(findings, request, took_s, everything=everything)
    done: list[Done] = []
    mended: set[str] = set()
    if fix:
        for one in repair(findings, lambda what: yes or _asked(what)):
            done.append(one)
            typer.echo(f"{one.outcome}: {one.what}: {one.text}", err=json)
        if not done:
            typer.echo("nothing here can be mended safely without you; the fixes say how", err=json)
        mended = {one.id for one in done if one.outcome == "done"}
        again = {one.id: one for one in examine(look_at(replace(request, deep=False)), only=mended)}
        findings = tuple(again.get(one.id, one) for one in findings)
    if json:
        from json import dumps

        typer.echo(dumps(as_json(request, findings, done, took_s), indent=2, ensure_ascii=False))
    elif done:
        for found in findings:
            if found.id in mended:
                typer.echo(f"{found.title} now: {found.status}: {found.answer.text}")
    status = exit_code(findings, done)
    if status is not ExitCode.OK:
        raise typer.Exit(status)


def _check_options(
    profile: str | None, settings: list[str] | None, *, fix: bool, yes: bool, hashes: bool, json: bool
) -> None:
    usage = None
    if settings and profile is None:
        usage = ("--set changes a profile, and none is given", "dflash-deploy doctor PROFILE --set …")
    elif hashes and profile is None:
        usage = ("--hashes reads a profile's checkpoints, and none is given", "dflash-deploy profile list")
    elif yes and not fix:
        usage = ("--yes goes with --fix", "dflash-deploy doctor --fix --yes")
    elif fix and not yes and (json or not sys.stdin.isatty()):
        usage = (
            "--fix asks before each change, and nobody can answer here",
            "dflash-deploy doctor --fix --yes",
        )
    if usage is not None:
        raise DeployError(usage[0], fix=usage[1], exit_code=ExitCode.USAGE)


def _asked(what: str) -> bool:
    try:
        return typer.confirm(f"{what}?", default=False)
    except typer.Abort:
        # Ctrl-C, or the end of the input: what was done until now is done.
        typer.echo(err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _print(findings: Sequence[Finding], request: Request, took_s: float, *, everything: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from dflash_deploy.doctor.view import lines

    console = Console()
    for line in lines(findings, request, took_s, everything=everything):
        word = line.split(maxsplit=1)[0] if line.startswith("  ") and line.strip() else ""
        if console.is_terminal and line[2:3] != " " and word in _COLOURS:
            text = Text(line)
            text.stylize(_COLOURS[word], 2, 2 + len(word))
            console.print(text, soft_wrap=True)
        elif console.is_terminal and line and not line.startswith(" "):
            console.print(Text(line, style="bold"), soft_wrap=True)
        else:
            typer.echo(line)
