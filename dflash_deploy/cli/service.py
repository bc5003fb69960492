"""``dflash-deploy service``: install, change, take back and take away services, as generations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli import given
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_deploy.deploy.generations import Generation, Manager, Store
    from dflash_deploy.deploy.notify import Event
    from dflash_deploy.deploy.service import Changed, Service

app = typer.Typer(
    help="Install tuned services, look at them, change them, take them back and away.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Name = Annotated[str, typer.Argument(help="Name of the service.", show_default=False)]
_System = Annotated[
    bool,
    typer.Option(
        "--system/--user",
        help="A service of the machine (for root), or of your own (systemctl --user).",
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/json.md lists its keys).")]


@app.command("install")
def install(
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STUDY|PROFILE",
            help="A study's name or folder, or a profile, whose first known setting is taken "
            "[default: the latest study].",
        ),
    ] = None,
    trial: Annotated[
        int | None, typer.Option(metavar="N", help="Take this trial of the study instead of the best one.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the service [default: the profile's].")
    ] = None,
    system: _System = True,
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
            metavar="PATH",
            parser=given.path,
            help="Interpreter that SGLang is installed in [default: the profile's, the study's, or the one "
            "chosen with `env use`].",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="One engine on each of these cards, as services NAME-gpuN on ports from the profile's on.",
        ),
    ] = None,
    router: Annotated[
        bool,
        typer.Option(
            "--router/--no-router",
            help="With --gpus: SGLang's router in front, on the profile's own address and port; the engines "
            "then listen for this machine alone, on the ports after it.",
        ),
    ] = False,
    router_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=given.path,
            help="Interpreter that the router (smg) is installed in [default: an environment made for it].",
        ),
    ] = None,
    timer: Annotated[
        bool,
        typer.Option(
            "--timer/--no-timer",
            help="Have a timer check it each minute, and restart it when it is dead (docs/monitoring.md).",
        ),
    ] = True,
    allow_simulated: Annotated[
        bool, typer.Option("--allow-simulated", help="Install it even though its study was only simulated.")
    ] = False,
    start: Annotated[
        bool,
        typer.Option(
            "--start/--no-start",
            help="Start it and see that it serves, else go back; or write it down and leave alone what runs.",
        ),
    ] = True,
    dry_run: _DryRun = False,
    json: _Json = False,
) -> None:
    """Install a tuned configuration as a service.

    Each installation is a generation of the service: it is started and asked for a real answer. When it does
    not start, answers badly, or holds more memory than planned, the generation before it is put back and
    started, and the reason is told; the exit status is 1 then.
    """
    from dflash_deploy.deploy import configuration as configurations
    from dflash_deploy.deploy import installation
    from dflash_deploy.deploy import service as services
    from dflash_deploy.deploy.systemctl import Systemd
    from dflash_deploy.deploy.timer import render_timer_units

    manager = _manager(system)
    if run_as is not None and not system:
        raise DeployError(
            "a service of your own manager runs as you",
            fix="leave out --run-as or --user",
            exit_code=ExitCode.USAGE,
        )
    if (router or router_python) and gpus is None:
        raise DeployError(
            "--router stands in front of several engines, and there is one",
            fix="name the cards with --gpus 0,1",
            exit_code=ExitCode.USAGE,
        )
    if source is not None:
        given.path(source)
    if name == "":
        raise DeployError(
            "--name is empty", fix="name the service, or leave --name out", exit_code=ExitCode.USAGE
        )
    try:
        chosen = configurations.of_source(source, trial)
    except DeployError as error:
        raise _with_persons_studies(error, source) from error
    if chosen.simulated and not allow_simulated:
        raise DeployError(
            f"{chosen.source} was simulated: no figure of it was measured on a card",
            fix="tune on the real card, or add --allow-simulated",
            exit_code=ExitCode.USAGE,
        )
    wanted = installation.Wanted(
        chosen, chosen.python(python), manager, run_as, name, Systemd(manager).version(), gpus
    )
    steps = installation.engines(wanted, behind=router, tell=_tell)
    if router:
        steps.append(installation.router(wanted, steps, router_python, dry_run=dry_run, tell=_tell))
    for one in installation.left_over(wanted, steps):
        _tell(f"note: {one} stays as it is; to take it away: dflash-deploy service uninstall {one}")
    units = render_timer_units(manager=manager) if timer else None
    if dry_run:
        for step in steps:
            service = _service(step.service, manager)
            number = service.store.next_number()
            _generation, unit, _evidence = step.make(number)
            _show_install(service, number, unit, start=start, watch=timer)
        return
    Systemd(manager).require()
    if manager == "user" and not _lingers():
        _tell("note: it runs while you are logged in; to have it from boot on: loginctl enable-linger")
    done = installation.install(
        steps,
        lambda one: _service(one, manager),
        lambda service, make: services.install(service, make, start=start, watch=units),
    )
    _report(done, json=json)


@app.command("list")
def list_services(*, system: _System = True, json: _Json = False) -> None:
    """List services, their state, and what has changed below them."""
    from dflash_deploy.deploy.generations import root_of, stores

    manager = _manager(system)
    found = [_summary(store, manager) for store in stores(root_of(manager))]
    if json:
        from json import dumps

        typer.echo(dumps({"schema_version": 1, "services": found}, indent=2))
        return
    if not found:
        typer.echo(
            "No service of the machine is installed (your own: --user)."
            if system
            else "No service of your own is installed."
        )
    for one in found:
        typer.echo("\n".join(_summary_lines(one)))


@app.command("show")
def show(name: _Name, *, system: _System = True, json: _Json = False) -> None:
    """Show the generations and the history of a service."""
    manager = _manager(system)
    stores = [service.store for service in _existing(name, manager, asked=False)]
    if json:
        histories = [[one.model_dump(mode="json") for one in store.history()] for store in stores]
        _print_json(
            [
                {**_summary(store, manager), "history": history}
                for store, history in zip(stores, histories, strict=True)
            ]
        )
        return
    for store in stores:
        _show(store, manager)


def _show(store: Store, manager: Manager) -> None:
    summary = _summary(store, manager)
    for line in _summary_lines(summary):
        typer.echo(line)
    for number in store.numbers():
        mark = "*" if number == summary["current"] else " "
        try:
            generation = store.generation(number)
        except DeployError as error:
            typer.echo(f" {mark} {number}: {_safe(error.message)}")
            continue
        kind = " (simulated)" if generation.simulated else ""
        typer.echo(f" {mark} {number}: {generation.created:%Y-%m-%d %H:%M} {_safe(generation.source)}{kind}")
    for one in store.history()[-10:]:
        back = f"gone back to {one.before or 'nothing'}: {_safe(one.why or 'no reason was written down')}"
        indented = ("done" if one.ok else back).replace("\n", "\n     ")
        what = f"{one.operation} {one.generation}" if one.generation else one.operation
        typer.echo(f"   {one.at:%Y-%m-%d %H:%M} {what}: {indented}")


@app.command("diff")
def diff(
    name: _Name,
    first: Annotated[int, typer.Argument(metavar="A", help="Number of a generation.")],
    second: Annotated[int, typer.Argument(metavar="B", help="Number of another.")],
    *,
    system: _System = True,
) -> None:
    """Show what differs between the units of two generations."""
    import difflib

    store = _one(name, _existing(name, _manager(system), asked=False)).store
    before, after = (
        store.unit_text(store.generation(number).number).splitlines(keepends=True)
        for number in (first, second)
    )
    lines = difflib.unified_diff(before, after, fromfile=f"generation {first}", tofile=f"generation {second}")
    typer.echo("".join(lines).encode(), nl=False)


@app.command("start")
def start(name: _Name, *, system: _System = True, dry_run: _DryRun = False, json: _Json = False) -> None:
    """Start a service and wait until its model answers."""
    from dflash_deploy.deploy import service as services

    found = _existing(name, _manager(system), asked=not dry_run)
    if dry_run:
        _would(found, "start it, and wait until the model answers")
        return
    _report([(service, services.start(service)) for service in found], json=json)


@app.command("stop")
def stop(name: _Name, *, system: _System = True, dry_run: _DryRun = False, json: _Json = False) -> None:
    """Stop a service, and see that nothing of it is left."""
    from dflash_deploy.deploy import service as services

    found = _existing(name, _manager(system), asked=not dry_run)[::-1]
    if dry_run:
        _would(found, "stop it, and see that its processes, port and memory are gone")
        return
    stopped = [(service, services.stop(service)) for service in found]
    if json:
        _print_json(
            [
                {"service": service.store.service, "stopped": not left, "left": left}
                for service, left in stopped
            ]
        )
    else:
        for service, left in stopped:
            typer.echo("\n".join(left) if left else f"{service.unit} is stopped; nothing of it is left")
    if any(left for _service_, left in stopped):
        raise typer.Exit(ExitCode.FAILED)


@app.command("restart")
def restart(name: _Name, *, system: _System = True, dry_run: _DryRun = False, json: _Json = False) -> None:
    """Restart a service and wait until its model answers.

    The engines of several cards are restarted one after the other.
    """
    from dflash_deploy.deploy import service as services

    found = _existing(name, _manager(system), asked=not dry_run)
    if dry_run:
        _would(found, "stop it", "start it, and wait until the model answers")
        return
    _report([(service, services.restart(service)) for service in found], json=json)


@app.command("rollback")
def rollback(
    name: _Name,
    number: Annotated[
        int | None,
        typer.Argument(metavar="[N]", help="Generation to go to [default: the last one before that served]."),
    ] = None,
    *,
    system: _System = True,
    dry_run: _DryRun = False,
    json: _Json = False,
) -> None:
    """Go back to an earlier generation (or any other).

    It is started and asked, as when it was installed.
    """
    from dflash_deploy.deploy import service as services

    service = _one(name, _existing(name, _manager(system), asked=not dry_run))
    if dry_run:
        target = services.rollback_target(service.store, number)
        _show_install(service, target, service.store.unit_text(target), start=True, watch=False)
        return
    _report([(service, services.rollback(service, number))], json=json)


@app.command("uninstall")
def uninstall(name: _Name, *, system: _System = True, dry_run: _DryRun = False) -> None:
    """Take a service away: its unit, its timer, its generations.

    What it fetched and compiled (its cache) stays, and is named; models and environments are never touched.
    """
    from shlex import join

    from dflash_deploy.deploy import service as services
    from dflash_deploy.deploy.timer import timer_of

    for service in _existing(name, _manager(system), asked=not dry_run)[::-1]:
        own, folder = service.store.service, service.store.folder
        if dry_run:
            _would(
                [service],
                f"stop it and {timer_of(own)}",
                f"remove {service.unit_path}",
                f"remove {folder}",
            )
            continue
        router = _router_folder(service)
        services.uninstall(service)
        typer.echo(f"{service.unit} is taken away: {service.unit_path}, {folder} and its timer are gone")
        cache = Path("/var/cache") / service.unit.removesuffix(".service")
        if system and cache.exists():
            typer.echo(
                f"kept: {cache} (fetched models, compiled kernels)\n"
                f"  to remove it: rm -rf {cache.resolve()} {cache}"
            )
        for path in services.kept_changes(service):
            typer.echo(f"kept: {path} (changes of your own)\n  to remove it: {join(['rm', '-r', str(path)])}")
        if router is not None:
            typer.echo(f"kept: {router} (the router's environment)\n  to remove it: rm -rf {router}")


def _router_folder(service: Service) -> Path | None:
    """The environment that was made for a router; None for an engine."""
    from dflash_deploy.serving_env.router import is_own_place

    current = service.store.current()
    generation = None if current is None else service.store.generation(current)
    if generation is None or generation.role != "router":
        return None
    folder = Path(generation.argv[0]).parents[1]
    return folder if is_own_place(folder) else None


def _with_persons_studies(error: DeployError, source: str | None) -> DeployError:
    """With sudo, a study that is not root's may be that of the person who typed it."""
    import os
    import pwd
    from contextlib import suppress
    from shlex import quote

    person = os.environ.get("SUDO_USER")
    if error.exit_code is not ExitCode.MISSING or person is None or (source is not None and "/" in source):
        return error
    with suppress(KeyError, OSError):
        folder = Path(pwd.getpwnam(person).pw_dir) / ".local" / "state" / "dflash-deploy" / "studies"
        found = [path.parent for path in folder.glob(f"{source or '*'}/study.json")]
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime)
            return DeployError(
                f"{error.message}; studies of {person} are in {folder}",
                fix=f"sudo dflash-deploy service install --from {quote(str(newest))}",
                exit_code=ExitCode.MISSING,
            )
    return error


def _manager(system: bool) -> Manager:
    return "system" if system else "user"


def _lingers() -> bool:
    from getpass import getuser

    try:
        return (Path("/var/lib/systemd/linger") / getuser()).exists()
    except (OSError, KeyError):
        return True


def _tell(line: str) -> None:
    typer.echo(_safe(line), err=True)


def _safe(text: str) -> str:
    from dflash_deploy.machine.text import printable

    return "\n".join(printable(line, longest=2000) for line in text.split("\n"))


def _store(name: str, manager: Manager) -> Store:
    from dflash_deploy.deploy.generations import Store, no_service, root_of

    folder = root_of(manager) / name
    if "/" in name or name in ("", ".", "..") or not folder.is_dir():
        raise no_service(name)
    return Store(folder, name)


def _existing(name: str, manager: Manager, *, asked: bool) -> list[Service]:
    """The service of that name, or those of several cards that were installed under it."""
    from dflash_deploy.deploy.fleet import members
    from dflash_deploy.deploy.generations import root_of
    from dflash_deploy.deploy.systemctl import Systemd

    root = root_of(manager)
    names = () if (root / name).is_dir() else members(root, name)
    if not names:
        _store(name, manager)
    if asked:
        Systemd(manager).require()
    return [_service(one, manager) for one in names or (name,)]


def _one(name: str, found: Sequence[Service]) -> Service:
    if len(found) > 1:
        raise DeployError(
            f"{name} is several services, each with generations of its own",
            fix=f"name one: {', '.join(one.store.service for one in found)}",
            exit_code=ExitCode.USAGE,
        )
    return found[0]


def _service(name: str, manager: Manager) -> Service:
    import os
    from contextlib import suppress
    from dataclasses import replace

    from dflash_deploy.deploy import canary
    from dflash_deploy.deploy import notify as notifying
    from dflash_deploy.deploy import service as services
    from dflash_deploy.deploy.generations import Store, root_of
    from dflash_deploy.deploy.key_file import read_api_key
    from dflash_deploy.deploy.systemctl import Systemd

    systemd = Systemd(manager)
    store = Store(root_of(manager) / name, name)

    def check(generation: Generation) -> canary.Canary:
        key_file = generation.api_key_file
        found = canary.run(
            services.base_url(generation),
            api_key=read_api_key(Path(key_file)) if key_file else None,
            vram_expected_mib=generation.vram_expected_mib,
            processes=lambda: services.processes(systemd, store.unit_name),
        )
        plain = generation.role == "engine" and not generation.simulated
        learnt = _learnt(generation) if plain and not found.problem else None
        return found if learnt is None else replace(found, seen=(*found.seen, learnt))

    def told(event: Event, why: str) -> None:
        current, notify = store.current(), None
        with suppress(DeployError):
            notify = store.generation(current).notify if current is not None else None
        if notify is not None:
            for problem in notifying.send(notify, notifying.message(event, name, why)):
                _tell(f"note: nobody was told: {problem}")

    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    unit_dir = Path("/etc/systemd/system") if manager == "system" else config / "systemd" / "user"
    return services.Service(store, systemd, unit_dir, check, _tell, told)


def _learnt(generation: Generation) -> str | None:
    """Let the log of a service that serves correct later plans; None where nothing of it can be planned."""
    from dflash_deploy.cli.plan_request import answer
    from dflash_deploy.cli.plan_source import Asked

    try:
        found = answer(Asked(unit=generation.unit_name, sglang=generation.versions.engine, keep=True))
    except DeployError:
        return None
    if found.calibrated is None or not found.calibrated.learnt:
        return None
    return f"plan: corrected by its log ({', '.join(found.calibrated.learnt).replace('_', ' ')})"


def _show_install(service: Service, number: int, unit: str, *, start: bool, watch: bool) -> None:
    from dflash_deploy.deploy.change import change_of
    from dflash_deploy.deploy.timer import timer_of

    _tell(f"would write generation {number} to {service.store.folder}, and change {service.unit_path}:")
    if service.unit_dir.is_dir():
        typer.echo(change_of(service.unit_path, unit).diff().encode(), nl=False)
    else:
        typer.echo(unit.encode(), nl=False)
    _tell("would then read units again and enable it" + (", start it, and ask it" if start else ""))
    if watch:
        _tell(f"would then enable and start {timer_of(service.store.service)}, which checks it each minute")


def _would(found: Sequence[Service], *steps: str) -> None:
    for service in found:
        for step in steps:
            typer.echo(f"{service.unit}: would {step}")


def _report(done: Sequence[tuple[Service, Changed]], *, json: bool) -> None:
    if json:
        _print_json([_as_json(service, changed) for service, changed in done])
    else:
        for service, changed in done:
            _say(service, changed)
    if any(changed.problem is not None for _service_, changed in done):
        raise typer.Exit(ExitCode.FAILED)


def _print_json(services: list[dict[str, object]]) -> None:
    """One service as it is, several in a list."""
    from json import dumps

    content = services[0] if len(services) == 1 else {"services": services}
    typer.echo(dumps({"schema_version": 1, **content}, indent=2))


def _as_json(service: Service, changed: Changed) -> dict[str, object]:
    return {
        "service": service.store.service,
        "unit": service.unit,
        "generation": changed.generation,
        "ok": changed.problem is None,
        "problem": changed.problem,
        "fix": changed.fix,
        "outage_s": changed.outage_s,
    }


def _say(service: Service, changed: Changed) -> None:
    if changed.problem is None:
        took = f" after {changed.outage_s:.0f} s (measured)" if changed.outage_s is not None else ""
        typer.echo(f"{service.unit}: generation {changed.generation}{took}")
        return
    now = f"generation {changed.generation}" if changed.generation else "no generation"
    typer.echo(f"error: {_safe(changed.problem)}", err=True)
    away = f", nothing was served for {changed.outage_s:.0f} s (measured)" if changed.outage_s else ""
    typer.echo(f"{service.unit}: {now} is current{away}", err=True)
    fix = changed.fix or f"dflash-deploy diagnose --unit {service.unit}"
    typer.echo(f"  fix: {_safe(fix)}", err=True)


def _summary(store: Store, manager: Manager) -> dict[str, object]:
    """A service for people and scripts; what cannot be read of it is said in ``problem``."""
    from dflash_deploy.deploy.below import versions_now
    from dflash_deploy.deploy.generations import as_json
    from dflash_deploy.deploy.systemctl import Systemd
    from dflash_deploy.deploy.versions import staleness

    summary: dict[str, object] = {
        "name": store.service,
        "unit": store.unit_name,
        "manager": manager,
        "current": store.current(),
        "generations": store.numbers(),
        "state": None,
        "stale": [],
        "cut_short": None,
        "problem": None,
        "generation": None,
    }

    def look_at_change() -> None:
        pending = store.pending()
        summary["cut_short"] = pending.operation if pending else None

    def look_at_generation() -> None:
        current = store.current()
        if current is not None:
            generation = store.generation(current)
            summary["generation"] = as_json(generation)
            summary["stale"] = list(staleness(generation.versions, versions_now(generation)))

    def look_at_unit() -> None:
        summary["state"] = Systemd(manager).active(store.unit_name)

    problems = []
    for look in (look_at_change, look_at_generation, look_at_unit):
        try:
            look()
        except DeployError as error:
            problems.append(error.message)
    summary["problem"] = "; ".join(problems) or None
    return summary


def _summary_lines(summary: dict[str, object]) -> list[str]:
    numbers, current, stale = summary["generations"], summary["current"], summary["stale"]
    of = len(numbers) if isinstance(numbers, list) else 0
    which = f"generation {current} of {of}" if current is not None else f"no current generation of {of}"
    user = " --user" if summary["manager"] == "user" else ""
    lines = [f"{summary['name']}: {which}, {summary['state'] or 'state unknown'}"]
    if isinstance(stale, list) and stale:
        lines += [f"  stale: {_safe(reason)}" for reason in stale]
        lines.append(f"  fix: dflash-deploy tune, then dflash-deploy service install{user}")
    if summary["cut_short"]:
        lines.append(
            f"  {summary['cut_short']} goes on, or was cut short; the next command ends it or goes back:"
        )
        lines.append(f"  fix: dflash-deploy service start{user} {summary['name']}")
    if summary["problem"]:
        lines.append(f"  problem: {_safe(str(summary['problem']))}")
    return lines
