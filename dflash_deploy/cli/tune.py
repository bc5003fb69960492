"""``dflash-deploy tune``: from a profile to the best configuration that was measured."""

from __future__ import annotations

import sys
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_deploy.cli.options import Python
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.deploy.lend import Unit

_SIMULATED_SPEED = 100.0
_BEAT_S = 10.0


def tune(
    profile: Annotated[
        str | None,
        typer.Argument(
            help="Profile to tune: a name (dflash-deploy profile list) or the path of a file. With "
            "--simulate, the card's own profile when left out. With --resume, the study to go on with.",
            show_default=False,
        ),
    ] = None,
    *,
    profile_option: Annotated[
        str | None, typer.Option("--profile", "-p", help="The same as the argument.", metavar="PROFILE")
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(help="Tune a simulated card instead of a real one, such as rtx-5090.", metavar="CARD"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search, and of the simulated card.")] = 0,
    trials: Annotated[
        int,
        typer.Option(min=1, help="Servers to launch in the whole study at most, known settings among them."),
    ] = 20,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no further trial after so many minutes.")
    ] = None,
    least_gain: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            help="Stop when no launch is expected to gain so many percent; 0 goes on to --trials.",
            metavar="PERCENT",
        ),
    ] = 0.4,
    baseline: Annotated[
        Literal["default"] | None,
        typer.Option(
            help="Also launch SGLang's own defaults, with nothing but the profile's fixed flags, to hold "
            "the best against: one launch more, none where the plan says that it cannot serve.",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Stop when the profile's objective is as good as this.", metavar="VALUE"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the study; else PROFILE-DATE-NUMBER.", metavar="STUDY")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a study: the last one, or the one that is named."),
    ] = False,
    gpu: Annotated[
        int | None,
        typer.Option(min=0, help="Number of the card to use, as nvidia-smi counts.", metavar="N"),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Share the study named by --name with workers on other cards and machines, through an "
            "Optuna storage: postgresql://USER@HOST/DATABASE, grpc://HOST:PORT or sqlite:///FILE. A password "
            "belongs into a file (PGPASSFILE).",
            metavar="URL",
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(help="Name of this worker among those; else that of the machine, with --gpu."),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Go on without this terminal, also after logout; progress goes to a log."
        ),
    ] = False,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach", help="Look at a running study: the one that is named, or that runs. Starts nothing."
        ),
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop a running study, named in the same way, as Ctrl-C would.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value of the profile. May be repeated.", metavar="KEY=VALUE"),
    ] = None,
    python: Python = None,
    host: Annotated[str, typer.Option(help="Address that the trials' servers listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the trials' servers; else a free one each.")
    ] = None,
    stop_service: Annotated[
        bool,
        typer.Option(
            "--stop-service",
            help="A service that runs on this card may be stopped for the study. It is started again in any "
            "case, at the latest by the next run of tune.",
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object at the end, and progress to stderr (docs/json.md)."
        ),
    ] = False,
    time_scale: Annotated[float, typer.Option(min=0.01, max=10_000, hidden=True)] = _SIMULATED_SPEED,
    beat_s: Annotated[float, typer.Option(min=0.01, max=600, hidden=True)] = _BEAT_S,
) -> None:
    """Find the best configuration of a profile by launching and measuring servers.

    Settings that the profile knows are tried first. A start that fails, a broken limit and wrong answers are
    results too; every trial is kept with its log. Ctrl-C ends the study after the running trial, twice at
    once; --resume goes on from there.
    A long study may be left alone: --detach, then --attach to look at it and --stop to end it.
    """
    from dflash_deploy.deploy.lend import give_back_lost, lent, not_back
    from dflash_deploy.deploy.systemctl import Systemd
    from dflash_deploy.server.orphans import end_orphans
    from dflash_deploy.tune.detached import LOG, how_to_look, leave_terminal
    from dflash_deploy.tune.meeting import meet, read_meeting
    from dflash_deploy.tune.opening import Place, open_again, open_new
    from dflash_deploy.tune.records import read_trials
    from dflash_deploy.tune.screen import screen_for
    from dflash_deploy.tune.signals import stop_once
    from dflash_deploy.tune.studies import studies_dir
    from dflash_deploy.tune.study import Effort, discard_untried, run_study
    from dflash_deploy.tune.summary import lines, summarize

    if profile is not None and profile_option is not None:
        raise typer.BadParameter("give the profile once", param_hint="--profile")
    wanted = profile or profile_option
    if resume and (simulate or settings or baseline or (wanted and name)):
        raise typer.BadParameter(
            "a study keeps its profile and card: name the study alone", param_hint="--resume"
        )
    if attach + stop + detach > 1 or ((attach or stop) and (resume or simulate or settings)):
        raise typer.BadParameter("they exclude each other", param_hint="--detach, --attach, --stop")
    if target is not None and not isfinite(target):
        raise typer.BadParameter("no result comes up to that", param_hint="--target")
    if detach and json:
        raise typer.BadParameter("a detached study prints to its log", param_hint="--detach, --json")
    if attach or stop:
        _look_or_stop(name or wanted, stop=stop)
        return
    if storage is not None and (resume or name is None):
        raise typer.BadParameter("it goes with the --name that all workers give", param_hint="--storage")
    meeting = None
    if storage is not None and name is not None:
        meeting = meet(storage, name, worker, gpu, beat_s=beat_s)
        name = meeting.folder_name
        # It has been here before.
        resume = (studies_dir() / name / "study.json").is_file()
    place = Place(python, host, port, gpu)
    progress = sys.stderr if json else sys.stdout
    with stop_once() as asked:
        for sentence in (*end_orphans(), *give_back_lost(Systemd)):
            typer.echo(sentence, err=True)
        opened = (
            open_again(name or wanted, place)
            if resume
            else open_new(
                wanted,
                overrides=settings or (),
                simulate=simulate,
                time_scale=time_scale,
                seed=seed,
                name=name,
                place=place,
                default_too=baseline is not None,
            )
        )
        folder, study = opened.folder, opened.study
        if meeting is not None:
            meeting.keep(folder)
        # While there is somebody to be told.
        holders = _holders(opened.rig.index, may_stop=stop_service)
        if detach and (tuner := leave_terminal(folder)) is not None:
            typer.echo("\n".join([*how_to_look(study, tuner), f"its log:    {folder / LOG}"]))
            return
        with screen_for(progress, study, read_trials(folder)) as screen:
            screen.note(f"study {study.name} in {folder}")
            for note in opened.notes:
                screen.note(note)
            effort = Effort(trials, minutes, least_gain / 100, target)
            try:
                with lent(holders, Systemd, screen.note) as not_started:
                    records, ending = run_study(
                        folder,
                        study,
                        opened.rig,
                        effort,
                        screen,
                        meeting=meeting or read_meeting(folder),
                        asked=asked,
                    )
            except DeployError:
                if meeting is not None:  # the other workers did not take it: the folder is for nothing
                    discard_untried(folder)
                raise
        # Within, for impatience is not to cut this short either.
        summary = summarize(folder, study, records, ending)
        for line in lines(study, summary):
            typer.echo(line, err=json)
        if json:
            typer.echo(summary.model_dump_json())
    if not_started:
        raise not_back(not_started)
    if ending == "interrupted":
        raise typer.Exit(ExitCode.INTERRUPTED)
    if summary.best is None:
        raise typer.Exit(ExitCode.FAILED)


def _holders(gpu: int | None, *, may_stop: bool) -> tuple[Unit, ...]:
    """The services on a card, which may be stopped."""
    from dflash_deploy.deploy.lend import require_consent, units_of
    from dflash_deploy.machine.gpu import gpu_processes

    if gpu is None:
        return ()
    units = units_of(gpu_processes(gpu) or ())
    require_consent(units, given=may_stop)
    return units


def _look_or_stop(name: str | None, *, stop: bool) -> None:
    """``--attach`` and ``--stop``: another process has the study."""
    from dflash_deploy.tune import detached
    from dflash_deploy.tune.records import read_study, read_trials
    from dflash_deploy.tune.studies import find_study
    from dflash_deploy.tune.summary import lines, summarize

    folder = find_study(name) if name else detached.study_at_work()
    study = read_study(folder)
    if stop:
        tuner = detached.stop(folder)
        typer.echo(
            f"study {study.name} was asked to stop (process {tuner.process.pid}): it finishes its running "
            "trial first, and stops at once when asked again"
        )
        typer.echo(f"go on with: dflash-deploy tune --resume {study.name}")
        return
    tuner = detached.require_tuner(folder)
    try:
        ending = detached.watch(folder, study, sys.stdout)
    except KeyboardInterrupt:
        typer.echo("")
        typer.echo("\n".join(detached.how_to_look(study, tuner)))
        return
    if ending is None:
        typer.echo(f"the tuner ended without a word; go on with: dflash-deploy tune --resume {study.name}")
        raise typer.Exit(ExitCode.FAILED)
    summary = summarize(folder, study, read_trials(folder), ending)
    for line in lines(study, summary):
        typer.echo(line)
    if summary.best is None:
        raise typer.Exit(ExitCode.FAILED)
