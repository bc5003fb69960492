"""Prompts of an exact number of tokens, as the server itself counts them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from dflash_deploy.bench.claims import count
from dflash_deploy.bench.workloads.prompt import Message, Prompt
from dflash_deploy.engine.sglang import http

_MOST_TRIES = 24
_WORDS = (
    "river",
    "stone",
    "garden",
    "window",
    "paper",
    "silver",
    "morning",
    "letter",
    "bridge",
    "candle",
    "forest",
)

Counter = Callable[[Prompt], int | None]
"""Tokens of a prompt with its template; None where it cannot be told."""


@dataclass(frozen=True)
class Fitted:
    """A prompt, and its length as the server counts it."""

    prompt: Prompt
    tokens: int


def fit(prompt: Prompt, tokens: int, count: Counter, *, salt: str | None = None) -> Fitted | None:
    """The prompt with words put in front of its question, so that it has ``tokens`` tokens.

    Words rarely are one token each, so the number of words is sought; where no number of words hits it, the
    nearest below is given, and ``Fitted.tokens`` says so.

    Args:
        prompt: to lengthen.
        tokens: wanted in all, template and system prompt among them.
        count: a ``ServerCounter``, for one.
        salt: begins the prompt, and is counted with it.

    Returns:
        None where the server cannot count, or the bare prompt is longer already.
    """
    shortest = prompt if salt is None else prompt.salted(salt)
    bare = count(shortest)
    if bare is None or bare > tokens:
        return None
    # The largest number of words that does not go over, between a number that fits and one that does not.
    fits, over = 0, None
    best = Fitted(shortest, bare)
    per_word = 1.3
    for _ in range(_MOST_TRIES):
        if best.tokens == tokens:
            break
        step = max(1, round((tokens - best.tokens) / per_word))
        guess = fits + step
        if over is not None:
            guess = min(guess, over - 1)
        if guess <= fits:
            break
        longer = _lengthened(prompt, guess, salt)
        counted = count(longer)
        if counted is None:
            return None
        if counted <= best.tokens:
            # More words and no more tokens: the server cuts off what goes over its context.
            break
        per_word = max(0.2, (counted - bare) / guess)
        if counted <= tokens:
            fits, best = guess, Fitted(longer, counted)
        else:
            over = guess
            if guess - fits > 1:
                per_word = max(per_word, (tokens - best.tokens) / (guess - fits - 1) * 1.01)
    return _filled_up(best, tokens, count)


def _filled_up(best: Fitted, tokens: int, count: Counter) -> Fitted:
    """Letters are one token each with every tokenizer that we know."""
    missing = tokens - best.tokens
    for tail in (" a" * missing, " a" * (missing - 1) + "."):
        if missing <= 0:
            break
        message = best.prompt.messages[-1]
        longer = replace(
            best.prompt, messages=(*best.prompt.messages[:-1], Message("user", message.content + tail))
        )
        counted = count(longer)
        if counted is not None and best.tokens < counted <= tokens:
            return Fitted(longer, counted)
    return best


def _lengthened(prompt: Prompt, words: int, salt: str | None) -> Prompt:
    filler = " ".join(_WORDS[place * place % len(_WORDS)] for place in range(words))
    message = Message("user", f"{filler}\n\n{prompt.question}")
    longer = replace(prompt, messages=(*prompt.messages[:-1], message))
    return longer if salt is None else longer.salted(salt)


class ServerCounter:
    """Counts by asking the server: ``/tokenize`` where it takes messages (SGLang, vLLM), else for one token.

    The latter costs a prefill for each question, and its ``usage`` is right with any engine. Not to be called
    from a coroutine.

    Args:
        base_url: root of the interface, without ``/v1``.
        model: name to ask for.
        api_key: of the server.
        timeout_s: for one answer.
        extras: it may be told to leave out thinking, which is not in OpenAI's interface.

    Attributes:
        by_asking: the server was asked for tokens, ``generated_tokens`` until now, one at a time.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None,
        timeout_s: float = 120.0,
        extras: bool = True,
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._body: dict[str, object] = {"model": model}
        if extras:
            self._body["chat_template_kwargs"] = {"enable_thinking": False}
        self.by_asking = False
        self.generated_tokens = 0

    def __call__(self, prompt: Prompt) -> int | None:
        """Tokens of the prompt; ``by_asking`` then says whether it is in the server's prefix cache now."""
        body = {**self._body, "messages": [message._asdict() for message in prompt.messages]}
        if not self.by_asking:
            if tokens := count(self._ask("/tokenize", body).get("count")):
                return tokens
            self.by_asking = True
        self.generated_tokens += 1
        usage = self._ask("/v1/chat/completions", {**body, "max_tokens": 1}).get("usage")
        return count(usage.get("prompt_tokens")) or None if isinstance(usage, dict) else None

    def _ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        status, answer = http.ask(
            "POST",
            self._base_url + path,
            timeout_s=self._timeout_s,
            api_key=self._api_key,
            content=json.dumps(body),
        )
        try:
            parsed: object = json.loads(answer) if status == 200 else None
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}
