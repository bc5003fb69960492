"""Servers elsewhere are asked through a person's proxy, those of this machine never."""

from __future__ import annotations

import os

import pytest

from tests.engine.test_http import Server, server
from tests.recording_proxy import recording_proxy
from tests.tool import run_tool

__all__ = ["server"]


@pytest.mark.parametrize("command", ["status", "health"])
def test_who_is_asked_through_a_proxy(command: str, server: Server):
    server.says("GET /health", {})
    with recording_proxy() as (proxy, seen):
        env = {**os.environ, "HTTP_PROXY": proxy, "ALL_PROXY": proxy}
        run_tool(command, "--url", server.url, env=env)
        assert seen == []
        told = run_tool(command, "--url", "http://model.example:8000", "--json", env=env)
    assert "GET http://model.example:8000/health HTTP/1.1" in seen
    # What takes connections is the proxy.
    assert "through a proxy" in told.stdout
    assert "takes connections" not in told.stdout
