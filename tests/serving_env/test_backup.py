from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy import paths
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env import environments, trees
from dflash_deploy.serving_env.backup import (
    Backup,
    back_up,
    find_backup,
    list_backups,
    remove_backup,
    restore,
)
from dflash_deploy.serving_env.create import create
from dflash_deploy.serving_env.current import choose, default_name, default_python
from dflash_deploy.serving_env.environments import (
    Environment,
    changing,
    find_environment,
    list_environments,
    replaced_folder,
    root,
)
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.remove import remove

from .command import run
from .conftest import Tool, ask, pin

NOBODY = 65534
VERSION = "import sglang, torch; print(sglang.__version__, torch.__version__)"


def engine_file(environment: Environment) -> Path:
    return next(environment.folder.glob("lib/python*/site-packages/sglang/__init__.py"))


def assert_whole(backup: Backup) -> None:
    manifest = trees.read_manifest(backup.folder / "manifest.jsonl")
    assert list(trees.differences(manifest, trees.scan(backup.tree))) == []


@pytest.fixture
def marked(environment: Environment) -> Environment:
    """With permissions, times, links and empty folders that a copy must keep."""
    extra = environment.folder / "extra"
    (extra / "empty").mkdir(parents=True)
    (extra / "secret").write_text("s")
    (extra / "secret").chmod(0o400)
    (extra / "run").write_text("#!/bin/sh\n")
    (extra / "run").chmod(0o755)
    (extra / "dangling").symlink_to("nowhere/at/all")
    (extra / "up").symlink_to("../extra")
    os.utime(extra / "run", ns=(1_000_000_001, 1_500_000_000_123_456_789))
    os.utime(extra / "dangling", ns=(1, 1_400_000_000_000_000_001), follow_symlinks=False)
    Path(os.fsdecode(bytes(extra) + b"/\xff\xfe")).write_text("a name that is no UTF-8")
    os.utime(extra, ns=(1, 1_300_000_000_000_000_000))
    return environment


def test_put_back_byte_for_byte(marked, said):
    before = trees.scan(marked.folder)
    made = back_up(marked, reason="before a patch", say=said.append)
    assert made.record.entries == len(before)
    assert made.record.reason == "before a patch"
    assert trees.scan(made.tree) == before
    # Writes of every kind to the environment, in place too, must not reach the backup.
    with engine_file(marked).open("a") as file:
        file.write("__version__ = 'broken'\n")
    (marked.folder / "extra" / "run").unlink()
    (marked.folder / "new").write_text("x")
    (marked.folder / "bin" / "sglang-say").chmod(0o600)
    assert_whole(made)
    restored = restore("main", made.record.id, say=said.append)
    assert trees.scan(marked.folder) == before
    assert restored.record == marked.record
    assert ask(marked.python, VERSION) == "0.5.23 2.14.1"
    script = subprocess.run(
        [marked.folder / "bin" / "sglang-say"], capture_output=True, text=True, check=True
    )
    assert script.stdout == "engine 0.5.23\n"
    assert sorted(path.name for path in root().iterdir()) == [".main.lock", "main"]


def test_what_stood_there_made_from_something_else_is_kept(environment, said, tool: Tool):
    """A step back must not cost what it steps back from; what is damaged is given up."""
    create("main", pin("0.5.19"), say=said.append, upgrade=True)
    newer = find_environment("main")
    assert newer is not None
    before = trees.scan(newer.folder)
    restore("main", None, say=said.append)
    assert [one.record.environment.packages["sglang"] for one in list_backups("main")] == ["0.5.23", "0.5.19"]
    kept = list_backups("main")[-1]
    assert kept.record.reason == "replaced by sglang==0.5.23"
    assert trees.scan(kept.tree) == before
    listed = tool("env", "list").stdout
    assert f"backup of main: {kept.record.id}, SGLang 0.5.19" in listed
    restore("main", list_backups("main")[0].record.id, say=said.append)
    assert len(list_backups("main")) == 2


def test_a_removed_environment_is_put_back(marked, said, tool: Tool):
    before = trees.scan(marked.folder)
    back_up(marked, reason="", say=said.append)
    remove("main", say=said.append)
    assert list_environments() == ([], [])
    (left,) = json.loads(tool("env", "list", "--json").stdout)["backups"]
    assert f"backup of main: {left['id']}, " in tool("env", "list").stdout
    restore("main", None, say=said.append)
    assert trees.scan(marked.folder) == before


def test_the_newest_is_taken(environment, said):
    first = back_up(environment, reason="one", say=said.append)
    (environment.folder / "second").touch()
    second = back_up(environment, reason="two", say=said.append)
    assert [one.record.id for one in list_backups("main")] == [first.record.id, second.record.id]
    (environment.folder / "second").unlink()
    restore("main", None, say=said.append)
    assert (environment.folder / "second").exists()
    restore("main", first.record.id, say=said.append)
    assert not (environment.folder / "second").exists()
    remove_backup("main", second.record.id)
    assert find_backup("main", None).record.id == first.record.id
    with pytest.raises(DeployError, match="has no backup"):
        find_backup("main", second.record.id)


@pytest.mark.parametrize("damage", ["content", "missing", "added", "mode", "manifest"])
def test_a_damaged_backup_is_not_put_back(damage, environment, said):
    before = trees.scan(environment.folder)
    made = back_up(environment, reason="", say=said.append)
    victim = next(made.tree.glob("lib/python*/site-packages/sglang/__init__.py"))
    match damage:
        case "content":
            about = victim.stat()
            victim.write_bytes(b"#" + victim.read_bytes()[1:])
            os.utime(victim, ns=(about.st_atime_ns, about.st_mtime_ns))
        case "missing":
            victim.unlink()
        case "added":
            (made.tree / "more").touch()
        case "mode":
            victim.chmod(0o777)
        case "manifest":
            (made.folder / "manifest.jsonl").write_text("[]\n")
    with pytest.raises(DeployError) as caught:
        restore("main", None, say=said.append)
    assert "is damaged" in caught.value.message
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    assert trees.scan(environment.folder) == before


_OPERATIONS = {
    *("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink"),
    *("os.chmod", "os.utime", "os.truncate", "shutil.rmtree"),
}


def steps_until_death(last: int, *arguments: str) -> int | None:
    """Run a command that its file operation number ``last`` ends, as kill -9 would.

    Returns:
        How many there were, None where it was ended.
    """
    counted = mmap.mmap(-1, 8)

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event in _OPERATIONS and any(
            isinstance(one, str | bytes) and "dflash-deploy" in os.fsdecode(one) for one in given
        ):
            count = int.from_bytes(counted[:]) + 1
            counted[:] = count.to_bytes(8)
            if count > last:
                os.kill(os.getpid(), signal.SIGKILL)

    done = run(*arguments, before=lambda: sys.addaudithook(hook))
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return int.from_bytes(counted[:]) if done.returncode == 0 else None


@pytest.fixture
def tiny(environment: Environment) -> Environment:
    """With few files, so that there are few moments to die at."""
    import shutil

    for path in environment.folder.glob("lib/python*/site-packages/*"):
        if not path.name.startswith("sglang"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in environment.folder.rglob("__pycache__"):
        shutil.rmtree(path)
    for path in environment.folder.glob("bin/*ctivate*"):
        path.unlink()
    return environment


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_killed_at_any_step(command, tiny, said):
    before = trees.scan(tiny.folder)
    back_up(tiny, reason="", say=said.append)
    changed = before
    steps = steps_until_death(1_000_000, "env", command, "main")
    assert steps is not None
    if command == "restore":
        (tiny.folder / "changed").touch()
        changed = trees.scan(tiny.folder)
    # Copying, in the middle, is the same over and over; at both ends things change place.
    for step in [*range(4), *range(4, steps - 12, steps // 3), *range(steps - 12, steps)]:
        assert steps_until_death(step, "env", command, "main") is None, step
        found = find_environment("main")
        assert found is not None
        assert trees.scan(found.folder) in (before, changed), step
        for backup in list_backups("main"):
            assert_whole(backup)
            assert trees.scan(backup.tree) == before
    assert steps_until_death(1_000_000, "env", command, "main") is not None
    if command == "restore":
        assert trees.scan(tiny.folder) == before
    back_up(tiny, reason="last", say=said.append)
    assert sorted(path.name for path in root().iterdir()) == [".main.lock", "main"]
    places = paths.data_dir() / "backups" / "main"
    assert [path for path in places.iterdir() if path.name.startswith(".")] == []


def test_adopting_killed_at_any_step_or_on_a_full_disk(tiny, tool: Tool, tmp_path):
    """What was begun is begun again; nothing is left that somebody would have to move away."""
    import resource

    theirs = tmp_path / "theirs"
    trees.copy(tiny.folder, theirs)
    before = trees.scan(theirs)
    words = ["env", "create", "ours", "--path", str(theirs)]
    whole = steps_until_death(1_000_000, *words)
    assert whole is not None
    for step in range(0, whole, 4):
        assert tool("env", "remove", "ours").returncode == 0
        assert steps_until_death(step, *words) is None, step
        found = find_environment("ours")
        assert found is None or found.prefix == theirs
        assert all("ours" in one.fix and one.name == "ours" for one in list_environments()[1]), step
        assert tool(*words).returncode == 0, step
    stamp = root() / "ours" / environments.STAMP
    most = stamp.stat().st_size - 1
    remove("ours", say=lambda _line: None)
    full = tool(*words, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    assert full.returncode == ExitCode.UNAVAILABLE
    assert "the disk is full" in full.stderr
    assert not stamp.parent.exists()
    assert list_environments()[1] == []
    assert trees.scan(theirs) == before


def test_an_empty_folder_is_nobodys_work(said, environment, tmp_path):
    (root() / "ours").mkdir()
    assert list_environments()[1] == []
    made = create("ours", pin(version=None, path=str(environment.folder)), say=said.append)
    assert made.adopted
    assert not any("cut short" in line for line in said)


def test_no_patch_is_applied_while_a_copy_is_made_and_the_other_way_round(environment, said, tool: Tool):
    """The copy would hold a patched file whose record it lacks."""
    site_packages = engine_file(environment).parents[1]
    with (
        changing("main"),
        pytest.raises(DeployError, match="another process is changing"),
        ledger.held(site_packages, wait_s=0),
    ):
        pass
    with ledger.held(site_packages):
        copying = subprocess.Popen([sys.executable, "-m", "dflash_deploy", "env", "backup", "main"])
        with pytest.raises(subprocess.TimeoutExpired):
            copying.wait(timeout=2)
        assert list_backups("main") == []
    assert copying.wait(timeout=60) == 0
    assert len(list_backups("main")) == 1


def test_whoever_waited_changes_the_tree_that_stands_there_now(tmp_path):
    """An environment was put back meanwhile: its folder has the name, not the lock."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    waits = threading.Event()
    done: list[str] = []

    def other() -> None:
        waits.set()
        with ledger.held(folder):
            with pytest.raises(DeployError), ledger.held(folder, wait_s=0):
                pass
            done.append("held what stands there")

    with ledger.held(folder):
        waiting = threading.Thread(target=other)
        waiting.start()
        waits.wait()
        folder.rename(tmp_path / "old")
        folder.mkdir()
    waiting.join(timeout=60)
    assert done == ["held what stands there"]


def test_exchange_where_the_file_system_cannot(tmp_path, monkeypatch, environment):
    """Without renameat2 the old tree stands aside for a moment; whoever finds it so puts it back."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_args, **_named: object())
        was = trees.exchange(tmp_path / "new", tmp_path / "old", tmp_path / "aside")
    assert was == tmp_path / "aside"
    assert (tmp_path / "old" / "new").exists()
    assert (tmp_path / "aside" / "old").exists()
    environment.folder.rename(replaced_folder("main"))
    assert find_environment("main") is None
    with changing("main"):
        assert find_environment("main") == environment


def test_full_disk_is_told_and_leaves_no_half_backup(environment, said, tool: Tool):
    import resource

    (environment.folder / "big").write_bytes(bytes(300_000))
    done = tool(
        "env",
        "backup",
        "main",
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert "the disk is full" in done.stderr
    assert list_backups("main") == []
    assert list((paths.data_dir() / "backups" / "main").iterdir()) == []


class TestUse:
    def test_choice_and_removal(self, environment, tool: Tool):
        assert default_python() is None
        assert tool("env", "use", "main").stdout.strip() == str(environment.python)
        assert default_python() == environment.python
        refused = tool("env", "remove", "main")
        assert refused.returncode == ExitCode.UNAVAILABLE
        assert "in use by whatever names no interpreter" in refused.stderr
        assert find_environment("main") is not None
        assert tool("env", "remove", "main", "--force").returncode == 0
        assert default_name() is None
        assert not environment.folder.exists()

    @pytest.mark.usefixtures("environment")
    def test_every_change_can_be_read_by_a_program(self, tool: Tool):
        def said(*words: str) -> dict[str, object]:
            done = tool("env", *words, "--json")
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        assert said("use", "main")["environment"]["default"] is True
        made = said("backup", "main")["backup"]["id"]
        other = said("backup", "main")["backup"]["id"]
        assert said("restore", "main")["environment"]["default"] is True
        assert said("use", "--none")["environment"] is None
        assert said("restore", "main", "--backup", made)["environment"]["default"] is False
        gone = said("remove", "main", "--backup", made)
        assert (gone["name"], gone["backup"]) == ("main", made)
        assert [one["id"] for one in gone["backups"]] == [other]
        gone = said("remove", "main")
        assert (gone["backup"], len(gone["backups"])) == (None, 1)

    def test_choice_that_is_gone(self, environment):
        choose("main")
        environment.folder.rename(environment.folder.with_name("away"))
        with pytest.raises(DeployError) as caught:
            default_python()
        assert caught.value.exit_code is ExitCode.MISSING

    def test_a_running_server_keeps_its_environment(self, environment, said):
        back_up(environment, reason="", say=said.append)
        code = "import time; print(1, flush=True); time.sleep(600)"
        server = subprocess.Popen([environment.python, "-c", code], stdout=subprocess.PIPE)
        try:
            assert server.stdout
            server.stdout.readline()
            for change in (remove, lambda name, say: restore(name, None, say=say)):
                with pytest.raises(DeployError) as caught:
                    change("main", say=said.append)
                assert f"process {server.pid}" in caught.value.message
            restore("main", None, say=said.append, force=True)
        finally:
            server.kill()
            server.wait()
        remove("main", say=said.append)

    def test_a_unit_keeps_its_environment(self, environment, said, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        unit = tmp_path / ".config" / "systemd" / "user" / "serve.service"
        unit.parent.mkdir(parents=True)
        unit.write_text(f"[Service]\nExecStart={environment.python} -m sglang.launch_server\n")
        with pytest.raises(DeployError) as caught:
            remove("main", say=said.append)
        assert f"unit {unit}" in caught.value.message
        unit.unlink()
        remove("main", say=said.append)

    def test_only_our_own_is_removed(self, said):
        foreign = root() / "photos"
        foreign.mkdir(parents=True)
        (foreign / "one.jpg").touch()
        with pytest.raises(DeployError):
            remove("photos", say=said.append, force=True)
        (foreign / ".complete").write_text('{"name": "photos"}')
        with pytest.raises(DeployError, match="not a record of this tool"):
            remove("photos", say=said.append, force=True)
        assert (foreign / "one.jpg").exists()
        elsewhere = root().parent / "elsewhere"
        elsewhere.mkdir()
        (root() / "link").symlink_to(elsewhere)
        with pytest.raises(DeployError):
            remove("link", say=said.append, force=True)
        assert elsewhere.exists()

    def test_links_within_are_removed_and_not_followed(self, environment, said, tmp_path):
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        (theirs / "photo").touch()
        (environment.folder / "link").symlink_to(theirs)
        (root() / ".main.restoring").symlink_to(theirs)
        (root() / ".main.removing-1").symlink_to(theirs)
        (root() / ".main.replaced").symlink_to(theirs)
        remove("main", say=said.append)
        assert not environment.folder.exists()
        assert (theirs / "photo").exists()

    def test_a_record_that_is_damaged_is_told_with_what_helps(self, environment, tool: Tool):
        (environment.folder / ".complete").write_text("{")
        done = tool("env", "list")
        assert done.returncode == 0
        assert f"fix: move {environment.folder / '.complete'} away" in done.stderr
        assert tool("env", "remove", "main").returncode == ExitCode.INVALID_INPUT
        assert engine_file(environment).exists()


def test_a_tree_with_closed_folders_is_deleted(tmp_path):
    tree = tmp_path / "tree"
    inner = tree / "closed" / "more"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for path in (inner / "file", inner, inner.parent, tree, tmp_path):
        os.chown(path, NOBODY, -1) if os.geteuid() == 0 else None
    for folder in (inner, inner.parent, tree):
        folder.chmod(0)
    child = os.fork()
    if child == 0:
        # As somebody whom closed folders stop, which they do not root.
        status = 1
        with contextlib.suppress(BaseException):
            os.chdir(tmp_path)
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            environments.delete_tree(Path("tree"))
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
_TREES = st.recursive(
    st.binary(max_size=64) | st.text("abc/.", min_size=1, max_size=8),
    lambda inner: st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(content=st.dictionaries(_NAMES, _TREES, max_size=4), mode=st.sampled_from([0o400, 0o644, 0o755]))
def test_any_tree_survives_copying(tmp_path_factory, content, mode):
    place = tmp_path_factory.mktemp("tree")

    def grow(folder: Path, inner: dict[str, object]) -> None:
        folder.mkdir()
        for name, value in inner.items():
            if isinstance(value, dict):
                grow(folder / name, value)
            elif isinstance(value, bytes):
                (folder / name).write_bytes(value)
                (folder / name).chmod(mode)
            else:
                (folder / name).symlink_to(str(value))

    grow(place / "one", content)
    copied = trees.copy(place / "one", place / "other")
    assert copied == trees.scan(place / "one") == trees.scan(place / "other")
    manifest = place / "manifest"
    manifest.write_bytes(trees.write_manifest(copied))
    assert trees.read_manifest(manifest) == copied
    assert list(trees.differences(copied, trees.scan(place / "other"))) == []
