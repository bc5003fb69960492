from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from dflash_deploy.deploy import gate
from dflash_deploy.proxy import proxy_for, sparing

PROXY = "http://proxy.corp:3128"
OWN = "127.0.0.1,localhost"

SPARED = [
    ({}, OWN, OWN),
    ({"NO_PROXY": ".corp"}, f".corp,{OWN}", f".corp,{OWN}"),
    ({"no_proxy": ".corp"}, f".corp,{OWN}", f".corp,{OWN}"),
    ({"no_proxy": "a", "NO_PROXY": "b"}, f"a,{OWN}", f"b,{OWN}"),
    ({"no_proxy": "", "NO_PROXY": "b"}, f"b,{OWN}", f"b,{OWN}"),
    ({"NO_PROXY": "*"}, "*", "*"),
    ({"no_proxy": "*", "NO_PROXY": "b"}, "*", f"b,{OWN}"),
]


@pytest.mark.parametrize(("theirs", "lower", "upper"), SPARED)
def test_a_server_is_spared_beside_what_a_person_spares(theirs, lower, upper):
    told = sparing("127.0.0.1", {"HTTP_PROXY": PROXY, **theirs})
    assert told == {"no_proxy": lower, "NO_PROXY": upper}
    assert sparing("127.0.0.1", theirs) == {}


@pytest.mark.parametrize(("theirs", "lower", "upper"), SPARED)
def test_the_program_of_a_unit_does_the_same(theirs, lower, upper):
    shown = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    argv = gate.past_proxies((sys.executable, "-c", shown, "a b", "--c=$d"), "127.0.0.1")
    done = subprocess.run(argv, env={"PATH": os.environ["PATH"], **theirs}, capture_output=True, check=True)
    words, environ = json.loads(done.stdout)
    assert words == ["a b", "--c=$d"]
    assert (environ["no_proxy"], environ["NO_PROXY"]) == (lower, upper)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("0.0.0.0", OWN),
        ("::", f"::1,{OWN}"),
        ("192.168.1.5", f"192.168.1.5,{OWN}"),
        ("localhost", "localhost,127.0.0.1"),
    ],
)
def test_the_address_that_a_server_asks_itself_at_is_spared(host, own):
    assert sparing(host, {"all_proxy": PROXY})["no_proxy"] == own


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:30000",
        "https://localhost",
        "http://[::1]:1",
        f"http://{socket.gethostname()}",
        f"http://{socket.gethostname().partition('.')[0]}.lan:30000",
        "http://localhost.localdomain",
        "http://127.9.9.9",
    ],
)
def test_this_machine_is_never_asked_through_a_proxy(url):
    assert proxy_for(url, {"http_proxy": PROXY, "HTTPS_PROXY": PROXY, "ALL_PROXY": PROXY}) is None


def test_a_name_that_only_begins_like_this_machines_is_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu1.corp")
    asked = {
        host: proxy_for(f"http://{host}", {"http_proxy": PROXY}) for host in ("gpu1", "gpu11", "gpu1.cor")
    }
    assert asked == {"gpu1": None, "gpu11": PROXY, "gpu1.cor": PROXY}


@pytest.mark.parametrize(
    ("environ", "proxy"),
    [
        ({"HTTP_PROXY": "proxy.corp:3128"}, PROXY),
        ({"HTTPS_PROXY": PROXY}, None),
        ({"ALL_PROXY": PROXY}, PROXY),
        ({"http_proxy": "", "HTTP_PROXY": PROXY}, None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "*"}, None),
        ({"ALL_PROXY": PROXY, "no_proxy": "x, 203.0.113.0/24"}, None),
        ({"ALL_PROXY": PROXY, "no_proxy": "203.0.113.7:8000"}, None),
        ({"ALL_PROXY": PROXY, "no_proxy": "203.0.113.7:8001,.,:8000,fe80::/10"}, PROXY),
    ],
)
def test_other_machines_are_asked_as_the_person_set_it(environ, proxy):
    assert proxy_for("http://203.0.113.7:8000", environ) == proxy


@pytest.mark.parametrize("spared", ["corp", ".corp", "*.corp", "gpu.corp"])
def test_a_domain_spares_its_hosts(spared):
    assert proxy_for("https://GPU.corp/v1", {"https_proxy": PROXY, "no_proxy": spared}) is None
    assert proxy_for("https://gpucorp.com", {"https_proxy": PROXY, "no_proxy": spared}) == PROXY


@pytest.mark.parametrize("url", ["http://[::1", "http://a:99999", "http://"])
def test_what_is_no_address_has_none(url):
    assert proxy_for(url, {"http_proxy": PROXY, "no_proxy": "b:80"}) is None
