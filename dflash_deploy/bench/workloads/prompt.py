"""One prompt, and what a good answer to it looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

Task = Literal["instruction", "math", "code", "prose", "tools", "long-context", "multi-turn"]
Language = Literal["en", "zh-TW"]
Role = Literal["system", "user", "assistant"]

TASKS: tuple[Task, ...] = get_args(Task)
LANGUAGES: tuple[Language, ...] = get_args(Language)


class Message(NamedTuple):
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a question.

    Attributes:
        id: ``<task>-<number>`` of the shipped ones, ``<file>:<line>`` of a person's own.
        task: one of ``TASKS``; None where the person's file does not say.
        language: one of ``LANGUAGES``, None where it is not known.
        messages: the last one is the user's.
        answer: what a right answer holds, in its simplest form (``42``, ``Tuesday``); None where there is no
            single one.
        reference: a whole good answer in words, code or JSON.
        schema: JSON schema that the answer must fit; the prompt asks for JSON alone.
        tool: the one function that the model is offered and must call, in OpenAI's form (``name``,
            ``description``, ``parameters``). ``reference`` then holds its arguments as JSON.
        long: asks for an answer of about a thousand tokens or more, so that one of fixed length stays on its
            subject.
        short: the answer is short by nature (a call, a number), so its length is not forced: what came after
            it would be rubbish, and no fault of the server.
        output_tokens: tokens of the answer at most, where a person's file says so; it may end before.
    """

    id: str
    messages: tuple[Message, ...]
    task: Task | None = None
    language: Language | None = None
    answer: str | None = None
    reference: str | None = None
    schema: Mapping[str, object] | None = None
    tool: Mapping[str, object] | None = None
    long: bool = False
    short: bool = False
    output_tokens: int | None = None

    @property
    def ends_freely(self) -> bool:
        """The answer's length is not forced."""
        return self.short or self.output_tokens is not None

    @property
    def question(self) -> str:
        """The user's last words."""
        return self.messages[-1].content

    def salted(self, salt: str) -> Prompt:
        """The same prompt, which begins in its own way, so that no prefix cache has met it."""
        first, *others = self.messages
        return replace(self, messages=(Message(first.role, f"[{salt}] {first.content}"), *others))


def ask(text: str, *, id: str = "prompt") -> Prompt:  # noqa: A002  (the field's name)
    """A prompt of one question."""
    return Prompt(id, (Message("user", text),))
