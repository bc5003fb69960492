"""The HTTP interface of a running SGLang, asked briefly and read with care.

Every call has a time limit over all of it and reads a bounded amount; a server that is away, slow or talks
nonsense gives ``None`` or ``False``, never an exception. Not to be called from a coroutine.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_deploy.proxy import proxy_for

_ANSWER_LIMIT_BYTES = 8 << 20
_TEXT_LIMIT = 300


@dataclass(frozen=True)
class SimulatorInfo:
    """What only the simulator tells of itself. VRAM is simulated."""

    card: str
    seed: int
    time_scale: float
    vram_used_mib: float | None
    vram_total_mib: float | None


@dataclass(frozen=True)
class MemoryUsage:
    """GiB by what the engine allocated them for; None where a release does not tell.

    Attributes:
        weights_gib: the target model's alone.
        kv_gib: the target's key/value pool; neither the draft's nor the recurrent states.
        graphs_gib: all captured graphs.
        free_at_start_gib: what was left free when it was ready.
    """

    weights_gib: float | None = None
    kv_gib: float | None = None
    graphs_gib: float | None = None
    free_at_start_gib: float | None = None


@dataclass(frozen=True)
class Generation:
    """How one small request ended.

    Attributes:
        status: of HTTP; None where no answer came in time.
        tokens: generated, as far as the answer says.
    """

    status: int | None
    tokens: int = 0


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself while it serves; None where it does not say.

    Attributes:
        accept_length: tokens a verify step gave on average since the start, the bonus token among them.
        kv_tokens: tokens the KV pool holds.
        max_running_requests: requests at once after the engine's own clamping, all ranks together.
        context_tokens: longest context of one request.
    """

    version: str | None = None
    accept_length: float | None = None
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    context_tokens: int | None = None
    memory: MemoryUsage | None = None
    simulator: SimulatorInfo | None = None


def load() -> None:
    """Load what asking needs, a fifth of a second: before a time is taken, or a deadline set."""
    import asyncio  # noqa: F401, PLC0415

    import httpx  # noqa: F401, PLC0415


def healthy(base_url: str, *, timeout_s: float, api_key: str | None = None) -> bool:
    """The server generated a token for its health check; that takes it a second at least."""
    return health_status(base_url, timeout_s=timeout_s, api_key=api_key) == 200


def health_status(base_url: str, *, timeout_s: float, api_key: str | None = None) -> int | None:
    """HTTP status of ``/health``, 503 when nothing was generated for 20 s; None without an answer."""
    status, _ = ask("GET", f"{base_url}/health", timeout_s=timeout_s, api_key=api_key)
    return status


def generate_once(base_url: str, *, timeout_s: float, api_key: str | None = None) -> Generation:
    """Ask for one token, as any client would; it waits its turn behind other requests."""
    request = {"text": "1 2 3", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    status, body = ask(
        "POST", f"{base_url}/generate", timeout_s=timeout_s, api_key=api_key, content=json.dumps(request)
    )
    content = _mapping(_parsed(body)) if status == 200 else None
    facts = _mapping(content.get("meta_info")) if content is not None else None
    return Generation(status, (_whole(facts, "completion_tokens") or 0) if facts is not None else 0)


def server_info(base_url: str, *, timeout_s: float, api_key: str | None = None) -> ServerInfo | None:
    """Ask ``/server_info``, or the name it had before."""
    deadline = time.monotonic() + timeout_s
    for path in ("/server_info", "/get_server_info"):
        left_s = deadline - time.monotonic()
        status, body = ask("GET", base_url + path, timeout_s=left_s, api_key=api_key)
        content = _mapping(_parsed(body)) if status == 200 else None
        if content is not None:
            return read_server_info(content)
        if status != 404:
            break
    return None


def read_server_info(content: Mapping[str, object]) -> ServerInfo:
    """Read the body of ``/server_info``, leaving out whatever is not as it should be."""
    states = content.get("internal_states")
    ranks = [rank for rank in states if isinstance(rank, dict)] if isinstance(states, list) else []
    lengths = [length for rank in ranks if (length := _number(rank, "avg_spec_accept_length")) is not None]
    limits = [limit for rank in ranks if (limit := _whole(rank, "effective_max_running_requests_per_dp"))]
    first = ranks[0] if ranks else {}
    return ServerInfo(
        version=_text(content, "version"),
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        kv_tokens=_whole(content, "max_total_num_tokens"),
        max_running_requests=sum(limits) if limits else _whole(content, "max_running_requests"),
        context_tokens=_whole(content, "context_length") or _whole(first, "context_length"),
        memory=_memory(ranks),
        simulator=_simulator(content.get("simulator")),
    )


def served_model(base_url: str, *, timeout_s: float, api_key: str | None = None) -> str | None:
    """Name of the model that is served. Answered before the server is ready."""
    status, body = ask("GET", f"{base_url}/v1/models", timeout_s=timeout_s, api_key=api_key)
    content = _mapping(_parsed(body)) if status == 200 else None
    models = content.get("data") if content is not None else None
    first = _mapping(models[0]) if isinstance(models, list) and models else None
    return _text(first, "id") if first is not None else None


def flush_cache(base_url: str, *, timeout_s: float, api_key: str | None = None) -> bool:
    """Empty the prefix cache; False where requests still run (or nothing answers)."""
    status, _ = ask("POST", f"{base_url}/flush_cache", timeout_s=timeout_s, api_key=api_key)
    return status == 200


def get_text(base_url: str, path: str, *, timeout_s: float, api_key: str | None = None) -> str | None:
    """The text at ``path``, ``/metrics`` for one; None unless the server answers 200."""
    status, body = ask("GET", base_url + path, timeout_s=timeout_s, api_key=api_key)
    return body.decode(errors="replace") if status == 200 else None


def certificates(url: str) -> ssl.SSLContext | bool:
    """For httpx: those that the system trusts, or ``SSL_CERT_FILE``, as every other client of a server does.

    Certificates take longer to load than most answers to come, so there are none where they are not needed.
    """
    return ssl.create_default_context() if url.startswith("https:") else False


def ask(
    method: str, url: str, *, timeout_s: float, api_key: str | None, content: str | None = None
) -> tuple[int | None, bytes]:
    """Status and body; no status where the server was not reached, took too long, or sent too much.

    Args:
        method: of HTTP.
        url: whole.
        timeout_s: for all of it.
        api_key: the server's, if it has one.
        content: JSON to send.
    """
    if timeout_s <= 0:
        return None, b""
    # For whoever asks (see ``load``); the values above are read without a server, too.
    import asyncio  # noqa: PLC0415

    import httpx  # noqa: PLC0415

    try:
        return asyncio.run(_asked(method, url, timeout_s, api_key, content))
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, TimeoutError, ValueError):
        return None, b""
    except ImportError:
        # A proxy by SOCKS needs a package of its own.
        return None, b""


async def _asked(
    method: str, url: str, timeout_s: float, api_key: str | None, content: str | None
) -> tuple[int | None, bytes]:
    import asyncio  # noqa: PLC0415

    import httpx  # noqa: PLC0415

    # Unpacked, so that a small answer cannot grow past the limit in one piece.
    headers = {"Accept-Encoding": "identity"}
    if content is not None:
        headers["Content-Type"] = "application/json"
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    body = bytearray()
    # One limit for all of it: each of httpx's own begins anew with every byte that arrives.
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(
            timeout=None,  # noqa: S113
            trust_env=False,
            proxy=proxy_for(url),
            verify=certificates(url),
        ) as client,
        client.stream(method, url, headers=headers, content=content) as answer,
    ):
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > _ANSWER_LIMIT_BYTES:
                return None, b""
        return answer.status_code, bytes(body)


def _parsed(body: bytes) -> object:
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed


def _mapping(value: object) -> Mapping[str, object] | None:
    return value if isinstance(value, dict) else None


def _number(content: Mapping[str, object], key: str) -> float | None:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Nothing here is below zero; NaN and infinity are no figures, nor is what no float can hold.
    return float(value) if 0 <= value < 1e15 else None


def _whole(content: Mapping[str, object], key: str) -> int | None:
    number = _number(content, key)
    return int(number) if number is not None else None


def _text(content: Mapping[str, object], key: str) -> str | None:
    value = content.get(key)
    # Half a surrogate pair, for one, can be put into no file.
    if not isinstance(value, str) or not value.isprintable():
        return None
    return value if 0 < len(value) <= _TEXT_LIMIT else None


def _memory(ranks: list[dict[str, object]]) -> MemoryUsage | None:
    """The first rank's: each rank has a card of its own, and all are alike."""
    usage = _mapping(ranks[0].get("memory_usage")) if ranks else None
    if usage is None:
        return None
    phases = _mapping(usage.get("graph"))
    # One number up to 0.5.16, an object by phase after it.
    parts = [_number(phases, phase) for phase in phases] if phases is not None else [_number(usage, "graph")]
    known = [part for part in parts if part is not None]
    found = MemoryUsage(
        _number(usage, "weight"),
        _number(usage, "kvcache"),
        sum(known) if known else None,
        _number(usage, "startup_available"),
    )
    return found if found != MemoryUsage() else None


def _simulator(value: object) -> SimulatorInfo | None:
    content = _mapping(value)
    if content is None:
        return None
    card, seed, scale = _text(content, "card"), _whole(content, "seed"), _number(content, "time_scale")
    if card is None or seed is None or scale is None or scale <= 0:
        return None
    return SimulatorInfo(
        card, seed, scale, _number(content, "vram_used_mib"), _number(content, "vram_total_mib")
    )
