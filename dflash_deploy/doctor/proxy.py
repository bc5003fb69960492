"""What a proxy of this shell means for servers, and for what is fetched from the hub."""

from __future__ import annotations

import os
from importlib.util import find_spec
from urllib.parse import urlsplit

from dflash_deploy.doctor.finding import Answer, passed, warned
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.proxy import own_addresses, proxies, sparing

_HTTP = ("http", "https")
_SOCKS = ("socks5", "socks5h")


def usable(subject: Subject) -> Answer | None:
    """Hugging Face's client can use the proxy, and servers that are started here do not need it.

    SGLang asks itself over HTTP before it is ready, by a client that takes the proxy of its environment;
    what this tool starts is told not to (``dflash_deploy.proxy``), and only a command by hand is not.
    """
    environ = {**os.environ, **(subject.profile.env if subject.profile else {})}
    found = proxies(environ)
    if not found:
        return None
    for name, value in found.items():
        scheme = _scheme(value)
        if scheme is None:
            return warned(
                f"{name} is no address of a proxy, so that nothing is fetched from the hub",
                f"export {name}=http://HOST:PORT",
            )
        if scheme in _SOCKS and find_spec("socksio") is None:
            return warned(
                f"{name} is a proxy by SOCKS, which nothing is fetched through from the hub without socksio",
                "pip install socksio beside dflash-deploy and in SGLang's environment",
            )
        if scheme not in (*_HTTP, *_SOCKS):
            return warned(
                f"{name} begins with {scheme}://, which Hugging Face's client does not know",
                f"export {name}=socks5://HOST:PORT (or http://HOST:PORT)",
            )
    host = subject.profile.service.host if subject.profile else "127.0.0.1"
    own, spared = own_addresses(host), sparing(host, environ)["no_proxy"]
    return passed(
        f"servers that are started here reach {own} past the proxy",
        f"SGLang that is started by hand needs no_proxy={spared} (NO_PROXY alike): it asks itself before it "
        "is ready",
    )


def _scheme(proxy: str) -> str | None:
    """Which kind of proxy it is; None where it is no address."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        whole = parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts.scheme if whole else None
