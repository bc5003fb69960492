"""The patches on real SGLang releases: the right verdict on each, and put back byte for byte."""

from __future__ import annotations

import compileall
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.description import load_patch, patch_names
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.operations import apply, revert
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine

from .environment import cache_root

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

HEAD = "nvfp4-lm-head"
BMM = "bmm-fp8-backend"
RELEASES = tuple(f"0.5.{number}" for number in range(16, 24))
EXPECTED = {
    HEAD: {
        release: VerdictKind.NOT_APPLICABLE if release < "0.5.19" else VerdictKind.NOT_NEEDED
        for release in RELEASES
    },
    BMM: dict.fromkeys(RELEASES, VerdictKind.UNMEASURED),
}
_WHEELS = cache_root() / "sglang-wheels"


def wheel(release: str) -> Path:
    """The release's wheel, downloaded once."""
    folder = _WHEELS / release
    if not list(folder.glob("*.whl")):
        _WHEELS.mkdir(parents=True, exist_ok=True)
        wanted = ["--only-binary=:all:", "--platform", "manylinux_2_34_x86_64", "--python-version", "3.11"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        made = folder.with_name(f"{release}.making")
        subprocess.run([*pip, *wanted, "--dest", str(made), f"sglang=={release}"], check=True)
        made.rename(folder)
    return next(folder.glob("*.whl"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but bytecode."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site_packages(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The release's Python sources and metadata, as an installer unpacks them."""
    folder = tmp_path_factory.mktemp(f"sglang-{release}") / "site-packages"
    with zipfile.ZipFile(wheel(release)) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
        archive.extractall(folder, names)
    yield folder


@pytest.mark.parametrize("name", patch_names())
def test_each_release_gets_the_right_verdict(name: str, release: str, site_packages: Path) -> None:
    verdict = examine(load_patch(name), find_tree(site_packages)).verdict
    assert verdict.kind is EXPECTED[name][release], verdict
    assert verdict.evidence[0] == f"SGLang {release}"
    assert any("as it was installed" in line for line in verdict.evidence)


@pytest.mark.parametrize("backend", ["cudnn", "cutlass"])
def test_the_back_end_is_changed_and_put_back(backend: str, site_packages: Path) -> None:
    before = contents(site_packages)
    tree, patch = find_tree(site_packages), load_patch(BMM)
    module = site_packages / patch.file
    apply(patch, tree, {"backend": backend}, decision=by_hand(backend))
    assert verify_intact(site_packages).applied == (BMM,)
    changed = {
        name for name, content in contents(site_packages).items() if before.get(name, content) != content
    }
    assert changed == {patch.file, str((tree.dist_info / "RECORD").relative_to(site_packages))}
    lines = zip(before[patch.file].splitlines(), module.read_bytes().splitlines(), strict=True)
    differing = [(old.strip(), new.strip()) for old, new in lines if old != new]
    assert differing == [(b'backend="cublas",', f'backend="{backend}",'.encode())]
    assert compileall.compile_dir(module.parent, quiet=1, maxlevels=0, workers=1)
    revert(BMM, tree)
    assert contents(site_packages) == before
