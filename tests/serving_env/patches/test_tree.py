from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches.tree import find_tree

from .trees import DFLASH, install


def make_venv(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/usr/bin/env")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    install(folder / "lib" / "python3.11" / "site-packages", version="0.5.18")
    (folder / "lib64").symlink_to("lib")
    return folder


@pytest.mark.parametrize("given", ["", "bin/python", "lib/python3.11/site-packages"])
def test_an_environment_is_found_by_any_of_its_paths(tmp_path: Path, given: str) -> None:
    venv = make_venv(tmp_path / "venv")
    tree = find_tree(venv / given)
    assert tree.site_packages == venv / "lib/python3.11/site-packages"
    assert tree.root == tree.site_packages
    assert tree.version == "0.5.18"
    assert tree.python == venv / "bin" / "python"


@pytest.mark.parametrize("given", ["", "bin/python3", "local/lib/python3.11/dist-packages"])
def test_debians_own_interpreter_has_its_packages_beside_it(tmp_path: Path, given: str) -> None:
    """As in a container: ``/usr/bin/python3``, and what pip installs lies in ``/usr/local``."""
    usr = tmp_path / "usr"
    (usr / "bin").mkdir(parents=True)
    (usr / "bin" / "python3").symlink_to("/usr/bin/env")
    (usr / "lib" / "python3" / "dist-packages").mkdir(parents=True)
    packages = install(usr / "local" / "lib" / "python3.11" / "dist-packages", version="0.5.18")
    tree = find_tree(usr / given)
    assert tree.site_packages == packages
    assert tree.python == usr / "bin" / "python3"


def test_a_folder_that_packages_are_installed_into_needs_no_interpreter(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path / "target"))
    assert tree.python is None
    assert tree.record == tmp_path / "target" / "sglang-0.5.18.dist-info" / "RECORD"


@pytest.mark.parametrize("by", ["direct_url", "pth"])
def test_an_editable_installation_is_found_where_its_checkout_is(tmp_path: Path, by: str) -> None:
    site_packages = install(tmp_path / "site-packages")
    checkout = tmp_path / "a checkout"
    (checkout / "python").mkdir(parents=True)
    shutil.move(site_packages / "sglang", checkout / "python" / "sglang")
    if by == "pth":
        (site_packages / "__editable__.sglang.pth").write_text(f"import os\n{checkout / 'python'}\n")
    else:
        url = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
        (site_packages / "sglang-0.5.18.dist-info" / "direct_url.json").write_text(json.dumps(url))
    tree = find_tree(site_packages)
    assert tree.root == checkout / "python"
    assert tree.editable
    assert tree.record is None


@pytest.mark.parametrize(
    ("version", "file", "commit"),
    [
        ("0.5.18.dev3+gc14312a66", "", "c14312a66"),
        ("0.5.18", "__commit_id__ = commit_id = 'g1cf2b8c12'\n", "1cf2b8c12"),
        ("0.5.18", "__commit_id__ = commit_id = None\n", None),
    ],
)
def test_the_commit_is_told_where_the_build_says_it(
    tmp_path: Path, version: str, file: str, commit: str | None
) -> None:
    tree = find_tree(install(tmp_path, version=version, files={"sglang/_version.py": file}))
    assert tree.commit == commit


def test_what_is_not_there_is_told_apart(tmp_path: Path) -> None:
    def refusal(path: Path) -> DeployError:
        with pytest.raises(DeployError) as caught:
            find_tree(path)
        return caught.value

    assert "no such environment" in refusal(tmp_path / "nothing").message
    (tmp_path / "empty" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    assert "holds no SGLang" in refusal(tmp_path / "empty").message

    no_package = install(tmp_path / "a" / "site-packages")
    shutil.rmtree(no_package / "sglang")
    error = refusal(no_package)
    assert "incomplete" in error.message
    assert error.exit_code is ExitCode.MISSING

    no_metadata = install(tmp_path / "b" / "site-packages")
    shutil.rmtree(no_metadata / "sglang-0.5.18.dist-info")
    assert "incomplete" in refusal(no_metadata).message

    two = install(tmp_path / "c" / "site-packages", version="0.5.17")
    install(two, version="0.5.18")
    assert "more than one SGLang" in refusal(two).message


def test_files_that_pip_lists_and_that_are_gone_are_told(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    assert tree.missing_files() == []
    (tmp_path / DFLASH).unlink()
    assert tree.missing_files() == [DFLASH]
