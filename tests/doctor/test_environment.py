from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dflash_deploy import paths
from dflash_deploy.doctor import environment as checks
from dflash_deploy.doctor.engine import read_engine
from dflash_deploy.doctor.finding import NotCheckedError, Status
from dflash_deploy.doctor.subject import Request, interpreter, look_at
from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env import environments, records
from dflash_deploy.serving_env.advice import ENTRIES
from dflash_deploy.serving_env.describe import Module, Program
from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.pins import pin_of_source
from tests.serving_env.patches.trees import install

from .builders import engine, gpu, host, reading, subject, torch, without


def program(name: str, **more: object) -> dict[str, object]:
    return {name: {"path": f"/usr/bin/{name}", "version": "13.0"} | more}


OLD_NVCC = {"nvcc": Program(path="/usr/bin/nvcc", version="12.4").model_dump()}


@pytest.mark.parametrize(
    ("check", "bad", "status", "words"),
    [
        (checks.release, engine(version="0.5.17"), Status.FAIL, "no DFlash2"),
        (checks.release, engine(version=None), Status.FAIL, "not installed"),
        (
            checks.cuda,
            engine(modules={"torch": torch(cuda="14.0")}),
            Status.FAIL,
            "the driver serves CUDA 13.3",
        ),
        (checks.cuda, engine(modules={"torch": torch(cuda=None)}), Status.FAIL, "without CUDA"),
        (checks.cuda, without(engine(), "torch"), Status.FAIL, "not installed"),
        (checks.cuda, engine(modules={}), Status.UNKNOWN, "only importing"),
        (
            checks.architecture,
            engine(modules={"torch": torch(arch_list=["sm_80", "sm_90"])}),
            Status.FAIL,
            "12.0",
        ),
        (
            checks.architecture,
            engine(modules={"torch": torch(arch_list=None)}),
            Status.UNKNOWN,
            "only importing",
        ),
        (
            checks.kernels,
            engine(modules={"sgl_kernel": Module(installed=True, error="undefined symbol")}),
            Status.FAIL,
            "undefined symbol",
        ),
        (checks.kernels, without(engine(modules={}), "sglang-kernel"), Status.FAIL, "not installed"),
        (checks.kernels, engine(modules={}), Status.UNKNOWN, "only importing"),
        (checks.flashinfer, without(engine(), "flashinfer-python"), Status.WARN, "not installed"),
        (
            checks.flashinfer,
            engine(packages={"flashinfer-cubin": "0.6.0"}),
            Status.FAIL,
            "different versions",
        ),
        (
            checks.flashinfer,
            without(engine(), "flashinfer-jit-cache"),
            Status.WARN,
            "compiled when first used",
        ),
        (checks.toolkit, engine(tools={"nvcc": None}), Status.FAIL, "no nvcc"),
        (checks.toolkit, engine(tools={"ninja": None}), Status.FAIL, "no ninja"),
        (checks.toolkit, engine(tools=OLD_NVCC), Status.FAIL, "sm_120"),
        (checks.compiler, engine(tools={"g++": None}), Status.FAIL, "no g++"),
        (checks.toolkit, engine(tools=program("nvcc", problem="status 3")), Status.FAIL, "status 3"),
        (
            checks.toolkit,
            engine(tools=program("nvcc", missing=["cuda_runtime.h"])),
            Status.FAIL,
            "cuda_runtime",
        ),
        (
            checks.toolkit,
            without(engine(tools=program("nvcc", missing=["curand_kernel.h"])), "flashinfer-jit-cache"),
            Status.FAIL,
            "curand_kernel.h",
        ),
        (checks.compiler, engine(tools={"gcc": None}), Status.FAIL, "no C compiler"),
        (checks.compiler, engine(tools=program("gcc", problem="not there")), Status.FAIL, "not there"),
        (checks.compiler, engine(headers=False), Status.FAIL, "Python.h is missing"),
        (checks.cudnn, engine(modules={"torch": torch(cudnn=None)}), Status.UNKNOWN, "cuDNN"),
        (checks.glibc, engine(glibc="2.31"), Status.FAIL, "older than 2.34"),
        (checks.pins, engine(packages={"torch": "2.13.0"}), Status.WARN, "torch 2.13.0 (wanted 2.14.1)"),
        (checks.pins, engine(wanted={}), Status.UNKNOWN, "no exact versions"),
    ],
)
def test_each_check_of_an_environment_finds_its_fault_and_passes_a_sound_one(check, bad, status, words):
    answer = check(subject(gpu(), engine=bad))
    assert answer.status is status
    assert words in answer.text
    assert answer.fix or (status is Status.UNKNOWN and check is checks.pins)
    assert check(subject(gpu(), engine=engine())).status is Status.PASS


def test_all_that_is_known_of_environments_belongs_to_some_check():
    known = {entry.id for entry in ENTRIES}
    assert known >= checks.OWN_CHECKS
    # What no check calls its own is told by the last one.
    assert known - checks.OWN_CHECKS == {"off-the-pins"}


def test_without_an_environment_one_check_fails_and_the_others_say_that_they_wait():
    nothing = subject(gpu())
    with pytest.raises(DeployError, match="no serving environment"):
        checks.release(nothing)
    for check in (
        checks.cuda,
        checks.architecture,
        checks.kernels,
        checks.flashinfer,
        checks.toolkit,
        checks.pins,
    ):
        with pytest.raises(NotCheckedError, match="engine"):
            check(nothing)
    assert checks.glibc(nothing).status is Status.PASS
    assert checks.glibc(subject(gpu(), host=host(glibc="2.31"))).status is Status.FAIL
    assert checks.glibc(subject(gpu(), host=host(glibc=None))).status is Status.UNKNOWN


def test_headers_that_only_ready_kernels_would_need_are_not_missed():
    found = engine(tools=program("nvcc", missing=["curand_kernel.h", "cublasLt.h"]))
    answer = checks.toolkit(subject(gpu(), engine=found))
    assert answer is not None
    assert answer.status is Status.PASS


def test_an_old_driver_is_updated_where_it_is_installed():
    def fix(**facts: object) -> str:
        old = subject(gpus=reading(gpu(), cuda_version="12.4"), engine=engine(), host=host(**facts))
        answer = checks.cuda(old)
        assert answer.status is Status.FAIL
        return answer.fix or ""

    assert fix().endswith("then restart the machine")
    assert "in Windows, not here" in fix(wsl=2)
    assert "of the machine that runs this container" in fix(container="docker")


def test_without_a_card_nothing_is_said_of_compilers():
    sound = subject(engine=engine(tools={"nvcc": None}))
    assert checks.toolkit(sound) is None
    assert checks.compiler(sound) is None
    assert checks.architecture(sound) is None
    assert checks.cudnn(sound) is None


def test_another_version_than_the_profile_writes_flags_for_warns():
    answer = checks.release(subject(gpu(), profile="rtx5090-single-user", engine=engine(version="0.5.21")))
    assert answer.status is Status.WARN
    assert "0.5.23" in answer.text


def test_an_old_cudnn_matters_where_the_product_goes_to_it(tmp_path: Path):
    tree = find_tree(install(tmp_path / "site-packages", version="0.5.19"))
    old = subject(gpu(), engine=engine(modules={"torch": torch(cudnn=91002)}), tree=tree)
    answer = checks.cudnn(old)
    assert answer is not None
    assert answer.status is Status.PASS
    assert "does not go to it" in answer.text
    apply(load_patch("bmm-fp8-backend"), tree, {"backend": "cudnn"}, decision=by_hand("cudnn"))
    answer = checks.cudnn(old)
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "older than 9.23.1" in answer.text


def test_kernels_that_were_compiled_before_are_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    built = tmp_path / ".cache" / "flashinfer" / "0.7.0" / "120a" / "cached_ops" / "bmm"
    built.mkdir(parents=True)
    (built / "bmm.so").touch()
    answer = checks.flashinfer(subject(gpu(), engine=without(engine(), "flashinfer-jit-cache")))
    assert answer.status is Status.PASS
    assert "compiled before" in answer.text


# Real interpreters ----------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with pip's metadata of an engine, and a torch that can be imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env"), "platbase": str(tmp_path)})
    )
    for name, version in {
        "sglang": "0.5.23",
        "torch": "2.14.1",
        "nvidia-cuda-runtime": "13.0.88",
        "nvidia-cudnn-cu13": "9.10.2.21",
    }.items():
        write_package(packages, name, version)
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(
        "import types\n"
        "__version__ = '2.14.1'\n"
        "version = types.SimpleNamespace(cuda='13.0', hip=None)\n"
        "_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: 'sm_90 sm_120')\n"
        "cudnn = types.SimpleNamespace(version=lambda: 91002)\n"
        "backends = types.SimpleNamespace(cudnn=cudnn)\n"
        "cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 0)\n"
    )
    return tmp_path / "env" / "bin" / "python"


def write_package(packages: Path, name: str, version: str) -> None:
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_metadata_alone_tells_cuda_and_cudnn(venv: Path):
    found = read_engine(venv, driver_version="610", deep=False)
    assert found.imports == "metadata"
    assert found.about.modules is not None
    about = found.about.modules["torch"]
    assert (about.cuda, about.cudnn, about.arch_list) == ("13.0", 91002, None)


def test_imports_are_remembered_until_packages_or_driver_change(venv: Path):
    deep = read_engine(venv, driver_version="610", deep=True)
    assert deep.imports == "now"
    again = read_engine(venv, driver_version="610", deep=False)
    assert again.imports == "remembered"
    assert again.about.modules == deep.about.modules
    assert again.about.modules is not None
    assert again.about.modules["torch"].arch_list == ["sm_90", "sm_120"]
    assert read_engine(venv, driver_version="620", deep=False).imports == "metadata"
    packages = next((venv.parents[1] / "lib").glob("python*")) / "site-packages"
    write_package(packages, "triton", "3.4")
    assert read_engine(venv, driver_version="610", deep=False).imports == "metadata"


def test_a_damaged_memory_is_asked_anew(venv: Path):
    read_engine(venv, driver_version=None, deep=True)
    (record,) = (paths.cache_dir() / "doctor").iterdir()
    record.write_text('{"schema_version": 1, "modules": 7}')
    assert read_engine(venv, driver_version=None, deep=False).imports == "metadata"


@pytest.mark.parametrize(
    ("version", "packages", "cuda"),
    [
        ("2.14.1+cu130", {}, "13.0"),
        ("2.8.0+cu128", {}, "12.8"),
        ("2.8.0", {"nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8"),
        ("2.8.0+cpu", {}, None),
    ],
)
def test_builds_of_torch_by_their_names(version, packages, cuda):
    from dflash_deploy.doctor.engine import _told_by

    modules = _told_by({"torch": version, **packages})
    assert modules is not None
    assert modules["torch"].cuda == cuda


def test_a_torch_of_unknown_build_is_not_guessed():
    from dflash_deploy.doctor.engine import _told_by

    assert _told_by({"torch": "2.8.0"}) is None
    assert _told_by({}) is None


def test_the_interpreter_is_the_one_given_then_the_profiles_then_the_chosen_one(tmp_path: Path):
    with pytest.raises(DeployError, match="no serving environment is chosen"):
        interpreter(Request())
    with pytest.raises(DeployError, match="no interpreter that can be run"):
        interpreter(Request(python=tmp_path / "python"))
    assert interpreter(Request(python=Path(sys.executable))) == Path(sys.executable)


def test_an_interpreter_that_does_not_answer_is_a_failure_of_one_check(tmp_path: Path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(DeployError, match="does not say what it has"):
        checks.release(look_at(Request(python=broken)))


# Environments that were left half-made ----------------------------------------------------


def leave_half_made(name: str) -> Path:
    folder = environments.folder_of(name)
    (folder / "lib").mkdir(parents=True)
    making = records.Making(name=name, began_at=environments.now(), pin=pin_of_source("version", "0.5.23"))
    environments.making_file(name).write_text(records.write_text(making))
    return folder


def test_no_environment_is_half_made():
    assert checks.half_made(subject()).status is Status.PASS


def test_what_a_cut_short_making_left_is_told_and_can_be_removed():
    folder = leave_half_made("main")
    answer = checks.half_made(subject())
    assert answer.status is Status.WARN
    assert answer.fix == "dflash-deploy env create main"
    assert answer.repair is not None
    answer.repair.run()
    assert not folder.exists()
    assert checks.half_made(subject()).status is Status.PASS


def test_an_environment_that_is_being_made_is_left_alone():
    with environments.changing("main"):
        leave_half_made("main")
        answer = checks.half_made(subject())
    assert answer.status is Status.WARN
    assert answer.repair is None


def test_a_folder_that_is_not_ours_is_never_removed():
    folder = environments.folder_of("photos")
    folder.mkdir(parents=True)
    (folder / "a.jpg").touch()
    answer = checks.half_made(subject())
    assert answer.status is Status.WARN
    assert answer.repair is None
    assert (folder / "a.jpg").exists()


def test_kernels_that_only_want_the_driver_are_the_drivers_trouble():
    wanting = engine(modules={"sgl_kernel": Module(installed=True, error="libcuda.so.1: cannot open it")})
    with pytest.raises(NotCheckedError) as caught:
        checks.kernels(subject(engine=wanting))
    assert caught.value.waits_for == "driver"
    assert checks.kernels(subject(engine=wanting, profile="sglang-cpu-smoke")).status is Status.UNKNOWN
    # A card is here, and CUDA's library is not found all the same.
    assert checks.kernels(subject(gpu(), engine=wanting)).status is Status.FAIL
