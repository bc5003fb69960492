"""What the ``env`` commands show: the same facts as JSON and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dflash_deploy.machine.gpu import GpuReading
from dflash_deploy.machine.text import printable
from dflash_deploy.machine.view import Section
from dflash_deploy.serving_env.advice import Advice
from dflash_deploy.serving_env.backup import Backup
from dflash_deploy.serving_env.describe import Description
from dflash_deploy.serving_env.environments import Broken, Environment

SCHEMA_VERSION = 1
_PACKAGES = {
    "torch": "torch",
    "flashinfer-python": "flashinfer",
    "flashinfer-cubin": "  cubin",
    "flashinfer-jit-cache": "  jit-cache",
    "sglang-kernel": "sgl-kernel",
    "sgl-kernel": "sgl-kernel",
    "triton": "triton",
    "transformers": "transformers",
    "nvidia-cudnn-cu13": "cudnn-cu13",
    "nvidia-cublas": "cublas",
}
_NEEDED = ("torch", "flashinfer-python")


def environment_json(environment: Environment, *, default: bool) -> dict[str, object]:
    """One environment, as docs/json.md describes."""
    record = environment.record
    return {
        "name": environment.name,
        "folder": str(environment.prefix),
        "python": str(environment.python),
        "python_version": record.python_version,
        "adopted": environment.adopted,
        "default": default,
        "source": record.pin.source,
        "pin": record.pin.id,
        "version": record.packages.get("sglang"),
        "installer": record.installer,
        "made_at": record.made_at,
        "made_by": record.made_by,
        "replaces": record.replaces,
    }


def list_json(
    whole: Sequence[Environment],
    broken: Sequence[Broken],
    backups: Sequence[Backup],
    default: str | None,
) -> dict[str, object]:
    """What ``env list --json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "default": default,
        "environments": [environment_json(one, default=one.name == default) for one in whole],
        "unfinished": [asdict(one) for one in broken],
        "backups": [backup_json(one) for one in backups],
    }


def list_lines(whole: Sequence[Environment], backups: Sequence[Backup], default: str | None) -> list[str]:
    """Environments and backups, a line each."""
    lines = []
    for one in whole:
        mark = "*" if one.name == default else " "
        what = "adopted" if one.adopted else one.record.made_at[:10]
        version = one.record.packages.get("sglang", "?")
        lines.append(f"{mark} {one.name:<24} SGLang {version:<14} {what:<10}  {one.prefix}")
    if not whole:
        lines.append("No environment yet: dflash-deploy env create sglang-0.5.23")
    lines += [f"  backup of {one.record.name}: {_backup_words(one)}" for one in backups]
    return [printable(line, longest=4096) for line in lines]


def _backup_words(backup: Backup) -> str:
    record = backup.record
    version = record.environment.packages.get("sglang", "?")
    return f"{record.id}, SGLang {version}, {record.size_bytes / (1 << 30):.2f} GiB: {record.reason}"


def backup_json(backup: Backup) -> dict[str, object]:
    """One backup."""
    record = backup.record
    return {
        "id": record.id,
        "name": record.name,
        "made_at": record.made_at,
        "reason": record.reason,
        "folder": str(backup.folder),
        "size_mib": record.size_bytes >> 20,
        "entries": record.entries,
        "version": record.environment.packages.get("sglang"),
        "source": record.environment.pin.source,
    }


def advice_json(advice: Sequence[Advice]) -> list[dict[str, object]]:
    """Findings, each with its weight in a word."""
    return [{**asdict(one), "weight": one.weight.name.lower()} for one in advice]


def show_json(
    environment: Environment | None,
    about: Description,
    advice: Sequence[Advice],
    backups: Sequence[Backup],
    *,
    default: bool,
) -> dict[str, object]:
    """What ``env show --json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "measured",
        "environment": environment_json(environment, default=default) if environment else None,
        **about.model_dump(),
        "findings": advice_json(advice),
        "backups": [backup_json(one) for one in backups],
    }


def show_sections(
    environment: Environment | None, about: Description, backups: Sequence[Backup], gpus: GpuReading
) -> tuple[Section, ...]:
    """An environment for people."""
    blocks = []
    if environment is not None:
        record = environment.record
        made = f"{record.made_at} with {record.installer}, from {record.pin.source}"
        if environment.adopted:
            made = f"adopted {record.made_at}"
        rows = [("folder", str(environment.prefix)), ("made", made)]
        rows += [("backup", _backup_words(one)) for one in backups]
        blocks.append(_section(environment.name, rows))
    blocks.append(_section("engine", _engine_rows(about)))
    blocks.append(_section("compilers", _tool_rows(about)))
    driver = (
        f"{gpus.driver_version}, serves CUDA {gpus.cuda_version}" if gpus.driver_version else "none found"
    )
    cards = [
        (f"gpu {gpu.index}", f"{gpu.name}, compute capability {gpu.compute_capability}")
        for gpu in gpus.readable
    ]
    blocks.append(_section("machine", [("driver", driver), *cards]))
    return tuple(blocks)


def finding_lines(advice: Sequence[Advice]) -> list[str]:
    """Findings as lines."""
    lines = []
    for one in advice:
        lines.append(f"{one.weight.name.lower()}: {one.text} [{one.id}]")
        if one.fix:
            lines.append(f"  fix: {one.fix}")
    return [printable(line, longest=4096) for line in lines]


def _engine_rows(about: Description) -> list[tuple[str, str]]:
    engine = about.sglang
    told = "not installed"
    if engine is not None:
        told = engine.version + (f", commit {engine.commit}" if engine.commit else "")
        told += ", editable" if engine.editable else ""
    rows = [("sglang", told), ("python", f"{about.python.version} ({about.python.executable})")]
    rows += [(label, about.packages[name]) for name, label in _PACKAGES.items() if name in about.packages]
    rows += [(_PACKAGES[name], "missing") for name in _NEEDED if name not in about.packages]
    torch = (about.modules or {}).get("torch")
    if torch is not None and torch.installed and torch.error is None:
        rows.append(("CUDA build", torch.cuda or "none (a CPU build)"))
        if torch.arch_list:
            rows.append(("built for", " ".join(torch.arch_list)))
            rows.append(("sm_120", "yes" if "sm_120" in torch.arch_list else "no"))
        if torch.cudnn:
            rows.append(("cuDNN", _cudnn(torch.cudnn)))
    rows += [
        (name, f"cannot be imported: {module.error}")
        for name, module in (about.modules or {}).items()
        if module.error is not None
    ]
    return rows


def _cudnn(number: int) -> str:
    """``9.23.1`` from 92301 (as cuDNN numbers itself since 9)."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def _tool_rows(about: Description) -> list[tuple[str, str]]:
    return [
        (name, f"{tool.version or tool.problem or '?'} ({tool.path})" if tool else "not found")
        for name, tool in about.tools.items()
    ]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Section:
    shown = tuple((printable(label), printable(text, longest=300)) for label, text in rows)
    return Section(printable(title), shown)
