"""The proxy of a person's environment: who is asked through it, and how a server reaches itself past it.

SGLang asks itself over HTTP before it is ready, by a client (``requests``) that takes the proxy of its
environment even for a loopback address: 0.5.16 to 0.5.23 alike, ``/model_info``, ``/generate`` and
``/freeze_gc``. A router asks its engines the same way.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not listened on
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The proxies that are set, by their variables' names in lower case."""
    return {name: value for name in _PROXIES if (value := _setting(environ, name))}


def own_addresses(host: str) -> str:
    """Where a server that listens on ``host`` asks itself, as a list for ``no_proxy``.

    Clients differ in what else they understand there: plain addresses and names all of them do.
    """
    return ",".join(dict.fromkeys((_EVERYWHERE.get(host, host), "127.0.0.1", "localhost")))


def sparing(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that let a server listening on ``host`` reach itself past the proxies of ``environ``.

    Both spellings, since clients read one or the other; each keeps what it lists already, a ``*`` as it is.
    Nothing where no proxy is set.
    """
    if not proxies(environ):
        return {}
    lower, upper = environ.get("no_proxy", "").strip(), environ.get("NO_PROXY", "").strip()
    own = own_addresses(host)
    return {
        name: theirs if theirs == "*" else ",".join(filter(None, (theirs, own)))
        for name, theirs in (("no_proxy", lower or upper), ("NO_PROXY", upper or lower))
    }


def proxy_for(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The proxy to ask ``url`` through: none for an address of this machine, else as the person set it.

    Args:
        url: of HTTP; there is none for one that is no address, as whoever asks it finds out.
        environ: where the variables are looked up.
    """
    found = proxies(environ)
    try:
        parts = urlsplit(url)
        host, at = (parts.hostname or "").lower(), str(parts.port)
    except ValueError:
        return None
    proxy = found.get(f"{parts.scheme}_proxy") or found.get("all_proxy")
    if proxy is None or not host or _is_here(host):
        return None
    for entry in _entries(environ):
        name, _, port = entry.rpartition(":")
        if _covers(entry, host) or (port == at and _covers(name, host)):
            return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _setting(environ: Mapping[str, str], name: str) -> str:
    """As Python's clients read it: in lower case it wins, empty too."""
    return environ.get(name, environ.get(name.upper(), "")).strip()


def _entries(environ: Mapping[str, str]) -> Iterator[str]:
    for entry in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(","):
        if stripped := entry.strip().lower():
            yield stripped


def _covers(entry: str, host: str) -> bool:
    """An entry is ``*``, a name or the end of one, an address, or a network."""
    domain = entry.removeprefix("*").lstrip(".")
    if entry in ("*", host) or (domain and host.endswith(f".{domain}")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """It is this machine's name or one of its addresses. Nobody is asked: a name server may be far."""
    own = socket.gethostname().lower()
    # With a domain or without: whoever names the machine may do the one, and the machine itself the other.
    if host.endswith(".localhost") or any(
        f"{one}.".startswith(f"{other}.") for one, other in ((host, "localhost"), (host, own), (own, host))
    ):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
