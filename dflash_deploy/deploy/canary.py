"""Whether a service that has just started serves: asked as a user would, within a time limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from dflash_deploy.bench.measurement import RequestResult
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.engine.sglang import http
from dflash_deploy.machine.gpu import read_gpus

_PROMPT = "The capital of France is Paris. The capital of Italy is"
_TOKENS = 32
_ANSWER_S = 120.0
_ASK_S = 30.0
_LARGEST_BYTES = 1 << 20
_SLACK_MIB = 512
_SLACK_SHARE = 0.03


@dataclass(frozen=True)
class Canary:
    """What came of it.

    Attributes:
        problem: why the service must not stay, or None.
        seen: what was looked at and found, a line each.
    """

    problem: str | None
    seen: tuple[str, ...]


def run(
    base_url: str,
    *,
    api_key: str | None,
    vram_expected_mib: int | None,
    processes: Callable[[], frozenset[int]],
) -> Canary:
    """Health, two greedy answers to one prompt, and memory.

    Args:
        base_url: root of the service's HTTP interface.
        api_key: of the service.
        vram_expected_mib: what the card held at most when the configuration was measured.
        processes: the service's, asked for when memory is looked at.
    """
    seen: list[str] = []
    if not http.healthy(base_url, timeout_s=_ANSWER_S, api_key=api_key):
        return Canary(f"{base_url}/health gave no healthy answer within {_ANSWER_S:.0f} s", ())
    seen.append("health: answers")
    model = http.served_model(base_url, timeout_s=_ASK_S, api_key=api_key)
    if model is None:
        return Canary(f"{base_url}/v1/models names no model (is the API key right?)", tuple(seen))
    first, second = (_complete(base_url, model, api_key) for _ in range(2))
    for answer in (first, second):
        if isinstance(answer, Exception):
            return Canary(f"a request for {_TOKENS} tokens failed: {_words(answer)}", tuple(seen))
        if faults := _faults(answer):
            return Canary(f"an answer is no good: {faults}", tuple(seen))
    same = _common(str(first), str(second))
    if not same.strip():
        return Canary(
            f"two greedy answers to one prompt differ from the start: "
            f"{str(first)[:60]!r} and {str(second)[:60]!r}",
            tuple(seen),
        )
    # A cached prefix is computed in other shapes: a near tie may end otherwise further on.
    seen.append("output: the same twice" if first == second else f"output: the same for {len(same)} letters")
    return _memory(base_url, api_key, vram_expected_mib, processes, seen)


def _memory(
    base_url: str,
    api_key: str | None,
    expected_mib: int | None,
    processes: Callable[[], frozenset[int]],
    seen: list[str],
) -> Canary:
    used, kind = _used_mib(base_url, api_key, processes)
    if used is None:
        return Canary(None, (*seen, "VRAM: not known here"))
    seen.append(f"VRAM: {used:,} MiB ({kind})")
    if expected_mib is not None:
        most = expected_mib + max(_SLACK_MIB, int(expected_mib * _SLACK_SHARE))
        if used > most:
            return Canary(
                f"it holds {used:,} MiB of VRAM, and {expected_mib:,} MiB were planned", tuple(seen)
            )
        seen[-1] += f", {expected_mib:,} MiB planned"
    return Canary(None, tuple(seen))


def _used_mib(
    base_url: str, api_key: str | None, processes: Callable[[], frozenset[int]]
) -> tuple[int | None, str]:
    info = http.server_info(base_url, timeout_s=_ASK_S, api_key=api_key)
    if info is not None and info.simulator is not None:
        used = info.simulator.vram_used_mib
        return (int(used) if used is not None else None), "simulated"
    ours, total = processes(), 0
    for gpu in read_gpus().gpus:
        held = [process for process in gpu.processes or () if process.pid in ours]
        if any(process.vram_mib is None for process in held):
            return None, ""
        total += sum(process.vram_mib or 0 for process in held)
    return (total or None), "measured"


def _complete(base_url: str, model: str, api_key: str | None) -> str | Exception:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    asked = {"model": model, "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        with httpx.Client(timeout=_ANSWER_S, trust_env=False) as client:
            answer = client.post(f"{base_url}/v1/completions", json=asked, headers=headers)
        if answer.status_code != 200:
            return ValueError(f"HTTP {answer.status_code}: {answer.text[:200]}")
        if len(answer.content) > _LARGEST_BYTES:
            return ValueError("the answer is too large")
        text = json.loads(answer.content)["choices"][0]["text"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
        return error
    return text if isinstance(text, str) else ValueError("the answer holds no text")


def _faults(text: str) -> str | None:
    if not text.strip():
        return "it is empty"
    result = RequestResult(0, 0, _TOKENS, 0.0, 0.0, 0.0, 0.0, text)
    return "; ".join(find_faults([result], None)) or None


def _common(first: str, second: str) -> str:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return first[:count]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
