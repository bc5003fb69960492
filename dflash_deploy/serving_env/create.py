"""An environment made from a pin, whole or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_deploy import __version__, paths, yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env import backup, environments, records, usage
from dflash_deploy.serving_env.describe import Description, describe
from dflash_deploy.serving_env.environments import Environment
from dflash_deploy.serving_env.installer import (
    Installer,
    Job,
    Say,
    Tool,
    find_installer,
    find_python,
    install,
    make_venv,
)
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.pins import PACKAGE, EnginePin, whole_path

_MIB = 1 << 20
_SPARE_MIB = 64


def create(
    name: str,
    pin: EnginePin,
    *,
    say: Say,
    tool: Tool | None = None,
    constraints: Path | None = None,
    upgrade: bool = False,
    force: bool = False,
) -> Environment:
    """Make the environment of that name; one that is already there from the same pin is left as it is.

    A making that was cut short is begun again; what it downloaded is taken from the installer's cache.

    Args:
        name: of the environment.
        pin: what to make it from.
        say: told each step.
        tool: the installer to use; None for uv when it is there.
        constraints: file of ``name==version`` lines that the choice of versions keeps to.
        upgrade: put it in the place of one made from another pin, which becomes a backup.
        force: also when a server runs from the one that is replaced.

    Raises:
        DeployError: it cannot be made; what stood there before stands there again.
    """
    if constraints is not None and not constraints.is_file():
        raise DeployError(f"{constraints}: no such file of constraints", exit_code=ExitCode.MISSING)
    if pin.local_wheel is not None and not pin.local_wheel.is_file():
        raise DeployError(f"{pin.local_wheel}: no such wheel", exit_code=ExitCode.MISSING)
    with environments.changing(name) as lock:
        standing = environments.find_environment(name)
        if standing is not None and not upgrade:
            return _same(standing, pin, say)
        if pin.kind == "path" and standing is None:
            return _adopt(name, pin, say)
        if pin.kind == "path" or (standing is not None and standing.adopted):
            raise DeployError(
                f"environment {name} cannot be replaced: an adopted environment has no place of its own",
                fix=f"dflash-deploy env remove {name}, or take another name",
                exit_code=ExitCode.USAGE,
            )
        installer = find_installer(tool)
        python = find_python(pin.python, installer)
        kept: str | None = None
        patched: list[str] = []
        if standing is not None:
            usage.refuse_while_running(standing, "replaced", force=force)
            check_disk(pin, environments.root())
            patched = _patches_of(standing)
            kept = backup.move_to_backup(standing, f"replaced by {pin.source}", say)
        else:
            _clear(name, say)
            check_disk(pin, environments.root())
        stamp = _Stamp(pin, str(installer), constraints, kept)
        try:
            made = _make(name, stamp, python, installer=installer, say=say, lock=lock)
        except BaseException:
            _undo(name, kept, say)
            raise
    for patch in patched:
        say(f"the patch {patch} was applied to what this replaces, and is not here: is it needed still?")
        say(f"  dflash-deploy patch check {patch} --env {name}")
    return made


def _patches_of(environment: Environment) -> list[str]:
    try:
        return [entry.change.patch for entry in ledger.entries(find_tree(environment.folder))]
    except DeployError:
        return []


def check_disk(pin: EnginePin, place: Path) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        DeployError: too little is free.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here, there = _existing(place), _existing(cache)
    if here.stat().st_dev == there.stat().st_dev:
        needs = {here: pin.disk_mib + pin.download_mib + _SPARE_MIB}
    else:
        needs = {here: pin.disk_mib + _SPARE_MIB, there: pin.download_mib + _SPARE_MIB}
    for folder, need_mib in needs.items():
        free_mib = shutil.disk_usage(folder).free // _MIB
        if free_mib < need_mib:
            raise DeployError(
                f"{folder} has {free_mib / 1024:.1f} GiB free (measured), and about {need_mib / 1024:.1f} "
                "GiB are needed (predicted: the environment, and downloads kept in the cache)",
                fix="free some space, or set XDG_DATA_HOME (environments) or XDG_CACHE_HOME (downloads) "
                "to a folder on a larger disk",
                exit_code=ExitCode.UNAVAILABLE,
            )


def _same(standing: Environment, pin: EnginePin, say: Say) -> Environment:
    if standing.record.pin == pin:
        say(f"environment {standing.name} is there already, made from {pin.source}")
        return standing
    raise DeployError(
        f"environment {standing.name} is there already, made from {standing.record.pin.source}, "
        f"not from {pin.source}",
        fix=f"give --replace (the old one is kept as a backup), or another name than {standing.name}",
        exit_code=ExitCode.USAGE,
    )


def _adopt(name: str, pin: EnginePin, say: Say) -> Environment:
    prefix = whole_path(str(pin.path))
    python = prefix / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise DeployError(
            f"{prefix} is no environment: it has no bin/python that can be started",
            fix="give the folder that holds bin/python (conda: conda env list)",
            exit_code=ExitCode.MISSING,
        )
    _clear(name, say)
    say(f"asking {python} what it has")
    about = describe(python, imports=False)
    _need_engine(about, pin, prefix)
    try:
        _begin(name, pin)
        _Stamp(pin, "adopted", adopted=prefix).write(name, about)
        environments.making_file(name).unlink()
    except BaseException:
        _undo(name, None, say)
        raise
    return environments.need_environment(name)


def _begin(name: str, pin: EnginePin) -> None:
    note = records.Making(name=name, pin=pin, began_at=environments.now())
    write_atomic(environments.making_file(name), records.write_text(note))


def _clear(name: str, say: Say) -> None:
    """Out of the way with what an interrupted making left; with nothing else."""
    folder = environments.folder_of(name)
    ours = environments.read_making(name) is not None
    if folder.is_symlink() or (folder.exists() and not ours and any(folder.iterdir())):
        _refuse_foreign(folder)
    if folder.exists() and not ours:
        folder.rmdir()
    elif folder.exists():
        say(f"an earlier making of {name} was cut short: beginning again (its downloads are kept)")
        environments.discard(folder, name)


def _refuse_foreign(folder: Path) -> None:
    raise DeployError(
        f"{folder} is there and was not made by this tool; it is left alone",
        fix=f"move it away, or give another name than {folder.name}",
        exit_code=ExitCode.UNAVAILABLE,
    )


@dataclass(frozen=True)
class _Stamp:
    """What the record of an environment says of its making."""

    pin: EnginePin
    installer: str
    constraints: Path | None = None
    replaces: str | None = None
    adopted: Path | None = None

    def write(self, name: str, about: Description) -> None:
        record = records.EnvironmentRecord(
            name=name,
            pin=self.pin,
            made_at=environments.now(),
            made_by=__version__,
            installer=self.installer,
            python_version=about.python.version,
            packages=about.packages,
            constraints=str(self.constraints.absolute()) if self.constraints else None,
            adopted=str(self.adopted) if self.adopted else None,
            replaces=self.replaces,
        )
        write_atomic(environments.folder_of(name) / environments.STAMP, records.write_text(record))


def _make(name: str, stamp: _Stamp, python: str, *, installer: Installer, say: Say, lock: int) -> Environment:
    pin = stamp.pin
    folder = environments.folder_of(name)
    _begin(name, pin)
    log_path = paths.state_dir() / "env" / f"{name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # For its owner alone: addresses of indexes may hold a password.
    opened = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "w+b") as log:
        say(f"making {folder} with {installer} and Python {pin.python} (log: {log_path})")
        job = Job(installer, log, log_path, say, lock)
        make_venv(folder, python, job)
        say(f"installing {' '.join(pin.requirements())}")
        install(folder, pin, stamp.constraints, job)
    say("asking it what it has")
    about = describe(folder / "bin" / "python", imports=False)
    _need_engine(about, pin, folder)
    if installer.tool == "pip":
        stamp = replace(stamp, installer=f"pip {about.packages.get('pip', '')}")
    lines = [f"# versions in {folder}, made from {pin.source}"]
    lines += [f"{package}=={version}" for package, version in sorted(about.packages.items())]
    write_atomic(folder / environments.CONSTRAINTS, "\n".join(lines) + "\n")
    stamp.write(name, about)
    environments.making_file(name).unlink()
    say(f"made {name}: {PACKAGE} {about.packages[PACKAGE]}, {len(about.packages)} packages")
    return environments.need_environment(name)


def _need_engine(about: Description, pin: EnginePin, prefix: Path) -> None:
    found = about.packages.get(PACKAGE)
    if found is None:
        python = shlex.quote(str(prefix / "bin" / "python"))
        pip = f"{python} -m pip install" if "pip" in about.packages else f"uv pip install --python {python}"
        raise DeployError(
            f"{prefix} has no {PACKAGE}",
            fix=f"choose an environment that has it, or install it there: {pip} {PACKAGE}",
            exit_code=ExitCode.MISSING,
        )
    if pin.version is not None and found != pin.version:
        raise DeployError(
            f"{PACKAGE} {yaml_file.describe(found)} was installed where the pin names {pin.version}",
            fix="correct the pin or the constraints",
            exit_code=ExitCode.INVALID_INPUT,
        )


def _undo(name: str, kept: str | None, say: Say) -> None:
    folder = environments.folder_of(name)
    if folder.exists():
        environments.discard(folder, name)
    environments.making_file(name).unlink(missing_ok=True)
    if kept is not None:
        backup.move_back(name, kept)
        say(f"{name} is what it was before")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
