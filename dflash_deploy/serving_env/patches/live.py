"""What only the serving interpreter can tell: how a patched module behaves, what the FP8 probe measures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_deploy.engine.interpreter import ask
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches.bmm import ProbeReport, read_report
from dflash_deploy.serving_env.patches.description import Patch
from dflash_deploy.serving_env.patches.tree import Tree

_INSIDE = Path(__file__).parents[2] / "inside"
_CHECK_MARK = b"DFLASH-DEPLOY-CHECK "
_PROBE_MARK = b"DFLASH-DEPLOY-BMM "
_CHECK_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class LiveCheck:
    """What the serving interpreter found.

    Attributes:
        outcome: ``not-run`` where it could not be tried here.
        message: what was found, or why it was not tried.
    """

    outcome: Literal["passed", "failed", "not-run"]
    message: str


def check(patch: Patch, tree: Tree, *, timeout_s: float = _CHECK_TIMEOUT_S) -> LiveCheck:
    """Have the environment's interpreter try the module as it is now."""
    if tree.python is None:
        return LiveCheck("not-run", f"no interpreter is known for {tree.site_packages}")
    command = [tree.python, _INSIDE / f"{patch.check}.py", tree.root / patch.file]
    # Elsewhere, so that no folder named like a module is imported in its place.
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = ask(command, timeout_s=timeout_s, errors="kept", folder=Path(elsewhere))
        except OSError as error:
            return LiveCheck("not-run", f"{tree.python}: {error.strerror}")
    if done.status is None:
        return LiveCheck("not-run", f"no answer within {timeout_s:.0f} s")
    said = _after(done.output, _CHECK_MARK)
    if isinstance(said, dict):
        message = str(said.get("message"))[:1000]
        match said.get("outcome"):
            case "passed":
                return LiveCheck("passed", message)
            case "failed":
                return LiveCheck("failed", message)
            case "not-run":
                return LiveCheck("not-run", message)
    last = done.errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
    return LiveCheck("not-run", f"{tree.python} ended with status {done.status}: {last[0][:300]}")


def measure(
    tree: Tree, options: Sequence[str] = (), *, timeout_s: float = 3600.0
) -> tuple[ProbeReport, bytes]:
    """Run the FP8 probe by the environment's interpreter; its progress goes to standard error.

    Returns:
        The report, and its JSON to be kept.

    Raises:
        DeployError: there is no interpreter, or it gave no report.
    """
    if tree.python is None:
        raise DeployError(
            f"no interpreter is known for {tree.site_packages}, to measure with",
            fix="give --env the environment's folder or its python",
            exit_code=ExitCode.MISSING,
        )
    try:
        done = ask([tree.python, _INSIDE / "bmm_probe.py", *options], timeout_s=timeout_s, errors="shown")
    except OSError as error:
        raise DeployError(f"{tree.python}: {error.strerror}", exit_code=ExitCode.MISSING) from error
    if done.status is None:
        raise DeployError(f"the FP8 probe gave no report within {timeout_s:.0f} s")
    said = _after(done.output, _PROBE_MARK)
    if said is None:
        raise DeployError(f"the FP8 probe ended with status {done.status} and without a report")
    content = json.dumps(said, indent=2).encode() + b"\n"
    return read_report(content, "the FP8 probe"), content


def _after(output: bytes, mark: bytes) -> object:
    for line in reversed(output.splitlines()):
        if line.startswith(mark):
            try:
                return json.loads(line[len(mark) :])
            except (ValueError, RecursionError):
                return None
    return None
