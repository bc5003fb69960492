"""Whether an environment is still what its patches made of it: quick, and with the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.tree import find_tree, read_bytes


@dataclass(frozen=True)
class IntegrityVerdict:
    """What a gate before a service needs to know.

    Attributes:
        intact: the service may start.
        version: SGLang's, or None where there is none.
        applied: patches that are in place, intact.
        problems: why it may not start, a sentence each.
        fix: the command that helps, or None.
    """

    intact: bool
    version: str | None
    applied: tuple[str, ...]
    problems: tuple[str, ...]
    fix: str | None


def verify_intact(
    environment: Path, *, required: Sequence[str] = (), version: str | None = None
) -> IntegrityVerdict:
    """Compare the changed files with what was recorded of them; nothing is changed, and nothing raised.

    Args:
        environment: its folder, its python or its site-packages folder.
        required: patches that must be in place.
        version: SGLang's version that must be installed.
    """
    try:
        tree = find_tree(environment)
        entries = ledger.entries(tree)
    except DeployError as error:
        return IntegrityVerdict(False, None, (), (error.message,), error.fix)
    except OSError as error:
        return IntegrityVerdict(False, None, (), (f"{environment}: {error}",), None)
    problems: list[str] = []
    applied: list[str] = []
    for entry in entries:
        change = entry.change
        if entry.state != "applied":
            problems.append(f"{entry.state} the patch {change.patch} was cut short, or goes on right now")
            continue
        try:
            now = ledger.sha256(read_bytes(tree.root / change.file))
        except OSError:
            now = None
        if now == change.after:
            applied.append(change.patch)
        elif change.version != tree.version:
            problems.append(
                f"the patch {change.patch} was applied to SGLang {change.version}, and {tree.version} has "
                "been installed over it"
            )
        elif now is None:
            problems.append(f"{tree.root / change.file}, changed by the patch {change.patch}, is not there")
        elif now == change.before:
            problems.append(f"the patch {change.patch} is gone: SGLang has been installed again over it")
        else:
            problems.append(
                f"{tree.root / change.file} was changed after the patch {change.patch} was applied"
            )
    named = {entry.change.patch for entry in entries}
    problems += [f"the patch {name} is not applied" for name in required if name not in named]
    if version is not None and version != tree.version:
        problems.append(f"SGLang {tree.version} is installed, and {version} is wanted")
    fix = f"dflash-deploy patch check --env {tree.quoted}" if problems else None
    return IntegrityVerdict(not problems, tree.version, tuple(applied), tuple(problems), fix)
