"""``dflash-deploy health``: one service, for monitoring, scripts and the timer that restarts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from dflash_deploy.cli import given
from dflash_deploy.cli.sought import ApiKeyFile, Url, places_sought
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.watch.health.examination import Limits
    from dflash_deploy.watch.health.verdict import Health
    from dflash_deploy.watch.places import Place

_WAIT_PAUSE_S = 2.0
_LEAST_S = 2.0
_UNKNOWN = ExitCode.INVALID_INPUT
"""What monitoring plugins call UNKNOWN has the same number."""
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What stands above it: any wrong command line."""


class Plugin(TyperCommand):
    """A command that keeps to what monitoring plugins do also where it cannot do its work.

    Whoever calls it reads standard output and the status: 2 is the service's fault, more than 3 is none.
    """

    def make_context(self, *given: Any, **more: Any) -> Any:  # noqa: ANN401 - typer's own types have no public name
        """Read the command line; a wrong one is unknown, not critical."""
        try:
            return super().make_context(*given, **more)
        except _UsageError as error:
            message = getattr(error, "format_message", error.__str__)()
            _say_unknown(message, json=False)
            raise DeployError(message, fix="dflash-deploy health --help", exit_code=_UNKNOWN) from error

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run it; what a person must fix is unknown. The timer's unit fails instead."""
        try:
            return super().invoke(ctx)
        except (DeployError, OSError) as error:
            if ctx.params["act"] or isinstance(error, BrokenPipeError):
                raise
            told = error if isinstance(error, DeployError) else DeployError(str(error))
            _say_unknown(told.message, json=ctx.params["json"])
            raise DeployError(told.message, fix=told.fix, exit_code=_UNKNOWN) from error


SETTINGS = {"cls": Plugin}
"""How typer is to make it."""


def health(
    name: Annotated[
        str | None,
        typer.Argument(help="Service or profile; may be left out where there is one service."),
    ] = None,
    *,
    url: Url = None,
    api_key_file: ApiKeyFile = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=_LEAST_S, max=600, help="Longest time of a whole check."),
    ] = 25.0,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="S", min=0, max=86400, help="Check again for so long, until it serves."
        ),
    ] = None,
    accept_length: Annotated[
        float | None,
        typer.Option(
            "--expect-accept-length",
            metavar="TOKENS",
            min=1,
            max=1000,
            help="Accept length to hold it against; warns below 70 % of it [default: what was measured when "
            "the installed generation was chosen].",
        ),
    ] = None,
    vram_warning_mib: Annotated[
        int,
        typer.Option("--vram-warning", metavar="MIB", min=0, help="Warn with less free VRAM than this."),
    ] = 300,
    vram_critical_mib: Annotated[
        int,
        typer.Option("--vram-critical", metavar="MIB", min=0, help="Critical with less free VRAM than this."),
    ] = 64,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show every layer, as on a terminal, after the one line.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
    ] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus",
            metavar="FILE",
            parser=given.path,
            help="Also write the figures for the node exporter's textfile collector (FILE.prom).",
        ),
    ] = None,
    act: Annotated[
        bool,
        typer.Option(
            "--act",
            help="For the timer: restart the unit when enough checks in a row found it dead, and say why.",
        ),
    ] = False,
    timer_units: Annotated[
        Path | None,
        typer.Option(
            "--timer-units",
            metavar="FOLDER",
            parser=given.path,
            help="Write the two units of the timer that checks with --act into this folder, and end.",
        ),
    ] = None,
    user: Annotated[
        bool, typer.Option("--user", help="With --timer-units: for your own manager, not the machine's.")
    ] = False,
    checks: Annotated[
        int,
        typer.Option("--checks", metavar="N", min=1, max=100, help="With --act: so many checks in a row."),
    ] = 3,
    cool_down_s: Annotated[
        float,
        typer.Option(
            "--cool-down", metavar="S", min=0, max=86400, help="With --act: no second restart within this."
        ),
    ] = 900.0,
) -> None:
    """Check one service in layers, from its unit to its card, by asking it for a token.

    Exits as monitoring plugins do: 0 ok, 1 warning, 2 critical, 3 unknown. A long prefill is no failure.
    """
    from dflash_deploy.watch.health.examination import Limits

    if timer_units is not None:
        _write_timer_units(timer_units, checks, cool_down_s, user=user)
        return
    if act and url is not None:
        raise DeployError(
            "--act restarts a unit, and --url names none", fix="give the service's name", exit_code=_UNKNOWN
        )
    limits = Limits(accept_length, vram_warning_mib, vram_critical_mib)
    found = _checked(name, url, api_key_file, limits, timeout_s=timeout_s, wait_s=wait_s)
    if found is None:
        called = "is found here" if name is None else f"called {name!r} is found here"
        _say_unknown(f"no service {called}", json=json)
        raise typer.Exit(_UNKNOWN)
    place, seen = found
    said = _act(place, seen, checks, cool_down_s) if act else None
    if prometheus is not None:
        _write_prometheus(prometheus, seen)
    _print(seen, json=json, layers=layers)
    if said is not None:
        typer.echo(said, err=json)
    if seen.verdict:
        raise typer.Exit(int(seen.verdict))


def _checked(
    name: str | None,
    url: str | None,
    api_key_file: Path | None,
    limits: Limits,
    *,
    timeout_s: float,
    wait_s: float | None,
) -> tuple[Place, Health] | None:
    """The last of as many checks as it takes; None where there is nothing to check."""
    import time

    from dflash_deploy.watch.health.examination import examine
    from dflash_deploy.watch.health.verdict import Verdict

    began = time.monotonic()
    while True:
        check_began = time.monotonic()
        left_s = timeout_s if wait_s is None else min(timeout_s, began + wait_s - check_began)
        place = _place(name, url, api_key_file, max(_LEAST_S, left_s) / 2)
        spent_s = time.monotonic() - check_began
        left_s = max(_LEAST_S / 2, left_s - spent_s)
        seen = None if place is None else examine(place, timeout_s=left_s, limits=limits)
        well = seen is not None and not seen.starting and seen.verdict in (Verdict.OK, Verdict.WARNING)
        if well or wait_s is None or time.monotonic() + _WAIT_PAUSE_S + _LEAST_S > began + wait_s:
            return (place, seen) if place is not None and seen is not None else None
        time.sleep(_WAIT_PAUSE_S)


def _place(name: str | None, url: str | None, api_key_file: Path | None, timeout_s: float) -> Place | None:
    """The one service that is meant, with its key.

    Raises:
        DeployError: several are found and none was named, or something given is wrong.
    """
    from dflash_deploy.watch.bounded import within

    def look() -> list[Place] | DeployError:
        try:
            return places_sought(name, url, api_key_file)
        except DeployError as error:
            return DeployError(error.message, fix=error.fix, exit_code=_UNKNOWN)

    (found,) = within(timeout_s, [look])
    if found is None:
        raise DeployError("systemd did not say in time which services there are", exit_code=_UNKNOWN)
    if isinstance(found, DeployError):
        raise found
    units = [place for place in found if place.unit is not None]
    meant = units if name is None and units else found
    if name is None and url is None:
        meant = [place for place in meant if place.found_by != "port" or _answers(place)]
    if len(meant) > 1:
        raise DeployError(
            f"several services are found here: {', '.join(place.name for place in meant)}",
            fix=f"name one: dflash-deploy health {meant[0].name}",
            exit_code=_UNKNOWN,
        )
    return meant[0] if meant else None


def _answers(place: Place) -> bool:
    from dflash_deploy.watch.health.serving import listens

    return place.base_url is not None and listens(place.base_url, 1.0)


def _act(place: Place, seen: Health, checks: int, cool_down_s: float) -> str:
    from dflash_deploy.watch.health.act import act
    from dflash_deploy.watch.health.evidence import Policy

    if place.unit is None:
        raise DeployError(f"{place.name} runs under no unit that could be restarted", exit_code=_UNKNOWN)
    return "\n".join(act(place.unit, seen, Policy(checks=checks, cool_down_s=cool_down_s)))


def _write_timer_units(folder: Path, checks: int, cool_down_s: float, *, user: bool) -> None:
    from dflash_deploy.deploy.timer import render_timer_units
    from dflash_deploy.files import write_atomic

    units = render_timer_units(
        manager="user" if user else "system",
        options=("--checks", str(checks), "--cool-down", f"{cool_down_s:g}"),
    )
    for name, text in units.items():
        write_atomic(folder / name, text)
        typer.echo(f"written: {folder / name}")


def _write_prometheus(path: Path, seen: Health) -> None:
    import time

    from dflash_deploy.files import write_atomic
    from dflash_deploy.watch.health import render

    write_atomic(path, render.prometheus(seen, now_s=time.time()))


def _print(seen: Health, *, json: bool, layers: bool) -> None:
    from dflash_deploy.watch.health import render

    if json:
        from json import dumps

        typer.echo(dumps(render.as_json(seen), indent=2, ensure_ascii=False))
        return
    terminal = sys.stdout.isatty()
    if layers or not terminal:
        typer.echo(render.plugin_line(seen))
    if layers or terminal:
        from rich.console import Console

        from dflash_deploy.machine.view import plain_lines, print_tables

        if terminal:
            print_tables(render.people_sections(seen), Console())
        else:
            typer.echo("\n".join(plain_lines(render.people_sections(seen))))


def _say_unknown(text: str, *, json: bool) -> None:
    from dflash_deploy.watch.health import render
    from dflash_deploy.watch.health.verdict import Health, Layer, Verdict

    nothing = Health(
        "nothing", (Layer("check", Verdict.UNKNOWN, text, "dflash-deploy status", needed=True),), 0.0
    )
    if json:
        from json import dumps

        typer.echo(dumps(render.as_json(nothing), indent=2))
    else:
        typer.echo(render.plugin_line(nothing))
