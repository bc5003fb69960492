"""Environments deleted: only those that this tool made, and not while somebody uses them."""

from __future__ import annotations

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env import current, environments, usage
from dflash_deploy.serving_env.environments import Environment
from dflash_deploy.serving_env.installer import Say


def remove(name: str, *, say: Say, force: bool = False) -> None:
    """Delete an environment, or what a making that was cut short left; backups stay.

    Of an adopted one only our record of it goes.

    Args:
        name: of the environment.
        say: told what is deleted.
        force: also one that is in use.

    Raises:
        DeployError: there is none of that name that is ours, or it is in use.
    """
    with environments.changing(name):
        folder = environments.folder_of(name)
        standing = environments.find_environment(name)
        if standing is None:
            if environments.read_making(name) is None:
                environments.need_environment(name)
            if folder.exists() and not folder.is_symlink():
                say(f"deleting {folder}, which is half-made")
                environments.discard(folder, name)
            environments.making_file(name).unlink(missing_ok=True)
            return
        if not force:
            _refuse_in_use(standing)
        say(f"deleting {folder}" if not standing.adopted else f"forgetting {standing.prefix}, which stays")
        environments.discard(folder, name)
    if current.default_name() == name:
        current.choose(None)


def _refuse_in_use(environment: Environment) -> None:
    users = list(usage.named_by_units(environment)) + list(usage.running_from(environment))
    if current.default_name() == environment.name:
        users.insert(0, "whatever names no interpreter (`env use`)")
    if users:
        raise DeployError(
            f"environment {environment.name} is in use by {', '.join(users[:5])}",
            fix="choose another one for that first, or give --force",
            exit_code=ExitCode.UNAVAILABLE,
        )
