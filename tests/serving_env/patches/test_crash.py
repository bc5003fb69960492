"""Apply and revert cut short: after every file operation, on a full disk, without permission, at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.patches import ledger, pip_record
from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.disk import Disk
from dflash_deploy.serving_env.patches.integrity import verify_intact
from dflash_deploy.serving_env.patches.operations import apply, mend, revert, unfinished
from dflash_deploy.serving_env.patches.tree import Tree, find_tree
from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine
from tests.serving_env.command import like_another_account, run

from .trees import FP8, FP8_SOURCE, fp8_patched, install, snapshot

BMM = "bmm-fp8-backend"
PATCHED = fp8_patched("cudnn")


def apply_bmm(tree: Tree, disk: Disk | None = None) -> None:
    evidence = b'{"schema_version": 1}'
    apply(
        load_patch(BMM), tree, {"backend": "cudnn"}, decision=by_hand("cudnn"), evidence=evidence, disk=disk
    )


def revert_bmm(tree: Tree, disk: Disk | None = None) -> None:
    revert(BMM, tree, disk=disk)


def operations(work: Callable[[Tree, Disk], None], tree: Tree) -> list[str]:
    told: list[str] = []
    work(tree, Disk(told.append))
    return told


def killed_after(number: int, work: Callable[[Tree, Disk], None], tree: Tree) -> None:
    """Do the work in a child that kills itself, as a power cut would, once it has done so many operations."""
    child = os.fork()
    if child == 0:
        done = 0

        def told(_operation: str) -> None:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(tree, Disk(told))
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"operation {number} was never reached"
    assert os.WTERMSIG(status) == signal.SIGKILL


def prepared(folder: Path, work: Callable[[Tree, Disk], None]) -> Tree:
    tree = find_tree(install(folder))
    (folder / FP8).chmod(0o640)
    if work is revert_bmm:
        apply_bmm(tree)
    return tree


@pytest.mark.parametrize("work", [apply_bmm, revert_bmm], ids=["apply", "revert"])
def test_killed_after_any_operation_leaves_old_or_new_and_the_next_run_mends_it(
    tmp_path: Path, work: Callable[[Tree, Disk], None]
) -> None:
    steps = operations(work, prepared(tmp_path / "count", work))
    assert len(steps) > 8
    for number in range(1, len(steps) + 1):
        where = f"after operation {number}: {steps[number - 1]}"
        folder = tmp_path / f"at {number}"
        original = find_tree(install(folder))
        (folder / FP8).chmod(0o640)
        before = snapshot(folder)
        tree = original
        if work is revert_bmm:
            apply_bmm(tree)

        killed_after(number, work, tree)

        assert (folder / FP8).read_text() in {FP8_SOURCE, PATCHED}, where
        cut_short = bool(unfinished(tree))
        if cut_short:
            assert not verify_intact(folder).intact, where
        said = mend(tree)
        assert bool(said) == cut_short, where
        assert all(BMM in line and "is as it was before" in line for line in said), where
        assert unfinished(tree) == [], where
        kind = examine(load_patch(BMM), tree).verdict.kind
        if kind is VerdictKind.APPLIED:
            assert (folder / FP8).read_text() == PATCHED, where
            line = pip_record.entry((tree.dist_info / "RECORD").read_bytes(), FP8)
            assert line is not None
            assert line.describes(PATCHED.encode()), where
            assert verify_intact(folder).intact, where
            revert_bmm(tree)
        else:
            assert kind is VerdictKind.UNMEASURED, where
            # A killed run may have left its own notes; the next application and its revert take them along.
            apply_bmm(tree)
            revert_bmm(tree)
        assert snapshot(folder) == before, where


def test_mending_may_itself_be_cut_short(tmp_path: Path) -> None:
    def cut(folder: Path) -> Tree:
        tree = find_tree(install(folder))
        steps = operations(apply_bmm, find_tree(install(folder.with_name("count"))))
        killed_after(steps.index("rename fp8_utils.py") + 1, apply_bmm, tree)
        return tree

    def mend_it(tree: Tree, disk: Disk) -> None:
        mend(tree, disk=disk)

    steps = operations(mend_it, cut(tmp_path / "first"))
    assert len(steps) > 4
    for number in range(1, len(steps)):
        tree = cut(tmp_path / f"at {number}")
        killed_after(number, mend_it, tree)
        mend(tree)
        assert unfinished(tree) == []
        assert (tree.root / FP8).read_text() == FP8_SOURCE, steps[number - 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int) -> Path:
    about = os.statvfs(folder)
    blocker = folder / "blocker"
    blocker.write_bytes(b"\0" * max(0, about.f_bavail * about.f_frsize - leave_bytes))
    return blocker


@pytest.mark.parametrize("leave_kib", [0, 4, 8, 16, 24, 32, 64])
def test_a_full_disk_leaves_the_original(small_disk: Path, leave_kib: int) -> None:
    source = FP8_SOURCE + "# padding\n" * 1500
    tree = find_tree(install(small_disk / "site-packages", files={FP8: source}))
    before = snapshot(tree.site_packages)
    fill(small_disk, leave_kib << 10)
    try:
        apply_bmm(tree)
    except DeployError as error:
        assert error.exit_code is ExitCode.UNAVAILABLE
        assert "No space left" in error.message
        assert "everything is as it was" in error.message
        assert snapshot(tree.site_packages) == before
    else:
        revert_bmm(tree)
        assert snapshot(tree.site_packages) == before


def test_a_full_disk_does_not_hold_up_a_revert(small_disk: Path) -> None:
    tree = find_tree(install(small_disk / "site-packages", files={FP8: FP8_SOURCE + "# padding\n" * 1500}))
    before = snapshot(tree.site_packages)
    apply_bmm(tree)
    fill(small_disk, 0)
    revert_bmm(tree)
    assert snapshot(tree.site_packages) == before


def test_a_read_only_environment_is_told_and_left(small_disk: Path) -> None:
    tree = find_tree(install(small_disk / "site-packages"))
    before = snapshot(tree.site_packages)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DeployError, match="Read-only file system") as caught:
        apply_bmm(tree)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert snapshot(tree.site_packages) == before
    assert examine(load_patch(BMM), tree).verdict.kind is VerdictKind.UNMEASURED


@pytest.mark.parametrize("work", [apply_bmm, revert_bmm], ids=["apply", "revert"])
def test_ctrl_c_at_any_operation_leaves_nothing_unfinished(
    tmp_path: Path, work: Callable[[Tree, Disk], None]
) -> None:
    """What was being applied is undone, what was being reverted is finished: a server may be started next."""
    steps = operations(work, prepared(tmp_path / "count", work))
    for number in range(len(steps)):
        folder = tmp_path / f"at {number}"
        tree = find_tree(install(folder))
        before = snapshot(folder)
        if work is revert_bmm:
            apply_bmm(tree)
        during = snapshot(folder)
        done = 0

        def told(_operation: str, last: int = number) -> None:
            nonlocal done
            done += 1
            if done == last + 1:
                raise KeyboardInterrupt

        where = f"at operation {number}: {steps[number]}"
        with pytest.raises(KeyboardInterrupt):
            work(tree, Disk(told))
        assert unfinished(tree) == [], where
        kind = examine(load_patch(BMM), tree).verdict.kind
        assert kind in {VerdictKind.APPLIED, VerdictKind.UNMEASURED}, where
        if kind is VerdictKind.UNMEASURED:
            assert snapshot(folder) == before, where
        elif work is revert_bmm:
            assert snapshot(folder) == during, where


def test_a_folder_without_permission_is_told_and_left(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path / "site-packages"))
    package = (tree.root / FP8).parent
    package.chmod(0o555)
    words = ["patch", "apply", BMM, "--env", tree.site_packages, "--set", "backend=cublas"]
    try:
        done = run(*words, before=like_another_account)
    finally:
        package.chmod(0o755)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "Permission denied; everything is as it was" in done.stderr
    assert f"fix: chmod u+rwX {package}" in done.stderr
    assert (tree.root / FP8).read_text() == FP8_SOURCE
    assert unfinished(tree) == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
def test_an_environment_of_somebody_else_is_told_of_and_left(tmp_path: Path) -> None:
    """It can be looked at; whoever would change it is told whose it is."""
    tree = find_tree(install(tmp_path / "site-packages"))
    env = tree.site_packages
    apply_bmm(tree)
    for path in (env, *env.rglob("*")):
        os.chown(path, 65534, 65534)
    before = snapshot(env)

    def patch(*words: str) -> subprocess.CompletedProcess[str]:
        return run("patch", *words, "--env", env, before=like_another_account)

    assert patch("check", BMM).returncode == 0
    assert patch("verify").returncode == 0
    assert patch("diff").stdout.startswith("--- a/")
    for words in (["revert"], ["apply", "nvfp4-lm-head"]):
        refused = patch(*words)
        assert refused.returncode == ExitCode.UNAVAILABLE
        assert "fix: run this as nobody, who owns " in refused.stderr
    assert snapshot(env) == before

    state = ledger.state_path(tree, BMM, "applied")
    state.rename(ledger.state_path(tree, BMM, "applying"))
    cut_short = patch("check", "--json")
    assert cut_short.returncode == 1
    told = json.loads(cut_short.stdout)["unfinished"]
    assert told[0] == f"applying {BMM} was cut short"
    assert "run this as nobody" in told[1]
    # Root itself leaves the owner what is the owner's.
    assert run("patch", "check", "--env", env).returncode == 1
    assert {path.stat().st_uid for path in env.rglob("*") if path.suffix != ".pyc"} == {65534}


@pytest.mark.parametrize("where", ["itself", "above"])
def test_a_site_packages_folder_that_may_not_be_entered_is_told(tmp_path: Path, where: str) -> None:
    tree = find_tree(install(tmp_path / "site-packages"))
    closed = tree.site_packages if where == "itself" else tmp_path
    closed.chmod(0)
    try:
        for words in (["check"], ["verify"], ["apply"], ["revert"], ["diff"], ["list"]):
            done = run("patch", *words, "--env", tree.site_packages, before=like_another_account)
            assert done.returncode == ExitCode.UNAVAILABLE, words
            assert "Permission denied" in done.stderr
            assert f"fix: chmod u+rwX {closed}" in done.stderr
    finally:
        closed.chmod(0o755)


_APPLY_AND_REVERT = """
import sys
from pathlib import Path
from dflash_deploy.errors import DeployError
from dflash_deploy.serving_env.patches.bmm import by_hand
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply, revert
from dflash_deploy.serving_env.patches.tree import find_tree
tree = find_tree(Path(sys.argv[1]))
for _ in range(15):
    apply(load_patch("bmm-fp8-backend"), tree, {"backend": "cudnn"}, decision=by_hand("cudnn"))
    try:
        revert("bmm-fp8-backend", tree)
    except DeployError as error:
        assert "is not applied" in error.message, error.message
"""


def test_two_at_once_take_turns(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path / "site-packages"))
    before = snapshot(tree.site_packages)
    argv = [sys.executable, "-c", _APPLY_AND_REVERT, str(tree.site_packages)]
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        _, errors = one.communicate(timeout=100)
        assert one.returncode == 0, errors
    assert snapshot(tree.site_packages) == before


def test_one_that_waits_too_long_says_so(tmp_path: Path) -> None:
    tree = find_tree(install(tmp_path))
    with ledger.locked(tree), pytest.raises(DeployError, match="another process") as caught:
        apply(load_patch(BMM), tree, {"backend": "cudnn"}, decision=by_hand("cudnn"), wait_s=0.2)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
