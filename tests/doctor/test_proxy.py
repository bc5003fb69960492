from __future__ import annotations

import pytest

from dflash_deploy.doctor import proxy
from dflash_deploy.doctor.finding import Status
from dflash_deploy.doctor.proxy import usable

from .builders import subject


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_nothing_is_said_without_a_proxy(monkeypatch: pytest.MonkeyPatch):
    assert usable(subject()) is None
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("http_proxy", "")
    assert usable(subject()) is None


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_a_proxy_is_no_trouble_for_what_is_started_here(name, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "proxy:3128")
    monkeypatch.setenv("no_proxy", ".corp")
    answer = usable(subject(profile="rtx5090-single-user"))
    assert answer is not None
    assert answer.status is Status.PASS
    assert "127.0.0.1,localhost" in answer.text
    assert "no_proxy=.corp,127.0.0.1,localhost " in answer.evidence[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("socks5://me:secret@p:1080", "without socksio"),
        ("socks://127.0.0.1:1080", "begins with socks://"),
        ("http://me:secret@[::1", "is no address"),
        ("me:secret@p:port", "is no address"),
    ],
)
def test_a_proxy_that_the_hubs_client_cannot_use_is_said(value, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proxy, "find_spec", lambda _: None)
    answer = usable(subject(profile="rtx5090-single-user", overrides=(f"env.ALL_PROXY={value}",)))
    assert answer is not None
    assert answer.status is Status.WARN
    assert said in answer.text
    assert answer.fix
    assert "secret" not in str(answer)
