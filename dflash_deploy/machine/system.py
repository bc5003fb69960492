"""What kind of system this is, read from its files: WSL, container, distribution, CPU, NVIDIA hardware.

``root`` is the file system's root; anything unreadable counts as absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dflash_deploy.machine.text import printable

_ROOT = Path("/")
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_LONGEST_FILE = 1 << 20

SYSTEMD_IN_WSL = "in /etc/wsl.conf: [boot] systemd=true; then in PowerShell: wsl --shutdown"


def wsl(root: Path = _ROOT) -> Literal[1, 2] | None:
    """Version of the Windows Subsystem for Linux that this is, or None."""
    release = _read(root / "proc/sys/kernel/osrelease")
    if "microsoft" not in release.lower():
        return None
    # WSL 1 has no kernel of its own and writes a capital M: "4.4.0-19041-Microsoft".
    return 1 if release.strip().endswith("-Microsoft") else 2


def container(root: Path = _ROOT, environ: Mapping[str, str] | None = None) -> str | None:
    """Kind of container that this process runs in (docker, podman, lxc, kubernetes …), or None."""
    environment = os.environ if environ is None else environ
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    told = _read(root / "run/systemd/container").strip() or environment.get("container", "").strip()
    # WSL's init names itself so, and is told apart elsewhere.
    if told and told != "wsl":
        return printable(told)
    match = re.search(r"kubepods|docker|libpod|lxc", _read(root / "proc/1/cgroup"))
    named = {"kubepods": "kubernetes", "libpod": "podman"}
    return named.get(match[0], match[0]) if match else None


def systemd_runs(root: Path = _ROOT) -> bool:
    """Systemd is the system's manager, and not only installed (``sd_booted(3)``)."""
    return (root / "run/systemd/system").is_dir()


def distribution_id(root: Path = _ROOT) -> str:
    """``ID`` of os-release (``ubuntu``, ``debian`` …), or of what it is like; empty if unknown."""
    release = _os_release(root)
    known = {"ubuntu", "debian", "fedora", "arch"}
    ids = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    return next((name for name in ids if name in known), ids[0])


def distribution(root: Path = _ROOT) -> str | None:
    """The distribution's name and version, as it calls itself."""
    name = _os_release(root).get("PRETTY_NAME")
    return printable(name) if name else None


def cpu_model(root: Path = _ROOT) -> str | None:
    """The CPU's name; on Arm, where the CPU gives none, the machine's."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    if match:
        return printable(match[1].strip())
    for source in ("sys/firmware/devicetree/base/model", "sys/class/dmi/id/product_name"):
        name = _read(root / source).strip("\0 \n")
        if name:
            return printable(name)
    return None


def memory_limit_mib(root: Path = _ROOT) -> int | None:
    """Limit that the control group sets on this system's memory, or None where there is none."""
    for source in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / source).strip()
        # Without a limit, version 1 writes a number near 2**63.
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text) >> 20
    return None


def nvidia_module_version(root: Path = _ROOT) -> str | None:
    """Version of the NVIDIA kernel module that is loaded, or None."""
    match = re.search(
        r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _read(root / "proc/driver/nvidia/version"), re.MULTILINE
    )
    return match[1] if match else None


def nvidia_on_pci(root: Path = _ROOT) -> bool:
    """A display or 3D controller of NVIDIA's is on the PCI bus, with a driver or without."""
    return any(
        _read(device / "vendor").strip() == _NVIDIA_VENDOR
        and _read(device / "class").startswith(_DISPLAY_CLASS)
        for device in _entries(root / "sys/bus/pci/devices")
    )


def _os_release(root: Path) -> dict[str, str]:
    text = _read(root / "etc/os-release") or _read(root / "usr/lib/os-release")
    pairs = re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE)
    return {key: value.strip().strip("\"'") for key, value in pairs}


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST_FILE).decode(errors="replace")
    except OSError:
        return ""
