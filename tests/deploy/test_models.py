"""Models that are on the machine already: found, given by their folder, or refused with what helps."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_deploy.deploy import access, models
from dflash_deploy.errors import DeployError, ExitCode

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_OLDER = "f" * 40
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what another account may read")


def snapshot(cache: Path, name: str, commit: str = _COMMIT, branch: str = "main") -> Path:
    """A model as the hub's library leaves it: names that link to the files."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    for made in (repository / "blobs", repository / "refs", folder):
        made.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    for file in ("config.json", "model.safetensors"):
        blob = repository / "blobs" / f"{commit[:4]}-{file}"
        blob.write_text("{}")
        (folder / file).symlink_to(f"../../blobs/{blob.name}")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(access, "_HIDDEN", ())
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "SUDO_USER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def test_a_whole_model_is_given_by_its_folder_under_the_name_that_users_know(cache: Path):
    target, draft = snapshot(cache, "org/model"), snapshot(cache, "org/draft")
    flags = {"model-path": "org/model", "speculative-draft-model-path": "org/draft", "tp-size": 1}
    found = models.local(flags, {}, None)
    assert found.flags == {
        "model-path": str(target),
        "speculative-draft-model-path": str(draft),
        "tp-size": 1,
        "served-model-name": "org/model",
    }
    assert [note.split()[0] for note in found.notes] == ["org/model", "org/draft"]


def test_the_revision_that_was_tuned_stays_and_a_chosen_name_too(cache: Path):
    snapshot(cache, "org/model")
    older = snapshot(cache, "org/model", _OLDER, branch="v1")
    flags = {"model-path": "org/model", "revision": "v1", "served-model-name": "mine"}
    assert models.local(flags, {}, None).flags == {"model-path": str(older), "served-model-name": "mine"}


def _shard_missing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')


def _blob_missing(folder: Path) -> None:
    (folder / "model.safetensors").resolve().unlink()


def _no_settings(folder: Path) -> None:
    (folder / "config.json").unlink()


def _odd_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


@pytest.mark.parametrize("harm", [_shard_missing, _blob_missing, _no_settings, _odd_index])
def test_a_download_that_was_cut_short_is_fetched_again_and_that_is_told(cache: Path, harm: Callable):
    harm(snapshot(cache, "org/model"))
    found = models.local({"model-path": "org/model"}, {}, None)
    assert found.flags == {"model-path": "org/model"}
    (note,) = found.notes
    assert f"not whole in {cache}" in note
    assert "hf download org/model" in note


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_what_can_never_be_fetched_is_refused(cache: Path, variable: str):
    with pytest.raises(DeployError, match=variable) as caught:
        models.local({"model-path": "org/model"}, {variable: "1"}, None)
    assert caught.value.exit_code == ExitCode.MISSING
    assert "hf download org/model" in (caught.value.fix or "")


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_that_the_profile_names_is_the_one_that_counts(cache: Path, tmp_path: Path, variable: str):
    snapshot(cache, "org/model")
    other = tmp_path / "other"
    env = {variable: str(other)}
    confined = access.Account(None, os.geteuid(), os.getegid(), ())
    with pytest.raises(DeployError, match="the profile's env names") as caught:
        models.local({"model-path": "org/model"}, env, confined)
    hub = other / "hub" if variable == "HF_HOME" else other
    assert f"HF_HUB_CACHE={hub} hf download org/model" in (caught.value.fix or "")
    folder = snapshot(hub, "org/model")
    assert models.local({"model-path": "org/model"}, env, confined).flags["model-path"] == str(folder)


@needs_root
@pytest.mark.parametrize(
    ("shut", "bits"),
    [(".", 0o700), ("home", 0o700), ("hf/hub", 0o700), ("hf/hub/models--org--model/blobs/*", 0o600)],
)
def test_what_the_account_may_not_read_is_refused_and_the_fix_lets_it(
    cache: Path, tmp_path: Path, shut: str, bits: int
):
    folder = snapshot(cache, "org/model")
    for place in tmp_path.glob(shut) if "*" in shut else [tmp_path if shut == "." else cache.parents[0]]:
        place.chmod(bits)
    # pytest's own folders above are closed to all but root.
    above = [parent for parent in tmp_path.parents if not parent.stat().st_mode & 0o001]
    for parent in above:
        parent.chmod(0o711)
    try:
        with pytest.raises(DeployError, match="may not read the model org/model") as caught:
            models.local({"model-path": "org/model"}, {}, access.account(None))
        assert caught.value.exit_code == ExitCode.UNAVAILABLE
        fix, _, other = (caught.value.fix or "").partition(";")
        assert "--run-as" in other
        subprocess.run(["sh", "-c", fix], check=True)
        found = models.local({"model-path": "org/model"}, {}, access.account(None))
        assert found.flags["model-path"] == str(folder)
    finally:
        for parent in above:
            parent.chmod(0o700)


@needs_root
def test_with_sudo_the_cache_of_the_person_counts_too(cache: Path, tmp_path: Path, monkeypatch):
    entry = pwd.getpwnam("nobody")
    person = pwd.struct_passwd((*entry[:5], str(tmp_path / "home"), entry[6]))
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: person)
    monkeypatch.setenv("SUDO_USER", "somebody")
    folder = snapshot(tmp_path / "home" / ".cache" / "huggingface" / "hub", "org/model")
    assert models.local({"model-path": "org/model"}, {}, None).flags["model-path"] == str(folder)


def test_what_a_service_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "_HIDDEN", (tmp_path / "hidden",))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "linked"))
    (tmp_path / "linked").symlink_to(tmp_path / "hidden")
    snapshot(tmp_path / "hidden" / "hub", "org/model")
    with pytest.raises(DeployError, match="has a /tmp and /var/tmp of its own"):
        models.local({"model-path": "org/model"}, {}, access.account(None))


def test_a_folder_that_is_gone_is_told_before_anything_is_stopped(tmp_path: Path):
    models.require({"model-path": str(tmp_path), "log-requests-target": "/not/there"}, None)
    with pytest.raises(DeployError, match="--model-path /not/there is not there"):
        models.require({"model-path": "/not/there"}, None)


def test_a_folder_named_from_where_one_stands_is_one_for_the_service_too(
    cache: Path, tmp_path: Path, monkeypatch
):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert models.local({"model-path": "org/model"}, {}, None).flags == {
        "model-path": str(tmp_path / "org" / "model")
    }
