"""Which back ends a server can be told to take for its FP8 products, with its environment patched once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.bmm import DEFAULT, ProbeReport, read_report_file, unusable
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.tree import Tree, find_tree
from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine, takes_variable

PATCH = "bmm-fp8-backend"
VARIABLE = "DFLASH_BMM_FP8_BACKEND"
_FLASHINFER = re.compile(r"flashinfer(?:_python)?-(?P<version>[^/]+)\.dist-info", re.IGNORECASE)


@dataclass(frozen=True)
class BmmChoices:
    """What ``DFLASH_BMM_FP8_BACKEND`` may be for a server of one environment.

    Attributes:
        applied: the patch is in place, intact, and reads the variable; otherwise the variable does nothing.
        default: what a server takes without the variable.
        accepted: every value that a server starts with; empty where the patch is not applied.
        works: those of ``accepted`` that the probe's record, kept with the patch, says work here, in that
            order; None where there is no record, or it is of other libraries than are installed.
        broken: those that the record says do not work, and why.
        problem: why the variable does nothing, or why there is no word on what works; None where all is well.
        fix: the command that helps, or None.
    """

    applied: bool
    default: str
    accepted: tuple[str, ...] = ()
    works: tuple[str, ...] | None = None
    broken: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    problem: str | None = None
    fix: str | None = None

    def require(self, value: str) -> None:
        """Let a value pass that a server of this environment can be told.

        Raises:
            DeployError: the patch is not applied, there is no such back end, or it is known not to work here.
        """
        if not self.applied:
            raise DeployError(
                f"{VARIABLE}={value} would do nothing here: {self.problem}",
                fix=self.fix,
                exit_code=ExitCode.MISSING,
            )
        if value not in self.accepted:
            raise DeployError(
                f"{VARIABLE}={value}: a server would refuse to start",
                fix=f"use one of: {', '.join(self.accepted)}",
                exit_code=ExitCode.INVALID_INPUT,
            )
        if value in self.broken:
            raise DeployError(
                f"{VARIABLE}={value}: the FP8 probe found that it does not work here: {self.broken[value]}",
                fix=f"use one of: {', '.join(self.works)}" if self.works else None,
                exit_code=ExitCode.UNAVAILABLE,
            )


def bmm_choices(environment: Path) -> BmmChoices:
    """What the variable may be; nothing is changed and nothing of the environment is run.

    Args:
        environment: its folder, its python or its site-packages folder.

    Raises:
        DeployError: there is no SGLang, or the environment's own records cannot be read.
    """
    tree = find_tree(environment)
    patch = load_patch(PATCH)
    found = examine(patch, tree)
    to_measure = (
        f"dflash-deploy patch apply {PATCH} --env {tree.quoted} --set backend={DEFAULT} "
        "(changes nothing until the variable is set)"
    )
    if found.verdict.kind is not VerdictKind.APPLIED or found.entry is None or found.content is None:
        can_be = found.verdict.kind in {VerdictKind.UNMEASURED, VerdictKind.NEEDED}
        problem = f"the patch {PATCH} that reads it is not applied"
        if not can_be:
            problem += f" ({found.verdict.kind}: {found.verdict.reason})"
        return BmmChoices(False, DEFAULT, problem=problem, fix=to_measure if can_be else found.verdict.fix)
    chosen = found.entry.change.parameters.get("backend", DEFAULT)
    if not takes_variable(found.content, VARIABLE):
        return BmmChoices(
            False,
            chosen,
            problem=f"{PATCH} was applied in an older form, which does not read the variable",
            fix=f"dflash-deploy patch revert {PATCH} --env {tree.quoted}, then {to_measure}",
        )
    accepted = patch.parameters["backend"].choices
    report, unknown = _record(tree)
    if report is None:
        return BmmChoices(True, chosen, accepted, problem=unknown, fix=_measured(tree))
    broken = {name: why for name, why in unusable(report).items() if name in accepted}
    tried = {one.backend for one in report.backends}
    return BmmChoices(
        True,
        chosen,
        accepted,
        works=tuple(name for name in accepted if name in tried and name not in broken),
        broken=MappingProxyType(broken),
    )


def _record(tree: Tree) -> tuple[ProbeReport | None, str | None]:
    path = ledger.evidence_path(tree, PATCH)
    if not path.exists():
        return None, f"no record of the FP8 probe is kept with {PATCH}: what works here is not known"
    try:
        report = read_report_file(path)
    except DeployError as error:
        return None, error.message
    if not report.measured:
        return None, f"the FP8 probe measured nothing: {report.problem}"
    installed = _flashinfer(tree)
    if report.flashinfer is not None and installed is not None and report.flashinfer != installed:
        return None, (
            f"the FP8 probe's record is of flashinfer {report.flashinfer}, and {installed} is installed"
        )
    return report, None


def _flashinfer(tree: Tree) -> str | None:
    for path in sorted(tree.site_packages.glob("flashinfer*.dist-info")):
        found = _FLASHINFER.fullmatch(path.name)
        if found:
            return found["version"]
    return None


def _measured(tree: Tree) -> str:
    return (
        f"dflash-deploy patch measure --env {tree.quoted} --out probe.json && "
        f"dflash-deploy patch apply {PATCH} --env {tree.quoted} --probe probe.json"
    )
