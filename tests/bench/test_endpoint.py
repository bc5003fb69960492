import json
import os

import pytest

from dflash_deploy.bench.endpoint import KEY_VARIABLE, Endpoint, discover, read_api_key
from dflash_deploy.errors import DeployError

from .test_load import speaks


def test_the_key_comes_from_the_environment_or_a_private_file(tmp_path):
    assert read_api_key(None, {KEY_VARIABLE: " k-1 "}) == "k-1"
    assert read_api_key(None, {}) is None
    for content in ("k-2\n", 'api-key: "k-2"\n'):
        path = tmp_path / "key"
        path.write_text(content)
        path.chmod(0o600)
        assert read_api_key(path, {KEY_VARIABLE: "k-1"}) == "k-2"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_may_use_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    path.write_text("secret-key")
    path.chmod(mode)
    with pytest.raises(DeployError, match="others than its owner") as caught:
        read_api_key(path)
    assert "secret-key" not in str(caught.value)
    assert "chmod 600" in caught.value.fix


@pytest.mark.parametrize("content", ["", "two words", "naïve", "api-key:"])
def test_what_is_no_key(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(DeployError, match="one key"):
        read_api_key(path)
    with pytest.raises(DeployError, match="cannot be read"):
        read_api_key(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(DeployError, match="cannot be read"):
        read_api_key(tmp_path / "pipe")


def test_a_key_is_not_shown():
    assert "secret" not in repr(Endpoint("http://a", api_key="secret"))


def test_a_server_is_asked_what_it_is():
    body = json.dumps({"data": [{"id": "llama"}]}).encode()
    url, thread = speaks(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    found = discover(f"{url}/v1/")
    thread.join(10)
    assert found == Endpoint(url, "llama")
    assert discover(url, model="mine").model == "mine"
