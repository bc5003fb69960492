"""The patches on real SGLang releases: the right verdict on each, and put back byte for byte."""

from __future__ import annotations

import compileall
import difflib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.choices import bmm_choices
from dflash_deploy.serving_env.patches.description import load_patch, patch_names, patches_dir
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.operations import apply, revert
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine

from .wheels import RELEASES, wheel

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

HEAD = "nvfp4-lm-head"
BMM = "bmm-fp8-backend"
EXPECTED = {
    HEAD: {
        release: VerdictKind.NOT_APPLICABLE if release < "0.5.19" else VerdictKind.NOT_NEEDED
        for release in RELEASES
    },
    BMM: dict.fromkeys(RELEASES, VerdictKind.UNMEASURED),
}


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


@pytest.mark.parametrize("backend", ["cublas", "cudnn"])
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
    old, new = (code.decode().splitlines() for code in (before[patch.file], module.read_bytes()))
    lines = [line for line in difflib.ndiff(old, new) if line[:2] in {"- ", "+ "}]
    assert [line[2:].strip() for line in lines if line[0] == "-"] == ['backend="cublas",']
    added = [line[2:] for line in lines if line[0] == "+"]
    assert added.count("            backend=_DFLASH_DEPLOY_BMM_FP8_BACKEND,") == 1
    put_in = (patches_dir() / BMM / "replacement.py").read_text().replace("${backend}", backend).splitlines()
    assert [line for line in added if line.strip()][1:-2] == [line for line in put_in if line.strip()]
    assert bmm_choices(site_packages).accepted == patch.parameters["backend"].choices
    assert compileall.compile_dir(module.parent, quiet=1, maxlevels=0, workers=1)
    revert(BMM, tree)
    assert contents(site_packages) == before
