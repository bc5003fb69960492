"""The real server, started as a unit with an API key starts it: the key is in nothing that it logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.deploy.gate import engine_with_key
from dflash_deploy.engine.launch import Launch
from dflash_deploy.engine.sglang import http
from dflash_deploy.server.outcome import Served
from dflash_deploy.server.process import Server

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

KEY = "sesame-opens-it"


def test_the_key_is_used_and_logged_nowhere(sglang, smoke_flags, tmp_path: Path):
    file = tmp_path / "engine.yaml"
    file.write_text(f"api-key: {KEY}\n")
    plain = sglang.launch({**smoke_flags, "served-model-name": "tiny-random"})
    argv = (*engine_with_key(plain.argv), "--config", str(file))
    launch = Launch(argv, plain.host, plain.port, plain.env)
    with Server(launch, tmp_path / "run") as server:
        outcome = server.start()
        log = server.log_path.read_text()
        assert isinstance(outcome, Served), log[-3000:]
        assert http.served_model(launch.base_url, timeout_s=30) is None
        assert http.served_model(launch.base_url, timeout_s=30, api_key=KEY) == "tiny-random"
        assert http.generate_once(launch.base_url, timeout_s=60, api_key=KEY).tokens == 1
    log = server.log_path.read_text()
    assert "server_args={" in log
    assert "'api_key': '(the API key)'" in log
    assert KEY not in log
