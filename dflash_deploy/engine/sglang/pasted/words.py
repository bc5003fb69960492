"""What every form of a pasted command comes down to: words, some of them not fully known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_deploy.errors import DeployError, ExitCode

MAX_CHARS = 1 << 18
"""Longest text that is read, and the most that its variables may make of it."""

MAX_WORDS = 20_000


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Attributes:
        text: with what is unknown standing in it as it was written.
        unknown: the parts of ``text`` whose value is not in what was pasted.
        line: where it stands, from one.
    """

    text: str
    unknown: tuple[str, ...] = ()
    line: int = 0


@dataclass(frozen=True)
class Statement:
    """One command with the variables set for it alone, and those exported before it."""

    words: tuple[Word, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    line: int = 0


class Growth:
    """Bounds what variables make of a text: one that holds another twice, again and again, grows for ever."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._chars = 0

    def add(self, chars: int) -> None:
        """Count what was made.

        Raises:
            DeployError: it is too much.
        """
        self._chars += chars
        if self._chars > 4 * MAX_CHARS:
            raise too_large(self._what)


class Notes:
    """Remarks on what was read, each once, in the order they came up."""

    _MOST = 40

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Keep a remark."""
        if len(self._texts) < self._MOST:
            self._texts[text] = None

    def all(self) -> tuple[str, ...]:
        """Everything remarked."""
        return tuple(self._texts)


def too_large(what: str) -> DeployError:
    """The error for a text that is no command any more."""
    return DeployError(
        f"{what}: too long to be a command",
        fix="paste the one command that starts SGLang",
        exit_code=ExitCode.INVALID_INPUT,
    )


def shown(text: str, longest: int = 60) -> str:
    """A text as it may stand in a message: short and printable."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    return plain if len(plain) <= longest else f"{plain[:longest]}…"
