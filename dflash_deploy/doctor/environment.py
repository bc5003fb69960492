"""Checks of the serving environment; what is known to go wrong stands in ``serving_env.advice``."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from dflash_deploy.doctor.engine import Engine
from dflash_deploy.doctor.finding import (
    Answer,
    NotCheckedError,
    Repair,
    Status,
    failed,
    passed,
    unknown,
    warned,
)
from dflash_deploy.doctor.gpu import used
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.engine.sglang.advice_case import Weight
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.host import Host
from dflash_deploy.paths import expanded
from dflash_deploy.serving_env.advice import DENSE_HEADS, Advice, Case, advise
from dflash_deploy.serving_env.environments import is_being_changed, list_environments, read_making
from dflash_deploy.serving_env.patches.bmm import DEFAULT
from dflash_deploy.serving_env.patches.choices import VARIABLE, bmm_choices
from dflash_deploy.serving_env.remove import remove

RELEASE = frozenset(
    {
        "engine-missing",
        "release-without-dflash2",
        "quantised-head-refused",
        "quantised-head-tensor-parallel",
        "padded-vocabulary",
    }
)
CUDA = frozenset({"driver-older-than-cuda", "torch-without-cuda", "torch-broken"})
ARCHITECTURE = frozenset({"torch-without-this-card"})
KERNELS = frozenset({"kernel-package-broken", "kernel-package-missing", "driver-library-missing"})
FLASHINFER = frozenset(
    {"flashinfer-missing", "flashinfer-broken", "flashinfer-cubin-differs", "flashinfer-compiles"}
)
TOOLKIT = frozenset(
    {
        "nvcc-missing",
        "nvcc-of-another-cuda",
        "nvcc-older-than-card",
        "ninja-missing",
        "program-broken",
        "cuda-headers-missing",
    }
)
COMPILER = frozenset({"compiler-missing", "c-compiler-missing", "compiler-broken", "python-headers-missing"})
CUDNN = frozenset({"cudnn-misaligned"})
GLIBC = frozenset({"glibc-too-old"})
ELSEWHERE = frozenset({"fp8-bmm-cublas"})
"""Told by the check of patches, whose measurement decides it."""
OWN_CHECKS = (
    RELEASE | CUDA | ARCHITECTURE | KERNELS | FLASHINFER | TOOLKIT | COMPILER | CUDNN | GLIBC | ELSEWHERE
)

_STATUS = {
    Weight.REFUSED: Status.FAIL,
    Weight.FITS: Status.WARN,
    Weight.WRONG: Status.FAIL,
    Weight.SLOW: Status.WARN,
    Weight.MEMORY: Status.WARN,
    Weight.NOTHING: Status.WARN,
    Weight.NOTE: Status.WARN,
}


def release(subject: Subject) -> Answer:
    """An environment is chosen, and has an SGLang that can do what is wanted."""
    engine = subject.engine()
    installed = engine.about.sglang
    found = _advised(subject, engine, RELEASE)
    if found is not None:
        return found
    told = f"SGLang {installed.version if installed else '?'} ({engine.python})"
    wanted = subject.profile.engine.version if subject.profile else None
    if wanted is not None and installed is not None and installed.version.partition("+")[0] != wanted:
        return warned(
            f"the profile writes flags for SGLang {wanted}; {installed.version} is installed",
            f"dflash-deploy env create sglang-{wanted} --version {wanted}, or in the profile: "
            f"engine.version: {installed.version}",
            str(engine.python),
        )
    return passed(told)


def cuda(subject: Subject) -> Answer | None:
    """The driver serves the CUDA that torch is built with."""
    engine = _engine(subject)
    found = _advised(subject, engine, CUDA)
    if found is not None:
        old = any(one.id == "driver-older-than-cuda" for one in _advice(subject, engine))
        return replace(found, fix=_newer_driver(subject.host())) if old else found
    torch = (engine.about.modules or {}).get("torch")
    if "torch" not in engine.about.packages:
        return failed("torch is not installed in this environment", _anew(engine))
    if torch is None or torch.cuda is None:
        return unknown("which CUDA torch is built with, only importing it tells", _deep(subject))
    serves = subject.gpus().cuda_version
    if serves is None and subject.on_cpu:
        return None
    if serves is None:
        return unknown(f"torch is built with CUDA {torch.cuda}; there is no driver to compare with")
    return passed(f"torch is built with CUDA {torch.cuda}, the driver serves {serves}", engine.source)


def _newer_driver(host: Host) -> str:
    new = "the NVIDIA driver (580 or newer for CUDA 13)"
    if host.wsl is not None:
        return f"update {new} in Windows, not here; then in PowerShell: wsl --shutdown"
    if host.container is not None:
        return f"update {new} of the machine that runs this container, and restart that"
    return f"update {new}, then restart the machine"


def architecture(subject: Subject) -> Answer | None:
    """Torch's build has code for this card."""
    engine = _engine(subject)
    capabilities = _capabilities(subject)
    if not capabilities:
        return None
    found = _advised(subject, engine, ARCHITECTURE)
    if found is not None:
        return found
    torch = (engine.about.modules or {}).get("torch")
    if torch is None or not torch.arch_list:
        return unknown("which cards torch's build has code for, only importing it tells", _deep(subject))
    names = ", ".join(f"sm_{one.replace('.', '')}" for one in capabilities)
    return passed(f"{names} is among {' '.join(torch.arch_list)}", engine.source)


def kernels(subject: Subject) -> Answer:
    """SGLang's own kernels can be loaded."""
    engine = _engine(subject)
    if any(one.id == "driver-library-missing" for one in _advice(subject, engine)):
        if subject.on_cpu:
            return unknown("made for cards; what SGLang takes in their place on a processor is not looked at")
        if not subject.gpus().readable:
            raise NotCheckedError("driver")
    found = _advised(subject, engine, KERNELS)
    if found is not None:
        return found
    packages = engine.about.packages
    version = packages.get("sglang-kernel") or packages.get("sgl-kernel")
    module = (engine.about.modules or {}).get("sgl_kernel")
    if module is None:
        if version is None:
            return failed("the kernel package (sglang-kernel) is not installed", _anew(engine))
        return unknown(f"sglang-kernel {version}: whether it loads, only importing it tells", _deep(subject))
    return passed(f"sglang-kernel {version or module.version} can be imported", engine.source)


def flashinfer(subject: Subject) -> Answer:
    """FlashInfer is there, its parts are of one version, and its kernels need not be compiled."""
    engine = _engine(subject)
    ids = FLASHINFER - ({"flashinfer-compiles"} if _compiled_before() else set())
    found = _advised(subject, engine, ids)
    if found is not None:
        return found
    packages = engine.about.packages
    parts = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
    told = ", ".join(f"{name} {packages[name]}" for name in parts if name in packages)
    if not told:
        return unknown("no engine is installed that would need it")
    return passed(told + ("; kernels were compiled before" if _compiled_before() else ""), engine.source)


def toolkit(subject: Subject) -> Answer | None:
    """Nvcc and ninja are there, of the right CUDA, for kernels that are compiled when first used."""
    return _tools(subject, TOOLKIT, ("nvcc", "ninja"))


def compiler(subject: Subject) -> Answer | None:
    """A C compiler and Python's headers are there: Triton needs both at every start."""
    return _tools(subject, COMPILER, ("g++", "gcc"))


def cudnn(subject: Subject) -> Answer | None:
    """CuDNN is sound, where the FP8 product is given to it."""
    engine = _engine(subject)
    if not any(one.startswith("12.") for one in _capabilities(subject)):
        return None
    torch = (engine.about.modules or {}).get("torch")
    if torch is None or torch.cudnn is None:
        return unknown("cuDNN's version is not told by the packages' names", _deep(subject))
    number = torch.cudnn
    version = f"cuDNN {number // 10_000}.{number // 100 % 100}.{number % 100}"
    backend = _fp8_backend(subject)
    found = _advised(subject, engine, CUDNN)
    if found is None:
        return passed(f"{version}; the FP8 product goes to {backend}", engine.source)
    if backend in ("cudnn", "auto"):
        return found
    return passed(
        f"{version} is older than 9.23.1, and the FP8 product does not go to it ({backend})", engine.source
    )


def glibc(subject: Subject) -> Answer:
    """The C library is new enough for SGLang's wheel."""
    try:
        about = subject.engine().about
    except DeployError:
        about = None
    version = (about.glibc if about else None) or subject.host().glibc
    if version is None:
        return unknown("this is not glibc, or it does not tell its version", "use a glibc distribution")
    if about is None:
        parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if parts < (2, 34):
            return failed(
                f"glibc {version} is older than 2.34, which SGLang's wheel is built for",
                "use a newer distribution, or a container",
            )
        return passed(f"glibc {version}")
    return _advised(subject, subject.engine(), GLIBC) or passed(f"glibc {version}")


def pins(subject: Subject) -> Answer:
    """Packages are as this SGLang asks for, and nothing else is known to be wrong."""
    engine = _engine(subject)
    others = {one.id for one in _advice(subject, engine)} - OWN_CHECKS
    found = _advised(subject, engine, others)
    if found is not None:
        return found
    if not engine.about.wanted:
        return unknown("this SGLang's metadata names no exact versions")
    return passed(f"{len(engine.about.wanted)} versions are as SGLang asks for")


def half_made(_: Subject) -> Answer:
    """No environment was left half-made."""
    whole, broken = list_environments()
    if not broken:
        return passed(f"{len(whole)} environment{'' if len(whole) == 1 else 's'}, all whole")
    removable = [one.name for one in broken if _was_cut_short(one.name)]
    told = "; ".join(f"{one.name}: {one.problem}" for one in broken)
    return warned(
        told,
        "; ".join(dict.fromkeys(one.fix for one in broken)),
        repair=Repair(
            f"delete what the cut-short making of {', '.join(removable)} left (downloads are kept)",
            partial(_remove_half_made, tuple(removable)),
        )
        if removable
        else None,
    )


def _remove_half_made(names: tuple[str, ...]) -> str:
    said: list[str] = []
    for name in names:
        remove(name, say=said.append)
    return "; ".join(said) or f"removed {', '.join(names)}"


def _was_cut_short(name: str) -> bool:
    try:
        making = read_making(name)
    except DeployError:
        return False
    return making is not None and not is_being_changed(name)


def _engine(subject: Subject) -> Engine:
    """The environment for every check but the first, which tells why there is none."""
    try:
        engine = subject.engine()
    except DeployError:
        raise NotCheckedError("engine") from None
    if engine.about.sglang is None:
        raise NotCheckedError("engine")
    return engine


def _capabilities(subject: Subject) -> tuple[str, ...]:
    cards = used(subject.gpus())
    return tuple(dict.fromkeys(gpu.compute_capability for gpu in cards if gpu.compute_capability))


def _advice(subject: Subject, engine: Engine) -> tuple[Advice, ...]:
    target, draft = subject.target(), subject.draft()
    head = target.card.lm_head if target and target.card else None
    tensor_parallel = subject.profile.flags.get("tensor-parallel-size", 1) if subject.profile else 1
    dflash2 = None
    if subject.profile is not None:
        dflash2 = bool(draft and draft.card and draft.card.architecture == "DFlash2DraftModel")
    case = Case(
        version=engine.about.sglang.version if engine.about.sglang else None,
        about=engine.about,
        capabilities=_capabilities(subject),
        driver_cuda=subject.gpus().cuda_version,
        quantised_head=None if head is None else head not in DENSE_HEADS,
        dflash2=dflash2,
        tensor_parallel=tensor_parallel if isinstance(tensor_parallel, int) else 1,
    )
    return advise(case)


def _advised(subject: Subject, engine: Engine, ids: Collection[str]) -> Answer | None:
    """What is known of these things in one answer, the weightiest first; None where nothing is."""
    found = [one for one in _advice(subject, engine) if one.id in ids]
    if not found:
        return None
    return Answer(
        _STATUS[found[0].weight],
        "; ".join(one.text for one in found),
        "; ".join(dict.fromkeys(one.fix for one in found if one.fix)) or None,
        (*(f"{one.id}: {one.evidence}" for one in found), f"{engine.python}, {engine.source}"),
    )


def _tools(subject: Subject, ids: Collection[str], names: tuple[str, ...]) -> Answer | None:
    engine = _engine(subject)
    if not _capabilities(subject):
        return None
    tools = engine.about.tools
    told = ", ".join(f"{name} {tool.version or ''}".strip() for name in names if (tool := tools.get(name)))
    headers = ", Python.h" if ids is COMPILER else ""
    paths = tuple(tool.path for name in names if (tool := tools.get(name)))
    return _advised(subject, engine, ids) or passed(told + headers, *paths)


def _compiled_before() -> bool:
    """FlashInfer has kernels of an earlier start in its cache."""
    cache = expanded(os.environ.get("FLASHINFER_WORKSPACE_BASE") or "~") / ".cache" / "flashinfer"
    try:
        return next(cache.glob("**/cached_ops/*/*.so"), None) is not None
    except PermissionError:
        return False


def _fp8_backend(subject: Subject) -> str:
    try:
        choices = bmm_choices(subject.tree().site_packages)
    except DeployError:
        return DEFAULT
    named = subject.profile.env.get(VARIABLE) if subject.profile else None
    return named if named in choices.accepted else choices.default


def _anew(engine: Engine) -> str:
    return f"dflash-deploy env create NAME --replace   (or install it for {engine.python})"


def _deep(subject: Subject) -> str:
    return f"{subject.request.command} --deep"
