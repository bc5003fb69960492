"""What cannot be served is said before a launch where it can be known, else by the server's own reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy import paths
from dflash_deploy.engine.boot import Stage
from dflash_deploy.errors import ExitCode
from dflash_deploy.server.outcome import NotServed
from dflash_deploy.server.process import Server

from .conftest import HOST, RealSglang
from .environment import SGLANG_VERSION

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def tune(sglang: RealSglang, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "tune", "sglang-cpu-smoke", *sglang.settings(), *options],
        check=False,
        capture_output=True,
        text=True,
    )


def launched() -> list[Path]:
    return list(paths.state_dir().glob("studies/*/trials/*/server.log"))


def check_refused(
    result: subprocess.CompletedProcess[str], exit_code: ExitCode, *words: str, fix: str = ""
) -> None:
    assert result.returncode == exit_code, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert f"fix: {fix}" in result.stderr
    assert launched() == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("flags.cuda-graph-max=8", ("cuda-graph-max",)),
        ("flags.attention-backend=torch_nativ", ("attention-backend", "torch_nativ", "torch_native")),
        ("flags.max-prefill-tokens=many", ("max-prefill-tokens", "many")),
    ],
)
def test_a_wrong_flag_is_found_before_anything_is_launched(sglang, setting, words):
    check_refused(tune(sglang, "--set", setting), ExitCode.INVALID_INPUT, *words)


def test_a_flag_that_the_installed_parser_no_longer_has_is_found_before_a_launch(sglang):
    right_for_0_5_19 = ("--set", "engine.version=0.5.19", "--set", "flags.cuda-graph-tc-compiler=eager")
    result = tune(sglang, *right_for_0_5_19)
    check_refused(result, ExitCode.INVALID_INPUT, "cuda-graph-tc-compiler", SGLANG_VERSION)
    assert list((paths.cache_dir() / "engine").iterdir()), "the installed parser was not asked"


def test_a_taken_port_is_named_and_nothing_is_launched(sglang):
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        check_refused(tune(sglang, "--port", port), ExitCode.UNAVAILABLE, f"port {port}", "taken")


def test_a_model_that_is_not_there_is_named(sglang, tmp_path):
    missing = tmp_path / "no-such-model"
    check_refused(tune(sglang, "--set", f"model.path={missing}"), ExitCode.MISSING, str(missing))


def test_an_interpreter_without_sglang_is_named_with_the_command_that_installs_it(sglang):
    result = tune(sglang, "--python", sys.executable)
    check_refused(result, ExitCode.MISSING, "SGLang is not installed", fix=f"{sys.executable} -m pip install")


def test_a_truncated_checkpoint_ends_the_start_with_a_reason(sglang, smoke_flags, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(sglang.model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with Server(sglang.launch(smoke_flags, model=broken), tmp_path / "run") as server:
        outcome = server.start()
    assert isinstance(outcome, NotServed)
    assert outcome.stage is Stage.LOAD
    assert "safetensors" in outcome.reason.lower()
    assert not server.alive
    assert server.stop().leftovers == ()
