"""Facts about SGLang that change from release to release: the one table of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEWEST = "0.5.23"
"""The release that this tool is written and tested against."""

RELEASES = (
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    NEWEST,
)

_VERSION = re.compile(
    r"v?(?P<release>\d{1,6}(?:\.\d{1,6}){1,3})"
    r"(?:\.?rc(?P<rc>\d{1,6}))?"
    r"(?:\.post(?P<post>\d{1,9}))?"
    r"(?:\.?dev(?P<dev>\d{1,12}))?"
    r"(?:\+(?P<local>[a-z0-9._-]{1,80}))?",
    re.IGNORECASE,
)

# Builds from the main branch carry the number of an old tag (0.5.6.post3, or 0.0.0), which says nothing of
# their age; their commit does. The release named is the first one that holds the commit.
_COMMITS = {
    "574274660": "0.5.18",
    "c14312a66": "0.5.19",
    "1cf2b8c": "0.5.19",
    "5f55db35e": "0.5.19",
}


@dataclass(frozen=True)
class Nearest:
    """A release whose facts are known, and in ``note`` why it stands in for another version."""

    release: str
    note: str | None = None


def order(version: str) -> tuple[int, ...]:
    """A key that sorts versions by age; unreadable ones sort as the oldest."""
    match = _VERSION.match(version.strip())
    if match is None:
        return (0,)
    release = [int(part) for part in match["release"].split(".")]
    release += [0] * (4 - len(release))
    post = int(match["post"] or 0)
    early = match["rc"] is not None or (match["dev"] is not None and not post)
    return (*release, post, 0 if early else 1)


def nearest(version: str) -> Nearest:
    """The known release that comes nearest to ``version``."""
    text = version.strip()
    match = _VERSION.match(text)
    if match is None:
        return Nearest(NEWEST, f"{text!r} is no SGLang version: {NEWEST} is taken")
    plain = re.sub(r"^v", "", text, flags=re.IGNORECASE).partition("+")[0]
    if plain in RELEASES:
        return Nearest(plain)
    for commit, release in _COMMITS.items():
        if f"g{commit}" in (match["local"] or ""):
            return Nearest(release, f"{text} is a build between releases: {release} comes nearest")
    if match["dev"] is not None and order(text) < order(RELEASES[0]):
        return Nearest(NEWEST, f"{text} does not say which release it comes near: {NEWEST} is taken")
    if order(text) > order(NEWEST):
        return Nearest(NEWEST, f"{text} is newer than what is known: {NEWEST} is taken")
    older = [release for release in RELEASES if order(release) <= order(text)]
    # A build on the way to a release has more of that release than of the one before.
    following = next((release for release in RELEASES if order(release) >= order(text)), NEWEST)
    release = following if match["dev"] or match["rc"] or not older else older[-1]
    return Nearest(release, f"{text} is not a known release: {release} comes nearest")
