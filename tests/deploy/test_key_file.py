"""Where a key is kept: read, never shown, and kept from others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dflash_deploy.deploy import key_file
from dflash_deploy.errors import DeployError
from dflash_deploy.watch.places import Place


def test_an_api_key_is_read_and_never_shown(tmp_path: Path):
    file = tmp_path / "key.yaml"
    file.write_text("api-key: sesame\n")
    key = key_file.read_api_key(file)
    assert key == "sesame"
    assert "sesame" not in repr(Place("url", "x", "http://x", api_key=key))


@pytest.mark.parametrize(
    "content", [b"", b"sesame", b"api-key: [1]", b'api-key: "a\\nb"', b"\xff", b"{" * 5000, b"api_key: x"]
)
def test_a_key_file_without_a_key_is_told_without_its_content(tmp_path: Path, content: bytes):
    file = tmp_path / "key.yaml"
    file.write_bytes(content)
    file.chmod(0o600)
    for look in (key_file.read_api_key, key_file.require):
        with pytest.raises(DeployError) as caught:
            look(file)
        assert "sesame" not in caught.value.message


def test_a_file_that_is_not_there_or_open_to_others_is_refused_and_the_fix_mends_it(tmp_path: Path):
    file = tmp_path / "a key.yaml"
    with pytest.raises(DeployError, match="is not there") as missing:
        key_file.require(file)
    subprocess.run(["sh", "-c", missing.value.fix or "false"], check=True)
    key_file.require(file)
    file.chmod(0o640)
    with pytest.raises(DeployError, match=r"others may read .*-rw-r-----") as open_to_others:
        key_file.require(file)
    subprocess.run(["sh", "-c", (open_to_others.value.fix or "false").split(";")[0]], check=True)
    key_file.require(file)


def test_a_folder_is_no_key_file(tmp_path: Path):
    with pytest.raises(DeployError, match="is no file"):
        key_file.require(tmp_path)
