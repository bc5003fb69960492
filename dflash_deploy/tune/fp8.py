"""Back ends of FP8 products, as a choice to measure: what the serving environment can be told to take.

SGLang reads no variable for them unless its environment is patched (``bmm-fp8-backend``), and some of them do
not work on every card; a launch would find out after minutes, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import VARIABLE, Choices, FlagSetting, Profile
from dflash_deploy.serving_env.patches import choices
from dflash_deploy.serving_env.patches.choices import BmmChoices

SETTING = f"{VARIABLE}{choices.VARIABLE}"


def require_reader(profile: Profile, python: Path) -> None:
    """Make sure that a back end which the profile names is read by the server.

    Raises:
        DeployError: the environment is not patched, or the value is none.
    """
    values = list(_values(profile))
    if values:
        found = choices.bmm_choices(python)
        for value in values:
            if value not in found.broken:
                found.require(value)


def without_broken(profile: Profile, python: Path) -> tuple[Profile, tuple[str, ...]]:
    """The profile less what is known not to work here, and what a person should know of it.

    Args:
        profile: of a study to be made.
        python: of the serving environment.

    Raises:
        DeployError: as ``require_reader``, or nothing is left.
    """
    if not list(_values(profile)):
        return profile, ()
    require_reader(profile, python)
    found = choices.bmm_choices(python)
    fixed = profile.env.get(choices.VARIABLE)
    if fixed is not None:
        found.require(fixed)
    notes = [f"{choices.VARIABLE}: {found.problem}; measure it: {found.fix}"] if found.problem else []
    bounds = profile.search.get(SETTING)
    update: dict[str, object] = {}
    if isinstance(bounds, Choices):
        kept = [choice for choice in bounds.choices if _broken(choice, found) is None]
        notes += [
            f"{SETTING}={_told(choice)} is not tried: {why}" for choice, why in _left_out(bounds, found)
        ]
        if not kept:
            raise DeployError(
                f"no choice of search.{SETTING} works here: {'; '.join(notes)}",
                fix=f"leave it out: --set search.{SETTING}=",
                exit_code=ExitCode.UNAVAILABLE,
            )
        update["search"] = {**profile.search, SETTING: bounds.model_copy(update={"choices": kept})}
    known = [
        one for one in profile.known if SETTING not in one.flags or not _broken(one.flags[SETTING], found)
    ]
    notes += [
        f"known setting {one.name} is not tried: {_broken(one.flags[SETTING], found)}"
        for one in profile.known
        if one not in known
    ]
    return profile.model_copy(update={**update, "known": known}), tuple(notes)


def _values(profile: Profile) -> Iterator[str]:
    """Every back end that a server may be told to take."""
    if choices.VARIABLE in profile.env:
        yield profile.env[choices.VARIABLE]
    bounds = profile.search.get(SETTING)
    offered = [*(bounds.choices if isinstance(bounds, Choices) else [])]
    for value in (*offered, *(known.flags.get(SETTING) for known in profile.known)):
        if isinstance(value, str):
            yield value


def _left_out(bounds: Choices, found: BmmChoices) -> Iterator[tuple[FlagSetting | None, str]]:
    for choice in bounds.choices:
        why = _broken(choice, found)
        if why is not None:
            yield choice, why


def _broken(choice: FlagSetting | None, found: BmmChoices) -> str | None:
    """Why a choice does not work here, by the probe; left out, the variable stands for the default."""
    why = found.broken.get(found.default if choice is None else str(choice))
    return None if why is None else f"the FP8 probe found that it does not work here: {why}"


def _told(choice: FlagSetting | None) -> str:
    return "null" if choice is None else str(choice)
