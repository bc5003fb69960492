from __future__ import annotations

import pytest

from dflash_deploy.doctor.finding import Status
from dflash_deploy.doctor.proxy import spares_this_machine

from .builders import subject


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_nothing_is_said_without_a_proxy_for_http(monkeypatch: pytest.MonkeyPatch):
    assert spares_this_machine(subject()) is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert spares_this_machine(subject()) is None
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("http_proxy", "")
    assert spares_this_machine(subject()) is None


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize(
    ("spared", "status"),
    [
        ("", Status.FAIL),
        ("10.0.0.0/8, .corp", Status.FAIL),
        ("corp,localhost", Status.FAIL),
        ("corp, 127.0.0.1", Status.PASS),
        ("127.0.0.0/8", Status.PASS),
        ("*", Status.PASS),
    ],
)
def test_a_server_must_reach_itself(name, spared, status, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("no_proxy", spared)
    answer = spares_this_machine(subject())
    assert answer is not None
    assert answer.status is status
    assert bool(answer.fix) == (status is Status.FAIL)


def test_the_variables_and_the_address_of_the_profile_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    overrides = ("env.http_proxy=http://proxy:3128", "service.host=localhost")
    answer = spares_this_machine(subject(profile="rtx5090-single-user", overrides=overrides))
    assert answer is not None
    assert answer.status is Status.FAIL
    assert "localhost" in answer.text
    answer = spares_this_machine(
        subject(profile="rtx5090-single-user", overrides=(*overrides, "env.no_proxy=localhost"))
    )
    assert answer is not None
    assert answer.status is Status.PASS
