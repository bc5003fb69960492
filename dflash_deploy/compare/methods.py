"""From a profile to the same service with another way of making draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from dflash_deploy.checkpoint.cards import find_model_card, list_model_cards
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import FlagSetting, Profile, Speculation
from dflash_deploy.tune.launching import model_flags

METHODS: tuple[Method, ...] = get_args(Method)

_PUBLISHED: Mapping[Method, Mapping[str, FlagSetting]] = {
    # Three steps and the target's own token: the setting that people publish figures of.
    "mtp": {"speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4},
    "ngram": {"speculative-num-draft-tokens": 8},
}


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
    how drafts are made: these were tuned for the profile's own method.

    Args:
        profile: the service.
        method: how drafts are made in its stead.
        drafts: draft models that the person names.
        simulated: for the simulator.

    Raises:
        DeployError: the method needs a draft model, and none is known for this target.
    """
    variant = profile.model_copy(update={"speculation": _speculation(profile, method, drafts.get(method))})
    given = {**profile.flags, **(profile.known[0].flags if profile.known else {})}
    own = profile.speculation.method == method
    drafting = {name: value for name, value in given.items() if _drafts(name) and own}
    flags = {
        **{name: value for name, value in given.items() if not _drafts(name)},
        **(drafting or _PUBLISHED.get(method, {})),
        **model_flags(variant, simulated=simulated),
    }
    return Arm(method, flags)


def _drafts(flag: str) -> bool:
    return flag.startswith("speculative-")


def _speculation(profile: Profile, method: Method, named: str | None) -> Speculation:
    if named is not None:
        return Speculation(method=method, draft=named)
    if profile.speculation.method == method:
        return profile.speculation
    if method in ("none", "ngram", "mtp"):
        return Speculation(method=method)
    target = find_model_card(profile.model.target)
    for card in list_model_cards() if target else []:
        # One that everybody makes for themselves has no place to be loaded from.
        if card.method == method and card.path is not None and target and target.id in card.targets:
            return Speculation(method=method, draft=card.id)
    raise DeployError(
        f"no {method} draft is known for {profile.model.target}",
        fix=f"add --draft {method}=FOLDER-OR-HUB-NAME, or leave {method} out of --methods",
        exit_code=ExitCode.MISSING,
    )
