"""Servers that stand behind a person's proxy, and those of this machine, which never do."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import pytest

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint, discover
from dflash_deploy.bench.load import Load, Player
from dflash_deploy.bench.quality.asking import ask as ask_all
from dflash_deploy.bench.transport import Patience
from dflash_deploy.bench.workloads.lengths import ServerCounter
from dflash_deploy.bench.workloads.prompt import ask
from dflash_deploy.errors import DeployError
from tests.recording_proxy import recording_proxy
from tests.tool import run_tool

from .sse_server import Script, serving

TEXT = "one two three four five"


def one(url):
    load = Load(Endpoint(url), [ask("One?")], Sampling(9), Patience(30.0, 60.0))
    (result,) = asyncio.run(Player(load).closed(1, requests=1))
    return result


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def port_of(url):
    return "127.0.0.1", urlsplit(url).port


def test_every_question_to_a_server_behind_a_proxy_goes_through_it(monkeypatch):
    with serving(Script(tokenizes=True)) as (url, _), recording_proxy(port_of(url)) as (proxy, seen):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        result = one("http://model.example:8000/root")
        assert (result.error, result.text) == (None, TEXT)
        assert seen == ["POST http://model.example:8000/root/v1/chat/completions HTTP/1.1"]
        assert ServerCounter("http://model.example:8000", "m", api_key=None)(ask("one two three")) == 3
        ask_all(Endpoint("http://model.example:8000"), [ask("One?")], max_tokens=1)
        discover("http://model.example:8000")
    asked = [line.removeprefix("POST ").removeprefix("GET ").split()[0] for line in seen[1:]]
    assert {f"http://model.example:8000{path}" for path in (
        "/tokenize", "/v1/chat/completions", "/v1/models", "/server_info",
    )} <= set(asked)  # fmt: skip


def test_the_bench_says_of_each_server_that_a_proxy_is_between(tmp_path):
    with serving(Script(wait_s=0.005)) as (url, _), recording_proxy(port_of(url)) as (proxy, _):
        ended = run_tool(
            "bench", "http://a.example", "--against", "http://b.example", "--most-rounds", "1",
            env={"http_proxy": proxy, "HOME": str(tmp_path)},
        )  # fmt: skip
    for server in "ab":
        assert f"http://{server}.example is asked through the proxy 127.0.0.1:" in ended.stderr


def test_nothing_of_this_machine_reaches_a_proxy(monkeypatch):
    with serving(Script(tokenizes=True)) as (url, _), recording_proxy() as (proxy, seen):
        for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        assert one(url).text == TEXT
        assert ServerCounter(url, "m", api_key=None)(ask("one two three")) == 3
        ask_all(Endpoint(url), [ask("One?")], max_tokens=1)
        discover(url)
    assert seen == []


def test_a_server_by_tls_is_reached_through_a_tunnel_and_must_be_whom_one_trusts(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with (
        serving(Script(wait_s=0.01), tls=context) as (url, _),
        recording_proxy(port_of(url)) as (proxy, seen),
    ):
        monkeypatch.setenv("https_proxy", proxy)
        assert one("https://model.example").error_kind == "untrusted"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        result = one("https://model.example")
        assert (result.error, result.text) == (None, TEXT)
        assert one("https://other.example").error_kind == "untrusted"
    assert seen == [*["CONNECT model.example:443 HTTP/1.1"] * 2, "CONNECT other.example:443 HTTP/1.1"]


def test_what_a_proxy_refuses_is_told_in_its_words(monkeypatch):
    with recording_proxy() as (proxy, _):
        monkeypatch.setenv("ALL_PROXY", proxy)
        by_tls, plain = one("https://model.example"), one("http://model.example")
    assert by_tls.error_kind == "unreachable"
    assert by_tls.error == "the proxy does not connect to it: HTTP/1.1 407 Proxy Authentication Required"
    assert plain.error == "HTTP 407"


@pytest.mark.parametrize("proxy", ["socks5://me:secret@p:1080", "https://p:1", "http://[p", "http://"])
def test_a_proxy_that_is_not_spoken_to_is_said_before_anything_is_asked(proxy, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(DeployError, match="is not spoken to") as caught:
        discover("http://model.example")
    assert "secret" not in caught.value.message
    assert "no_proxy" in str(caught.value.fix)
