from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import Tree, find_tree

from .trees import DFLASH, METHOD, install

HEAD = "nvfp4-lm-head"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = find_tree(install(tmp_path))
    apply(load_patch(HEAD), tree, {})
    return tree


def test_an_environment_without_patches_is_intact(tmp_path: Path) -> None:
    verdict = verify_intact(install(tmp_path))
    assert verdict.intact
    assert verdict.version == "0.5.18"
    assert verdict.applied == ()


def test_an_applied_patch_is_intact(tree: Tree) -> None:
    verdict = verify_intact(tree.site_packages, required=[HEAD], version="0.5.18")
    assert verdict.intact
    assert verdict.applied == (HEAD,)
    assert verdict.fix is None


def upgrade(tree: Tree) -> None:
    tree.dist_info.rename(tree.dist_info.with_name("sglang-0.5.19.dist-info"))
    (tree.site_packages / "sglang-0.5.19.dist-info" / "METADATA").write_text("Version: 0.5.19\n")
    (tree.root / DFLASH).write_text(METHOD + "# newer\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (upgrade, "applied to SGLang 0.5.18, and 0.5.19 has been installed over it"),
        (lambda tree: (tree.root / DFLASH).write_text(METHOD), "installed again over it"),
        (lambda tree: (tree.root / DFLASH).write_text("edited"), "was changed after"),
        (lambda tree: (tree.root / DFLASH).unlink(), "is not there"),
        (
            lambda tree: ledger.state_path(tree, HEAD, "applied").rename(
                ledger.state_path(tree, HEAD, "applying")
            ),
            "was cut short",
        ),
        (lambda tree: ledger.state_path(tree, HEAD, "applied").write_text("{"), "not a record"),
    ],
)
def test_whatever_happened_to_it_is_told(tree: Tree, change: object, said: str) -> None:
    assert callable(change)
    change(tree)
    verdict = verify_intact(tree.site_packages)
    assert not verdict.intact
    assert said in verdict.problems[0]
    assert verdict.fix is not None


def test_what_a_service_wants_is_asked_for(tmp_path: Path) -> None:
    verdict = verify_intact(install(tmp_path), required=[HEAD], version="0.5.19")
    assert verdict.problems == (
        f"the patch {HEAD} is not applied",
        "SGLang 0.5.18 is installed, and 0.5.19 is wanted",
    )


def test_the_gate_needs_no_more_than_the_standard_library() -> None:
    code = "import sys; import dflash_deploy.serving_env.patches.integrity; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    loaded = {name for name in foreign if not name.startswith(("_", "dflash_deploy"))}
    assert not loaded & {"pydantic", "yaml", "typer", "rich", "httpx", "platformdirs"}
