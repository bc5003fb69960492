"""``dflash-deploy emit``: the systemd unit of a study's best configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.cli import given
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.deploy.unit import UnitSpec
    from dflash_deploy.tune.records import StudyRecord, TrialRecord

PYTHON_PLACE = Path("/opt/dflash-deploy/env/bin/python")
"""Where the serving environment is taken to be when nothing says otherwise."""


def emit(
    study: Annotated[
        str | None, typer.Argument(help="Name or folder of a study; without it, the latest one.")
    ] = None,
    *,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Take this trial instead of the best one.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            parser=given.path,
            help="Write the unit there, or into that folder, instead of printing it.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --output: show what would change, and write nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="With --output: replace a different file, which is kept as FILE.previous."
        ),
    ] = False,
    allow_simulated: Annotated[
        bool,
        typer.Option(
            "--allow-simulated", help="With --output: write it even though its study was only simulated."
        ),
    ] = False,
    system: Annotated[
        bool,
        typer.Option(
            "--system/--user-manager",
            help="Unit for the machine's systemd, which root installs, or for your own (systemctl --user).",
        ),
    ] = True,
    user: Annotated[
        str | None,
        typer.Option(
            "--user",
            metavar="NAME",
            help="Account that runs it [default: the profile's, else one that systemd makes].",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="PATH",
            parser=given.path,
            help=f"Interpreter of the serving environment [default: the study's, else {PYTHON_PLACE}].",
        ),
    ] = None,
) -> None:
    """Print or write the systemd unit of a tuned service.

    A unit is the file that makes systemd start a service and keep it running: here with the best
    configuration of a study, or with that of --trial. It starts the real engine, also when the study was
    simulated; a comment at its top says so then, and how it is installed.
    """
    from dflash_deploy.deploy import change
    from dflash_deploy.deploy.unit import render_unit
    from dflash_deploy.tune.records import read_study, read_trials

    if output is None and (dry_run or force):
        raise DeployError(
            "--dry-run and --force are about a file, and none is named",
            fix="add --output FILE",
            exit_code=ExitCode.USAGE,
        )
    if user is not None and not system:
        raise DeployError(
            "a unit of your own manager runs as you",
            fix="leave out --user or --user-manager",
            exit_code=ExitCode.USAGE,
        )
    folder = _study_folder(study)
    record = read_study(folder)
    chosen = _choose(record, read_trials(folder), trial)
    spec = _spec(record, chosen, python=python, system=system, user=user)
    unit = render_unit(spec)
    if output is None:
        # As bytes: a unit is UTF-8 whatever the terminal's encoding is.
        typer.echo(unit.encode(), nl=False)
        return
    planned = change.change_of(output, unit, name_in_folder=spec.unit_name)
    if dry_run:
        typer.echo(planned.diff(), nl=False)
        return
    if record.simulated and not allow_simulated:
        raise DeployError(
            f"study {record.name} was simulated: no figure of it was measured on a card",
            fix="tune on the real card, or add --allow-simulated to write the unit all the same",
            exit_code=ExitCode.USAGE,
        )
    change.apply(planned, replace=force)
    typer.echo(f"{planned.path}: {'as it was' if planned.empty else 'written'}", err=True)


def _study_folder(study: str | None) -> Path:
    from dflash_deploy.tune.study import last_study, studies_dir

    if study is None:
        return last_study()
    if study and "/" not in study and study not in (".", ".."):
        named = studies_dir() / study
        if (named / "study.json").is_file():
            return named
    folder = given.path(study)
    if "/" in study or (folder / "study.json").is_file():
        return folder
    raise DeployError(
        f"there is no study {study!r} in {studies_dir()}",
        fix="dflash-deploy tune, or give the folder of the study",
        exit_code=ExitCode.MISSING,
    )


def _choose(study: StudyRecord, trials: list[TrialRecord], number: int | None) -> TrialRecord:
    from dflash_deploy.tune.select import best_trial

    if number is None:
        best = best_trial(study, trials)
        if best is None:
            raise DeployError(
                f"study {study.name} has no configuration that served within its limits",
                fix="give it more trials, or name one yourself with --trial N",
            )
        return best
    numbers = ", ".join(str(one.number) for one in trials)
    chosen = next((trial for trial in trials if trial.number == number), None)
    if chosen is None:
        raise DeployError(
            f"study {study.name} has no trial {number}",
            fix=f"give one that it has: {numbers}" if trials else "dflash-deploy tune",
            exit_code=ExitCode.MISSING,
        )
    if chosen.measured is None or chosen.outcome not in ("served", "degraded", "infeasible"):
        raise DeployError(
            f"trial {number} ended as {chosen.outcome}: {chosen.reason or 'no reason was recorded'}",
            fix="give a trial that served, or leave --trial out for the best one",
        )
    return chosen


def _spec(
    study: StudyRecord, trial: TrialRecord, *, python: Path | None, system: bool, user: str | None
) -> UnitSpec:
    from dflash_deploy.deploy.unit import UnitSpec
    from dflash_deploy.engine.sglang.command import launch_argv
    from dflash_deploy.engine.sglang.flags import FlagTable
    from dflash_deploy.tune.launching import values

    profile = study.profile
    service = profile.service
    measured_with = Path(trial.argv[0]) if trial.argv and not study.simulated else None
    argv = launch_argv(
        (python.absolute() if python else None) or profile.engine.python or measured_with or PYTHON_PLACE,
        values(trial.flags),
        host=service.host,
        port=service.port,
        table=FlagTable.for_version(study.engine_version),
    )
    return UnitSpec(
        service=service.name,
        argv=argv,
        host=service.host,
        port=service.port,
        env=profile.env,
        manager="system" if system else "user",
        user=(user or service.user) if system else user,
        api_key_file=str(service.api_key_file) if service.api_key_file else None,
        comments=_evidence(study, trial),
    )


def _evidence(study: StudyRecord, trial: TrialRecord) -> tuple[str, ...]:
    """Where the configuration comes from and what is known of it, each figure with its kind."""
    from dflash_deploy import __version__
    from dflash_deploy.checkpoint.cards import find_model_card

    kind = f"simulated {study.card}" if study.simulated else f"measured on {study.card or 'this machine'}"
    lines = [
        f"dflash-deploy {__version__}: study {study.name}, trial {trial.number} ({trial.source}), "
        f"SGLang {study.engine_version}",
    ]
    if study.simulated:
        lines.append(
            "SIMULATED: never run on a card. Tune on the real one before you rely on this configuration."
        )
        for flag in ("model-path", "speculative-draft-model-path"):
            card = find_model_card(str(trial.flags.get(flag, "")))
            if card is not None and card.path is None:
                lines.append(
                    f"--{flag} {card.id}: everyone makes this model for themselves; put its folder there."
                )
    if trial.violations:
        lines.append(f"It breaks limits of its profile: {', '.join(sorted(trial.violations))}.")
    if (measured := trial.measured) is not None:
        lines.append(
            f"{measured.users} at once: {measured.total_tokens_per_s.median:.1f} tokens/s in all, "
            f"{measured.user_tokens_per_s.median:.1f} for the median user, "
            f"TTFT p95 {measured.ttft_p95_s:.2f} s ({kind})"
        )
        if measured.vram_used_mib is not None:
            total = f" of {measured.vram_total_mib:,}" if measured.vram_total_mib else ""
            lines.append(f"VRAM at most {measured.vram_used_mib:,}{total} MiB ({kind})")
    return tuple(lines)
