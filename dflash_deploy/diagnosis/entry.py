"""One entry of the catalogue: how a failure shows, what it means, and what helps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_deploy.diagnosis.expression import Expression, Template, UndefinedError, Value
from dflash_deploy.diagnosis.pattern import Pattern
from dflash_deploy.diagnosis.stage import Stage
from dflash_deploy.engine.launch import FlagValue

Severity = Literal["error", "warning", "note", "benign"]
"""error: ends a start or a server, or makes answers wrong. warning: it serves, with less than was asked for.
note: worth knowing. benign: looks bad, means nothing, and keeps others from taking its line for a failure."""

Role = Literal["cause", "generic", "symptom"]
"""cause: names a reason. generic: the same words have many reasons; a cause beside it is the better answer.
symptom: what is said once the reason has been said already, or never was."""

_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,12})?")


@dataclass(frozen=True)
class Fix:
    """A change that helps. ``flags`` are the engine flags it changes; None takes a flag away."""

    text: str
    flags: Mapping[str, FlagValue | None]


@dataclass(frozen=True)
class FixRule:
    """A fix and when it is the right one."""

    when: Expression | None
    text: Template
    flags: Mapping[str, Template | FlagValue | None]

    def fix(self, names: Mapping[str, Value]) -> Fix | None:
        """The fix with its figures; None where it does not hold or a figure is not known."""
        if self.when is not None and not self.when.holds(names):
            return None
        try:
            return Fix(
                self.text.render(names),
                {
                    name: _flag_value(value, names) if isinstance(value, Template) else value
                    for name, value in self.flags.items()
                },
            )
        except UndefinedError:
            return None


@dataclass(frozen=True)
class Example:
    """A log of our own that an entry must name, and the fix that must come of it where figures matter."""

    log: str
    fix_holds: str | None = None


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        stage: where such a failure belongs; ``unknown`` takes the stage in which the line was logged.
        patterns: any of them shows it.
        at: stages in which it can show; empty where that does not matter.
        needs: each must stand somewhere in the same log.
        unless: none may stand in the same log.
        when: a condition on the captured figures.
        causes: the first whose figures are all known is told.
        fixes: the first that holds is told.
        evidence: where it is known from.
        versions: of the engine, where it hangs on that.
        examples: logs it must be found in as the root cause.
        lookalikes: lines it must not be found in.
    """

    id: str
    engine: str
    stage: Stage
    severity: Severity
    role: Role
    patterns: tuple[Pattern, ...]
    at: frozenset[Stage]
    needs: tuple[Pattern, ...]
    unless: tuple[Pattern, ...]
    when: Expression | None
    causes: tuple[Template, ...]
    fixes: tuple[FixRule, ...]
    evidence: tuple[str, ...]
    versions: str
    examples: tuple[Example, ...]
    lookalikes: tuple[str, ...]

    def cause(self, names: Mapping[str, Value]) -> str:
        """What happened, with figures where the log gave them."""
        for template in self.causes:
            try:
                return template.render(names)
            except UndefinedError:
                continue
        return self.id.replace("-", " ")

    def fix(self, names: Mapping[str, Value]) -> Fix | None:
        """What helps here."""
        return next((fix for rule in self.fixes if (fix := rule.fix(names)) is not None), None)


def read_value(text: str) -> Value:
    """A captured text as a number where it is one."""
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return text


def _flag_value(template: Template, names: Mapping[str, Value]) -> FlagValue:
    alone = template.alone
    if alone is None:
        return template.render(names)
    value = alone.value(names)
    return int(value) if isinstance(value, float) and value.is_integer() else value
