"""Questions to a server whose whole answers matter, and not their timing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from dflash_deploy.bench.claims import GIVEN_UP, count, text_of
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.quality.agreement import Said
from dflash_deploy.bench.quality.answers import Answer
from dflash_deploy.bench.workloads import Prompt
from dflash_deploy.engine.sglang.http import certificates
from dflash_deploy.proxy import proxy_for

DEFAULT_TIMEOUT_S = 300.0
_LARGEST_BYTES = 8 << 20
_LARGEST_ERROR = 300
_MOST_LOST = 2
"""Questions without an answer, and the others are not asked: each costs minutes."""

_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
_REFUSED = frozenset({400, 422})
_BEYOND_THE_STANDARD: Mapping[str, object] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "return_token_ids": True,
}
"""SGLang and vLLM know these. A server that refuses them is asked without."""


@dataclass(frozen=True)
class Reply:
    """What came back: an answer, or the error that came instead.

    Attributes:
        cached_tokens: of the prompt, found in the server's prefix cache; None where it does not say.
        refused: the server takes no such request (too long, no tools): no fault of its answers.
        lost: nothing came in time, or nobody was there.
    """

    answer: Answer
    token_ids: tuple[int, ...] | None = None
    cached_tokens: int | None = None
    error: str | None = None
    refused: bool = False
    lost: bool = False

    @property
    def said(self) -> Said:
        """As far as agreement goes."""
        call = "" if self.answer.tool is None else f"{self.answer.tool}({self.answer.arguments})"
        return Said(self.answer.thoughts + self.answer.text + call, self.token_ids, self.answer.tokens)


def ask(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    at_once: int = 1,
    ignore_eos: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Reply]:
    """Ask every prompt, greedily and without a thinking phase; never raises for what a server does.

    Args:
        endpoint: the server.
        prompts: in the order in which they are begun.
        max_tokens: of each answer at most.
        at_once: requests at the same time.
        ignore_eos: answers of exactly that length.
        timeout_s: for one answer, on the clock.
    """
    bodies = [_body(endpoint.model, prompt, max_tokens, ignore_eos) for prompt in prompts]
    return asyncio.run(_ask_all(endpoint, bodies, at_once, timeout_s))


async def _ask_all(
    endpoint: Endpoint, bodies: Sequence[Mapping[str, object]], at_once: int, timeout_s: float
) -> list[Reply]:
    turn = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    headers = {"accept-encoding": "identity"}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    async with httpx.AsyncClient(
        limits=limits,
        trust_env=False,
        proxy=proxy_for(endpoint.base_url),
        headers=headers,
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        verify=certificates(endpoint.base_url),
    ) as client:
        url = f"{endpoint.base_url}/v1/chat/completions"

        lost = 0

        async def in_turn(body: Mapping[str, object]) -> Reply:
            nonlocal lost
            async with turn:
                if lost >= _MOST_LOST:
                    return _failed("not asked: the server did not answer before", lost=True)
                reply = await _ask_one(client, url, {**body, **_BEYOND_THE_STANDARD}, timeout_s)
                if reply.refused:
                    reply = await _ask_one(client, url, body, timeout_s)
                lost += reply.lost
                return reply

        return list(await asyncio.gather(*(in_turn(body) for body in bodies)))


def _body(model: str, prompt: Prompt, max_tokens: int, ignore_eos: bool) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "messages": [message._asdict() for message in prompt.messages],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if prompt.tool is not None:
        body["tools"] = [{"type": "function", "function": prompt.tool}]
    return body


async def _ask_one(
    client: httpx.AsyncClient, url: str, body: Mapping[str, object], timeout_s: float
) -> Reply:
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", url, json=body) as response,
        ):
            content = bytearray()
            # Undecoded: what was not asked for compressed could unpack into anything.
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > _LARGEST_BYTES:
                    return _failed("the answer does not end")
    except TimeoutError:
        return _failed(f"no answer within {timeout_s:.0f} s", lost=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _failed(f"{type(error).__name__} {error}".rstrip(), lost=True)
    if response.status_code != httpx.codes.OK:
        text = " ".join(content[:_LARGEST_ERROR].decode(errors="replace").split())
        return _failed(f"HTTP {response.status_code}: {text}", refused=response.status_code in _REFUSED)
    try:
        return _read(json.loads(content))
    except (ValueError, RecursionError, LookupError, TypeError):
        return _failed("the answer is no chat completion")


def _read(content: object) -> Reply:
    """Raises LookupError or TypeError for what is no chat completion."""
    if not isinstance(content, dict):
        raise TypeError
    choices = content["choices"]
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise TypeError
    choice = choices[0]
    message = choice["message"]
    if not isinstance(message, dict):
        raise TypeError
    ended = choice.get("finish_reason")
    if isinstance(ended, str) and ended in GIVEN_UP:
        return _failed(f"the server gave the answer up: finish_reason {ended}")
    told = (text_of(message.get(key)) for key in ("reasoning_content", "reasoning"))
    thoughts, text = _apart(next(filter(None, told), None) or "", text_of(message.get("content")) or "")
    calls = message.get("tool_calls")
    first = calls[0] if isinstance(calls, list) and calls else None
    call = first.get("function") if isinstance(first, dict) else None
    usage = content.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    # As SGLang calls them, and as vLLM does.
    ids = choice.get("response_token_ids", choice.get("token_ids"))
    return Reply(
        Answer(
            text=text,
            thoughts=thoughts,
            tool=_text(call, "name"),
            arguments=_text(call, "arguments"),
            tokens=count(usage.get("completion_tokens")),
            ended=ended != "length",
        ),
        token_ids=tuple(ids) if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None,
        cached_tokens=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _apart(thoughts: str, text: str) -> tuple[str, str]:
    """Thoughts and what follows them, of a server that leaves both in the text too."""
    before, ended, after = text.rpartition(_THOUGHT_ENDS)
    if ended:
        return thoughts + before.replace(_THOUGHT_BEGINS, "", 1).lstrip(), after.lstrip()
    if text.lstrip().startswith(_THOUGHT_BEGINS):
        return thoughts + text, ""
    return thoughts, text


def _failed(error: str, *, refused: bool = False, lost: bool = False) -> Reply:
    return Reply(Answer(""), error=error, refused=refused, lost=lost)


def _text(call: object, key: str) -> str | None:
    value = call.get(key) if isinstance(call, dict) else None
    return value if isinstance(value, str) else None
