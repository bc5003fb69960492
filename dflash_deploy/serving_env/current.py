"""The environment that commands take when no interpreter is named."""

from __future__ import annotations

from pathlib import Path

from dflash_deploy import paths
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env import records
from dflash_deploy.serving_env.environments import Environment, find_environment, need_environment
from dflash_deploy.serving_env.refused import refused


def _record_file() -> Path:
    return paths.state_dir() / "environment.json"


def default_name() -> str | None:
    """Its name, None where none was chosen.

    Raises:
        DeployError: the record of the choice is wrong.
    """
    record = records.read(_record_file(), records.DefaultRecord)
    return record.name if record is not None else None


def default_environment() -> Environment | None:
    """It, None where none was chosen.

    Raises:
        DeployError: the environment that was chosen is not there any more.
    """
    name = default_name()
    if name is None:
        return None
    environment = find_environment(name)
    if environment is None:
        raise DeployError(
            f"environment {name}, chosen with `env use`, is not there any more",
            fix="choose another (dflash-deploy env list, dflash-deploy env use NAME), or none (dflash-deploy "
            "env use --none)",
            exit_code=ExitCode.MISSING,
        )
    return environment


def default_python() -> Path | None:
    """Its interpreter, None where none was chosen.

    Raises:
        DeployError: as above.
    """
    environment = default_environment()
    return environment.python if environment is not None else None


def choose(name: str | None) -> None:
    """Take this environment from now on, or none.

    Raises:
        DeployError: there is no such environment, or the choice cannot be written down.
    """
    try:
        if name is None:
            _record_file().unlink(missing_ok=True)
            return
        need_environment(name)
        write_atomic(_record_file(), records.write_text(records.DefaultRecord(name=name)))
    except OSError as error:
        raise refused(error, _record_file()) from error
