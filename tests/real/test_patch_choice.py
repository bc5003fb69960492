"""A real server whose FP8 back end a variable names: read as it starts, and a wrong name ends the start."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches.bmm import to_measure
from dflash_deploy.serving_env.patches.choices import PATCH, VARIABLE, bmm_choices
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.live import check
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree

from .conftest import RealSglang

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
def patched(sglang: RealSglang, tmp_path: Path) -> Path:
    """A prefix with a copy of SGLang alone; all else comes from the shared environment, which stays."""
    base = find_tree(sglang.environment.folder)
    prefix = tmp_path / "patched"
    site_packages = prefix / "lib" / base.site_packages.parent.name / "site-packages"
    for source in (base.root / "sglang", base.dist_info):
        shutil.copytree(source, site_packages / source.name, symlinks=True)
    (site_packages / "shared.pth").write_text(f"{base.site_packages}\n")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sglang.environment.python.resolve())
    shutil.copy(sglang.environment.folder / "pyvenv.cfg", prefix)
    apply(load_patch(PATCH), find_tree(prefix), {"backend": "cublas"}, decision=to_measure())
    return prefix


def test_a_real_server_reads_the_variable_as_it_starts(
    sglang: RealSglang, patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, **sglang.environment.variables()}
    python = str(patched / "bin" / "python")
    module = "sglang.srt.layers.quantization.fp8_utils"
    code = f"import {module} as found; print(found.__file__, found._DFLASH_DEPLOY_BMM_FP8_BACKEND)"

    def start(*words: str, value: str) -> subprocess.CompletedProcess[str]:
        given = environment | {VARIABLE: value}
        return subprocess.run(
            [python, *words], env=given, capture_output=True, text=True, check=False, timeout=300
        )

    read = start("-c", code, value="cutlass")
    assert read.returncode == 0, read.stderr
    file, backend = read.stdout.split()[-2:]
    assert file.startswith(str(patched))
    assert backend == "cutlass"

    wrong = start(
        "-m", "sglang.launch_server", "--model-path", str(sglang.model), "--device", "cpu", value="cudn"
    )
    assert wrong.returncode != 0
    last = wrong.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: {VARIABLE}='cudn' names no back end")

    assert bmm_choices(patched).accepted == load_patch(PATCH).parameters["backend"].choices
    for name, given in sglang.environment.variables().items():
        monkeypatch.setenv(name, given)
    monkeypatch.setenv(VARIABLE, "cutlass")
    found = check(load_patch(PATCH), find_tree(patched))
    assert found.message.startswith("it compiles and takes cublas; "), "the patch's own choice is tried"
