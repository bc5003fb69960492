"""What only the serving interpreter can tell: how a patched module behaves, what the FP8 probe measures."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches.bmm import ProbeReport, read_report
from dflash_deploy.serving_env.patches.description import Patch
from dflash_deploy.serving_env.patches.tree import Tree

_INSIDE = Path(__file__).parents[2] / "inside"
_CHECK_MARK = "DFLASH-DEPLOY-CHECK "
_PROBE_MARK = "DFLASH-DEPLOY-BMM "
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
    script = _INSIDE / f"{patch.check}.py"
    argv = [str(tree.python), str(script), str(tree.root / patch.file)]
    # Elsewhere, so that no folder named like a module is imported in its place; no bytecode is left behind.
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                cwd=elsewhere,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        except subprocess.TimeoutExpired:
            return LiveCheck("not-run", f"no answer within {timeout_s:.0f} s")
        except OSError as error:
            return LiveCheck("not-run", f"{tree.python}: {error.strerror}")
    said = _after(done.stdout, _CHECK_MARK)
    if isinstance(said, dict):
        message = str(said.get("message"))
        match said.get("outcome"):
            case "passed":
                return LiveCheck("passed", message)
            case "failed":
                return LiveCheck("failed", message)
            case "not-run":
                return LiveCheck("not-run", message)
    last = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
    return LiveCheck("not-run", f"{tree.python} ended with status {done.returncode}: {last[0][:300]}")


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
    argv = [str(tree.python), str(_INSIDE / "bmm_probe.py"), *options]
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeployError(f"the FP8 probe gave no report within {timeout_s:.0f} s") from error
    except OSError as error:
        raise DeployError(f"{tree.python}: {error.strerror}", exit_code=ExitCode.MISSING) from error
    said = _after(done.stdout, _PROBE_MARK)
    if said is None:
        raise DeployError(f"the FP8 probe ended with status {done.returncode} and without a report")
    content = json.dumps(said, indent=2).encode() + b"\n"
    return read_report(content, "the FP8 probe"), content


def _after(output: str, mark: str) -> object:
    for line in reversed(output.splitlines()):
        if line.startswith(mark):
            try:
                return json.loads(line[len(mark) :])
            except ValueError:
                return None
    return None
