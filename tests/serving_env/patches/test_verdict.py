from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.bmm import Decision, by_hand
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.serving_env.patches.verdict import Verdict, VerdictKind, examine
from tests.serving_env.command import like_another_account, run

from .trees import DFLASH, FIXED, FP8, FP8_SOURCE, METHOD, SHAPES, install

HEAD = "nvfp4-lm-head"
BMM = "bmm-fp8-backend"


def verdict(site_packages: Path, name: str = HEAD, decision: Decision | None = None) -> Verdict:
    return examine(load_patch(name), find_tree(site_packages), decision).verdict


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_selector_without_the_quantised_head_needs_the_patch(tmp_path: Path, shape: str) -> None:
    found = verdict(install(tmp_path, files={DFLASH: shape}))
    assert found.kind is VerdictKind.NEEDED
    assert found.fix == f"dflash-deploy patch apply {HEAD} --env {tmp_path}"


def test_a_module_without_dflash2_has_no_use_for_it(tmp_path: Path) -> None:
    found = verdict(install(tmp_path, files={DFLASH: "class DFlashDraftModel:\n    pass\n"}))
    assert found.kind is VerdictKind.NOT_APPLICABLE
    assert "no DFlash2" in found.reason


@pytest.mark.parametrize("record", [True, False])
def test_upstreams_own_fix_is_known_by_its_structure(tmp_path: Path, record: bool) -> None:
    found = verdict(install(tmp_path, version="0.5.18", files={DFLASH: FIXED}, record=record))
    assert found.kind is VerdictKind.NOT_NEEDED
    assert found.reason == "upstream since 0.5.19"


def test_the_same_fix_put_in_later_is_someone_elses(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / DFLASH).write_text(FIXED)
    found = verdict(tmp_path)
    assert found.kind is VerdictKind.APPLIED_BY_OTHERS
    assert any("changed after it was installed" in line for line in found.evidence)


def test_half_a_fix_by_someone_else_is_neither_taken_nor_changed(tmp_path: Path) -> None:
    half = FIXED.replace('        logits[:, self.lm_head.org_vocab_size :] = float("-inf")\n', "")
    found = verdict(install(tmp_path, files={DFLASH: half}))
    assert found.kind is VerdictKind.DRIFTED
    assert "padded tail" in found.reason


def test_code_that_has_moved_on_is_shown_and_left(tmp_path: Path) -> None:
    moved = METHOD.replace(
        "torch.matmul(hidden.to(weight.dtype), weight[:org].T)", "self.project(hidden)[:, :org]"
    )
    found = verdict(install(tmp_path, files={DFLASH: moved}))
    assert found.kind is VerdictKind.DRIFTED
    assert found.differences is not None
    assert "torch.matmul($hidden" in found.differences
    assert "self.project(hidden)[:, :org]" in found.differences
    assert "DFlash2DraftModel.compute_candidates, line " in found.differences


def test_a_module_that_does_not_parse_is_left(tmp_path: Path) -> None:
    found = verdict(install(tmp_path, files={DFLASH: "class DFlash2DraftModel(:\n"}))
    assert found.kind is VerdictKind.DRIFTED
    assert "not valid Python" in found.reason


def test_code_that_is_nested_too_deeply_is_left(tmp_path: Path) -> None:
    for depth in (400, 900, 5000, 200_000):
        branches = "".join(f"    elif x == {number}:\n        pass\n" for number in range(depth))
        sums = " + ".join(["x"] * depth)
        code = f"{METHOD}\n\ndef of_candidates(x):\n    y = {sums}\n    if y:\n        pass\n{branches}"
        found = verdict(install(tmp_path / str(depth), files={DFLASH: code}))
        assert found.kind in {VerdictKind.NEEDED, VerdictKind.DRIFTED}, depth
    assert found.kind is VerdictKind.DRIFTED


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / DFLASH).unlink()
    os.mkfifo(tmp_path / DFLASH)
    assert verdict(tmp_path).kind is VerdictKind.FILE_MISSING


def test_a_missing_file_is_never_read_as_fixed(tmp_path: Path) -> None:
    listed = install(tmp_path / "listed" / "site-packages")
    (listed / DFLASH).unlink()
    found = verdict(listed)
    assert found.kind is VerdictKind.FILE_MISSING
    assert "incomplete" in found.reason
    assert any("RECORD lists it" in line for line in found.evidence)

    elsewhere = install(tmp_path / "elsewhere" / "site-packages", record=False)
    (elsewhere / DFLASH).unlink()
    assert verdict(elsewhere).kind is VerdictKind.FILE_MISSING


def test_the_back_end_is_a_matter_of_measurement(tmp_path: Path) -> None:
    install(tmp_path)
    assert verdict(tmp_path, BMM).kind is VerdictKind.UNMEASURED
    no_gpu = Decision(decided=False, backend=None, reason="no CUDA device is here to measure on")
    found = verdict(tmp_path, BMM, no_gpu)
    assert found.kind is VerdictKind.UNMEASURED
    assert no_gpu.reason in found.reason
    works = Decision(decided=True, backend=None, reason="cublas works")
    assert verdict(tmp_path, BMM, works).kind is VerdictKind.NOT_NEEDED
    fails = Decision(decided=True, backend="cudnn", reason="cublas fails")
    assert verdict(tmp_path, BMM, fails).kind is VerdictKind.NEEDED


def test_another_back_end_in_the_call_is_upstreams_or_someone_elses(tmp_path: Path) -> None:
    other = FP8_SOURCE.replace('"cublas"', '"cudnn"')
    assert verdict(install(tmp_path / "a", files={FP8: other}), BMM).kind is VerdictKind.NOT_NEEDED
    install(tmp_path / "b")
    (tmp_path / "b" / FP8).write_text(other)
    assert verdict(tmp_path / "b", BMM).kind is VerdictKind.APPLIED_BY_OTHERS
    gone = FP8_SOURCE.replace("flashinfer_bmm_fp8", "another_name")
    assert verdict(install(tmp_path / "c", files={FP8: gone}), BMM).kind is VerdictKind.NOT_APPLICABLE
    computed = FP8_SOURCE.replace('backend="cublas"', "**options")
    assert verdict(install(tmp_path / "d", files={FP8: computed}), BMM).kind is VerdictKind.DRIFTED


def test_a_damaged_file_tells_nothing_of_the_release(tmp_path: Path) -> None:
    for place, damage in (("a", "broken = True\n"), ("b", "no python at all (\n")):
        install(tmp_path / place)
        (tmp_path / place / FP8).write_text(damage)
        found = verdict(tmp_path / place, BMM)
        assert found.kind is VerdictKind.DRIFTED
        assert "this release" not in found.reason
        assert "--force-reinstall" in (found.fix or "")


def test_ours_is_known_and_an_edit_of_ours_is_refused(tmp_path: Path) -> None:
    install(tmp_path)
    assert apply(load_patch(HEAD), find_tree(tmp_path), {}).kind is VerdictKind.APPLIED
    assert verdict(tmp_path).kind is VerdictKind.APPLIED
    with (tmp_path / DFLASH).open("a") as file:
        file.write("# touched\n")
    found = verdict(tmp_path)
    assert found.kind is VerdictKind.DRIFTED
    assert "edited since" in found.reason
    assert f"revert {HEAD} --env {tmp_path} --force" in str(found.fix)


def test_a_checkout_that_another_environment_has_patched_is_told(tmp_path: Path) -> None:
    for name in ("one", "other"):
        install(tmp_path / name, version="0.5.18")
        shutil.move(tmp_path / name / "sglang", tmp_path / "check out" / "sglang")
        (tmp_path / name / "sglang.pth").write_text(f"{tmp_path / 'check out'}\n")
    apply(load_patch(HEAD), find_tree(tmp_path / "one"), {})
    found = verdict(tmp_path / "other")
    assert found.kind is VerdictKind.DRIFTED
    assert "another environment that runs this checkout" in found.reason
    assert f"git -C '{tmp_path / 'check out'}' checkout {DFLASH}" in str(found.fix)


def test_a_file_that_may_not_be_read_is_told_with_what_helps(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / DFLASH).chmod(0)
    done = run("patch", "check", HEAD, "--env", tmp_path, before=like_another_account)
    assert done.returncode == 1
    assert "cannot be read: Permission denied" in done.stdout
    assert f"fix: chmod u+rwX {tmp_path / DFLASH}" in done.stdout


def test_an_application_in_progress_is_not_read_as_applied(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    apply(load_patch(HEAD), tree, {})
    ledger.state_path(tree, HEAD, "applied").rename(ledger.state_path(tree, HEAD, "applying"))
    found = verdict(tmp_path)
    assert found.kind is VerdictKind.DRIFTED
    assert "cut short" in found.reason


def test_what_an_upgrade_made_needless_has_a_record_to_drop(tmp_path: Path) -> None:
    install(tmp_path)
    apply(load_patch(HEAD), find_tree(tmp_path), {})
    (tmp_path / "sglang-0.5.18.dist-info").rename(tmp_path / "old")
    install(tmp_path, version="0.5.19", files={DFLASH: FIXED})
    found = verdict(tmp_path)
    assert found.kind is VerdictKind.NOT_NEEDED
    assert found.stale
    assert found.fix is not None
    assert found.fix.startswith(f"dflash-deploy patch revert {HEAD} --env {tmp_path}")


def test_an_upgrade_over_ours_is_seen(tmp_path: Path) -> None:
    install(tmp_path)
    apply(load_patch(BMM), find_tree(tmp_path), {"backend": "cudnn"}, decision=by_hand("cudnn"))
    (tmp_path / "sglang-0.5.18.dist-info").rename(tmp_path / "sglang-0.5.19.dist-info")
    (tmp_path / "sglang-0.5.19.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.19\n")
    (tmp_path / FP8).write_text(FP8_SOURCE + "# newer\n")
    found = verdict(tmp_path, BMM)
    assert found.stale
    assert any("0.5.19 has been installed since" in line for line in found.evidence)
    assert found.kind is VerdictKind.UNMEASURED
