"""The checkpoints that a profile names: their cards where there are some, and what the engine is given."""

from __future__ import annotations

from pathlib import Path

from dflash_deploy.checkpoint.cards import ModelCard, find_model_card
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import Profile


def target_card(profile: Profile) -> ModelCard | None:
    """Facts about the target, or None where no card describes it."""
    return find_model_card(profile.model.target)


def draft_card(profile: Profile) -> ModelCard | None:
    """Facts about the draft, or None where there is no draft model or no card describes it."""
    draft = profile.speculation.draft or profile.speculation.draft_path
    return find_model_card(draft) if draft is not None else None


def target_path(profile: Profile) -> str:
    """Hub name, or folder from the root, of the target.

    Raises:
        DeployError: nothing says where it is, or its folder is not there.
    """
    path = profile.model.path
    if path is None:
        card = target_card(profile)
        path = card.path if card is not None else profile.model.target
    if path is None:
        raise DeployError(
            f"the profile does not say where the model {profile.model.target!r} lies, and it is on no hub",
            fix="add --set model.path=FOLDER",
            exit_code=ExitCode.MISSING,
        )
    return _place(path, "model.path")


def draft_path(profile: Profile) -> str | None:
    """Hub name, or folder from the root, of the draft; None where there is none outside the target.

    Raises:
        DeployError: its folder is not there.
    """
    path = profile.speculation.draft_path
    if path is None:
        card = draft_card(profile)
        path = card.path if card is not None else profile.speculation.draft
    return _place(path, "speculation.draft_path") if path is not None else None


def _place(path: str, key: str) -> str:
    """A hub name as it is; a folder from the root, made sure of."""
    folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
    if folder.is_dir():
        return str(folder.resolve())
    if path.startswith(("/", "./", "../", "~")):
        raise DeployError(
            f"{path}: no such model folder",
            fix=f"give the right one: --set {key}=FOLDER",
            exit_code=ExitCode.MISSING,
        )
    return path
