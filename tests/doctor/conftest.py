from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.checkpoint.checkpoints import draft_config, draft_tensors, small_qwen, write_checkpoint
from tests.machine.nvml_stub import StubCard, build_stub, stub_env
from tests.tool import run_tool

Doctor = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _no_person(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No token, cache or setting of whoever runs the tests."""
    for name in [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "FLASHINFER_WORKSPACE_BASE",
        "TMPDIR",
        "TRITON_CACHE_DIR",
        *("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"),
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's libraries: NVML, and a CUDA that starts unless ``CUDA_STUB`` says how it does not."""
    folder = build_stub(tmp_path_factory.mktemp("nvml"))
    source = Path(__file__).with_name("cuda_stub.c")
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


@pytest.fixture
def doctor(nvml: Path) -> Doctor:
    """Runs ``dflash-deploy doctor`` as a process, on a machine with the given cards."""

    def run(
        *arguments: str | Path, cards: tuple[StubCard, ...] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        stub = stub_env(nvml, *cards) if cards else {}
        done = run_tool("doctor", *arguments, env={**os.environ, **stub, **(env or {})})
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def write_pair(folder: Path, *, shards: int = 2, **dflash: object) -> tuple[Path, Path]:
    """A small target with a tokenizer, and its draft."""
    model = small_qwen()
    target = write_checkpoint(folder / "target", model.config(), model.build(), shards=shards, tokenizer={})
    config = draft_config(
        model, **({"target_layer_ids": [1, 2], "mask_token_id": 5, "selector_rank": 8} | dflash)
    )
    draft = write_checkpoint(folder / "draft", config, draft_tensors(config))
    return target, draft


def write_profile(folder: Path, target: Path | str, draft: Path | str, **service: object) -> Path:
    """A profile for them on a free port, for an RTX 5090."""
    path = folder / "mine.yaml"
    lines = [
        "extends: rtx5090-single-user",
        f"model: {{target: {target}}}",
        f"speculation: {{method: dflash, draft: {draft}}}",
    ]
    if service:
        lines.append("service: {" + ", ".join(f"{key}: {value}" for key, value in service.items()) + "}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path)
