"""The methods of a comparison: which, and what each is launched with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.engine.sglang.drafting import PREFIX, drafting
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import METHOD, FlagSetting, Profile
from dflash_deploy.tune.launching import METHODS, draft_flags, method_of, target_flags
from dflash_deploy.tune.space import Settings


@dataclass(frozen=True)
class Arm:
    """One method of a comparison, and the flags that it is launched with (host and port are not in them)."""

    method: Method
    flags: Mapping[str, FlagSetting]


def read_methods(text: str) -> tuple[Method, ...]:
    """Methods by comma, in their order, each once.

    Raises:
        DeployError: an unknown one, or none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = [method for word in words for method in METHODS if method == word]
    if len(known) < len(words) or not words:
        unknown = next((word for word in words if word not in METHODS), None)
        raise DeployError(
            "no method is given" if unknown is None else f"there is no method {unknown!r}",
            fix=f"methods are {', '.join(METHODS)}",
            exit_code=ExitCode.USAGE,
        )
    return tuple(dict.fromkeys(known))


def read_drafts(given: Sequence[str]) -> dict[Method, str]:
    """``METHOD=PLACE`` as a person writes it.

    Raises:
        DeployError: it is none.
    """
    drafts: dict[Method, str] = {}
    for word in given:
        name, _, place = word.partition("=")
        method = next((one for one in ("dspark", "dflash") if one == name), None)
        if method is None or not place:
            raise DeployError(
                f"{word!r} names no draft model",
                fix="write dspark=… or dflash=…, with a model card, a folder or a hub name",
                exit_code=ExitCode.USAGE,
            )
        drafts[method] = place
    return drafts


def arm_of(profile: Profile, method: Method, drafts: Mapping[Method, str], *, simulated: bool) -> Arm:
    """The profile's service with this method.

    The profile's own flags and those of its first known setting hold for every method, but for those that say
    how drafts are made: these were tuned for the method of that setting. Others are launched as figures are
    published of them.

    Args:
        profile: the service.
        method: how drafts are made in its stead.
        drafts: draft models that the person names.
        simulated: for the simulator.

    Raises:
        DeployError: the method needs a draft model, and none is known for this target.
    """
    known: Settings = profile.known[0].flags if profile.known else {}
    given = {name: value for name, value in {**profile.flags, **known}.items() if name != METHOD}
    tuned = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    if method_of(profile, known) != method:
        tuned = {}
    flags: dict[str, FlagSetting] = {
        **{name: value for name, value in given.items() if not name.startswith(PREFIX)},
        **drafting(method, tuned),
        **target_flags(profile, simulated=simulated),
        **draft_flags(profile, method, simulated=simulated, named=drafts.get(method)),
    }
    return Arm(method, flags)
