"""What is known to go wrong with an engine's environment and its sources, and the evidence for it.

Of the seven things that cost people most, the first five are here: a release without DFlash2, the quantised
output head that its selector refuses (its padding and tensor parallelism among it), and the FP8 product on
consumer Blackwell. What is wrong with flags is told by ``engine.sglang.advice``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dflash_deploy.engine.sglang.advice_case import Row, Weight
from dflash_deploy.engine.sglang.versions import nearest, order
from dflash_deploy.serving_env.describe import Description, Module

__all__ = ["DENSE_HEADS", "ENTRIES", "Advice", "Case", "Entry", "advise", "named"]

DENSE_HEADS = frozenset({"bf16", "bfloat16", "fp16", "float16", "fp32", "float32", "shared"})
"""Number formats of an output head, as model cards name them, that every release takes."""

_DFLASH2 = "0.5.19"
_CUDNN_SOUND = 92301
_GLIBC = (2, 34)
_FIRST_CUDA_OF_SM_120 = (12, 8)


@dataclass(frozen=True)
class Case:
    """One engine on one machine; None where a thing is not known.

    Attributes:
        version: of SGLang.
        about: its environment.
        capabilities: compute capabilities of the machine's cards, such as ``12.0``.
        driver_cuda: newest CUDA version that the driver serves.
        quantised_head: whether the target's output head is quantised.
        dflash2: whether the draft has DFlash2's candidate selector.
        tensor_parallel: cards that one model is spread over.
    """

    version: str | None = None
    about: Description | None = None
    capabilities: tuple[str, ...] = ()
    driver_cuda: str | None = None
    quantised_head: bool | None = None
    dflash2: bool | None = None
    tensor_parallel: int = 1

    @property
    def release(self) -> str | None:
        """The release whose facts hold for the version."""
        return nearest(self.version).release if self.version else None

    def before(self, release: str) -> bool:
        """Whether it is known to be older than a release."""
        return self.release is not None and order(self.release) < order(release)

    def module(self, name: str) -> Module | None:
        """What came of importing a module, None where that was not tried."""
        modules = self.about.modules if self.about else None
        return modules.get(name) if modules else None

    def lacks(self, package: str) -> bool:
        """Whether a package is known to be missing."""
        return self.about is not None and package not in self.about.packages

    def without(self, program: str) -> bool:
        """Whether a program is known to be missing, where there is a card to compile for."""
        return self.about is not None and bool(self.capabilities) and self.about.tools.get(program) is None

    @property
    def consumer_blackwell(self) -> bool:
        """A card of compute capability 12.x is there."""
        return any(one.startswith("12.") for one in self.capabilities)


@dataclass(frozen=True)
class Advice:
    """One thing to know, and what helps.

    Attributes:
        fix: a command, or the change to make; None where there is nothing to do.
        evidence: where this is known from.
    """

    id: str
    text: str
    fix: str | None
    evidence: str
    weight: Weight


@dataclass(frozen=True)
class Entry(Row[Case]):
    """One row of this table: what helps, and where it is known from."""

    fix: str | None
    evidence: str

    def advice(self, case: Case) -> Advice:
        """What it says of a case."""
        return Advice(self.id, self.words(case), self.fix, self.evidence, self.weight)


def advise(case: Case) -> tuple[Advice, ...]:
    """All that holds of a case, what matters most first."""
    found = [entry.advice(case) for entry in ENTRIES if entry.when(case)]
    return tuple(sorted(found, key=lambda one: one.weight))


def named(ids: Collection[str], case: Case) -> tuple[Advice, ...]:
    """Of these entries, what holds of a case."""
    return tuple(one for one in advise(case) if one.id in ids)


def _numbers(version: str | None) -> tuple[int, ...]:
    parts = (version or "").split(".")[:2]
    return tuple(int(part) for part in parts) if parts and all(part.isdigit() for part in parts) else ()


def _off_pins(case: Case) -> list[str]:
    """Packages in another version than SGLang asks for; a local part (``+cpu``) is no other version."""
    about = case.about
    if about is None:
        return []
    return [
        f"{name} {about.packages[name]} (wanted {wanted})"
        for name, wanted in sorted(about.wanted.items())
        if name in about.packages and about.packages[name].partition("+")[0] != wanted.partition("+")[0]
    ]


def _unbuilt(case: Case) -> list[str]:
    """Cards that torch's build has no code for."""
    torch = case.module("torch")
    if torch is None or not torch.arch_list:
        return []
    built = {arch.partition("_")[2].rstrip("af") for arch in torch.arch_list}
    majors = {arch[:-1] for arch in built}
    return [
        one
        for one in case.capabilities
        if one.replace(".", "") not in built and not (one[:-2] in majors and f"{one[:-2]}0" in built)
    ]


def _driver_too_old(case: Case) -> bool:
    torch = case.module("torch")
    build, driver = _numbers(torch.cuda if torch else None), _numbers(case.driver_cuda)
    # Minor versions of one major version work together (CUDA's minor version compatibility).
    return bool(build and driver) and driver[0] < build[0]


def _nvcc_version(case: Case) -> tuple[int, ...]:
    nvcc = case.about.tools.get("nvcc") if case.about else None
    return _numbers(nvcc.version) if nvcc else ()


def _nvcc_other_cuda(case: Case) -> bool:
    torch, nvcc = case.module("torch"), _nvcc_version(case)
    build = _numbers(torch.cuda if torch else None)
    return bool(build and nvcc) and nvcc[0] != build[0]


def _broken_programs(case: Case, *names: str) -> list[str]:
    tools = case.about.tools if case.about and case.capabilities else {}
    return [
        f"{name} ({tool.path}) does not run: {tool.problem}"
        for name in names
        if (tool := tools.get(name)) is not None and tool.problem
    ]


def _headers_missing(case: Case) -> list[str]:
    nvcc = case.about.tools.get("nvcc") if case.about and case.capabilities else None
    missing = nvcc.missing if nvcc else []
    # FlashInfer alone includes the others, and compiles nothing where its kernels came ready.
    return missing if "cuda_runtime.h" in missing or case.lacks("flashinfer-jit-cache") else []


def _cubin_differs(case: Case) -> bool:
    packages = case.about.packages if case.about else {}
    version, cubin = packages.get("flashinfer-python"), packages.get("flashinfer-cubin")
    return version is not None and cubin is not None and version != cubin


def _broken(case: Case, name: str) -> bool:
    module = case.module(name)
    return module is not None and module.installed and module.error is not None and not _wants_driver(module)


def _wants_driver(module: Module) -> bool:
    """It is sound, as far as can be told: what it did not find comes with the driver."""
    return module.installed and _DRIVERS in (module.error or "")


def _kept_from_driver(case: Case) -> list[str]:
    modules = case.about.modules if case.about else None
    return [name for name, module in (modules or {}).items() if _wants_driver(module)]


def _error(case: Case, name: str) -> str:
    module = case.module(name)
    return (module.error if module else None) or "unknown"


def _old_glibc(case: Case) -> bool:
    glibc = _numbers(case.about.glibc if case.about else None)
    return bool(glibc) and glibc < _GLIBC


_DRIVERS = "libcuda.so"
_SURFACE = "read in the wheels 0.5.14 to 0.5.23"
_REINSTALL = "install it there, or make an environment anew: dflash-deploy env create NAME --replace"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "engine-missing",
        Weight.REFUSED,
        lambda case: case.about is not None and case.about.sglang is None,
        "SGLang is not installed in this environment",
        "dflash-deploy env create NAME",
        "its metadata",
    ),
    Entry(
        "release-without-dflash2",
        Weight.REFUSED,
        lambda case: case.before(_DFLASH2) and case.dflash2 is not False,
        lambda case: (
            f"SGLang {case.version} has no DFlash2: a draft whose architecture is DFlash2DraftModel is not "
            f"loaded. {_DFLASH2} is the first release that has it"
        ),
        f"dflash-deploy env create NAME --version {_DFLASH2} (or newer)",
        f"pull request 35371 (c14312a66); {_SURFACE}",
    ),
    Entry(
        "quantised-head-refused",
        Weight.REFUSED,
        lambda case: bool(case.quantised_head) and case.dflash2 is not False and case.before(_DFLASH2),
        "builds between the DFlash2 merge (c14312a66) and pull request 35496 (1cf2b8c) refuse a quantised "
        'output head: "DFlash2 selector requires a dense FP16/BF16/FP32 target lm_head"; '
        "--enable-fp32-lm-head does not make it dense",
        "dflash-deploy patch check nvfp4-lm-head; or, without a change of code, dflash-deploy checkpoint "
        "dense-head SRC DST",
        f"pull request 35496, issue 35534; {_SURFACE}",
    ),
    Entry(
        "padded-vocabulary",
        Weight.NOTE,
        lambda case: bool(case.quantised_head) and case.dflash2 is not False and case.before(_DFLASH2),
        "a quantised head gives scores for a vocabulary padded to a multiple of 64: unless the tail is "
        "masked, ids that no tokenizer knows can be proposed; and FlashInfer's top-k takes contiguous scores "
        "only",
        "dflash-deploy patch apply nvfp4-lm-head does both",
        "pull request 35496",
    ),
    Entry(
        "quantised-head-tensor-parallel",
        Weight.REFUSED,
        lambda case: bool(case.quantised_head) and case.tensor_parallel > 1 and case.before(_DFLASH2),
        "with a quantised head on several cards the candidates of each card are not put together: the patch "
        "refuses it, and releases before 0.5.19 hang in top-k",
        "one card (--tensor-parallel-size 1), 0.5.19 or newer, or a dense head",
        "pull request 35496",
    ),
    Entry(
        "fp8-bmm-cublas",
        Weight.NOTE,
        lambda case: case.consumer_blackwell and bool(case.version) and not case.before("0.5.17"),
        lambda case: (
            "per-tensor FP8 layers go to FlashInfer's bmm_fp8 with cuBLAS, which does not initialise on some "
            "of these cards (CUBLAS_STATUS_NOT_INITIALIZED, _NOT_SUPPORTED). Another back end is no sure "
            "cure: cuDNN plans anew for each shape (stalls of 0.2 to 17 s)"
            + ("" if case.before("0.5.20") else "; 0.5.20 and newer try kernels of their own first")
        ),
        "dflash-deploy patch check bmm-fp8-backend --measure tells before anything is changed",
        f"pull requests 28333, 31961; vLLM 48210; FlashInfer 3255; {_SURFACE}",
    ),
    Entry(
        "cudnn-misaligned",
        Weight.WRONG,
        lambda case: (
            case.consumer_blackwell
            and (torch := case.module("torch")) is not None
            and torch.cudnn is not None
            and torch.cudnn < _CUDNN_SOUND
        ),
        "this cuDNN is older than 9.23.1: as back end of bmm_fp8 it raised misaligned-address errors",
        "leave that product to another back end, or install nvidia-cudnn-cu13 9.23.1 or newer",
        "published reports on compute capability 12.x",
    ),
    Entry(
        "flashinfer-missing",
        Weight.SLOW,
        lambda case: case.lacks("flashinfer-python") and not case.lacks("sglang"),
        "FlashInfer is not installed: DFlash2's selector falls back to torch's top-k, which about halves its "
        "speed and is told in one INFO line; FP4 products have no kernel",
        _REINSTALL,
        _SURFACE,
    ),
    Entry(
        "flashinfer-broken",
        Weight.SLOW,
        lambda case: _broken(case, "flashinfer"),
        lambda case: f"FlashInfer cannot be imported: {_error(case, 'flashinfer')}",
        _REINSTALL,
        "tried in this environment",
    ),
    Entry(
        "flashinfer-cubin-differs",
        Weight.REFUSED,
        _cubin_differs,
        "flashinfer-cubin and flashinfer-python have different versions; FlashInfer refuses that at import",
        "remove flashinfer-cubin, or install it in flashinfer-python's version",
        "their metadata; 0.5.16 and newer do not require flashinfer-cubin",
    ),
    Entry(
        "flashinfer-compiles",
        Weight.NOTE,
        lambda case: (
            case.lacks("flashinfer-jit-cache")
            and not case.lacks("flashinfer-python")
            and bool(case.capabilities)
        ),
        "no flashinfer-jit-cache: kernels are compiled when first used, so a first start takes 6 to 77 "
        "minutes more, silently, and needs nvcc; later ones take them from ~/.cache/flashinfer",
        "give the first start a long deadline and keep ~/.cache; on little RAM set MAX_JOBS=2",
        "published boots with empty caches",
    ),
    Entry(
        "driver-library-missing",
        Weight.REFUSED,
        lambda case: bool(_kept_from_driver(case)),
        lambda case: (
            f"{' and '.join(_kept_from_driver(case))} cannot be imported: libcuda.so.1, which comes with the "
            "NVIDIA driver, is not found here. The environment itself needs no change"
        ),
        "dflash-deploy doctor tells how the driver comes here",
        "tried in this environment",
    ),
    Entry(
        "torch-broken",
        Weight.REFUSED,
        lambda case: _broken(case, "torch"),
        lambda case: f"torch cannot be imported: {_error(case, 'torch')}",
        _REINSTALL,
        "tried in this environment",
    ),
    Entry(
        "kernel-package-broken",
        Weight.REFUSED,
        lambda case: _broken(case, "sgl_kernel"),
        lambda case: (
            f"sgl_kernel cannot be imported: {_error(case, 'sgl_kernel')} (an undefined symbol means that it "
            "was built for another torch)"
        ),
        _REINSTALL,
        "tried in this environment",
    ),
    Entry(
        "kernel-package-missing",
        Weight.REFUSED,
        lambda case: (
            case.lacks("sglang-kernel")
            and case.lacks("sgl-kernel")
            and not case.lacks("sglang")
            and (kernel := case.module("sgl_kernel")) is not None
            and not kernel.installed
        ),
        "the kernel package (sglang-kernel, module sgl_kernel) is not installed: the server ends at import",
        _REINSTALL,
        "tried in this environment",
    ),
    Entry(
        "torch-without-cuda",
        Weight.REFUSED,
        lambda case: (
            bool(case.capabilities)
            and (torch := case.module("torch")) is not None
            and torch.error is None
            and torch.installed
            and torch.cuda is None
            and torch.hip is None
        ),
        "this torch is a build without CUDA, and there is a card",
        _REINSTALL,
        "torch.version.cuda",
    ),
    Entry(
        "torch-without-this-card",
        Weight.REFUSED,
        lambda case: bool(_unbuilt(case)),
        lambda case: (
            f"torch's build has no code for compute capability {', '.join(_unbuilt(case))}: "
            '"no kernel image is available"'
        ),
        "install a torch built with CUDA 12.8 or newer for compute capability 12.x; " + _REINSTALL,
        "torch's list of architectures",
    ),
    Entry(
        "driver-older-than-cuda",
        Weight.REFUSED,
        _driver_too_old,
        lambda case: (
            f"the driver serves CUDA {case.driver_cuda}, and torch is built with another major version: "
            '"CUDA driver version is insufficient for CUDA runtime version"'
        ),
        "update the NVIDIA driver (580 or newer for CUDA 13), then restart the machine",
        "NVML, torch.version.cuda",
    ),
    Entry(
        "nvcc-missing",
        Weight.WRONG,
        lambda case: case.without("nvcc"),
        'no nvcc: what FlashInfer and SGLang compile when first used cannot be ("Could not find nvcc"), '
        "and the CUTLASS kernels for FP8 on consumer Blackwell are left out",
        "install the CUDA toolkit of torch's major version, and set CUDA_HOME",
        "FlashInfer issue 1904",
    ),
    Entry(
        "nvcc-of-another-cuda",
        Weight.WRONG,
        _nvcc_other_cuda,
        "nvcc and torch's build are of different major versions of CUDA; kernels compiled here may not load",
        "set CUDA_HOME to the toolkit of torch's major version",
        "nvcc --version, torch.version.cuda",
    ),
    Entry(
        "nvcc-older-than-card",
        Weight.WRONG,
        lambda case: case.consumer_blackwell and () < _nvcc_version(case) < _FIRST_CUDA_OF_SM_120,
        "this nvcc does not know compute capability 12.x: \"Value 'sm_120' is not defined\"",
        "install CUDA toolkit 12.8 or newer, and set CUDA_HOME",
        "published failures in graph capture",
    ),
    Entry(
        "ninja-missing",
        Weight.WRONG,
        lambda case: case.without("ninja"),
        "no ninja: nothing can be compiled when it is first used",
        "install the package ninja into the environment, or ninja-build into the system",
        "published failures",
    ),
    Entry(
        "compiler-missing",
        Weight.WRONG,
        lambda case: case.without("g++"),
        "no g++: nothing can be compiled when it is first used; Triton needs a C compiler at every start",
        "install g++ (Debian and Ubuntu: apt-get install g++)",
        "published failures",
    ),
    Entry(
        "c-compiler-missing",
        Weight.WRONG,
        lambda case: case.without("gcc") and not case.without("g++"),
        "no C compiler (gcc or clang): Triton needs one at every start",
        "install gcc (Debian and Ubuntu: apt-get install gcc)",
        "published failures",
    ),
    Entry(
        "program-broken",
        Weight.WRONG,
        lambda case: bool(_broken_programs(case, "nvcc", "ninja")),
        lambda case: "; ".join(_broken_programs(case, "nvcc", "ninja")),
        "set CUDA_HOME to a whole CUDA toolkit, or unset it; or install the program again",
        "PROGRAM --version",
    ),
    Entry(
        "compiler-broken",
        Weight.WRONG,
        lambda case: bool(_broken_programs(case, "g++", "gcc")),
        lambda case: "; ".join(_broken_programs(case, "g++", "gcc")),
        "set CC and CXX to compilers that run, or unset them; or install the program again",
        "PROGRAM --version",
    ),
    Entry(
        "cuda-headers-missing",
        Weight.WRONG,
        lambda case: bool(_headers_missing(case)),
        lambda case: (
            f"nvcc has no {', '.join(_headers_missing(case))}: what is compiled when first used stops with "
            '"No such file or directory"'
        ),
        "install the whole toolkit (Debian and Ubuntu: apt-get install cuda-toolkit-13-0), and set CUDA_HOME "
        "to it",
        "nvcc --dryrun; published failures",
    ),
    Entry(
        "python-headers-missing",
        Weight.WRONG,
        lambda case: case.about is not None and bool(case.capabilities) and not case.about.python.headers,
        "Python.h is missing: Triton cannot compile its launcher, and then says that it does not support "
        "this platform",
        "install Python's headers (Debian and Ubuntu: apt-get install python3-dev), or make the environment "
        "with uv's Python",
        "published failures on 0.5.20",
    ),
    Entry(
        "off-the-pins",
        Weight.NOTE,
        lambda case: bool(_off_pins(case)),
        lambda case: "other versions than this SGLang asks for: " + ", ".join(_off_pins(case)[:8]),
        _REINSTALL,
        "SGLang's metadata",
    ),
    Entry(
        "glibc-too-old",
        Weight.REFUSED,
        _old_glibc,
        "glibc is older than 2.34, which SGLang's wheel is built for",
        "use a newer distribution, or a container",
        _SURFACE,
    ),
)
