"""What flags do nothing, hurt, or keep a server from starting, with the evidence for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.sglang.advice_case import Advice, Case, Model, Weight
from dflash_deploy.engine.sglang.advice_entries import ENTRIES

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import FlagValue
    from dflash_deploy.engine.sglang.flags import FlagProblem

__all__ = ["Advice", "Case", "Model", "Weight", "advise"]


def advise(case: Case, problems: Sequence[FlagProblem] = ()) -> tuple[Advice, ...]:
    """All that holds of a configuration, what matters most first.

    Args:
        case: the configuration.
        problems: what the version's parser says of its arguments.
    """
    found = [_of_problem(problem, case) for problem in problems]
    found += [entry.advice(case) for entry in ENTRIES if entry.when(case)]
    return tuple(sorted(found, key=lambda one: one.weight))


def _of_problem(problem: FlagProblem, case: Case) -> Advice:
    name = problem.flag.removeprefix("--")
    change: dict[str, FlagValue | None] = {}
    if problem.flag.startswith("--") and problem.kind not in ("repeated", "value", "type", "choice"):
        change[name] = None
    if problem.instead is not None and problem.instead in case.flags:
        change[problem.instead] = case.flags[problem.instead]
    return Advice(
        id=f"flag-{problem.kind}",
        text=problem.message,
        flags=change,
        cost="works for now" if problem.warning else f"SGLang {case.version} ends with status 2 at once",
        evidence=f"options of SGLang {case.version}'s own parser",
        weight=Weight.NOTE if problem.warning else Weight.REFUSED,
        stage=None if problem.warning else Stage.ARGUMENTS,
    )
