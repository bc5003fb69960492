"""``dflash-deploy diagnose``: why a server failed, from its log."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.diagnosis import Diagnosis


def diagnose(
    log: Annotated[
        str | None,
        typer.Argument(metavar="LOG", help="The log: a file (gzip, bz2, xz too), or - for standard input."),
    ] = None,
    *,
    unit: Annotated[
        str | None, typer.Option("--unit", metavar="NAME", help="Read the journal of this service or unit.")
    ] = None,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Read the log of this trial of a study.")
    ] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="NAME", help="With --trial: the study [default: the latest]."),
    ] = None,
    exit_status: Annotated[
        int | None,
        typer.Option(
            "--exit-status", metavar="N", help="The status that the server ended with, where it is known."
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print a bug report instead: no host names, home folders, keys, addresses or prompts in it.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead (docs/json.md lists its keys).")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what is benign in full, too.")
    ] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Check every entry of the catalogue against its own examples.")
    ] = False,
) -> None:
    """Name the root cause of a failed start or a dead server, and what helps.

    Exits with 0 when nothing of severity error is found, with 1 when a failure is found (named or unknown),
    with 3 or 4 when the log cannot be read or is not there.
    """
    if selftest:
        _selftest()
        return
    if sum(given is not None for given in (log, unit, trial)) != 1 or (study is not None and trial is None):
        raise DeployError(
            "one log is wanted: a file, - for standard input, --unit NAME, or --trial N (with --study NAME)",
            fix="dflash-deploy diagnose server.log",
            exit_code=ExitCode.USAGE,
        )
    found = _read(log, unit, trial, study, exit_status)
    if found.lines_read == 0:
        raise DeployError("the log is empty", exit_code=ExitCode.INVALID_INPUT)
    _show(found, report=report, json=json, verbose=verbose)
    if found.root is not None:
        raise typer.Exit(ExitCode.FAILED)


def _show(found: Diagnosis, *, report: bool, json: bool, verbose: bool) -> None:
    from dflash_deploy.diagnosis import view

    if report:
        typer.echo(view.report(found))
    elif json:
        from json import dumps

        typer.echo(dumps(view.as_json(found), indent=2, ensure_ascii=False))
    else:
        typer.echo(view.as_text(found, verbose=verbose))


def _read(
    log: str | None, unit: str | None, trial: int | None, study: str | None, exit_status: int | None
) -> Diagnosis:
    import sys

    from dflash_deploy.diagnosis import diagnose as read

    if unit is not None:
        from dflash_deploy.watch.journal import unit_log

        with unit_log(unit) as journal:
            return read(journal, exit_status=exit_status)
    if trial is not None:
        return _read_trial(trial, study, exit_status)
    if log is None or log == "-":
        # Reading stops at a log's end, and closes nothing that is not its own.
        with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
            return read(stdin, exit_status=exit_status)
    return read(Path(log), exit_status=exit_status)


def _read_trial(number: int, study: str | None, exit_status: int | None) -> Diagnosis:
    from dflash_deploy.diagnosis import diagnose as read
    from dflash_deploy.tune.launching import values
    from dflash_deploy.tune.records import read_trials, trial_folder
    from dflash_deploy.tune.studies import last_study, studies_dir

    folder = last_study() if study is None else _study_folder(study, studies_dir())
    path = trial_folder(folder, number) / "server.log"
    record = next((record for record in read_trials(folder) if record.number == number), None)
    if not path.is_file():
        known = record is not None and not record.launched
        raise DeployError(
            f"trial {number} of {folder.name} "
            + (f"was not launched: {record.reason}" if known and record else "left no log"),
            fix=shlex.join(["ls", str(folder / "trials")]),
            exit_code=ExitCode.MISSING,
        )
    flags = {
        name: value
        for name, value in values(record.flags if record else {}).items()
        if isinstance(value, bool | int | float | str)
    }
    return read(path, exit_status=exit_status, flags=flags)


def _study_folder(study: str, studies: Path) -> Path:
    folder = next(
        (place for place in (studies / study, Path(study)) if (place / "study.json").is_file()), None
    )
    if folder is None:
        raise DeployError(
            f"there is no study {study!r} in {studies}", fix=f"ls {studies}", exit_code=ExitCode.MISSING
        )
    return folder


def _selftest() -> None:
    from dflash_deploy.diagnosis.catalogue import load_catalogue
    from dflash_deploy.diagnosis.selftest import failures

    entries = load_catalogue()
    wrong = failures(entries)
    for line in wrong:
        typer.echo(line)
    examples = sum(len(entry.examples) for entry in entries)
    typer.echo(f"{len(entries)} entries, {examples} examples: {len(wrong) or 'none'} wrong")
    if wrong:
        raise typer.Exit(ExitCode.FAILED)
