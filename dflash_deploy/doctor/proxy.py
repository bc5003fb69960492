"""Whether a proxy of this shell stands between a server and itself."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from dflash_deploy.doctor.finding import Answer, failed, passed
from dflash_deploy.doctor.subject import Subject

_HERE = "127.0.0.1"


def spares_this_machine(subject: Subject) -> Answer | None:
    """No proxy is asked for an address of this machine.

    SGLang asks itself over HTTP before it is ready, by a client that takes the proxy of its environment.
    """
    environ = {**os.environ, **(subject.profile.env if subject.profile else {})}
    proxy = _setting(environ, "http_proxy") or _setting(environ, "all_proxy")
    if proxy is None:
        return None
    host = subject.profile.service.host if subject.profile else _HERE
    host = _HERE if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not listened on
    if _spared(host, _setting(environ, "no_proxy") or ""):
        return passed(f"{host} is reached without the proxy")
    names = ",".join(dict.fromkeys((host, _HERE, "localhost")))
    return failed(
        f"a proxy is set for HTTP, and {host} is not spared: SGLang asks itself through it before it is "
        "ready, and ends two minutes later (Initialization failed. warmup error)",
        f'export no_proxy="{names}${{no_proxy:+,$no_proxy}}" NO_PROXY="{names}${{NO_PROXY:+,$NO_PROXY}}"',
        "http_proxy, all_proxy and no_proxy of this shell and of the profile; a unit has the profile's alone",
    )


def _setting(environ: Mapping[str, str], name: str) -> str | None:
    """As Python's clients read it: in lower case it wins, empty too."""
    return environ.get(name, environ.get(name.upper())) or None


def _spared(host: str, no_proxy: str) -> bool:
    return any(_covers(entry.strip().lower(), host) for entry in no_proxy.split(","))


def _covers(entry: str, host: str) -> bool:
    """An entry is ``*``, a name or the end of one, an address, or a network."""
    if entry in ("*", host) or (entry and host.endswith("." + entry.lstrip("."))):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
