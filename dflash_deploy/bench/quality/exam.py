"""Questions with known answers, texts to compare, and the same again: whether a server is fit to be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.quality.agreement import Agreement, Said, agree
from dflash_deploy.bench.quality.answers import Answer, answer_faults, copied, misses
from dflash_deploy.bench.quality.asking import DEFAULT_TIMEOUT_S, Reply, ask
from dflash_deploy.bench.workloads import LANGUAGES, Language, Message, Prompt, Task, load, long_context

Kind = Literal["exact", "json", "tool", "copy"]
Mode = Literal["alone", "together", "cached"]

_KNOWN_TOKENS = 320
TEXT_TOKENS = 128
_REPEATED = 3
"""Prompts that are asked three times."""

_LEAST_ASKED = 4
_LEAST_LOST = 3
_COPY = {
    "en": "Copy the following text exactly, character by character, and write nothing else:\n\n{text}",
    "zh-TW": "請一字不差地抄寫下面這段文字，不要寫任何其他內容：\n\n{text}",  # noqa: RUF001
}
_SUM_UP: Mapping[Language, str] = {
    "en": "Now say in three sentences what the document is about.",
    "zh-TW": "現在請用三句話說明這份文件的內容。",
}
_DOCUMENT_CHARS: Mapping[Language, int] = {"en": 3600, "zh-TW": 1100}
"""Of some nine hundred tokens either."""


@dataclass(frozen=True)
class Item:
    """A question whose right answer is known."""

    kind: Kind
    prompt: Prompt

    def misses(self, reply: Reply) -> str | None:
        """Why the reply is not right, None where it is."""
        if self.kind == "copy":
            return copied(reply.answer.text, self.prompt.reference or "")
        return misses(self.prompt, reply.answer)


@dataclass(frozen=True)
class Sheet:
    """What is asked.

    Attributes:
        known: questions with right answers.
        free: texts of some length, asked alone, together, and again.
        talks: two turns of a conversation each; the second finds the first in the cache.
    """

    known: tuple[Item, ...]
    free: tuple[Prompt, ...]
    talks: tuple[tuple[Prompt, Prompt], ...]


@dataclass(frozen=True)
class Score:
    """Questions of one kind that were answered, and those answered right."""

    asked: int
    right: int


@dataclass(frozen=True)
class Examination:
    """How one server did.

    Attributes:
        scores: by kind; empty where the model is not expected to know anything.
        missed: why an answer is wrong, by the question's id.
        faults: what makes the server unfit, a line each with an example; empty where all is well.
        answers: to the texts, by how they were asked and by the prompt's id.
        repeated: prompts that were asked three times.
        repeated_same: of them, those with one answer to the last byte.
        cached_tokens: found in the prefix cache by the second turns, None where the server does not say.
        refused: questions that the server does not take, such as tool calls.
        unbegun: answers that did not get beyond the model's thoughts.
    """

    scores: Mapping[Kind, Score]
    missed: Mapping[str, str]
    faults: tuple[str, ...]
    answers: Mapping[Mode, Mapping[str, Said]]
    repeated: int
    repeated_same: int
    cached_tokens: int | None
    refused: int
    unbegun: int = 0


def sheet(*, context_tokens: int | None = None) -> Sheet:
    """The questions, English and Traditional Chinese, always the same ones.

    Args:
        context_tokens: leave out what has no room in it.
    """
    every = {task: [one for one in load(task) if _fits(one, context_tokens)] for task in _TASKS}
    exact = [one for task in _TASKS for one in every[task] if one.answer is not None and task != "code"]
    tools = every["tools"]
    texts = [one for task in ("instruction", "multi-turn", "prose") for one in every[task] if one.reference]
    known = [
        *(Item("exact", one) for one in _both_languages(exact, 10)),
        *(Item("json", one) for one in _both_languages([one for one in tools if one.schema], 4)),
        *(Item("tool", one) for one in _both_languages([one for one in tools if one.tool], 4)),
        *(Item("copy", _copy(one)) for one in _both_languages(texts, 4)),
    ]
    long = [one for task in ("instruction", "code", "math", "prose") for one in every[task] if one.long]
    turns = [
        (first, second)
        for first, second in pairwise(every["multi-turn"])
        if len(first.messages) == 2 and second.messages[: len(first.messages)] == first.messages
    ]
    languages = {first.language: (first, second) for first, second in reversed(turns)}
    documents = [talk for talk in map(_about_a_document, LANGUAGES) if _fits(talk[1], context_tokens)]
    talks = tuple(dict.fromkeys([*languages.values(), *documents, *turns]))[:4]
    return Sheet(tuple(known), tuple(_both_languages(long, 6)), talks)


def examine(
    endpoint: Endpoint,
    questions: Sheet,
    *,
    users: int,
    knows: bool = True,
    read_text: bool = True,
    text_tokens: int = TEXT_TOKENS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_stage: Callable[[str], None] | None = None,
) -> Examination:
    """Examine a server. It takes some sixty requests of a few hundred tokens at most.

    Args:
        endpoint: the server.
        questions: from ``sheet``.
        users: requests at once, where more than one is asked at a time.
        knows: the model is expected to answer right. Off for random weights and for a simulator.
        read_text: judge the texts. Off for random weights.
        text_tokens: length at which the texts are cut, those compared with others'.
        timeout_s: for one answer, on the clock.
        on_stage: told what is going on, in a few words.
    """
    tell = on_stage or (lambda _: None)
    asked: list[_Asked] = []

    def put(prompts: Sequence[Prompt], at_once: int, max_tokens: int = text_tokens) -> list[Reply]:
        if any(one.reply.lost for one in asked):
            # It is not waited for once more.
            return [Reply(Answer(""), error="not asked", lost=True) for _ in prompts]
        replies = ask(endpoint, prompts, max_tokens=max_tokens, at_once=at_once, timeout_s=timeout_s)
        asked.extend(
            _Asked(prompt, max_tokens, reply) for prompt, reply in zip(prompts, replies, strict=True)
        )
        return replies

    scores: dict[Kind, Score] = {}
    missed: dict[str, str] = {}
    if knows:
        tell(f"{len(questions.known)} questions with known answers")
        replies = put([item.prompt for item in questions.known], users, _KNOWN_TOKENS)
        scores, missed = _graded(questions.known, replies)
    tell(f"{len(questions.free)} texts, one at a time")
    alone = put(questions.free, 1)
    tell("three of them twice more")
    again = [put(questions.free[:_REPEATED], 1) for _ in range(2)]
    tell("conversations, their second turns from the cache")
    talks = [put(talk, 1)[1] for talk in questions.talks]
    answers: dict[Mode, Mapping[str, Said]] = {"alone": _said(questions.free, alone)}
    if users > 1:
        tell(f"the texts again, {users} at once")
        answers["together"] = _said(questions.free, put(questions.free, users))
    answers["cached"] = _said([second for _, second in questions.talks], talks)
    trios = [trio for trio in zip(alone, *again, strict=False) if not any(reply.error for reply in trio)]
    cached = [reply.cached_tokens for reply in talks if reply.cached_tokens is not None]
    return Examination(
        scores=scores,
        missed=missed,
        faults=(
            *_failed(asked),
            *_answer_faults(asked, read_text=read_text),
            *_ignorance(scores, missed),
            *_restlessness(trios),
        ),
        answers=answers,
        repeated=len(trios),
        repeated_same=sum(len({reply.said for reply in trio}) == 1 for trio in trios),
        cached_tokens=sum(cached) if cached else None,
        refused=sum(one.reply.refused for one in asked),
        unbegun=sum(not one.reply.answer.begun for one in asked),
    )


def agreement(ours: Examination, plain: Examination) -> dict[Mode, Agreement]:
    """How far the answers of two servers to one sheet agree, by the way they were asked."""
    found: dict[Mode, Agreement] = {}
    for mode, answers in ours.answers.items():
        both = [prompt for prompt in answers if prompt in plain.answers.get(mode, {})]
        if both:
            found[mode] = agree(
                [answers[prompt] for prompt in both], [plain.answers[mode][prompt] for prompt in both]
            )
    return found


def faults_beside(ours: Examination, plain: Examination) -> tuple[str, ...]:
    """What only shows beside plain decoding: questions unlearned, other texts from the first words on."""
    asked = min(_asked(ours), _asked(plain))
    lost = sorted(set(ours.missed) - set(plain.missed))
    gained = set(plain.missed) - set(ours.missed)
    faults = [f"{mode}: {one.fault}" for mode, one in agreement(ours, plain).items() if one.fault is not None]
    if len(lost) - len(gained) >= max(_LEAST_LOST, asked // 4):
        faults.append(
            f"wrong-answers: {len(lost)} that plain decoding gives right, for example {lost[0]}: "
            f"{ours.missed[lost[0]]}"
        )
    return tuple(faults)


_TASKS: tuple[Task, ...] = ("instruction", "math", "code", "prose", "tools", "long-context", "multi-turn")


def _fits(prompt: Prompt, context_tokens: int | None) -> bool:
    if context_tokens is None:
        return True
    # Three characters of English a token at worst, one of Chinese; and twenty tokens of the chat's form.
    text = "".join(message.content for message in prompt.messages)
    tokens = len(text) / (3 if prompt.language == "en" else 1) + 20 * len(prompt.messages)
    return tokens + _KNOWN_TOKENS < context_tokens


def _both_languages(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many, spread over the tasks, every other one in Chinese as long as there are such."""
    queues: dict[tuple[object, object], list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault((prompt.task, prompt.language), []).append(prompt)
    taken: list[Prompt] = []
    turn = 0
    while len(taken) < count and any(queues.values()):
        language = ("en", "zh-TW")[turn % 2]
        of_language = [queue for (_, spoken), queue in queues.items() if spoken == language and queue]
        if of_language:
            taken.append(of_language[turn // 2 % len(of_language)].pop(0))
        turn += 1
    return taken


def _about_a_document(language: Language) -> tuple[Prompt, Prompt]:
    """Two turns of which the first is long enough to be in any prefix cache.

    Of models with a recurrent state, a cache has what stands before a multiple of some hundred tokens.
    """
    asked = next(one for one in long_context(_DOCUMENT_CHARS[language]) if one.language == language)
    first = replace(asked, id=f"{asked.id}-talk")
    more = (Message("assistant", first.reference or ""), Message("user", _SUM_UP[language]))
    messages = (*first.messages, *more)
    return first, replace(first, id=f"{first.id}-2", messages=messages, answer=None, reference=None)


def _copy(prompt: Prompt) -> Prompt:
    text = prompt.reference or ""
    words = _COPY[prompt.language or "en"].format(text=text)
    return Prompt(
        f"copy-{prompt.id}", (Message("user", words),), prompt.task, prompt.language, reference=text
    )


def _said(prompts: Sequence[Prompt], replies: Sequence[Reply]) -> dict[str, Said]:
    pairs = zip(prompts, replies, strict=True)
    return {prompt.id: reply.said for prompt, reply in pairs if reply.error is None}


def _graded(items: Sequence[Item], replies: Sequence[Reply]) -> tuple[dict[Kind, Score], dict[str, str]]:
    scores: dict[Kind, Score] = {}
    missed: dict[str, str] = {}
    for item, reply in zip(items, replies, strict=True):
        if reply.error is not None or not reply.answer.begun:
            continue
        problem = item.misses(reply)
        if problem is not None:
            missed[item.prompt.id] = problem
        before = scores.get(item.kind, Score(0, 0))
        scores[item.kind] = Score(before.asked + 1, before.right + (problem is None))
    return scores, missed


def _asked(examination: Examination) -> int:
    return sum(score.asked for score in examination.scores.values())


@dataclass(frozen=True)
class _Asked:
    prompt: Prompt
    max_tokens: int
    reply: Reply


def _failed(asked: Sequence[_Asked]) -> list[str]:
    errors = [one.reply.error for one in asked if one.reply.error is not None]
    faulty = [one.reply.error for one in asked if one.reply.error is not None and not one.reply.refused]
    # One that refuses everything is of no use either.
    counted = errors if len(errors) == len(asked) else faulty
    return (
        [f"no-answer: {len(counted)} of {len(asked)} requests, for example {counted[0]}"] if counted else []
    )


def _answer_faults(asked: Sequence[_Asked], *, read_text: bool) -> list[str]:
    found: dict[str, list[str]] = {}
    answered = [one for one in asked if one.reply.error is None]
    for one in answered:
        answer = one.reply.answer
        faults = answer_faults(one.prompt, answer) if read_text else {}
        if answer.tokens is not None and answer.tokens > one.max_tokens:
            faults["wrong-count"] = f"{answer.tokens} tokens by usage where {one.max_tokens} were allowed"
        for fault, example in faults.items():
            found.setdefault(fault, []).append(f"{one.prompt.id}: {example}")
    return [
        f"{fault}: {len(examples)} of {len(answered)} answers, for example {examples[0]}"
        for fault, examples in found.items()
    ]


def _ignorance(scores: Mapping[Kind, Score], missed: Mapping[str, str]) -> list[str]:
    asked = sum(score.asked for score in scores.values())
    right = sum(score.right for score in scores.values())
    if asked < _LEAST_ASKED or right * 2 >= asked:
        return []
    name, example = next(iter(missed.items()))
    return [f"wrong-answers: {asked - right} of {asked}, for example {name}: {example}"]


def _restlessness(trios: Sequence[tuple[Reply, ...]]) -> list[str]:
    """Near ties make answers part somewhere; that all part at their first letter is something else."""
    if not trios or any(len({reply.said.text[:1] for reply in trio}) == 1 for trio in trios):
        return []
    texts = [repr(reply.said.text[:40]) for reply in trios[0]]
    return [f"unstable: one prompt, three times, and no answer begins like the others: {', '.join(texts)}"]
