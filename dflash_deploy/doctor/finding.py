"""What a check finds, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class Status(StrEnum):
    """How a check ends, the worst first."""

    FAIL = "fail"
    WARN = "warn"
    UNKNOWN = "unknown"
    PASS = "pass"  # noqa: S105 - a verdict, no password

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Status).index(self)


@dataclass(frozen=True)
class Repair:
    """A change that is safe to make: nothing of a person's is lost by it.

    Attributes:
        what: what is changed, told before it is done.
        run: does it, and says in a sentence what was done; raises DeployError or OSError where it cannot.
    """

    what: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Answer:
    """What one check says.

    Attributes:
        fix: the command that mends it, or the change to make; None where there is nothing to do.
        evidence: what it was told from.
        kind: whether its figures were measured now, or are predicted.
        repair: what ``--fix`` can do about it.
        waits_for: id of the check whose trouble kept this one from looking.
    """

    status: Status
    text: str
    fix: str | None = None
    evidence: tuple[str, ...] = ()
    kind: Literal["measured", "predicted"] = "measured"
    repair: Repair | None = field(default=None, compare=False)
    waits_for: str | None = None


class NotCheckedError(Exception):
    """A check could not look, because of what another one tells."""

    def __init__(self, waits_for: str) -> None:
        super().__init__(waits_for)
        self.waits_for = waits_for


@dataclass(frozen=True)
class Finding:
    """A check's answer under the check's name."""

    id: str
    group: str
    title: str
    answer: Answer

    @property
    def status(self) -> Status:
        """How the check ended."""
        return self.answer.status


def passed(text: str, *evidence: str) -> Answer:
    """All is well."""
    return Answer(Status.PASS, text, None, evidence)


def warned(text: str, fix: str | None, *evidence: str, repair: Repair | None = None) -> Answer:
    """It works, and not as it could."""
    return Answer(Status.WARN, text, fix, evidence, repair=repair)


def failed(text: str, fix: str | None, *evidence: str, repair: Repair | None = None) -> Answer:
    """A server would not start so, or not serve."""
    return Answer(Status.FAIL, text, fix, evidence, repair=repair)


def unknown(text: str, fix: str | None = None, *evidence: str) -> Answer:
    """It cannot be told."""
    return Answer(Status.UNKNOWN, text, fix, evidence)
