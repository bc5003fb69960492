"""Subjects with facts as a test wants them; what is not named raises, as a fact that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_deploy.doctor.engine import Engine
from dflash_deploy.doctor.subject import Request, Subject, look_at
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.gpu import Gpu, GpuProcess, GpuReading
from dflash_deploy.machine.host import Host
from dflash_deploy.profile.load import load_profile
from dflash_deploy.serving_env.describe import Description, Module

IDLE = Gpu(
    index=0,
    name="NVIDIA GeForce RTX 5090",
    uuid="GPU-0",
    pci_bus_id="00000000:01:00.0",
    pcie_gen=1,
    pcie_gen_max=5,
    pcie_width=16,
    pcie_width_max=16,
    compute_capability="12.0",
    memory_total_mib=32607,
    memory_used_mib=2,
    memory_free_mib=32122,
    memory_reserved_mib=483,
    power_limit_w=575.0,
    power_limit_default_w=575.0,
    clock_reasons=("idle",),
    persistence_mode=True,
    processes=(),
)

HOST = Host(
    memory_total_mib=65536,
    memory_available_mib=60000,
    swap_total_mib=0,
    swap_free_mib=0,
    memory_limit_mib=None,
    disks=(),
    cpu_model=None,
    cpu_cores=8,
    cpu_threads=16,
    cpus_usable=16,
    architecture="x86_64",
    kernel="6.8",
    distribution="Debian",
    glibc="2.39",
    wsl=None,
    container=None,
    shared_memory_total_mib=32768,
    shared_memory_free_mib=32768,
)


def gpu(**changes: Any) -> Gpu:
    return replace(IDLE, **changes)


def process(pid: int, mib: int | None, name: str = "python", *, desktop: bool = False) -> GpuProcess:
    return GpuProcess(pid, name, "alice", mib, "compute", desktop)


def reading(*gpus: Gpu, **more: Any) -> GpuReading:
    known = {"driver_version": "610.43.02", "cuda_version": "13.3", "visible": tuple(g.index for g in gpus)}
    return GpuReading(gpus=gpus, **(known | more))


def host(**changes: Any) -> Host:
    return replace(HOST, **changes)


def torch(**changes: Any) -> Module:
    known: dict[str, Any] = {
        "installed": True,
        "version": "2.14.1",
        "cuda": "13.0",
        "arch_list": ["sm_90", "sm_100", "sm_120"],
        "cudnn": 92301,
    }
    return Module(**(known | changes))


def engine(
    *,
    version: str | None = "0.5.23",
    packages: dict[str, str] | None = None,
    modules: dict[str, Module] | None = None,
    tools: dict[str, Any] | None = None,
    headers: bool = True,
    glibc: str = "2.39",
    wanted: dict[str, str] | None = None,
    imports: Any = "now",
) -> Engine:
    """A sound environment, but for what is given."""
    sound = {
        "sglang": version or "",
        "torch": "2.14.1",
        "flashinfer-python": "0.7.0",
        "flashinfer-jit-cache": "0.7.0",
        "sglang-kernel": "0.4",
    }
    kernel = Module(installed=True, version="0.4")
    about = Description.model_validate(
        {
            "python": {
                "version": "3.12.3",
                "implementation": "CPython",
                "executable": "/env/bin/python",
                "prefix": "/env",
                "headers": headers,
            },
            "glibc": glibc,
            "packages": sound | (packages or {}),
            "wanted": {"torch": "2.14.1"} if wanted is None else wanted,
            "sglang": None if version is None else {"version": version},
            "tools": {
                "nvcc": {"path": "/usr/local/cuda/bin/nvcc", "version": "13.0"},
                "ninja": {"path": "/usr/bin/ninja", "version": "1.11"},
                "g++": {"path": "/usr/bin/g++", "version": "13.2.0"},
                "gcc": {"path": "/usr/bin/gcc", "version": "13.2.0"},
            }
            | (tools or {}),
        }
    )
    found = {"torch": torch(), "sgl_kernel": kernel} if modules is None else modules
    return Engine(Path("/env/bin/python"), about.model_copy(update={"modules": found}), imports)


def without(found: Engine, *packages: str) -> Engine:
    kept = {name: version for name, version in found.about.packages.items() if name not in packages}
    return replace(found, about=found.about.model_copy(update={"packages": kept}))


def subject(
    *gpus: Gpu,
    profile: str | None = None,
    overrides: tuple[str, ...] = (),
    request: Request | None = None,
    **facts: Any,
) -> Subject:
    """A machine with these cards, or with ``gpus=reading(...)``; a fact may be given as a value."""
    if request is None:
        loaded = load_profile(profile, overrides=overrides) if profile else None
        request = Request(loaded, profile, overrides)
    real = look_at(request)
    known: dict[str, Any] = {
        "gpus": reading(*gpus) if gpus else GpuReading(problem="no driver", fix="install it"),
        "host": HOST,
        "units": (),
        "engine": _missing,
        "tree": _missing,
        "target": real.target,
        "draft": real.draft,
    } | facts
    return Subject(request, **{name: _fact(value) for name, value in known.items()})


def _fact(value: Any) -> Callable[[], Any]:
    return value if callable(value) else lambda: value


def _missing() -> Any:
    raise DeployError("no serving environment is chosen", fix="dflash-deploy env create")
