from __future__ import annotations

import codecs
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches import ledger, pip_record
from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.operations import apply, mend, revert
from dflash_deploy.serving_env.patches.tree import Tree, find_tree
from dflash_deploy.serving_env.patches.verdict import Verdict, VerdictKind, examine

from .trees import DFLASH, FP8, FP8_SOURCE, METHOD, SHAPES, fp8_patched, install, snapshot

HEAD = "nvfp4-lm-head"
BMM = "bmm-fp8-backend"


def apply_bmm(tree: Tree, backend: str = "cudnn") -> Verdict:
    return apply(
        load_patch(BMM), tree, {"backend": backend}, decision=by_hand(backend), evidence=b'{"a": 1}\n'
    )


def record(tree: Tree) -> bytes:
    return (tree.dist_info / "RECORD").read_bytes()


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
def test_apply_changes_one_place_and_revert_puts_everything_back(
    tmp_path: Path, line_end: str, bom: bytes
) -> None:
    source = bom + FP8_SOURCE.replace("\n", line_end).encode()
    install(tmp_path, files={FP8: source}, line_end=line_end)
    tree, before = find_tree(tmp_path), snapshot(tmp_path)
    assert apply_bmm(tree).kind is VerdictKind.APPLIED
    assert (tmp_path / FP8).read_bytes() == bom + fp8_patched("cudnn").replace("\n", line_end).encode()
    assert "byte for byte" in revert(BMM, tree)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_the_selector_is_patched_and_put_back(tmp_path: Path, shape: str, line_end: str) -> None:
    source = shape.replace("\n", line_end).encode()
    install(tmp_path, files={DFLASH: source})
    tree, before = find_tree(tmp_path), snapshot(tmp_path)
    apply(load_patch(HEAD), tree, {})
    patched = (tmp_path / DFLASH).read_bytes()
    compile(patched, DFLASH, "exec")
    assert patched.count(b"\r\n") == (patched.count(b"\n") if line_end == "\r\n" else 0)
    revert(HEAD, tree)
    assert snapshot(tmp_path) == before


def test_pips_list_says_what_is_there(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path, line_end="\r\n"))
    before = record(tree)
    apply_bmm(tree)
    line = pip_record.entry(record(tree), FP8)
    assert line is not None
    assert line.describes((tmp_path / FP8).read_bytes())
    assert len(record(tree).splitlines()) == len(before.splitlines())
    others = [line for line in before.splitlines() if not line.startswith(FP8.encode())]
    assert [line for line in record(tree).splitlines() if not line.startswith(FP8.encode())] == others


@pytest.mark.parametrize("first", [HEAD, BMM])
def test_two_patches_come_off_in_any_order(tmp_path: Path, first: str) -> None:
    tree = find_tree(install(tmp_path))
    before = {name: kept[-1] for name, kept in snapshot(tmp_path).items()}
    apply(load_patch(HEAD), tree, {})
    apply_bmm(tree)
    revert(first, tree)
    left = examine(load_patch(BMM if first == HEAD else HEAD), tree).verdict
    assert left.kind is VerdictKind.APPLIED
    revert(left.patch, tree)
    after = {name: kept[-1] for name, kept in snapshot(tmp_path).items()}
    assert after == before
    assert not ledger.folder(tree).exists()


def test_applying_twice_changes_nothing(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    once = snapshot(tmp_path)
    assert apply_bmm(tree).kind is VerdictKind.APPLIED
    assert snapshot(tmp_path) == once
    with pytest.raises(DeployError, match="with backend=cudnn") as caught:
        apply_bmm(tree, "cutlass")
    assert "revert" in str(caught.value.fix)


def test_the_measurement_is_kept_with_the_patch(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    assert ledger.evidence_path(tree, BMM).read_bytes() == b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "needs a value for backend"),
        ({"backend": "magic"}, "expected one of cublas, cudnn, cutlass, auto"),
        ({"backend": "cudnn", "speed": "9"}, "no parameter 'speed'"),
    ],
)
def test_wrong_parameters_change_nothing(tmp_path: Path, parameters: dict[str, str], said: str) -> None:
    tree, before = find_tree(install(tmp_path)), snapshot(tmp_path)
    with pytest.raises(DeployError, match=said):
        apply(load_patch(BMM), tree, parameters, decision=by_hand("cudnn"))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "content", ["class DFlashDraftModel: pass\n", METHOD.replace("torch.matmul(", "product("), "def ("]
)
def test_what_is_not_needed_or_not_known_is_refused_unchanged(tmp_path: Path, content: str) -> None:
    tree, before = find_tree(install(tmp_path, files={DFLASH: content})), snapshot(tmp_path)
    with pytest.raises(DeployError, match="is not applied"):
        apply(load_patch(HEAD), tree, {})
    assert snapshot(tmp_path) == before


def test_bytecode_of_the_old_code_does_not_run(tmp_path: Path) -> None:
    install(
        tmp_path,
        files={
            FP8: "def flashinfer_bmm_fp8():\n    return _raw_flashinfer_bmm_fp8(1, backend='cublas')\n"
            "def _raw_flashinfer_bmm_fp8(x, backend):\n    return backend\n"
        },
    )
    module = "sglang.srt.layers.quantization.fp8_utils"
    code = f"from {module} import flashinfer_bmm_fp8 as f; print(f())"

    def runs() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    tree = find_tree(tmp_path)
    # Bytecode that Python never compares with its source: only its removal helps.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / FP8), invalidation_mode=unchecked, doraise=True)
    assert runs() == "cublas"
    apply_bmm(tree)
    assert runs() == "cudnn"
    py_compile.compile(str(tmp_path / FP8), invalidation_mode=unchecked, doraise=True)
    revert(BMM, tree)
    assert runs() == "cublas"


def test_a_file_of_this_second_gets_a_time_of_another(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    path = tmp_path / FP8
    before = int(path.stat().st_mtime)
    apply_bmm(tree)
    assert int(path.stat().st_mtime) != before


def test_an_installers_cache_that_shares_the_file_is_left_alone(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path / "site-packages"))
    path, cached = tmp_path / "site-packages" / FP8, tmp_path / "cache.py"
    os.link(path, cached)
    apply_bmm(tree)
    assert cached.read_text() == FP8_SOURCE
    revert(BMM, tree)
    assert path.samefile(cached)
    assert path.stat().st_nlink == 2


def test_a_file_that_is_a_link_becomes_a_link_again(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path / "site-packages"))
    path, cached = tmp_path / "site-packages" / FP8, tmp_path / "cache.py"
    path.rename(cached)
    path.symlink_to(cached)
    apply_bmm(tree)
    assert not path.is_symlink()
    assert cached.read_text() == FP8_SOURCE
    revert(BMM, tree)
    assert path.readlink() == cached


def test_a_package_that_lies_outside_is_refused(tmp_path: Path) -> None:
    site_packages = install(tmp_path / "site-packages")
    shutil.move(site_packages / "sglang" / "srt", tmp_path / "shared")
    (site_packages / "sglang" / "srt").symlink_to(tmp_path / "shared")
    with pytest.raises(DeployError, match="outside the environment"):
        apply_bmm(find_tree(site_packages))
    assert (tmp_path / "shared" / "layers/quantization/fp8_utils.py").read_text() == FP8_SOURCE


def test_a_file_system_without_hard_links_gets_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_paths: object, **_options: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    tree = find_tree(install(tmp_path))
    (tmp_path / FP8).chmod(0o640)
    before = snapshot(tmp_path)
    apply_bmm(tree)
    revert(BMM, tree)
    assert snapshot(tmp_path) == before


def test_permissions_stay(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    (tmp_path / FP8).chmod(0o444)
    apply_bmm(tree)
    assert (tmp_path / FP8).stat().st_mode & 0o777 == 0o444


def test_an_editable_checkout_is_patched_where_it_lies(tmp_path: Path) -> None:
    site_packages = install(tmp_path / "site-packages")
    shutil.move(site_packages / "sglang", tmp_path / "python" / "sglang")
    (site_packages / "sglang.pth").write_text(f"{tmp_path / 'python'}\n")
    tree, before = find_tree(site_packages), snapshot(tmp_path)
    apply_bmm(tree)
    assert '("cudnn")' in (tmp_path / "python" / FP8).read_text()
    revert(BMM, tree)
    assert snapshot(tmp_path) == before


def test_what_someone_changed_since_is_not_lost(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    with (tmp_path / FP8).open("a") as file:
        file.write("# mine\n")
    with pytest.raises(DeployError, match="changed since"):
        revert(BMM, tree)
    assert (tmp_path / FP8).read_text().endswith("# mine\n")


@pytest.mark.parametrize("record", [True, False])
def test_what_someone_changed_since_is_kept_beside_when_the_original_is_wanted(
    tmp_path: Path, record: bool
) -> None:
    tree = find_tree(install(tmp_path, record=record))
    before = snapshot(tmp_path)
    for expected in (f"{Path(FP8).name}.edited", f"{Path(FP8).name}.edited.1"):
        apply_bmm(tree)
        with (tmp_path / FP8).open("a") as file:
            file.write(f"# {expected}\n")
        edited = (tmp_path / FP8).read_bytes()
        assert expected in revert(BMM, tree, force=True)
        assert (tmp_path / FP8).with_name(expected).read_bytes() == edited
    after = snapshot(tmp_path)
    kept = {name for name in after if ".edited" in name}
    assert len(kept) == 2
    assert {name: about for name, about in after.items() if name not in kept} == before


def test_another_build_of_the_same_version_is_no_edit(tmp_path: Path) -> None:
    """Pip has put it there, so that nobody's work would be lost."""
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    install(tmp_path, files={FP8: FP8_SOURCE + "# a day later\n"})
    after = (tmp_path / FP8).read_bytes()
    assert "was gone already" in revert(BMM, tree)
    assert (tmp_path / FP8).read_bytes() == after


def test_a_damaged_original_is_not_put_back(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    patched = (tmp_path / FP8).read_bytes()
    kept = next(path for path in (ledger.folder(tree) / "kept").iterdir() if b"cublas" in path.read_bytes())
    kept.write_bytes(b"broken")
    with pytest.raises(DeployError, match="missing or damaged"):
        revert(BMM, tree)
    assert (tmp_path / FP8).read_bytes() == patched


def test_a_reinstallation_is_seen_and_can_be_patched_again(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    install(tmp_path)
    problems = verify_intact(tmp_path).problems
    assert "installed again over it" in problems[0]
    assert apply_bmm(tree).kind is VerdictKind.APPLIED
    assert verify_intact(tmp_path).intact
    install(tmp_path)
    assert "was gone already" in revert(BMM, tree)
    assert not ledger.folder(tree).exists()


def test_reverting_what_is_not_applied_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="is not applied") as caught:
        revert(BMM, find_tree(install(tmp_path)))
    assert caught.value.exit_code is ExitCode.MISSING


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"patch": 5}', "x" * (2 << 20)])
def test_a_broken_record_is_told(tmp_path: Path, content: str) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    ledger.state_path(tree, BMM, "applied").write_text(content)
    for work in (lambda: revert(BMM, tree), lambda: mend(tree)):
        with pytest.raises(DeployError, match="not a record"):
            work()
    assert not verify_intact(tmp_path).intact


def test_a_record_cannot_name_a_file_outside(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply_bmm(tree)
    path = ledger.state_path(tree, BMM, "applied")
    path.write_text(path.read_text().replace(FP8, "../../elsewhere.py"))
    with pytest.raises(DeployError, match="not a record"):
        revert(BMM, tree)


def test_pip_can_still_upgrade_and_uninstall(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    site_packages = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    install(site_packages)
    tree = find_tree(tmp_path / "venv")
    apply_bmm(tree)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "show", "sglang"], check=True, capture_output=True, text=True).stdout
    assert "Version: 0.5.18" in listed
    subprocess.run([*pip, "uninstall", "-y", "sglang"], check=True, capture_output=True)
    assert not (site_packages / FP8).exists()
    assert not list(site_packages.glob("sglang*"))
    verdict = verify_intact(tmp_path / "venv")
    assert not verdict.intact
    assert "no SGLang" in verdict.problems[0]
