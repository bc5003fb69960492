"""A server with OpenAI's chat interface, whichever engine stands behind it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.bench.transport import Address
from dflash_deploy.engine.sglang import http
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular

KEY_VARIABLE = "DFLASH_API_KEY"
_MOST_KEY_BYTES = 4096
_ASK_S = 10.0


@dataclass(frozen=True)
class Endpoint:
    """Whom to ask.

    Attributes:
        base_url: root of the interface, without ``/v1``.
        model: name to ask for; SGLang answers to any.
        api_key: sent to this server alone, never shown.
        engine: ``sglang`` where it is known to be one, else None.
        version: of the engine, where it says.
        time_scale: server seconds in a second of the clock; above one for a simulated server.
        context_tokens: longest context of one request, where it says.
        extras: it may be asked for what is not in OpenAI's interface: an exact length, no thinking.
    """

    base_url: str
    model: str = "default"
    api_key: str | None = field(default=None, repr=False)
    engine: str | None = None
    version: str | None = None
    time_scale: float = 1.0
    context_tokens: int | None = None
    simulated: bool = False
    extras: bool = True


def discover(url: str, *, model: str | None = None, api_key: str | None = None) -> Endpoint:
    """Ask a server what it is; what it does not say stays unknown.

    Args:
        url: its address, with or without ``/v1`` or the whole of ``/v1/chat/completions``.
        model: name to ask for; None takes the first that the server names.
        api_key: of the server.

    Raises:
        DeployError: the address is none.
    """
    base_url = url.strip().rstrip("/").removesuffix("/chat/completions").removesuffix("/v1").rstrip("/")
    try:
        Address.parse(base_url)
    except ValueError as error:
        raise no_address(error) from None
    named = model or http.served_model(base_url, timeout_s=_ASK_S, api_key=api_key)
    info = http.server_info(base_url, timeout_s=_ASK_S, api_key=api_key)
    known = info is not None and (info.kv_tokens is not None or info.version is not None)
    simulator = info.simulator if info else None
    return Endpoint(
        base_url,
        named or "default",
        api_key,
        engine="sglang" if known else None,
        version=info.version if info else None,
        time_scale=simulator.time_scale if simulator else 1.0,
        context_tokens=info.context_tokens if info else None,
        simulated=simulator is not None,
    )


def no_address(error: ValueError) -> DeployError:
    """What is told of an address that is none."""
    return DeployError(
        str(error), fix="give an address like http://127.0.0.1:30000", exit_code=ExitCode.USAGE
    )


def read_api_key(file: Path | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The key to send: from a file that its owner alone may read, or from ``DFLASH_API_KEY``.

    Never from an argument, which every user of the machine can see.

    Args:
        file: holds the key alone, or the line ``api-key: …`` as the engine reads it.
        environ: None takes this process's own.

    Raises:
        DeployError: the file cannot be read, others may read it, or it holds no key.
    """
    if file is None:
        key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "").strip()
        return _sound(key, KEY_VARIABLE) if key else None
    try:
        data = read_regular(file, most_bytes=_MOST_KEY_BYTES)
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise DeployError(
            f"{file}: the API key cannot be read: {error.strerror or error}", exit_code=ExitCode.MISSING
        ) from error
    if mode & 0o077:
        raise DeployError(
            f"{file}: others than its owner may use the API key (mode {mode:04o})",
            fix=f"chmod 600 {file}",
            exit_code=ExitCode.INVALID_INPUT,
        )
    text = data.decode(errors="replace").strip()
    return _sound(text.removeprefix("api-key:").strip().strip("\"'"), str(file))


def _sound(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise DeployError(
            f"{source}: expected one key of printable ASCII without spaces",
            fix="write the key alone, or one line: api-key: …",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return key
