from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.checkpoint import Checkpoint, read_checkpoint
from dflash_deploy.errors import DeployError, ExitCode
from tests.checkpoint.checkpoints import Qwen, small_qwen, write_checkpoint, write_safetensors
from tests.checkpoint.hub_server import COMMIT, Hub, serve
from tests.recording_proxy import recording_proxy

NAME = "someone/Small-Qwen"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = small_qwen()
    return write_checkpoint(tmp_path / "repository", model.config(), model.build(), shards=3)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub({NAME: folder})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint + "/")
        yield running


def in_cache(home: Path, folder: Path, *, reference: str = "main", commit: str = COMMIT) -> Path:
    """The folder's files as a download leaves them: blobs, and links to them."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / reference).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / reference).write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{number:064}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def facts(checkpoint: Checkpoint) -> tuple[object, ...]:
    return checkpoint.shape, checkpoint.weights, checkpoint.disk_bytes, checkpoint.files


def test_the_hub_tells_the_same_as_the_folder(hub: Hub, folder: Path) -> None:
    read = read_checkpoint(NAME)
    assert facts(read) == facts(read_checkpoint(folder))
    assert (read.hub_name, read.commit) == (NAME, COMMIT)
    assert read.place == f"{NAME}@{COMMIT[:8]} (hub)"


def test_a_large_checkpoint_costs_little_of_the_network(hub: Hub, tmp_path: Path) -> None:
    model = Qwen()
    hub.repositories["Qwen/Qwen3.8-27B"] = write_checkpoint(
        tmp_path / "large", model.config(), model.build(), shards=8
    )
    assert read_checkpoint("Qwen/Qwen3.8-27B").disk_bytes > 55e9
    assert sum(request.sent for request in hub.requests) < 4 << 20
    # Of every file, one request brings both the header's length and the header.
    weights = [
        request
        for request in hub.requests
        if request.path.startswith("/storage") and "model-" in request.path
    ]
    assert len(weights) == 8
    assert all(request.bytes_range for request in weights)


def test_a_header_longer_than_the_first_request(hub: Hub, tmp_path: Path) -> None:
    config = small_qwen().config()
    tensors = {
        f"model.language_model.layers.0.mlp.experts.{n}.up_proj.weight": ("BF16", (2, 2)) for n in range(4000)
    }
    hub.repositories["someone/experts"] = write_checkpoint(tmp_path / "many", config, tensors)
    assert sum(row.tensors for row in read_checkpoint("someone/experts").weights) == 4000


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    read_checkpoint(NAME)
    told = {request.path.startswith("/storage"): request.authorization for request in hub.requests}
    assert told == {False: "Bearer hf_secret", True: None}


def test_the_token_of_a_login_is_used(hub: Hub, hub_folders: Path) -> None:
    (hub_folders / "token").write_text("hf_login\n")
    read_checkpoint(NAME)
    assert hub.requests[0].authorization == "Bearer hf_login"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, ExitCode.UNAVAILABLE, "no access"),
        (403, ExitCode.UNAVAILABLE, "no access"),
        (404, ExitCode.MISSING, "the hub has no"),
        (500, ExitCode.UNAVAILABLE, "answered 500"),
        (429, ExitCode.UNAVAILABLE, "answered 429"),
    ],
)
def test_a_hub_that_refuses(hub: Hub, status: int, code: ExitCode, said: str) -> None:
    hub.status = status
    with pytest.raises(DeployError, match=said) as caught:
        read_checkpoint(NAME)
    assert caught.value.exit_code == code
    assert caught.value.fix


def test_an_unknown_revision(hub: Hub) -> None:
    with pytest.raises(DeployError, match="not in this revision"):
        read_checkpoint(NAME, revision="v2")
    assert read_checkpoint(NAME, revision="v1/x").commit == COMMIT


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"[]",
        b"{}",
        b'{"sha": "../x", "siblings": []}',
        b'{"sha": "' + COMMIT.encode() + b'", "siblings": [1, {}]}',
        b'{"sha": "' + COMMIT.encode() + b'", "siblings": [{"rfilename": "config.json"}]}',
        b'{"sha": "' + COMMIT.encode() + b'", "siblings": [{"rfilename": "config.json", "size": -5}]}',
        b"[" * 100_000,
        b" " * (17 << 20),
    ],
)
def test_a_hub_that_answers_nonsense(hub: Hub, listing: bytes) -> None:
    hub.listing = listing
    with pytest.raises(DeployError):
        read_checkpoint(NAME)


def test_a_hub_that_serves_no_parts_of_files(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    assert read_checkpoint(NAME).shape.layers == 4
    tensors = {
        f"model.language_model.layers.0.mlp.experts.{n}.up_proj.weight": ("BF16", (2, 2)) for n in range(4000)
    }
    hub.repositories["someone/experts"] = write_checkpoint(tmp_path / "many", small_qwen().config(), tensors)
    with pytest.raises(DeployError, match="does not serve the part"):
        read_checkpoint("someone/experts")


def test_an_answer_that_ends_early(hub: Hub) -> None:
    hub.cut_at = 100
    with pytest.raises(DeployError, match=r"sent 100 of [\d,]+ bytes"):
        read_checkpoint(NAME)


def test_no_hub_in_reach_says_what_to_do() -> None:
    with pytest.raises(DeployError, match="cannot be reached") as caught:
        read_checkpoint(NAME)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert f"hf download {NAME}" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALL_PROXY", "socks://127.0.0.1:1080", "Unknown scheme"),
        ("NO_PROXY", "localhost,fe80::/10", "Invalid port"),
        ("ALL_PROXY", "socks5://127.0.0.1:1080", "needs the package socksio"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_said(variable, value, said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    # As where the package is not there.
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(DeployError, match=said) as caught:
        read_checkpoint("someone/something")
    assert caught.value.fix


def test_models_are_fetched_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording_proxy() as (proxy, seen):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
        with pytest.raises(DeployError, match="407"):
            read_checkpoint("someone/something")
    assert seen == ["CONNECT hub.example:443 HTTP/1.1"]


def test_a_known_model_out_of_reach_names_its_card() -> None:
    for offline in (True, False):
        with pytest.raises(DeployError) as caught:
            read_checkpoint("RadixArk/Qwen3.8-27B-NVFP4", offline=offline)
        assert "qwen3.8-27b-nvfp4" in str(caught.value.fix)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_by_the_environment(hub: Hub, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(DeployError, match="nor in the Hugging Face cache") as caught:
        read_checkpoint(NAME)
    assert caught.value.exit_code == ExitCode.MISSING
    assert hub.requests == []


def test_the_cache_comes_before_the_hub(hub: Hub, folder: Path, hub_folders: Path) -> None:
    in_cache(hub_folders, folder)
    read = read_checkpoint(NAME)
    assert facts(read) == facts(read_checkpoint(folder))
    assert (read.commit, read.place) == (COMMIT, f"{NAME}@{COMMIT[:8]} (cache)")
    assert hub.requests == []


def test_revisions_in_the_cache(folder: Path, hub_folders: Path) -> None:
    other = "f" * 40
    in_cache(hub_folders, folder, reference="refs/pr/1", commit=other)
    for revision in ("refs/pr/1", other, other[:7]):
        assert read_checkpoint(NAME, revision=revision, offline=True).commit == other
    with pytest.raises(DeployError, match="nor in the"):
        read_checkpoint(NAME, offline=True)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_the_cache_may_lie_elsewhere(
    folder: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache(tmp_path, folder)
    monkeypatch.setenv(variable, str(tmp_path / "hub"))
    assert read_checkpoint(NAME, offline=True).commit == COMMIT


def test_a_broken_off_download_is_completed_from_the_hub(hub: Hub, folder: Path, hub_folders: Path) -> None:
    snapshot = in_cache(hub_folders, folder)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    assert facts(read_checkpoint(NAME)) == facts(read_checkpoint(folder))
    with pytest.raises(DeployError, match=r"model-00002-of-00003\.safetensors: is missing") as caught:
        read_checkpoint(NAME, offline=True)
    assert f"hf download {NAME}" in str(caught.value.fix)
    hub.status = 500
    with pytest.raises(DeployError, match="is missing"):
        read_checkpoint(NAME)


def test_a_link_to_a_blob_that_is_gone(folder: Path, hub_folders: Path) -> None:
    snapshot = in_cache(hub_folders, folder)
    (snapshot / "config.json").resolve().unlink()
    with pytest.raises(DeployError, match="a link to a file that is not there"):
        read_checkpoint(NAME, offline=True)


@pytest.mark.parametrize("reference", ["../../../x", "", "zz", "a" * 40_000])
def test_a_cache_with_a_wrong_reference(folder: Path, hub_folders: Path, reference: str) -> None:
    snapshot = in_cache(hub_folders, folder)
    (snapshot.parent.parent / "refs" / "main").write_text(reference)
    with pytest.raises(DeployError, match="nor in the"):
        read_checkpoint(NAME, offline=True)


@pytest.mark.parametrize("revision", ["../../x", "a//b", "", "-x", "a b", "\0"])
def test_a_wrong_revision(revision: str) -> None:
    with pytest.raises(DeployError, match="no branch, tag or commit"):
        read_checkpoint(NAME, revision=revision, offline=True)


@pytest.mark.parametrize(
    "name", ["../etc", "a/b/c", "/nowhere/at/all", "a--b/c", "a/../b", "x" * 300, "a b", "~nobody0/x"]
)
def test_what_is_neither_a_folder_nor_a_hub_name(name: str) -> None:
    with pytest.raises(DeployError, match="no such folder") as caught:
        read_checkpoint(name, offline=True)
    assert caught.value.exit_code == ExitCode.MISSING


def test_the_hub_library_reads_this_hub_alike(hub: Hub, folder: Path) -> None:
    """What is tested against here is what Hugging Face's own library takes for a hub."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write_safetensors(folder / "model.safetensors", {"x": ("BF16", (3, 4))})
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=False)
    info = api.model_info(NAME, files_metadata=True)
    assert info.sha == COMMIT
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    assert sizes["config.json"] == (folder / "config.json").stat().st_size
    metadata = api.parse_safetensors_file_metadata(NAME, "model.safetensors")
    assert metadata.parameter_count == {"BF16": 12}
    assert json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"] == 64
