"""The prompts that come with the tool: ``workloads/<task>.yaml``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dflash_deploy.bench.workloads.long_context import Haystack, Needle, hide
from dflash_deploy.bench.workloads.prompt import TASKS, Language, Message, Prompt, Task
from dflash_deploy.resources import resource_dir
from dflash_deploy.yaml_file import read, validate

LONG_CONTEXT_CHARS = 8000
"""Length of the documents that ``load`` makes; ``long_context`` makes any other."""

_Text = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Question(_Part):
    ask: _Text
    language: Language = "en"
    system: _Text | None = None
    answer: _Text | None = None
    reference: _Text | None = None
    json_schema: dict[str, object] | None = Field(default=None, alias="schema")
    tool: dict[str, object] | None = None
    long: bool = False


class _Turn(_Part):
    ask: _Text
    reference: _Text


class _Conversation(_Part):
    language: Language = "en"
    system: _Text
    turns: list[_Turn] = Field(min_length=1)


class _Needle(_Part):
    language: Language = "en"
    needle: _Text
    ask: _Text
    answer: _Text
    reference: _Text


class _File(_Part):
    """Questions stand alone; the turns of a conversation share their beginning; needles lie in a haystack."""

    questions: list[_Question] = []
    conversations: list[_Conversation] = []
    haystack: dict[Language, list[_Text]] = {}
    needles: list[_Needle] = []


def load_all() -> tuple[Prompt, ...]:
    """The prompts of every task."""
    return tuple(prompt for task in TASKS for prompt in load(task))


@cache
def load(task: Task) -> tuple[Prompt, ...]:
    """The prompts of one task, always in the same order: runs are compared question by question."""
    numbers = count(1)
    return tuple(_prompts(task, _file(task), numbers))


def long_context(chars: int) -> tuple[Prompt, ...]:
    """The prompts of the task ``long-context``, each with a document of about ``chars`` characters."""
    return tuple(_needles("long-context", _file("long-context"), count(1), chars))


@cache
def _file(task: Task) -> _File:
    return validate(read(resource_dir("workloads") / f"{task}.yaml"), _File)


def _prompts(task: Task, file: _File, numbers: Iterator[int]) -> Iterator[Prompt]:
    for one in file.questions:
        system = (Message("system", one.system),) if one.system else ()
        yield Prompt(
            _id(task, numbers),
            (*system, Message("user", one.ask)),
            task,
            one.language,
            one.answer,
            one.reference,
            one.json_schema,
            one.tool,
            one.long,
        )
    for talk in file.conversations:
        said: tuple[Message, ...] = (Message("system", talk.system),)
        for turn in talk.turns:
            said = (*said, Message("user", turn.ask))
            yield Prompt(_id(task, numbers), said, task, talk.language, reference=turn.reference)
            said = (*said, Message("assistant", turn.reference))
    yield from _needles(task, file, numbers, LONG_CONTEXT_CHARS)


def _needles(task: Task, file: _File, numbers: Iterator[int], chars: int) -> Iterator[Prompt]:
    for place, one in enumerate(file.needles):
        haystack = Haystack(one.language, tuple(file.haystack[one.language]))
        # The depths are spread over the whole document and come in no order.
        depth = (place * 0.618 + 0.05) % 1.0
        document = hide(Needle(one.needle, depth), haystack, start=place, chars=chars)
        yield Prompt(
            _id(task, numbers),
            (Message("user", f"{document}\n\n{one.ask}"),),
            task,
            one.language,
            one.answer,
            one.reference,
        )


def _id(task: Task, numbers: Iterator[int]) -> str:
    return f"{task}-{next(numbers):03d}"
