"""From a profile to the same service with another way of making draft tokens."""

from __future__ import annotations

from functools import cache

from dflash_deploy.checkpoint.cards import ModelCard, find_model_card, list_model_cards
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.profile.schema import Profile, Speculation

_WITH_MODEL: tuple[Method, ...] = ("dspark", "dflash")
"""Methods whose draft is a model of its own."""


def speculation_of(profile: Profile, method: Method, named: str | None = None) -> Speculation | None:
    """How the profile's service makes its drafts with this method.

    Args:
        profile: the service.
        method: in place of its own, or that.
        named: the draft that a person wants, before any other.

    Returns:
        None where the method needs a draft model, and none is known for this target.
    """
    if named is not None:
        return Speculation(method=method, draft=named)
    if profile.speculation.method == method:
        return profile.speculation
    if method not in _WITH_MODEL:
        return Speculation(method=method)
    for other, place in profile.speculation.drafts.items():
        if other == method:
            return Speculation(method=method, draft=place)
    card = _made_for(profile.model.target, method, placed=True)
    return None if card is None else Speculation(method=method, draft=card.id)


def draft_card(profile: Profile, method: Method) -> ModelCard | None:
    """What is known of the draft that a method loads here; None where it loads none, or nothing is known."""
    speculation = speculation_of(profile, method)
    if speculation is None or method in ("none", "ngram"):
        return None
    if speculation.draft is not None:
        return _card(speculation.draft)
    return _made_for(profile.model.target, method, placed=False) if method == "mtp" else None


def no_draft(profile: Profile, method: Method) -> str:
    """Why ``speculation_of`` came to nothing."""
    return f"no {method} draft is known for {profile.model.target}"


@cache
def _made_for(target: str, method: Method, *, placed: bool) -> ModelCard | None:
    """The first draft of a method that is known for a target.

    Args:
        target: id, folder or hub name of the target.
        method: of drafting.
        placed: it must be known where to load it from: not what everybody makes for themselves, nor what is
            within the target.
    """
    known = _card(target)
    if known is None:
        return None
    cards = (card for card in list_model_cards() if card.method == method and known.id in card.targets)
    return next((card for card in cards if card.path is not None or not placed), None)


_card = cache(find_model_card)
"""A search asks for the same ones a thousand times."""
