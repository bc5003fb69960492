"""Systems told apart by their files, laid out under a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.machine import system
from dflash_deploy.machine.host import models_dir, read_host


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_systemd_that_is_only_installed_does_not_run(tmp_path: Path):
    assert not system.systemd_runs(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert system.systemd_runs(tmp_path)


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.6.87.2-microsoft-standard-WSL2\n", 2),
        ("4.4.0-19041-Microsoft\n", 1),
        ("6.8.0-60-generic\n", None),
    ],
)
def test_wsl(tmp_path: Path, release: str, version: int | None):
    assert system.wsl(lay(tmp_path, {"proc/sys/kernel/osrelease": release})) == version


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {"container": "podman"}, "podman"),
        ({"run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({}, {"container": "systemd-nspawn"}, "systemd-nspawn"),
        ({"run/systemd/container": "wsl\n"}, {}, None),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"proc/1/cgroup": "11:memory:/kubepods/burstable/pod1\n"}, {}, "kubernetes"),
        ({"proc/1/cgroup": "4:cpu:/docker/4fa6\n"}, {}, "docker"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, None),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str | None):
    assert system.container(lay(tmp_path, files), environ) == kind


def test_distribution(tmp_path: Path):
    assert system.distribution(tmp_path) is None
    assert system.distribution_id(tmp_path) == ""
    release = 'PRETTY_NAME="Linux Mint 22"\nID=linuxmint\nID_LIKE="ubuntu debian"\n'
    lay(tmp_path, {"etc/os-release": release})
    assert system.distribution(tmp_path) == "Linux Mint 22"
    assert system.distribution_id(tmp_path) == "ubuntu"


@pytest.mark.parametrize(
    ("files", "model"),
    [
        (
            {"proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD Ryzen 9 9950X\nmodel name\t: other\n"},
            "AMD Ryzen 9 9950X",
        ),
        (
            {"proc/cpuinfo": "processor : 0\n", "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n"},
            "NVIDIA_DGX_Spark",
        ),
        ({"sys/firmware/devicetree/base/model": "Board\0"}, "Board"),
        ({}, None),
    ],
)
def test_cpu_model(tmp_path: Path, files: dict[str, str], model: str | None):
    assert system.cpu_model(lay(tmp_path, files)) == model


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"sys/fs/cgroup/memory.max": f"{8 << 30}\n"}, 8192),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 << 30}\n"}, 4096),
        ({}, None),
    ],
)
def test_memory_limit(tmp_path: Path, files: dict[str, str], limit: int | None):
    assert system.memory_limit_mib(lay(tmp_path, files)) == limit


def test_nvidia_hardware_and_module(tmp_path: Path):
    assert not system.nvidia_on_pci(tmp_path)
    assert system.nvidia_module_version(tmp_path) is None
    devices = "sys/bus/pci/devices"
    lay(tmp_path, {f"{devices}/a/vendor": "0x10de\n", f"{devices}/a/class": "0x040300\n"})
    assert not system.nvidia_on_pci(tmp_path), "the card's sound device alone is no card"
    lay(tmp_path, {f"{devices}/b/vendor": "0x10de\n", f"{devices}/b/class": "0x030000\n"})
    assert system.nvidia_on_pci(tmp_path)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.43.02  Release Build  (x)\n"
    lay(tmp_path, {"proc/driver/nvidia/version": line})
    assert system.nvidia_module_version(tmp_path) == "610.43.02"


def test_files_that_are_not_text(tmp_path: Path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_bytes(b'PRETTY_NAME="\xff\x1b[2J"\n')
    assert system.distribution(tmp_path).isprintable()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").mkdir()
    assert system.cpu_model(tmp_path) is None


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/data/hub", "HF_HOME": "/x"}, "/data/hub"),
        ({"HF_HOME": "/x"}, "/x/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_where_models_are_kept(environ: dict[str, str], folder: str):
    assert str(models_dir(environ)) == folder


def test_this_host():
    host = read_host()
    assert 0 < host.memory_available_mib <= host.memory_total_mib
    assert 0 <= host.swap_free_mib <= host.swap_total_mib
    assert host.cpus_usable >= 1
    assert [disk.use for disk in host.disks] == ["home", "cache", "models"]
    assert all(0 <= disk.free_mib <= disk.total_mib for disk in host.disks)
