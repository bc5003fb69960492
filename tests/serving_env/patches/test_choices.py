"""One patch, and a server that is told by a variable which back end its FP8 products take."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.bmm import by_hand, to_measure
from dflash_deploy.serving_env.patches.choices import PATCH, VARIABLE, BmmChoices, bmm_choices
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from tests.serving_env.command import run

from .trees import FP8, install

CALLS = """\
from __future__ import annotations


def _raw_flashinfer_bmm_fp8(x, backend):
    return backend


def flashinfer_bmm_fp8():
    return _raw_flashinfer_bmm_fp8(1, backend="cublas")
"""
MODULE = "sglang.srt.layers.quantization.fp8_utils"
ALL = ("cublas", "cudnn", "cutlass", "auto")


def takes(site_packages: Path, value: str | None, *, then: str = "") -> subprocess.CompletedProcess[str]:
    """Start a program that takes the call, as a server does, with the variable set or not."""
    environment = {name: kept for name, kept in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": str(site_packages)} | ({} if value is None else {VARIABLE: value})
    code = f"import os\nfrom {MODULE} import flashinfer_bmm_fp8 as f\n{then}\nprint(f())"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def patched(folder: Path, backend: str = "cublas") -> Path:
    site_packages = install(folder / "site-packages", files={FP8: CALLS})
    decision = to_measure() if backend == "cublas" else by_hand(backend)
    apply(load_patch(PATCH), find_tree(site_packages), {"backend": backend}, decision=decision)
    return site_packages


def record(folder: Path, outcomes: dict[str, str], **facts: object) -> Path:
    call = {"m": 8, "k": 1, "n": 1, "first_s": 0.1, "steady_s": 1e-5, "relative_error": 0.0, "correct": True}
    backends = [
        {
            "backend": name,
            "outcome": outcome,
            "message": "NOT_INITIALIZED" if outcome == "fails" else None,
            "calls": [call],
        }
        for name, outcome in outcomes.items()
    ]
    report = {"schema_version": 1, "measured": True, "device": "a card", **facts, "backends": backends}
    path = folder / "probe.json"
    path.write_text(json.dumps(report))
    return path


def test_the_variable_is_the_one_that_the_description_names() -> None:
    backend = load_patch(PATCH).parameters["backend"]
    assert (backend.variable, backend.choices) == (VARIABLE, ALL)


@pytest.mark.parametrize("applied", ["cublas", "cudnn"])
def test_a_server_takes_what_the_variable_names_else_what_was_applied(tmp_path: Path, applied: str) -> None:
    site_packages = patched(tmp_path, applied)
    for value in (None, "", *ALL):
        done = takes(site_packages, value)
        assert done.stdout.strip() == (value or applied), done.stderr


def test_it_is_read_once_so_that_nothing_captured_changes(tmp_path: Path) -> None:
    done = takes(patched(tmp_path), "cutlass", then=f"os.environ['{VARIABLE}'] = 'cudnn'")
    assert done.stdout.strip() == "cutlass"


@pytest.mark.parametrize("value", ["cublaslt", "CUDNN", " cudnn", "cudnn\n"])
def test_a_wrong_name_ends_the_start_and_not_a_request(tmp_path: Path, value: str) -> None:
    done = takes(patched(tmp_path), value, then="print('the server is up')")
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: {VARIABLE}={value!r} names no back end")
    assert "expected one of cublas, cudnn, cutlass, auto; unset, it is cublas" in last


def test_unpatched_the_variable_does_nothing_and_is_refused_with_the_command(tmp_path: Path) -> None:
    site_packages = install(tmp_path / "vé nv" / "site-packages", files={FP8: CALLS})
    assert takes(site_packages, "cudnn").stdout.strip() == "cublas"
    choices = bmm_choices(site_packages)
    assert (choices.applied, choices.accepted, choices.default) == (False, (), "cublas")
    with pytest.raises(DeployError, match="would do nothing here") as caught:
        choices.require("cudnn")
    assert caught.value.fix is not None
    command = shlex.split(caught.value.fix.partition(" (")[0])
    done = run(*command[1:])
    assert done.returncode == 0, done.stderr
    bmm_choices(site_packages).require("cudnn")
    assert takes(site_packages, "cudnn").stdout.strip() == "cudnn"
    assert takes(site_packages, None).stdout.strip() == "cublas"


def test_where_there_is_nothing_to_patch_no_patch_is_advised(tmp_path: Path) -> None:
    """Someone else has put another back end into the call."""
    choices = bmm_choices(install(tmp_path, files={FP8: CALLS.replace('="cublas"', '="cudnn"')}))
    assert not choices.applied
    assert choices.problem is not None
    assert "not-needed" in choices.problem
    assert choices.fix is None


def test_without_a_record_every_name_passes_and_that_nothing_is_known_is_said(tmp_path: Path) -> None:
    choices = bmm_choices(patched(tmp_path))
    assert (choices.applied, choices.accepted, choices.works) == (True, ALL, None)
    assert "no record of the FP8 probe" in str(choices.problem)
    assert "patch measure" in str(choices.fix)
    for value in ALL:
        choices.require(value)
    with pytest.raises(DeployError, match="refuse to start"):
        choices.require("magic")


def kept(site_packages: Path, probe: Path) -> BmmChoices:
    """The patch is applied already; the record comes to it later."""
    done = run("patch", "apply", PATCH, "--env", str(site_packages), "--probe", str(probe))
    assert done.returncode == 0, done.stderr
    return bmm_choices(site_packages)


def test_the_record_tells_what_works(tmp_path: Path) -> None:
    site_packages = patched(tmp_path)
    outcomes = {"cublas": "fails", "cudnn": "works", "cutlass": "absent", "first-path": "works"}
    choices = kept(site_packages, record(tmp_path, outcomes, cudnn="9.24.0"))
    assert choices.works == ("cudnn",)
    assert dict(choices.broken) == {"cublas": "fails (NOT_INITIALIZED)", "cutlass": "is not here"}
    assert choices.problem is None
    choices.require("cudnn")
    # The record has nothing of it.
    choices.require("auto")
    with pytest.raises(DeployError, match=r"NOT_INITIALIZED") as caught:
        choices.require("cublas")
    assert caught.value.fix == "use one of: cudnn"


def test_a_record_of_other_libraries_says_nothing(tmp_path: Path) -> None:
    site_packages = patched(tmp_path)
    (site_packages / "flashinfer_python-0.6.2.dist-info").mkdir()
    outcomes = {"cublas": "works", "cudnn": "fails"}
    old = kept(site_packages, record(tmp_path, outcomes, flashinfer="0.6.1"))
    assert old.works is None
    assert "of flashinfer 0.6.1, and 0.6.2 is installed" in str(old.problem)
    now = kept(site_packages, record(tmp_path, outcomes, flashinfer="0.6.2"))
    assert now.works == ("cublas",)


def test_a_cudnn_with_misaligned_addresses_does_not_count_as_working(tmp_path: Path) -> None:
    outcomes = {"cublas": "works", "cudnn": "works", "auto": "works"}
    choices = kept(patched(tmp_path), record(tmp_path, outcomes, cudnn="9.20.0"))
    assert choices.works == ("cublas",)
    assert "misaligned" in choices.broken["cudnn"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema_version": 1, "measured": false}'])
def test_a_record_that_says_nothing_is_not_read_as_all_works(tmp_path: Path, content: bytes) -> None:
    site_packages = patched(tmp_path)
    ledger.evidence_path(find_tree(site_packages), PATCH).write_bytes(content)
    choices = bmm_choices(site_packages)
    assert (choices.applied, choices.works) == (True, None)
    assert choices.problem


def test_a_file_of_an_older_form_of_the_patch_is_not_taken_for_one_that_reads_the_variable(
    tmp_path: Path,
) -> None:
    site_packages = patched(tmp_path, "cudnn")
    path = site_packages / FP8
    older = CALLS.replace('"cublas"', '"cudnn"').encode()
    tree = find_tree(site_packages)
    state = ledger.state_path(tree, PATCH, "applied")
    told = json.loads(state.read_text())
    path.write_bytes(older)
    state.write_text(json.dumps({**told, "after": ledger.sha256(older)}))
    choices = bmm_choices(site_packages)
    assert (choices.applied, choices.default) == (False, "cudnn")
    assert f"patch revert {PATCH}" in str(choices.fix)
    found = json.loads(run("patch", "check", PATCH, "--env", str(site_packages), "--json").stdout)
    assert found["patches"][0]["verdict"] == "applied"
    assert not any(VARIABLE in line for line in found["patches"][0]["evidence"])


def test_the_back_end_of_old_needs_no_measurement(tmp_path: Path) -> None:
    """It is what runs without the patch; and check and list tell of the variable."""
    env = str(install(tmp_path / "site-packages", files={FP8: CALLS}))
    before = json.loads(run("patch", "check", PATCH, "--env", env, "--json").stdout)["patches"][0]
    assert before["verdict"] == "unmeasured"
    assert any("--set backend=cublas" in line for line in before["evidence"])
    done = run("patch", "apply", PATCH, "--env", env, "--set", "backend=cublas", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["patches"][0]
    assert (told["verdict"], told["changed"]) == ("applied", True)
    assert any(f"{VARIABLE}=cublas|cudnn|cutlass|auto" in line for line in told["evidence"])
    assert VARIABLE in run("patch", "list").stdout
    assert run("patch", "revert", PATCH, "--env", env).returncode == 0
    assert (Path(env) / FP8).read_text() == CALLS


@pytest.mark.parametrize(("backend", "stays"), [("cublas", True), ("cudnn", False)])
def test_a_default_that_fails_here_is_no_fault_of_the_patch(
    tmp_path: Path, backend: str, stays: bool
) -> None:
    """Where cuBLAS fails, being able to name another is what the patch is for."""
    venv = tmp_path / "venv"
    site_packages = install(venv / "lib" / "python3.11" / "site-packages", files={FP8: CALLS})
    python = venv / "bin" / "python"
    python.parent.mkdir()
    finding = json.dumps({"outcome": "failed", "message": "CUBLAS_STATUS_NOT_INITIALIZED"})
    python.write_text(f"#!/bin/sh\necho 'DFLASH-DEPLOY-CHECK {finding}'\n")
    python.chmod(0o755)
    words = ["--set", f"backend={backend}"] + ([] if backend == "cublas" else ["--unmeasured"])
    done = run("patch", "apply", PATCH, "--env", str(venv), *words)
    assert done.returncode == (0 if stays else 1)
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in done.stdout + done.stderr
    assert ((site_packages / FP8).read_text() == CALLS) is not stays
