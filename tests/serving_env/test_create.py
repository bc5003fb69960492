from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy import paths
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.backup import list_backups, restore
from dflash_deploy.serving_env.create import create
from dflash_deploy.serving_env.environments import find_environment, list_environments, making_file, root

from .conftest import UV, Tool, ask, needs_uv, pin, write_pin
from .wheels import write_wheel

VERSION = "import sglang, torch; print(sglang.__version__, torch.__version__)"


def test_made_from_a_release(said, tool: Tool):
    made = create("main", pin(), say=said.append)
    assert ask(made.python, VERSION) == "0.5.23 2.14.1"
    assert Path(ask(made.python, "import sys; print(sys.prefix)")) == made.folder
    assert made.folder == paths.data_dir() / "envs" / "main"
    script = subprocess.run([made.folder / "bin" / "sglang-say"], capture_output=True, text=True, check=True)
    assert script.stdout == "engine 0.5.23\n"
    record = made.record
    assert record.packages["sglang"] == "0.5.23"
    assert record.packages["torch"] == "2.14.1"
    assert record.installer.split()[0] == ("uv" if UV else "pip")
    assert record.installer.split()[1][0].isdigit()
    constraints = (made.folder / "constraints.txt").read_text().splitlines()
    assert {"sglang==0.5.23", "torch==2.14.1"} <= set(constraints)
    assert any("installing sglang==0.5.23" in line for line in said)
    assert not making_file("main").exists()
    listed = json.loads(tool("env", "list", "--json").stdout)
    assert [one["name"] for one in listed["environments"]] == ["main"]
    assert listed["environments"][0]["version"] == "0.5.23"
    log = paths.state_dir() / "env" / "main.log"
    assert "sglang==0.5.23" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    # A second run finds it done.
    assert create("main", pin(), say=said.append).record == record


@needs_uv
def test_files_are_not_shared_with_the_cache(said):
    """A file edited in place must not change what the next environment gets."""
    one = create("one", pin(), say=said.append, tool="uv")
    for path in one.folder.rglob("*.py"):
        assert path.stat().st_nlink == 1
        with path.open("a") as file:
            file.write("# edited\n")
    other = create("other", pin(), say=said.append, tool="uv")
    text = next(other.folder.glob("lib/python*/site-packages/sglang/__init__.py")).read_text()
    assert "edited" not in text


def test_wheel_with_digest(wheels, said):
    wheel = wheels / "sglang-0.5.19-py3-none-any.whl"
    made = create("main", pin(version=None, wheel=str(wheel)), say=said.append)
    assert ask(made.python, VERSION) == "0.5.19 2.13.0"
    wrong = pin(version=None, wheel=f"{wheel}#sha256={'0' * 64}")
    with pytest.raises(DeployError) as caught:
        create("other", wrong, say=said.append)
    assert find_environment("other") is None
    assert not (root() / "other").exists()
    assert caught.value.exit_code in (ExitCode.INVALID_INPUT, ExitCode.FAILED)


def test_git_commit(tmp_path, said):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    repository = tmp_path / "engine"
    package = repository / "python"
    (package / "sglang").mkdir(parents=True)
    (package / "sglang" / "__init__.py").write_text("__version__ = '0.5.24.dev1'\n")
    (package / "backend.py").write_text(BACKEND)
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "sglang"\nversion = "0.5.24.dev1"\n'
    )
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    source = {"git": f"file://{repository}", "commit": commit.stdout.strip(), "subdirectory": "python"}
    made = create("main", pin(version=None, id="git", **source), say=said.append)
    from dflash_deploy.serving_env.describe import describe

    engine = describe(made.python, imports=False).sglang
    assert engine is not None
    assert engine.commit == commit.stdout.strip()
    assert engine.version == "0.5.24.dev1"


BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "sglang-0.5.24.dev1"
    with zipfile.ZipFile(f"{folder}/{name}-py3-none-any.whl", "w") as out:
        out.write("sglang/__init__.py")
        out.writestr(f"{name}.dist-info/METADATA",
                     "Metadata-Version: 2.1\\nName: sglang\\nVersion: 0.5.24.dev1\\n")
        out.writestr(f"{name}.dist-info/WHEEL",
                     "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        out.writestr(f"{name}.dist-info/RECORD", "")
    return f"{name}-py3-none-any.whl"
"""


def test_constraints_are_kept_to(wheels, said, tmp_path):
    file = tmp_path / "constraints.txt"
    file.write_text("torch==2.13.0\n")
    with pytest.raises(DeployError) as caught:
        create("main", pin(), say=said.append, constraints=file)
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    assert list_environments() == ([], [])
    first = create("first", pin(), say=said.append)
    again = create("again", pin(), say=said.append, constraints=first.folder / "constraints.txt")
    assert again.record.packages == first.record.packages


def test_a_wheel_that_is_not_there_is_told_before_anything_is_made(said, tmp_path):
    with pytest.raises(DeployError) as caught:
        create("main", pin(version=None, wheel=str(tmp_path / "sglang-1-py3-none-any.whl")), say=said.append)
    assert caught.value.exit_code is ExitCode.MISSING
    assert said == []


def test_a_release_that_is_not_there(said):
    with pytest.raises(DeployError) as caught:
        create("main", pin("0.5.99"), say=said.append)
    assert "cannot be had together" in caught.value.message
    assert "0.5.99" in caught.value.message
    assert list(root().glob("[!.]*")) == []


def test_too_little_disk_is_told_before_anything_is_made(tool: Tool, tmp_path):
    path = write_pin(tmp_path, disk_mib=1 << 40)
    done = tool("env", "create", "main", "--pin", path)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "GiB free (measured)" in done.stderr
    assert list(root().glob("[!.]*")) == []


def test_what_is_not_named_is_named_after_its_release(tmp_path, tool: Tool, monkeypatch):
    """And a name that speaks of a release is never filled with another one."""
    monkeypatch.setattr("dflash_deploy.serving_env.create.check_disk", lambda *_: None)  # a real one's size
    named = tool("env", "create", "sglang-0.5.99")
    assert named.returncode == ExitCode.INVALID_INPUT
    assert "sglang==0.5.99" in named.stderr
    made = tool("env", "create", "--version", "0.5.19")
    assert made.returncode == 0, made.stderr
    assert Path(made.stdout.strip()).parents[1].name == "sglang-0.5.19"
    unnamed = tool("env", "create", "--path", tmp_path)
    assert unnamed.returncode == ExitCode.USAGE
    assert "env create NAME --path" in unnamed.stderr


def test_another_pin_needs_replace_and_the_old_one_can_be_put_back(environment, said):
    with pytest.raises(DeployError, match=r"made from sglang==0\.5\.23"):
        create("main", pin("0.5.19"), say=said.append)
    new = create("main", pin("0.5.19"), say=said.append, upgrade=True)
    assert ask(new.python, VERSION) == "0.5.19 2.13.0"
    (kept,) = list_backups("main")
    assert new.record.replaces == kept.record.id
    old = restore("main", None, say=said.append)
    assert old.record == environment.record
    assert ask(old.python, VERSION) == "0.5.23 2.14.1"


def test_a_patch_that_an_upgrade_takes_away_is_told(environment, said):
    """And comes back with the environment that had it."""
    from dflash_deploy.serving_env.patches.bmm import to_measure
    from dflash_deploy.serving_env.patches.description import load_patch
    from dflash_deploy.serving_env.patches.integrity import verify_intact
    from dflash_deploy.serving_env.patches.operations import apply
    from dflash_deploy.serving_env.patches.tree import find_tree

    patch = load_patch("bmm-fp8-backend")
    file = next(environment.folder.glob("lib/python*/site-packages")) / patch.file
    file.parent.mkdir(parents=True)
    file.write_text("def flashinfer_bmm_fp8():\n    _raw_flashinfer_bmm_fp8(backend='cublas')\n")
    apply(patch, find_tree(environment.folder), {"backend": "cublas"}, decision=to_measure())
    create("main", pin("0.5.19"), say=said.append, upgrade=True)
    assert "the patch bmm-fp8-backend was applied to what this replaces" in said[-2]
    assert said[-1] == "  dflash-deploy patch check bmm-fp8-backend --env main"
    restore("main", None, say=said.append)
    assert verify_intact(environment.folder).applied == ("bmm-fp8-backend",)


def test_a_failed_upgrade_leaves_what_was(environment, said):
    with pytest.raises(DeployError):
        create("main", pin("0.5.99"), say=said.append, upgrade=True)
    assert find_environment("main") == environment
    assert ask(environment.python, VERSION) == "0.5.23 2.14.1"
    assert list_backups("main") == []


def test_a_folder_of_somebody_else_is_left_alone(said):
    (root() / "main").mkdir(parents=True)
    (root() / "main" / "letter.txt").write_text("mine")
    with pytest.raises(DeployError, match="not made by this tool"):
        create("main", pin(), say=said.append)
    assert (root() / "main" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "Ä", "a..b", "x" * 65])
def test_names_that_lead_elsewhere(name, said):
    with pytest.raises(DeployError) as caught:
        create(name, pin(), say=said.append)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("installer", "moment", "number"),
    [
        ("pip", "installing ", signal.SIGKILL),
        pytest.param("uv", "making ", signal.SIGKILL, marks=needs_uv),
        pytest.param("uv", "installing ", signal.SIGKILL, marks=needs_uv),
        pytest.param("uv", "installing ", signal.SIGTERM, marks=needs_uv),
        pytest.param("uv", "asking ", signal.SIGTERM, marks=needs_uv),
    ],
)
def test_cut_short_and_run_again(installer, moment, number, tool: Tool, tmp_path):
    path = write_pin(tmp_path)
    command = ["env", "create", "main", "--pin", str(path), "--installer", installer]
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_deploy", *command], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr
        for line in process.stderr:
            if line.startswith(moment):
                process.send_signal(number)
                break
        process.communicate(timeout=60)
        if process.returncode != 0:
            break
        # On a busy machine all may be done before the signal comes.
        shutil.rmtree(root())
    assert process.returncode != 0
    assert list_environments()[0] == []
    if number is signal.SIGTERM:
        assert process.returncode == ExitCode.INTERRUPTED
        assert list(root().glob("[!.]*")) == []
    else:
        refused = tool("env", "use", "main")
        assert refused.returncode == ExitCode.MISSING
        assert "cut short" in refused.stderr
    if number is signal.SIGKILL:
        # Which pin it was need not be said again.
        command = ["env", "create", "main", "--installer", installer]
    for _ in range(100):
        done = tool(*command)
        # An installer that dies with its parent may hold the lock for a moment.
        if "by another process" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert ask(Path(done.stdout.strip()), VERSION) == "0.5.23 2.14.1"
    (whole,) = list_environments()[0]
    made_with, version = whole.record.installer.split()
    assert made_with == installer
    assert version[0].isdigit()


def test_cut_short_while_an_old_one_is_replaced(environment, said, tool: Tool, tmp_path):
    path = write_pin(tmp_path, "0.5.19")
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_deploy", "env", "create", "main", "--replace", "--pin", str(path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    for line in process.stderr:
        if line.startswith("installing"):
            process.kill()
    process.communicate(timeout=60)
    for _ in range(100):
        done = tool("env", "restore", "main")
        if "by another process" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert ask(environment.python, VERSION) == "0.5.23 2.14.1"


def test_full_disk(wheels, said, tmp_path):
    """On a disk of its own that is really full."""
    big = tmp_path / "wheels"
    big.mkdir()
    for wheel in wheels.glob("torch-2.14.1*"):
        shutil.copy(wheel, big)
    write_wheel(
        big,
        "sglang",
        "0.5.23",
        {"sglang/__init__.py": "", "sglang/big.bin": bytes(120 << 20)},
        ["torch==2.14.1"],
    )
    place = paths.data_dir()
    place.mkdir(parents=True)
    script = 'mount -t tmpfs -o size=80m tmpfs "$1" && shift && "$@"; s=$?; ls -A "$DATA/envs" >&2; exit $s'
    box = ["unshare", "-m", "sh", "-c", script, "sh", str(place)]
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(place)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root and unshare")
    path = write_pin(tmp_path)
    tool = [sys.executable, "-m", "dflash_deploy", "env", "create", "main", "--pin", str(path)]
    done = subprocess.run(
        [*box, *tool],
        env={**os.environ, "PIP_FIND_LINKS": str(big), "UV_FIND_LINKS": str(big), "DATA": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert "the disk is full" in done.stderr
    assert done.stderr.splitlines()[-1] == ".main.lock"


def test_one_maker_at_a_time(said):
    from dflash_deploy.serving_env.environments import changing

    with changing("main"), pytest.raises(DeployError) as caught:
        create("main", pin(), say=said.append)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert "by another process" in caught.value.message


class TestAdopted:
    @pytest.fixture
    def theirs(self, environment, tmp_path) -> Path:
        """An environment elsewhere, which nobody may write to."""
        folder = tmp_path / "theirs"
        shutil.copytree(environment.folder, folder, symlinks=True)
        (folder / ".complete").unlink()
        return folder

    def test_is_described_and_never_written_to(self, theirs, said, tool: Tool):
        from dflash_deploy.serving_env.remove import remove
        from dflash_deploy.serving_env.trees import scan

        before = scan(theirs)
        made = create("conda", pin(version=None, path=str(theirs)), say=said.append)
        assert made.adopted
        assert made.python == theirs / "bin" / "python"
        assert tool("env", "show", "conda", "--json").returncode == 0
        doctor = tool("env", "doctor", "conda")
        assert "env create NAME --replace" in doctor.stdout
        for command in (["backup", "conda"], ["create", "conda", "--replace", "--path", theirs]):
            done = tool("env", *command)
            assert done.returncode == ExitCode.USAGE, done.stderr
        remove("conda", say=said.append)
        assert find_environment("conda") is None
        assert scan(theirs) == before

    def test_a_folder_without_an_engine(self, said, tmp_path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
        with pytest.raises(DeployError, match="has no sglang"):
            create("conda", pin(version=None, path=str(tmp_path / "empty")), say=said.append)
        with pytest.raises(DeployError, match="no bin/python"):
            create("conda", pin(version=None, path=str(tmp_path)), say=said.append)
        assert list_environments() == ([], [])
