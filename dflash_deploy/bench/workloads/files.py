"""Prompts from a person's own file: JSON lines, ShareGPT, or OpenAI's batch format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_deploy.bench.workloads.prompt import LANGUAGES, TASKS, Message, Prompt, Role
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular

MAX_BYTES = 64 << 20
MAX_PROMPTS = 100_000
MAX_PROMPT_CHARS = 4 << 20
MAX_ARRIVAL_S = 86_400.0
MAX_OUTPUT_TOKENS = 1 << 20
_MOST_MESSAGES = 1000
_MOST_PROBLEMS = 10

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
}
_FIX = (
    'write one JSON object a line: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]};'
    " ShareGPT files and OpenAI batch files are taken as well"
)
_FIX_ARRIVALS = f"write seconds from the beginning, one a line, in order: {MAX_PROMPTS:,} in a day at most"


class _WrongEntryError(Exception):
    """What is wrong with one entry."""


def read(path: Path) -> tuple[Prompt, ...]:
    """Read a file of prompts; its form is told by its content.

    * JSON lines: ``prompt`` (or ``messages``), and if wanted ``system``, ``answer``, ``reference``, ``task``,
      ``language``, ``max_tokens``.
    * OpenAI batch: JSON lines with ``body`` holding ``messages`` (or ``prompt``) and ``max_tokens``.
    * ShareGPT: a JSON list of objects with ``conversations``; asked is the last human turn, and the answer
      after it is the reference. Conversations in which nobody asks, of which such files have many, are
      passed over.

    Raises:
        DeployError: it cannot be read, or some lines are wrong; these are told with their numbers.
    """
    text = _text_of(path)
    prompts: list[Prompt] = []
    problems: list[str] = []
    for line, entry in _entries(text):
        try:
            if isinstance(entry, _WrongEntryError):
                raise entry
            if not _is_silent(entry):
                prompts.append(_prompt(entry, f"{path.name}:{line}"))
        except _WrongEntryError as wrong:
            problems.append(f"{path}:{line}: {wrong}")
        if len(problems) >= _MOST_PROBLEMS:
            break
        if len(prompts) > MAX_PROMPTS:
            raise _refused([f"{path}:{line}: more than {MAX_PROMPTS:,} prompts"])
    if problems:
        raise _refused(problems)
    if not prompts:
        raise _refused([f"{path}: it holds no prompt"])
    return tuple(prompts)


def read_arrivals(path: Path) -> tuple[float, ...]:
    """Read moments at which requests are to come: seconds from the beginning, one a line, in order.

    Raises:
        DeployError: it cannot be read, or a line holds no moment.
    """
    moments: list[float] = []
    for number, line in enumerate(_text_of(path, _FIX_ARRIVALS).splitlines(), 1):
        if not (word := line.strip()):
            continue
        try:
            moment = float(word)
        except ValueError:
            moment = -1.0
        if not (moments[-1] if moments else 0.0) <= moment <= MAX_ARRIVAL_S or len(moments) >= MAX_PROMPTS:
            raise DeployError(
                f"{path}:{number}: {word[:40]!r} is no next moment",
                fix=_FIX_ARRIVALS,
                exit_code=ExitCode.INVALID_INPUT,
            )
        moments.append(moment)
    if not moments:
        raise DeployError(f"{path}: it holds no moment", exit_code=ExitCode.INVALID_INPUT)
    return tuple(moments)


def longest_answer(prompts: Sequence[Prompt]) -> int | None:
    """The largest number of tokens that a file asks for, if it does so for every prompt."""
    limits = [one.output_tokens for one in prompts if one.output_tokens is not None]
    return max(limits) if len(limits) == len(prompts) else None


def without_lengths(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The prompts, for answers that are all of one length."""
    return tuple(replace(one, output_tokens=None) for one in prompts)


def _text_of(path: Path, fix: str = _FIX) -> str:
    try:
        data = read_regular(path, most_bytes=MAX_BYTES)
    except FileNotFoundError as error:
        raise DeployError(f"{path}: no such file", exit_code=ExitCode.MISSING) from error
    except OSError as error:
        raise DeployError(
            f"{path}: cannot be read: {error.strerror or error}", exit_code=ExitCode.INVALID_INPUT
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refused([f"{path}:{line}: expected UTF-8 text"], fix) from error


def _refused(problems: list[str], fix: str = _FIX) -> DeployError:
    return DeployError("\n".join(problems), fix=fix, exit_code=ExitCode.INVALID_INPUT)


def _entries(text: str) -> Iterator[tuple[int, object]]:
    """Every entry with the line on which it begins; what is no JSON comes as ``_WrongEntryError``."""
    if text.lstrip().startswith("["):
        yield from _list_entries(text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, _WrongEntryError(f"not JSON: {_said(error)}")


def _list_entries(text: str) -> Iterator[tuple[int, object]]:
    decoder = json.JSONDecoder()
    place, line, counted = text.index("[") + 1, 1, 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        line += text.count("\n", counted, place)
        counted = place
        if place >= len(text):
            yield line, _WrongEntryError("the list does not end")
            return
        if text[place] == "]":
            return
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield line, _WrongEntryError(f"not JSON: {_said(error)}")
            return
        yield line, entry


def _said(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"


def _is_silent(entry: object) -> bool:
    """A ShareGPT conversation without a human turn."""
    talk = entry.get("conversations") if isinstance(entry, dict) else None
    return isinstance(talk, list) and not any(
        _ROLES.get(str(one.get("role", one.get("from")))) == "user" for one in talk if isinstance(one, dict)
    )


def _prompt(entry: object, name: str) -> Prompt:
    if not isinstance(entry, dict):
        raise _WrongEntryError("expected an object")
    reference = entry.get("reference")
    body = entry.get("body")
    if isinstance(body, dict):
        messages, limit = _asked(body), body.get("max_tokens")
        limit = body.get("max_completion_tokens") if limit is None else limit
    elif "conversations" in entry:
        messages, limit = _messages(entry["conversations"]), None
        last = max((place for place, one in enumerate(messages) if one.role == "user"), default=-1)
        if last + 1 < len(messages) and last >= 0:
            reference = reference or messages[last + 1].content
        messages = messages[: last + 1]
    else:
        messages, limit = _asked(entry), entry.get("max_tokens")
    system = _text(entry, "system")
    if system is not None:
        messages = [Message("system", system), *messages]
    if not messages or messages[-1].role != "user":
        raise _WrongEntryError("expected a conversation that ends with the user's turn")
    if sum(len(message.content) for message in messages) > MAX_PROMPT_CHARS:
        raise _WrongEntryError(f"longer than {MAX_PROMPT_CHARS >> 20} million characters")
    if limit is not None and not (type(limit) is int and 1 <= limit <= MAX_OUTPUT_TOKENS):
        raise _WrongEntryError(f"max_tokens: expected a whole number from 1 to {MAX_OUTPUT_TOKENS:,}")
    task, language = entry.get("task"), entry.get("language")
    return Prompt(
        name,
        tuple(messages),
        task=task if task in TASKS else None,
        language=language if language in LANGUAGES else None,
        answer=_text(entry, "answer"),
        reference=_text({"reference": reference}, "reference"),
        output_tokens=limit,
    )


def _asked(content: Mapping[str, object]) -> list[Message]:
    if "messages" in content:
        return _messages(content["messages"])
    if "prompt" not in content:
        raise _WrongEntryError("expected prompt, messages, conversations or body")
    prompt = content["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise _WrongEntryError("prompt: expected text")
    return [Message("user", prompt)]


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value or len(value) > _MOST_MESSAGES:
        raise _WrongEntryError(f"expected a list of 1 to {_MOST_MESSAGES} messages")
    messages = []
    for place, one in enumerate(value):
        if not isinstance(one, dict):
            raise _WrongEntryError(f"message {place + 1}: expected an object")
        role = one.get("role", one.get("from"))
        content = one.get("content", one.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise _WrongEntryError(f"message {place + 1}: unknown role {str(role)[:40]!r}")
        messages.append(Message(_ROLES[role], _content(content, place + 1)))
    return messages


def _content(content: object, number: int) -> str:
    """Text, or OpenAI's list of parts where all are text."""
    if isinstance(content, list):
        parts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if texts and len(texts) == len(content):
            return "\n".join(texts)
        raise _WrongEntryError(f"message {number}: only text is taken, no images or sound")
    if not isinstance(content, str):
        raise _WrongEntryError(f"message {number}: expected text")
    return content


def _text(entry: Mapping[str, object], key: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise _WrongEntryError(f"{key}: expected text")
    return value or None
