"""``dflash-deploy env``: the environment that SGLang runs in, made, kept, put back."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash_deploy.machine.gpu import GpuReading
    from dflash_deploy.serving_env.advice import Advice
    from dflash_deploy.serving_env.describe import Description
    from dflash_deploy.serving_env.environments import Environment
    from dflash_deploy.serving_env.pins import EnginePin

app = typer.Typer(
    help="Make, list, choose, back up and repair the environment that SGLang runs in.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Name = Annotated[str, typer.Argument(help="Name of the environment.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/json.md lists its keys).")]
_Force = Annotated[bool, typer.Option("--force", help="Also while it is in use.")]
_OtherPython = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Look at this interpreter instead of a named environment."),
]
_ImportS = Annotated[
    float, typer.Option(metavar="S", min=1, max=3600, help="Longest wait for the import of one package.")
]


@app.command("create")
def create(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the environment [default: sglang-VERSION, or the id of --pin].", show_default=False
        ),
    ] = None,
    *,
    pin: Annotated[
        str | None,
        typer.Option(
            metavar="ID|FILE",
            help="What to make it from: an id of profiles/engines, or a file [default: what an environment "
            "of that name was made from; the release that NAME begins with, as sglang-0.5.22 does; else "
            "sglang-0.5.23].",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Make it from this release on PyPI.")
    ] = None,
    wheel: Annotated[
        str | None, typer.Option(metavar="PATH|URL", help="Make it from this wheel of SGLang.")
    ] = None,
    git: Annotated[
        str | None, typer.Option(metavar="URL@COMMIT", help="Make it from a commit (all 40 digits).")
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Adopt an environment that exists; nothing is written to it."),
    ] = None,
    installer: Annotated[
        Literal["uv", "pip"] | None, typer.Option(help="Installer [default: uv when it is there, else pip].")
    ] = None,
    constraints: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep to these versions, such as the constraints.txt of another environment."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in the place of an old one, which becomes a backup.")
    ] = False,
    force: _Force = False,
    json: _Json = False,
) -> None:
    """Make an environment, or go on where an interrupted making left off (downloads are kept).

    It needs about 11 GB, and 6 GB for downloads. Progress goes to standard error.
    """
    from dflash_deploy.serving_env.create import create as make
    from dflash_deploy.serving_env.current import default_name
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, environment_json

    sources = {"version": version, "wheel": wheel, "git": git, "path": str(path) if path else None}
    wanted = _pin(name, pin, sources)
    name = name or _name_of(wanted)
    with _in_order():
        made = make(
            name,
            wanted,
            say=_say,
            tool=installer,
            constraints=constraints,
            upgrade=replace,
            force=force,
        )
    default = default_name()
    if json:
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "environment": environment_json(made, default=made.name == default),
            }
        )
        return
    typer.echo(str(made.python))
    if default != made.name:
        _say(f"to take it from now on: dflash-deploy env use {made.name}")


@app.command("list")
def list_(json: _Json = False) -> None:
    """List environments, which one is taken, and backups, also those of environments that are gone."""
    from dflash_deploy.serving_env.backup import all_backups
    from dflash_deploy.serving_env.current import default_name
    from dflash_deploy.serving_env.environments import list_environments
    from dflash_deploy.serving_env.view import list_json, list_lines

    whole, broken = list_environments()
    backups = all_backups()
    default = default_name()
    if json:
        _print_json(list_json(whole, broken, backups, default))
        return
    for line in list_lines(whole, backups, default):
        typer.echo(line)
    for bad in broken:
        _say(f"not an environment: {bad.name}: {bad.problem}")
        _say(f"  fix: {bad.fix}")


@app.command("show")
def show(
    name: Annotated[
        str | None, typer.Argument(help="Name of the environment [default: the one in use].")
    ] = None,
    *,
    python: _OtherPython = None,
    import_timeout: _ImportS = 90.0,
    json: _Json = False,
) -> None:
    """Ask an environment's interpreter what it has, and say what is missing or slow."""
    from dflash_deploy.machine.view import plain_lines, print_tables
    from dflash_deploy.serving_env.backup import list_backups
    from dflash_deploy.serving_env.current import default_name
    from dflash_deploy.serving_env.view import finding_lines, show_json, show_sections

    environment, about, gpus, advice = _examined(name, python, import_timeout)
    backups = list_backups(environment.name) if environment else []
    if json:
        default = environment is not None and environment.name == default_name()
        _print_json(show_json(environment, about, advice, backups, default=default))
        return
    from rich.console import Console

    blocks = show_sections(environment, about, backups, gpus)
    console = Console()
    if console.is_terminal:
        print_tables(blocks, console)
    else:
        typer.echo("\n".join(plain_lines(blocks)))
    for line in finding_lines(advice):
        typer.echo(line)


@app.command("doctor")
def doctor(
    name: Annotated[
        str | None, typer.Argument(help="Name of the environment [default: the one in use].")
    ] = None,
    *,
    python: _OtherPython = None,
    import_timeout: _ImportS = 90.0,
    json: _Json = False,
) -> None:
    """Say what is wrong with an environment on this machine, with the fix and the evidence for each thing.

    Exits with 1 when something keeps a server from starting or from serving right.
    """
    from dflash_deploy.engine.sglang.advice_case import Weight
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, advice_json, finding_lines

    _, about, _, advice = _examined(name, python, import_timeout)
    if json:
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "python": about.python.executable,
                "findings": advice_json(advice),
            }
        )
    else:
        for line in finding_lines(advice) or ["nothing is known to be wrong with it"]:
            typer.echo(line)
    if any(one.weight in (Weight.REFUSED, Weight.WRONG) for one in advice):
        raise typer.Exit(ExitCode.FAILED)


@app.command("use")
def use(
    name: Annotated[str | None, typer.Argument(help="Name of the environment.")] = None,
    *,
    none: Annotated[bool, typer.Option("--none", help="Take none: profiles name their interpreter.")] = False,
    json: _Json = False,
) -> None:
    """Take an environment where no interpreter is named."""
    from dflash_deploy.serving_env.current import choose
    from dflash_deploy.serving_env.environments import need_environment
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, environment_json

    if (name is None) != none:
        raise DeployError(
            "give the name of an environment, or --none",
            fix="dflash-deploy env list",
            exit_code=ExitCode.USAGE,
        )
    choose(name)
    taken = need_environment(name) if name else None
    if json:
        environment = environment_json(taken, default=True) if taken else None
        _print_json({"schema_version": SCHEMA_VERSION, "environment": environment})
        return
    typer.echo(str(taken.python) if taken else "none is taken")


@app.command("backup")
def backup(
    name: _Name,
    *,
    reason: Annotated[str, typer.Option(help="Why, kept with it.")] = "asked for",
    json: _Json = False,
) -> None:
    """Copy an environment, so that it can be put back byte for byte."""
    from dflash_deploy.serving_env.backup import back_up
    from dflash_deploy.serving_env.environments import need_environment
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, backup_json

    environment = need_environment(name)
    with _in_order():
        made = back_up(environment, reason=reason[:200], say=_say)
    if json:
        _print_json({"schema_version": SCHEMA_VERSION, "backup": backup_json(made)})
    else:
        typer.echo(made.record.id)


@app.command("restore")
def restore(
    name: _Name,
    *,
    backup_id: Annotated[
        str | None, typer.Option("--backup", metavar="ID", help="Which backup [default: the newest].")
    ] = None,
    force: _Force = False,
    json: _Json = False,
) -> None:
    """Put a backup in its environment's place, also where that was removed.

    What stands there made from something else becomes a backup; what was made from the same is given up.
    """
    from dflash_deploy.serving_env.backup import restore as put_back
    from dflash_deploy.serving_env.current import default_name
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, environment_json

    with _in_order():
        restored = put_back(name, backup_id, say=_say, force=force)
    if json:
        environment = environment_json(restored, default=restored.name == default_name())
        _print_json({"schema_version": SCHEMA_VERSION, "environment": environment})
        return
    typer.echo(str(restored.python))


@app.command("remove")
def remove(
    name: _Name,
    *,
    backup_id: Annotated[
        str | None, typer.Option("--backup", metavar="ID", help="Delete this backup, not the environment.")
    ] = None,
    force: _Force = False,
    json: _Json = False,
) -> None:
    """Delete an environment that this tool made; its backups stay. An adopted one is only forgotten."""
    from dflash_deploy.serving_env.backup import list_backups, remove_backup
    from dflash_deploy.serving_env.remove import remove as delete
    from dflash_deploy.serving_env.view import SCHEMA_VERSION, backup_json

    with _in_order():
        if backup_id is not None:
            remove_backup(name, backup_id)
        else:
            delete(name, say=_say, force=force)
    kept = list_backups(name)
    if json:
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "name": name,
                "backup": backup_id,
                "backups": [backup_json(one) for one in kept],
            }
        )
    elif kept and backup_id is None:
        _say(f"{len(kept)} backup(s) stay; to put one back: dflash-deploy env restore {name}")


def _pin(name: str | None, pin: str | None, sources: dict[str, str | None]) -> EnginePin:
    from dflash_deploy.serving_env.environments import find_environment, read_making
    from dflash_deploy.serving_env.pins import load_pin, pin_of_name, pin_of_source

    given = {key: value for key, value in sources.items() if value is not None}
    if len(given) + (pin is not None) > 1:
        raise DeployError(
            "give one of --pin, --version, --wheel, --git and --path",
            fix="dflash-deploy env create --help",
            exit_code=ExitCode.USAGE,
        )
    if given:
        ((kind, source),) = given.items()
        return pin_of_source(kind, source)
    if pin is not None:
        return load_pin(pin)
    known = find_environment(name) if name is not None else None
    begun = known.record if known is not None else read_making(name) if name is not None else None
    return begun.pin if begun is not None else pin_of_name(name)


def _name_of(pin: EnginePin) -> str:
    from dflash_deploy.serving_env.pins import GIVEN, PACKAGE

    if pin.id != GIVEN:
        return pin.id
    if pin.version is not None:
        return f"{PACKAGE}-{pin.version}"
    raise DeployError(
        f"name the environment that is made from this {pin.kind}",
        fix=f"dflash-deploy env create NAME --{pin.kind} …",
        exit_code=ExitCode.USAGE,
    )


def _examined(
    name: str | None, python: Path | None, import_s: float
) -> tuple[Environment | None, Description, GpuReading, tuple[Advice, ...]]:
    from dataclasses import replace

    from dflash_deploy.machine.gpu import read_gpus
    from dflash_deploy.serving_env.advice import Case, advise
    from dflash_deploy.serving_env.current import default_name
    from dflash_deploy.serving_env.describe import describe
    from dflash_deploy.serving_env.environments import need_environment
    from dflash_deploy.serving_env.pins import whole_path

    environment = None
    if python is None:
        wanted = name or default_name()
        if wanted is None:
            raise DeployError(
                "name an environment: none is chosen",
                fix="dflash-deploy env list, then dflash-deploy env use NAME; or give --python",
                exit_code=ExitCode.USAGE,
            )
        environment = need_environment(wanted)
        python = environment.python
    elif name is not None:
        raise DeployError("give a name or --python, not both", exit_code=ExitCode.USAGE)
    about = describe(whole_path(python), import_s=import_s)
    gpus = read_gpus()
    torch = (about.modules or {}).get("torch")
    seen = [gpu.compute_capability for gpu in gpus.readable if gpu.compute_capability]
    case = Case(
        version=about.sglang.version if about.sglang else None,
        about=about,
        capabilities=tuple(dict.fromkeys(seen or (torch.capabilities if torch else None) or ())),
        driver_cuda=gpus.cuda_version,
    )
    advice = advise(case)
    if environment is not None and not environment.adopted:
        # One that is adopted is not ours to make anew: what is advised is one of another name.
        name = environment.name
        advice = tuple(replace(one, fix=one.fix and one.fix.replace("NAME", name)) for one in advice)
    return environment, about, gpus, advice


@contextmanager
def _in_order() -> Iterator[None]:
    """Ctrl-C and SIGTERM end a change in order: what was begun is undone."""
    from dflash_deploy.tune.signals import stop_once

    with stop_once():
        yield


def _say(line: str) -> None:
    from dflash_deploy.machine.text import printable

    typer.echo(printable(line, longest=4096), err=True)


def _print_json(document: dict[str, object]) -> None:
    from json import dumps

    typer.echo(dumps(document, indent=2, ensure_ascii=False))
