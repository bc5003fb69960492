"""Which beginnings of prompts are still in memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prefix:
    """A boundary within a prompt: a key for everything before it, and how many tokens that is."""

    key: bytes
    tokens: int


def prefixes(prompt: str, tokens: int, every_tokens: int) -> tuple[Prefix, ...]:
    """Boundaries of a prompt, the longest last; text stands for tokens, evenly."""
    if tokens <= every_tokens:
        return ()
    # A fixed number of characters, so that two prompts with one beginning have the same boundaries.
    chars = every_tokens * 4
    digest = hashlib.blake2b(digest_size=12)
    found = []
    for end in range(chars, len(prompt) + 1, chars):
        digest.update(prompt[end - chars : end].encode("utf-8", "replace"))
        found.append(Prefix(digest.copy().digest(), min(tokens - 1, tokens * end // len(prompt))))
    return tuple(found)


@dataclass
class PrefixCache:
    """Least recently used beginnings fall out.

    Attributes:
        max_entries: state checkpoints there is room for; None where keys and values alone matter.
    """

    max_entries: int | None
    _kept: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def match(self, boundaries: tuple[Prefix, ...]) -> int:
        """Tokens of the longest known beginning."""
        for prefix in reversed(boundaries):
            if prefix.key in self._kept:
                self._kept.move_to_end(prefix.key)
                return prefix.tokens
        return 0

    def insert(self, boundaries: tuple[Prefix, ...]) -> None:
        """Remember a prompt."""
        last = 0
        for prefix in boundaries:
            if prefix.key not in self._kept:
                self._kept[prefix.key] = prefix.tokens - last
            self._kept.move_to_end(prefix.key)
            last = prefix.tokens
        while self.max_entries is not None and len(self._kept) > self.max_entries:
            self._kept.popitem(last=False)

    def shrink(self, tokens: int) -> None:
        """Forget until at most so many tokens are held."""
        while self._kept and self.tokens > tokens:
            self._kept.popitem(last=False)

    @property
    def tokens(self) -> int:
        """Tokens held for nobody in particular."""
        return sum(self._kept.values())

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
