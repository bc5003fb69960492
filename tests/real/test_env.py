"""The real SGLang's environment, adopted and asked; and its own reading of a checkpoint with a dense head."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.errors import ExitCode
from tests.checkpoint_tools.checkpoints import memory_mib_of_making_dense, write_checkpoint

from .conftest import RealSglang
from .environment import SGLANG_VERSION

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_adopted_and_described(sglang: RealSglang) -> None:
    folder = sglang.environment.folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    made = tool("env", "create", "cpu", "--path", str(folder))
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(sglang.environment.python)
    shown = json.loads(tool("env", "show", "cpu", "--json").stdout)
    assert shown["environment"]["adopted"] is True
    assert shown["sglang"]["version"] == SGLANG_VERSION
    assert shown["sglang"]["location"].startswith(str(folder))
    torch = shown["modules"]["torch"]
    assert torch["error"] is None
    assert torch["version"].startswith(shown["packages"]["torch"].partition("+")[0])
    assert shown["wanted"]["torch"] == "2.14.1"
    told = {finding["id"] for finding in shown["findings"]}
    # As it is made: without FlashInfer and the kernels, and with another torch than SGLang pins.
    assert {"flashinfer-missing", "kernel-package-missing", "off-the-pins"} <= told
    assert tool("env", "doctor", "cpu").returncode == ExitCode.FAILED
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_made_from_the_index_saved_put_back_and_removed() -> None:
    """An early release, because it is small; what is done is the same for any."""
    made = tool("env", "create", "early", "--version", "0.1.5")
    assert made.returncode == 0, made.stderr
    python = Path(made.stdout.strip())
    folder = python.parents[1]
    before = contents(folder)
    assert tool("env", "backup", "early").returncode == 0
    for path in folder.rglob("site-packages/requests*"):
        shutil.rmtree(path)
    assert contents(folder) != before
    restored = tool("env", "restore", "early")
    assert restored.returncode == 0, restored.stderr
    assert contents(folder) == before
    assert subprocess.run([python, "-c", "import requests"], check=False).returncode == 0
    doctor = tool("env", "doctor", "early")
    assert doctor.returncode == ExitCode.FAILED
    assert "release-without-dflash2" in doctor.stdout
    assert tool("env", "remove", "early").returncode == 0
    assert not folder.exists()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


_ASK = """
import json, sys
from sglang.srt.layers.quantization.modelopt_quant import ModelOptMixedPrecisionConfig
for folder in sys.argv[1:]:
    for name in ("config.json", "hf_quant_config.json"):
        document = json.load(open(f"{folder}/{name}"))
        config = ModelOptMixedPrecisionConfig.from_config(document.get("quantization_config", document))
        print("ANSWER", config.is_layer_excluded("lm_head"), config.resolve_quant_algo("lm_head"),
              config.resolve_quant_algo("model.layers.0.mlp"))
"""


def test_a_dense_head_is_read_as_dense(sglang: RealSglang, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    dense = tmp_path / "dense"
    made = tool("checkpoint", "dense-head", str(source), str(dense))
    assert made.returncode == 0, made.stderr
    asked = subprocess.run(
        [sglang.environment.python, "-c", _ASK, str(source), str(dense)],
        env={"PATH": "/usr/bin:/bin", **sglang.environment.variables()},
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [line for line in asked.stdout.splitlines() if line.startswith("ANSWER")]
    quantised, unquantised = "ANSWER False NVFP4 NVFP4", "ANSWER True None NVFP4"
    assert answers == [quantised, quantised, unquantised, unquantised], asked.stderr[-2000:]
    load = "import sys, safetensors.torch as s; print(s.load_file(sys.argv[1])['lm_head.weight'].dtype)"
    command = [sglang.environment.python, "-c", load, dense / "model-00002-of-00002.safetensors"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "torch.bfloat16"


def test_the_head_of_a_real_size_needs_little_memory(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 4 << 30:
        pytest.skip("needs 4 GiB of disk")
    assert memory_mib_of_making_dense(tmp_path, rows=248_320) < 300
