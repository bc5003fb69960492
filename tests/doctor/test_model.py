from __future__ import annotations

import hashlib
import json
import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.doctor import hashes, hub
from dflash_deploy.doctor import model as checks
from dflash_deploy.doctor.finding import NotCheckedError, Status
from dflash_deploy.doctor.subject import Model, Request, Subject
from dflash_deploy.errors import DeployError

from .builders import subject
from .conftest import write_pair, write_profile

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def of(folder: Path, target: Path | str, draft: Path | str, *, deep: bool = False) -> Subject:
    profile = write_profile(folder, target, draft)
    found = subject(profile=str(profile))
    if deep:
        loaded = found.request
        return subject(request=Request(loaded.profile, loaded.profile_name, hashes=True))
    return found


def cached(name: str, source: Path) -> Path:
    """Lay a checkpoint out in the hub's cache, as its client does: blobs by digest, links by name."""
    repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if file.suffix == ".json":
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - git's
        (repository / "blobs" / digest).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_without_a_profile_nothing_is_said_of_models():
    nothing = subject()
    assert [
        check(nothing)
        for check in (checks.target, checks.draft, checks.whole, checks.content, checks.belong_together)
    ] == [None] * 5


def test_a_whole_pair_passes_every_check(tmp_path: Path, pair):
    found = of(tmp_path, *pair)
    for check in (checks.target, checks.draft, checks.whole, checks.belong_together):
        answer = check(found)
        assert answer is not None
        assert answer.status is Status.PASS, answer


def test_a_checkpoint_that_is_not_here_yet_warns_and_a_missing_folder_fails(tmp_path: Path, pair):
    answer = checks.target(subject(profile="rtx5090-single-user"))
    assert answer is not None
    assert (answer.status, answer.fix) == (Status.WARN, "hf download RadixArk/Qwen3.8-27B-NVFP4")
    answer = checks.target(of(tmp_path, tmp_path / "nowhere", pair[1]))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "no such folder" in answer.text


def test_a_profile_that_drafts_with_nothing_fails():
    found = subject(profile="rtx5090-single-user", overrides=("speculation={method: mtp}",))
    assert checks.draft(found) is None
    assert checks.belong_together(found) is None


def test_a_file_that_is_cut_short_fails(tmp_path: Path, pair):
    shard = next(pair[0].glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    answer = checks.target(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert shard.name in answer.text


def test_a_file_that_the_index_names_and_is_missing_fails(tmp_path: Path, pair):
    next(pair[0].glob("*.safetensors")).unlink()
    answer = checks.target(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "is missing" in answer.text
    assert "hf download" in (answer.fix or "")


def test_an_index_of_another_size_fails(tmp_path: Path, pair):
    index = pair[0] / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_size"] += 1
    index.write_text(json.dumps(document))
    answer = checks.whole(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "the index tells of" in answer.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('{"model": {"vocab": ', "cut short"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "Git LFS pointer"),
        ("<html>", "no JSON"),
    ],
)
def test_a_tokenizer_that_is_none_fails(content: str, words: str, tmp_path: Path, pair):
    (pair[0] / "tokenizer.json").write_text(content)
    answer = checks.whole(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert words in answer.text
    # Its folder is no name on the hub.
    assert f"hf download OWNER/NAME --local-dir {pair[0]}" == answer.fix


def test_a_checkpoint_that_cannot_be_read_is_told_once_and_not_called_whole(tmp_path: Path, pair):
    shard = next(pair[0].glob("*.safetensors"))
    shard.write_bytes(b"")
    found = of(tmp_path, *pair)
    answer = checks.target(found)
    assert answer is not None
    # The hub's client takes a file that is there for whole.
    assert (answer.fix or "").endswith(f"--include {shard.name} --force-download")
    for check in (checks.whole, checks.belong_together):
        with pytest.raises(NotCheckedError, match="target"):
            check(found)


def test_a_checkpoint_that_may_not_be_read_is_not_downloaded_again():
    error = DeployError("/m/config.json: cannot be read", fix="hf download OWNER/NAME")
    error.__cause__ = DeployError("in the cache")
    error.__cause__.__cause__ = PermissionError(13, "Permission denied", "/m/config.json")
    answer = checks.target(subject(target=Model("/m", None, None, error), draft=None))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert (answer.fix or "").startswith("ls -ldL /m/config.json")


def test_a_target_without_a_tokenizer_fails(tmp_path: Path, pair):
    (pair[0] / "tokenizer.json").unlink()
    answer = checks.whole(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "no tokenizer" in answer.text


def test_a_download_that_was_broken_off(tmp_path: Path, pair):
    snapshot = cached("me/target", pair[0])
    found = of(tmp_path, "me/target", pair[1])
    answer = checks.whole(found)
    assert answer is not None
    assert answer.status is Status.PASS
    (snapshot.parents[1] / "blobs" / "abc.incomplete").touch()
    answer = checks.whole(found)
    assert answer is not None
    assert answer.status is Status.WARN
    assert "hf download me/target" in (answer.fix or "")
    next(snapshot.glob("*.safetensors")).unlink()
    answer = checks.target(of(tmp_path, "me/target", pair[1]))
    assert answer is not None
    assert answer.status is Status.FAIL


@pytest.mark.parametrize("place", ["cache", "folder"])
def test_hashes_find_one_changed_byte(tmp_path: Path, pair, place: str):
    target = pair[0]
    name: str | Path = target
    if place == "cache":
        target = cached("me/target", pair[0])
        name = "me/target"
        cached("me/draft", pair[1])
        found = of(tmp_path, name, "me/draft", deep=True)
    else:
        for folder in pair:
            record(folder)
        found = of(tmp_path, *pair, deep=True)
    answer = checks.content(found)
    assert answer is not None
    assert answer.status is Status.PASS, answer
    shard = next(target.glob("*.safetensors")).resolve()
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    answer = checks.content(found)
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "damaged" in answer.text
    assert "rm " in (answer.fix or "")


def record(folder: Path) -> None:
    """What ``hf download --local-dir`` writes beside the files."""
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for file in folder.glob("*.*"):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            (records / f"{file.name}.metadata").write_text(f"{COMMIT}\n{digest}\n1700000000.0\n")


def test_files_without_a_recorded_digest_are_unknown(tmp_path: Path, pair):
    answer = checks.content(of(tmp_path, *pair, deep=True))
    assert answer is not None
    assert answer.status is Status.UNKNOWN
    assert checks.content(of(tmp_path, *pair)) is None


@pytest.mark.parametrize(
    ("dflash", "words"),
    [
        ({"target_layer_ids": [1, 9]}, "layers: the draft reads layer 9"),
        ({"num_target_layers": 64}, "made for a target with 64"),
        ({"mask_token_id": 5000}, "mask token"),
    ],
)
def test_a_draft_of_another_target_fails(tmp_path: Path, dflash, words):
    answer = checks.belong_together(of(tmp_path, *write_pair(tmp_path, **dflash)))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert words in answer.text


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
def test_a_draft_of_another_width_or_vocabulary_fails(tmp_path: Path, pair, key: str):
    config = pair[1] / "config.json"
    document = json.loads(config.read_text())
    document[key] *= 2
    config.write_text(json.dumps(document))
    answer = checks.belong_together(of(tmp_path, *pair))
    assert answer is not None
    assert answer.status is Status.FAIL


def test_a_known_draft_is_compared_without_its_files(tmp_path: Path, pair):
    answer = checks.belong_together(subject(profile="rtx5090-single-user"))
    assert answer is not None
    assert answer.status is Status.PASS
    answer = checks.belong_together(of(tmp_path, pair[0], "qwen3.8-27b-dflash2"))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "vocabulary" in answer.text
    assert "hidden size" in answer.text
    answer = checks.belong_together(of(tmp_path, "somebody/target", "somebody/draft"))
    assert answer is not None
    assert answer.status is Status.UNKNOWN


@given(content=st.binary(max_size=200), cut=st.integers(0, 199))
def test_a_digest_is_of_every_byte(tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int):
    file = tmp_path_factory.mktemp("digest") / "file"
    file.write_bytes(content)
    for like in ("0" * 64, "0" * 40):
        whole = hashes.digest_of(file, like)
        assert len(whole) == len(like)
        if content:
            at = cut % len(content)
            changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            file.write_bytes(changed)
            assert hashes.digest_of(file, like) != whole
            file.write_bytes(content)


@given(text=st.binary(max_size=300))
def test_any_record_of_digests_is_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
):
    folder = tmp_path_factory.mktemp("record")
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    (folder / "a").touch()
    (records / "a.metadata").write_bytes(text)
    found = hashes.recorded(folder / "a")
    assert found is None or len(found) in (40, 64)


def test_the_command_that_asks_again_can_be_typed_as_it_stands():
    request = Request(profile_name="my own.yaml", overrides=("model.path=/a b",), python=Path("/c d/python"))
    asked = ["dflash-deploy", "doctor", "my own.yaml", "--set", "model.path=/a b", "--python", "/c d/python"]
    assert shlex.split(request.command) == asked


def test_a_model_that_everyone_makes_is_not_looked_for_on_the_hub():
    found = subject(profile="sglang-cpu-smoke")
    answer = checks.target(found)
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "doctor sglang-cpu-smoke --set model.path=" in (answer.fix or "")
    assert hub.offline(found).status is Status.PASS
    assert checks.whole(found) is None
