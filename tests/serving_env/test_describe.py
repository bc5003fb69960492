from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflash_deploy.engine.sglang.advice_case import Weight
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.advice import ENTRIES, Case, advise
from dflash_deploy.serving_env.describe import Description, Module, Program, describe
from dflash_deploy.serving_env.environments import Environment

from .conftest import Tool


def packages_of(environment: Environment) -> Path:
    return next(environment.folder.glob("lib/python*/site-packages"))


def install(environment: Environment, module: str, code: str) -> None:
    folder = packages_of(environment) / module
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(code)


class TestDescribe:
    def test_what_is_there(self, environment):
        about = describe(environment.python)
        assert about.sglang is not None
        assert about.sglang.version == "0.5.23"
        assert about.sglang.location == str(packages_of(environment) / "sglang")
        assert about.packages["torch"] == "2.14.1"
        assert about.wanted == {"torch": "2.14.1"}
        assert about.python.prefix == str(environment.folder)
        assert about.modules is not None
        assert about.modules["torch"].version == "2.14.1"
        assert about.modules["torch"].cuda is None
        assert about.modules["flashinfer"] == Module(installed=False)

    def test_imports_that_fail_hang_or_crash_are_answers(self, environment):
        install(environment, "torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
        install(environment, "flashinfer", "import time; print('noise', flush=True); time.sleep(600)")
        install(environment, "sgl_kernel", "import os; os.kill(os.getpid(), 11)")
        install(
            environment, "triton", "import sys; print('DFLASH-DEPLOY-ENVIRONMENT {not json'); sys.exit(3)"
        )
        modules = describe(environment.python, import_s=5).modules
        assert modules is not None
        assert modules["torch"].error == "OSError: libcudart.so.13: cannot open shared object file"
        assert modules["flashinfer"].error == "no answer within 5 s"
        assert modules["sgl_kernel"].error == "it was ended by SIGSEGV"
        assert "SystemExit" in (modules["triton"].error or "")
        assert all(module.installed for module in modules.values())

    def test_what_wants_the_driver_is_not_called_broken(self, environment):
        """SGLang's kernels tell of it last, below a page of what they tried."""
        tried = "Could not load any common_ops library!\\n" + "a place that was tried\\n" * 100
        install(environment, "sgl_kernel", f"raise ImportError('{tried}libcuda.so.1: cannot open it')")
        about = describe(environment.python)
        assert about.modules is not None
        told = about.modules["sgl_kernel"].error or ""
        assert "\n" not in told
        assert len(told) <= 1000
        advice = {one.id: one for one in advise(Case(version="0.5.23", about=about))}
        assert "kernel-package-broken" not in advice
        found = advice["driver-library-missing"]
        assert "sgl_kernel" in found.text
        assert "env create" not in (found.fix or "")

    def test_torch_is_asked_for_what_its_build_is(self, environment):
        install(
            environment,
            "torch",
            "import types\n"
            "version = types.SimpleNamespace(cuda='13.0', hip=None)\n"
            "_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: 'sm_90 sm_100 sm_120')\n"
            "cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2,\n"
            "    get_device_capability=lambda index: (12, index))\n"
            "backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 91900))\n",
        )
        modules = describe(environment.python).modules
        assert modules is not None
        torch = modules["torch"]
        assert (torch.cuda, torch.cudnn, torch.cuda_available) == ("13.0", 91900, True)
        assert torch.arch_list == ["sm_90", "sm_100", "sm_120"]
        assert torch.capabilities == ["12.0", "12.1"]

    @pytest.mark.parametrize("version", ["0.5.20.dev3+gc14312a66", "0.5.20.dev3+20260901.gc14312a66"])
    def test_commit_in_a_version(self, environment, version):
        metadata = next(packages_of(environment).glob("sglang-*.dist-info")) / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        engine = describe(environment.python, imports=False).sglang
        assert engine is not None
        assert engine.commit == "c14312a66"

    def test_programs_that_variables_name_are_those_that_are_asked(self, environment, tmp_path, monkeypatch):
        """As the engine's compilers do: a variable wins, whether or not its program is there."""
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho release 13.0, V13.0.88; echo '#$ INCLUDES=\"-I{tmp_path}\"'\n")
        nvcc.chmod(0o755)
        (tmp_path / "cuda_runtime.h").touch()
        (tmp_path / "curand_kernel.h").touch()
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setenv("CC", f"{tmp_path}/no-such-gcc -O2")
        tools = describe(environment.python, imports=False).tools
        assert tools["nvcc"] is not None
        assert (tools["nvcc"].path, tools["nvcc"].version) == (str(nvcc), "13.0")
        assert set(tools["nvcc"].missing) <= {"cublasLt.h"}
        assert tools["gcc"] is not None
        assert tools["gcc"].path == f"{tmp_path}/no-such-gcc"
        assert "No such file" in (tools["gcc"].problem or "")
        nvcc.write_text("#!/bin/sh\necho 'line 12: 1.2.3' >&2; exit 3\n")
        tools = describe(environment.python, imports=False).tools
        assert tools["nvcc"] is not None
        assert (tools["nvcc"].version, tools["nvcc"].problem) == (None, "line 12: 1.2.3")

    def test_damaged_metadata(self, environment):
        for path in packages_of(environment).glob("*.dist-info/METADATA"):
            path.write_bytes(b"\xff\xfe\0nothing")
        about = describe(environment.python)
        assert about.packages.get("torch") is None

    def test_no_interpreter(self, tmp_path):
        with pytest.raises(DeployError) as caught:
            describe(tmp_path / "python")
        assert caught.value.exit_code is ExitCode.MISSING
        talker = tmp_path / "talker"
        talker.write_text("#!/bin/sh\necho hello\n")
        talker.chmod(0o755)
        with pytest.raises(DeployError, match="does not say what it has"):
            describe(talker)

    def test_nothing_is_written_into_it(self, environment):
        from dflash_deploy.serving_env.trees import scan

        before = scan(environment.folder)
        describe(environment.python)
        assert scan(environment.folder) == before


class TestCommands:
    @pytest.mark.usefixtures("environment")
    def test_show_and_doctor(self, tool: Tool):
        assert tool("env", "show").returncode == ExitCode.USAGE
        tool("env", "use", "main")
        shown = json.loads(tool("env", "show", "--json").stdout)
        assert shown["environment"]["name"] == "main"
        assert shown["environment"]["default"] is True
        assert shown["sglang"]["version"] == "0.5.23"
        ids = {finding["id"] for finding in shown["findings"]}
        assert {"flashinfer-missing", "kernel-package-missing"} <= ids
        doctor = tool("env", "doctor")
        assert doctor.returncode == ExitCode.FAILED
        assert "about halves its speed" in " ".join(doctor.stdout.split())
        assert "dflash-deploy env create main --replace" in doctor.stdout
        assert "\x1b" not in doctor.stdout
        plain = tool("env", "show", "main")
        assert "flashinfer" in plain.stdout
        assert plain.returncode == 0
        other = tool("env", "doctor", "--python", sys.executable, "--json")
        assert other.returncode == ExitCode.FAILED
        assert json.loads(other.stdout)["findings"][0]["id"] == "engine-missing"


def about(**more: object) -> Description:
    tools = dict.fromkeys(("nvcc", "ninja", "g++", "gcc"), Program(path="/usr/bin/x", version="13.0"))
    given: dict[str, object] = {
        "python": {
            "version": "3.11.9",
            "implementation": "CPython",
            "executable": "/e/bin/python",
            "prefix": "/e",
            "headers": True,
        },
        "glibc": "2.39",
        "packages": {
            "sglang": "0.5.23",
            "torch": "2.14.1",
            "flashinfer-python": "0.7.2",
            "flashinfer-jit-cache": "0.7.2",
            "sglang-kernel": "0.4.10",
        },
        "wanted": {"torch": "2.14.1", "flashinfer-python": "0.7.2"},
        "sglang": {"version": "0.5.23"},
        "tools": tools,
        "modules": {
            "torch": {
                "installed": True,
                "version": "2.14.1+cu130",
                "cuda": "13.0",
                "cudnn": 92301,
                "arch_list": ["sm_80", "sm_90", "sm_100", "sm_120"],
            },
            "flashinfer": {"installed": True, "version": "0.7.2"},
            "sgl_kernel": {"installed": True},
            "triton": {"installed": True},
        },
    }
    return Description.model_validate(given | more)


def ids(**case: object) -> set[str]:
    given: dict[str, object] = {
        "version": "0.5.23",
        "about": about(),
        "capabilities": ("8.9",),
        "driver_cuda": "13.1",
    }
    return {one.id for one in advise(Case(**(given | case)))}  # type: ignore[arg-type]


class TestAdvice:
    def test_a_sound_environment(self):
        assert ids() == set()
        assert ids(capabilities=("12.0",)) == {"fp8-bmm-cublas"}
        assert advise(Case()) == ()

    @pytest.mark.parametrize(
        ("version", "expected"),
        [
            ("0.5.18", True),
            ("0.5.17", True),
            ("0.5.19", False),
            ("0.5.23", False),
            ("0.5.6.post3.dev1+gc14312a66", False),
        ],
    )
    def test_release_without_dflash2(self, version, expected):
        assert ("release-without-dflash2" in ids(version=version)) is expected
        assert "release-without-dflash2" not in ids(version=version, dflash2=False)

    def test_quantised_head(self):
        told = ids(version="0.5.18", quantised_head=True, tensor_parallel=2)
        assert {"quantised-head-refused", "padded-vocabulary", "quantised-head-tensor-parallel"} <= told
        for sound in ({"version": "0.5.23"}, {"quantised_head": False}, {"quantised_head": None}):
            assert not ids(**({"version": "0.5.18", "quantised_head": True} | sound)) & {
                "quantised-head-refused"
            }

    @pytest.mark.parametrize(
        ("module", "change", "capability", "expected"),
        [
            ("torch", {"cudnn": 92300}, "12.0", "cudnn-misaligned"),
            ("torch", {"cuda": None}, "8.9", "torch-without-cuda"),
            ("torch", {"arch_list": ["sm_80", "sm_90"]}, "12.0", "torch-without-this-card"),
            ("torch", {"error": "ImportError: x"}, "8.9", "torch-broken"),
            ("torch", {"cuda": "12.8"}, "8.9", "nvcc-of-another-cuda"),
            ("torch", {"cuda": "14.0"}, "8.9", "driver-older-than-cuda"),
            (
                "sgl_kernel",
                {"error": "ImportError: undefined symbol: _ZN3c10"},
                "8.9",
                "kernel-package-broken",
            ),
            ("flashinfer", {"error": "RuntimeError: x"}, "8.9", "flashinfer-broken"),
        ],
    )
    def test_modules(self, module, change, capability, expected):
        modules = about().model_dump()["modules"]
        modules[module] |= change
        assert expected in ids(about=about(modules=modules), capabilities=(capability,))

    @pytest.mark.parametrize(
        ("program", "expected"),
        [("nvcc", "nvcc-missing"), ("ninja", "ninja-missing"), ("g++", "compiler-missing")],
    )
    def test_programs(self, program, expected):
        tools = about().model_dump()["tools"] | {program: None}
        assert expected in ids(about=about(tools=tools))
        # Without a card there is nothing to compile for.
        assert expected not in ids(about=about(tools=tools), capabilities=())

    def test_packages(self):
        packages = about().packages
        bare = {"sglang": "0.5.23", "torch": "2.13.0+cpu"}
        assert {"flashinfer-missing", "off-the-pins"} <= ids(about=about(packages=bare))
        assert "off-the-pins" not in ids(about=about(packages=packages | {"torch": "2.14.1+cu130"}))
        assert "flashinfer-cubin-differs" in ids(
            about=about(packages=packages | {"flashinfer-cubin": "0.6.12"})
        )
        assert "glibc-too-old" in ids(about=about(glibc="2.31"))
        assert "engine-missing" in ids(about=about(sglang=None))

    def test_minor_versions_and_families_work_together(self):
        assert "driver-older-than-cuda" not in ids(driver_cuda="13.0")
        assert "driver-older-than-cuda" in ids(driver_cuda="12.9")
        # Code for 8.0 runs on 8.9; code for 12.0 on 12.1.
        assert "torch-without-this-card" not in ids(capabilities=("8.9", "12.1"))

    def test_each_has_evidence_and_a_name_of_its_own(self):
        assert len({entry.id for entry in ENTRIES}) == len(ENTRIES)
        for entry in ENTRIES:
            assert entry.evidence
            assert entry.fix or entry.weight is Weight.NOTE

    def test_what_matters_most_comes_first(self):
        found = advise(
            Case(version="0.5.18", about=about(packages={"sglang": "0.5.18"}), quantised_head=True)
        )
        assert [one.weight for one in found] == sorted(one.weight for one in found)
