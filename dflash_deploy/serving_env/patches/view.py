"""What ``patch`` shows: the same facts as JSON and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap

from dflash_deploy.machine.text import printable
from dflash_deploy.serving_env.advice import Advice
from dflash_deploy.serving_env.patches.description import Patch
from dflash_deploy.serving_env.patches.integrity import IntegrityVerdict
from dflash_deploy.serving_env.patches.live import LiveCheck
from dflash_deploy.serving_env.patches.tree import Tree
from dflash_deploy.serving_env.patches.verdict import Verdict, VerdictKind

SCHEMA_VERSION = 1
_LONGEST = 4096
_WORDS = {
    VerdictKind.NEEDED: "needed",
    VerdictKind.UNMEASURED: "to be measured",
    VerdictKind.NOT_NEEDED: "not needed",
    VerdictKind.NOT_APPLICABLE: "not applicable",
    VerdictKind.APPLIED: "applied",
    VerdictKind.APPLIED_BY_OTHERS: "applied by someone else",
    VerdictKind.DRIFTED: "drifted",
    VerdictKind.FILE_MISSING: "file missing",
}


def tree_json(tree: Tree) -> dict[str, object]:
    """The environment."""
    return {
        "site_packages": str(tree.site_packages),
        "sglang": str(tree.root / "sglang"),
        "version": tree.version,
        "commit": tree.commit,
        "python": str(tree.python) if tree.python else None,
    }


def verdict_json(
    verdict: Verdict, live: LiveCheck | None = None, advice: Sequence[Advice] = ()
) -> dict[str, object]:
    """One patch's verdict, and what is known besides."""
    found = {**asdict(verdict), "verdict": str(verdict.kind), "name": verdict.patch}
    del found["kind"], found["patch"]
    known = [{"id": one.id, "text": one.text, "fix": one.fix, "evidence": one.evidence} for one in advice]
    return {**found, "check": asdict(live) if live else None, "advice": known}


def patch_json(patch: Patch, here: Verdict | None = None) -> dict[str, object]:
    """One patch's description, without its anchors; and how it stands in an environment that was named."""
    wanted = {
        "name",
        "summary",
        "symptom",
        "upstream",
        "versions",
        "limits",
        "drop_when",
        "file",
        "parameters",
    }
    stands = {"verdict": str(here.kind), "reason": here.reason} if here else {}
    return {**patch.model_dump(mode="json", include=wanted), "decided_by": patch.decided_by, **stands}


def verdict_lines(
    verdict: Verdict, live: LiveCheck | None = None, advice: Sequence[Advice] = ()
) -> Iterator[str]:
    """One patch's verdict for people, and what is known besides."""
    yield f"{verdict.patch}: {_WORDS[verdict.kind]}"
    yield from _indented(verdict.reason)
    for evidence in verdict.evidence:
        yield from _indented(evidence, mark="- ")
    if verdict.stale:
        yield from _indented(
            "the record of an earlier application is out of date; apply or revert drops it", mark="! "
        )
    if live is not None:
        words = {"passed": "works", "failed": "DOES NOT WORK", "not-run": "not tried"}
        yield from _indented(
            f"tried by the serving interpreter: {words[live.outcome]}: {live.message}", mark="- "
        )
    for one in advice:
        yield from _indented(f"{one.text} [{one.id}; {one.evidence}]", mark="i ")
    if verdict.differences:
        yield from (f"    {printable(line, longest=400)}" for line in verdict.differences.splitlines())
    if verdict.fix:
        yield f"  fix: {printable(verdict.fix, longest=_LONGEST)}"


def verified_lines(verdict: IntegrityVerdict) -> Iterator[str]:
    """The gate's answer for people."""
    if verdict.intact:
        told = (
            f"as they were applied: {', '.join(verdict.applied)}"
            if verdict.applied
            else "none is applied, and none was cut short"
        )
        yield printable(f"patches of SGLang {verdict.version}: {told}", longest=_LONGEST)
    for problem in verdict.problems:
        yield printable(f"not to be started: {problem}", longest=_LONGEST)
    if verdict.fix:
        yield printable(f"  fix: {verdict.fix}", longest=_LONGEST)


def patch_lines(patch: Patch) -> Iterator[str]:
    """One patch's description for people."""
    yield f"{patch.name}: {patch.summary}"
    yield from _indented(f"symptom: {patch.symptom}")
    yield from _indented(f"for: {patch.versions}")
    yield from _indented(f"upstream: {patch.upstream.note}")
    for reference in patch.upstream.references:
        yield f"    {reference}"
    for limit in patch.limits:
        yield from _indented(f"limit: {limit}")
    for name, parameter in patch.parameters.items():
        yield from _indented(f"--set {name}={'|'.join(parameter.choices)}: {parameter.summary}")
        if parameter.variable is not None:
            yield from _indented(f"{parameter.variable}=… gives one server another {name} than was applied")
    yield from _indented(f"no longer wanted when: {patch.drop_when}")


def here_line(verdict: Verdict) -> str:
    """How a patch stands in an environment, in a line under its description."""
    return "\n".join(_indented(f"here: {_WORDS[verdict.kind]}: {verdict.reason}"))


def environment_line(tree: Tree) -> str:
    """Which SGLang is looked at."""
    return printable(f"SGLang {tree.version} in {tree.root}", longest=_LONGEST)


def all_settled(verdicts: Sequence[Verdict]) -> bool:
    """Nothing is left to be done or looked at by a person."""
    open_kinds = {VerdictKind.NEEDED, VerdictKind.DRIFTED, VerdictKind.FILE_MISSING}
    return not any(verdict.kind in open_kinds or verdict.stale for verdict in verdicts)


def _indented(text: str, *, mark: str = "") -> list[str]:
    indent = " " * (2 + len(mark))
    shown = printable(" ".join(text.split()), longest=_LONGEST)
    return wrap(shown, 100, initial_indent=f"  {mark}", subsequent_indent=indent, break_long_words=False)
