"""What a service's environment looked like when the service was installed, for a check before each start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.tree import find_tree


@dataclass(frozen=True)
class SealedFile:
    """A module that a patch changed: where it is, and its SHA-256."""

    patch: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Seal:
    """An environment with nothing in it in an unknown state.

    Attributes:
        site_packages: the folder that its interpreter imports from.
        version: SGLang's.
        files: what patches have changed.
    """

    site_packages: str
    version: str
    files: tuple[SealedFile, ...] = ()


def seal_of(python: Path) -> Seal:
    """Look at the environment of an interpreter.

    Raises:
        DeployError: it has no SGLang, or a patch in it is not intact.
    """
    try:
        tree = find_tree(python)
    except DeployError as error:
        if error.exit_code is not ExitCode.MISSING:
            raise
        raise DeployError(
            error.message,
            fix="give --python the interpreter that SGLang is installed in, or make an environment: "
            "dflash-deploy env create, then env use",
            exit_code=ExitCode.MISSING,
        ) from None
    verdict = verify_intact(python)
    if not verdict.intact:
        raise DeployError(
            f"the environment of {python} is not as its patches left it: {'; '.join(verdict.problems)}",
            fix=verdict.fix,
            exit_code=ExitCode.UNAVAILABLE,
        )
    files = tuple(
        SealedFile(entry.change.patch, str(tree.root / entry.change.file), entry.change.after)
        for entry in ledger.entries(tree)
        if entry.state == "applied"
    )
    return Seal(str(tree.site_packages), tree.version, files)
