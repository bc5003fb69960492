from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.doctor import cuda
from dflash_deploy.doctor.finding import Status
from dflash_deploy.machine import nvml, system

from .builders import gpu, subject


@pytest.fixture
def _library(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml))


def test_nothing_is_started_without_a_card():
    assert cuda.starts(subject()) is None


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("told", "status", "words"),
    [
        ("0", Status.PASS, "can be started"),
        ("999", Status.FAIL, "nvidia_uvm"),
        ("804", Status.FAIL, "cuda-compat"),
        ("12345", Status.FAIL, "manual"),
        ("x", Status.FAIL, "status -6"),
        ("h", Status.WARN, "did not start within"),
    ],
)
def test_cuda_is_started_and_its_answer_told(told, status, words, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_STUB", told)
    monkeypatch.setattr(cuda, "_START_S", 0.5 if told == "h" else 100.0)
    answer = cuda.starts(subject(gpu()))
    assert answer is not None
    assert answer.status is status
    assert words in answer.text
    assert bool(answer.fix) == (status is not Status.PASS)


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """NVML's is: a container that was started for nvidia-smi alone, or a loader that does not look there."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(cuda, "_START_S", 100.0)
    answer = cuda.starts(subject(gpu()))
    assert answer is not None
    if answer.status is Status.PASS:
        pytest.skip("CUDA is installed here")
    assert answer.status is Status.FAIL
    monkeypatch.setattr(system, "container", lambda: "docker")
    assert "NVIDIA_DRIVER_CAPABILITIES" in (cuda._not_loaded("…").fix or "")
    monkeypatch.setattr(nvml, "FOLDERS", (tmp_path,))
    (tmp_path / "libcuda.so.1").touch()
    assert "ldconfig" in (cuda._not_loaded("…").fix or "")
