"""Repairs that are safe to make, each told, asked for, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_deploy.doctor.finding import Finding
from dflash_deploy.errors import DeployError


@dataclass(frozen=True)
class Done:
    """What became of one repair.

    Attributes:
        id: of the check that found the need for it.
        what: what it changes.
        text: what was done, or why not.
    """

    id: str
    what: str
    outcome: Literal["done", "declined", "failed"]
    text: str


def repair(findings: Sequence[Finding], allowed: Callable[[str], bool]) -> Iterator[Done]:
    """Make the repairs that the findings offer.

    Args:
        findings: of the checks.
        allowed: asked before each, with what it changes in words.
    """
    for finding in findings:
        offered = finding.answer.repair
        if offered is None:
            continue
        if not allowed(offered.what):
            yield Done(finding.id, offered.what, "declined", "left as it is")
            continue
        try:
            said = offered.run()
        except DeployError as error:
            yield Done(finding.id, offered.what, "failed", error.message)
        except OSError as error:
            yield Done(
                finding.id, offered.what, "failed", f"{error.filename or ''}: {error.strerror or error}"
            )
        else:
            yield Done(finding.id, offered.what, "done", said)
