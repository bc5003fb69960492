"""Failures provoked on the real server are named from its own log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dflash_deploy.diagnosis import Diagnosis, diagnose
from dflash_deploy.server.ports import free_port

from .conftest import HOST, RealSglang, Running, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

_DEADLINE_S = 400.0
_AT_ONCE = 2
_SERVES = "The server is fired up and ready to roll"
_PLAIN = ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "4096")


@dataclass(frozen=True)
class Provoked:
    """A start that must fail: how it is made, what must be named, and the words that mark its end."""

    entry: str
    make: Callable[[RealSglang, Path], tuple[list[str], dict[str, str]]]
    hangs_after: str | None = None


def flags(*words: str) -> Callable[[RealSglang, Path], tuple[list[str], dict[str, str]]]:
    return lambda sglang, _folder: (["--model-path", str(sglang.model), *_PLAIN, *words], {})


def model(change: Callable[[Path], None]) -> Callable[[RealSglang, Path], tuple[list[str], dict[str, str]]]:
    def make(sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
        copy = folder / "model"
        shutil.copytree(sglang.model, copy)
        change(copy)
        return ["--model-path", str(copy), *_PLAIN], {}

    return make


def edit_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def missing_model(_sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
    return ["--model-path", str(folder / "no-such-model"), *_PLAIN], {}


def missing_on_the_hub(_sglang: RealSglang, _folder: Path) -> tuple[list[str], dict[str, str]]:
    return ["--model-path", "no-such-owner/no-such-model", *_PLAIN], {}


def taken_port(sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
    return ["--model-path", str(sglang.model), *_PLAIN, "--port", (folder / "port").read_text()], {}


def yaml_alias(sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
    config = folder / "server.yaml"
    config.write_text(f"model-path: {sglang.model}\ndisable-cuda-graph: true\n")
    return ["--config", str(config)], {}


def draft_on_a_cpu(sglang: RealSglang, _folder: Path) -> tuple[list[str], dict[str, str]]:
    draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(sglang.model)]
    return ["--model-path", str(sglang.model), *_PLAIN, *draft], {}


def no_yaml(_sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
    return ["--config", str(folder / "none.yaml")], {}


def full_cache(sglang: RealSglang, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The n-gram corpus is compiled into a cache on a disk that has no room."""
    home = folder / "home"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(home)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a full disk needs the right to mount one")
    words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    words += ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"]
    cache = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TVM_FFI_CACHE_DIR": str(home)}
    return ["--model-path", str(sglang.model), *_PLAIN, *words], cache


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")


CASES: dict[str, Provoked] = {
    "a flag that is not known": Provoked("flag-unknown", flags("--no-such-flag", "1")),
    "a flag in short that may be several": Provoked("flag-ambiguous", flags("--cuda-graph", "1")),
    "a choice that is none": Provoked("flag-choice", flags("--attention-backend", "flash_infer")),
    "a value of the wrong kind": Provoked("flag-value", flags("--mem-fraction-static", "most")),
    "an old name in a YAML file": Provoked("yaml-alias", yaml_alias),
    "a YAML file that is not there": Provoked("yaml-config", no_yaml),
    "a model that is not there": Provoked("model-not-found", missing_model),
    "a model that is not downloaded": Provoked("hub-offline", missing_on_the_hub),
    "weights cut short": Provoked("weights-damaged", model(cut_short)),
    "a pointer in place of weights": Provoked("weights-damaged", model(pointer)),
    "a folder without weights": Provoked("weights-none", model(lambda f: (f / "model.safetensors").unlink())),
    "an architecture nobody knows": Provoked(
        "architecture-unsupported", model(edit_config(architectures=["Qwen9ForCausalLM"]))
    ),
    "a model type nobody knows": Provoked("transformers-too-old", model(edit_config(model_type="qwen9"))),
    "a configuration that is no JSON": Provoked(
        "config-damaged", model(lambda f: (f / "config.json").write_text('{"model_type": '))
    ),
    "a tokenizer that is not there": Provoked(
        "tokenizer-missing", model(lambda f: [p.unlink() for p in f.glob("tokenizer*")] and None)
    ),
    "a context longer than the model's": Provoked("context-too-long", flags("--context-length", "400000")),
    "no memory for one token": Provoked("weights-leave-no-kv", flags("--mem-fraction-static", "-0.2")),
    "a draft algorithm without a card": Provoked("dflash-device", draft_on_a_cpu),
    "a full disk in the cache": Provoked("disk-full", full_cache),
    "a port that is taken": Provoked("port-taken", taken_port, "already in use"),
}


@pytest.fixture(scope="module")
def diagnoses(
    sglang: RealSglang, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Diagnosis | None]]:
    folder = tmp_path_factory.mktemp("provoked")
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()

        def provoke(number: int, case: Provoked) -> Diagnosis:
            own = folder / str(number)
            own.mkdir()
            (own / "port").write_text(str(holder.getsockname()[1]))
            return _run(sglang, case, own)

        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                running = {
                    name: pool.submit(provoke, at, case) for at, (name, case) in enumerate(CASES.items())
                }
                yield {name: _result(future) for name, future in running.items()}
        finally:
            for home in folder.glob("*/home"):
                subprocess.run(["umount", str(home)], capture_output=True, check=False)


def _result(future: Future[Diagnosis]) -> Diagnosis | None:
    try:
        return future.result()
    except pytest.skip.Exception:
        return None


def _run(sglang: RealSglang, case: Provoked, folder: Path) -> Diagnosis:
    words, more = case.make(sglang, folder)
    if "--port" not in words:
        words += ["--port", str(free_port(HOST))]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(sglang.environment.python), "-m", "sglang.launch_server", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | sglang.environment.variables() | {"TMPDIR": str(folder)} | more,
            start_new_session=True,
        )
    status: int | None = None
    try:
        end = time.monotonic() + _DEADLINE_S
        while status is None and time.monotonic() < end:
            status = process.poll()
            said = log.read_text(errors="replace")
            # One that serves after all has failed to fail: nobody need wait for its end.
            if _SERVES in said or (case.hangs_after and case.hangs_after in said):
                break
            time.sleep(0.2)
    finally:
        _end(process)
    return diagnose(log, exit_status=status)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("case", CASES)
def test_a_provoked_failure_is_named(diagnoses, case):
    if diagnoses[case] is None:
        pytest.skip("a full disk needs the right to mount one")
    root = diagnoses[case].root
    assert root is not None
    assert root.id == CASES[case].entry, (root, diagnoses[case].unknown)
    assert root.fix is not None


@pytest.fixture(scope="module")
def served(sglang, smoke_flags, tmp_path_factory) -> Iterator[Running]:
    """A server that comes up, and whose scheduler is killed at the end of these tests."""
    plain = {name: value for name, value in smoke_flags.items() if not name.startswith("speculative-")}
    yield from run(sglang.launch(plain), tmp_path_factory.mktemp("served"))


def test_a_healthy_log_has_no_error(served):
    diagnosis = diagnose(served.server.log_path)
    assert diagnosis.stage == "serving"
    assert [finding for finding in diagnosis.findings if finding.severity == "error"] == []


def test_a_child_that_is_killed_is_told(served):
    children = psutil.Process(served.server.pid).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in " ".join(child.cmdline()))
    scheduler.kill()
    end = time.monotonic() + _DEADLINE_S
    while served.server.alive and time.monotonic() < end:
        time.sleep(0.2)
    diagnosis = diagnose(served.server.log_path, exit_status=served.server.exit_status)
    assert diagnosis.root is not None
    assert diagnosis.root.id == "killed"
    assert diagnosis.root.confidence == "medium"
