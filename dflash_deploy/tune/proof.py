"""Whether a configuration would hold for an hour of real use: a soak, contexts up to the promise, an exam.

Everybody at once writes a long answer; then everybody at once brings a longer and longer context, up to all
that was promised. The server has to live through it with the memory free that the profile wants, and its pool
has to be the one that was there when the configuration won. After all that its answers have to be right:
known questions, calls, copies, the same again, many at once, and second turns from the cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player, patience
from dflash_deploy.bench.measurement import Round
from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.bench.quality.exam import Examination, examine, sheet
from dflash_deploy.bench.workloads import Prompt
from dflash_deploy.bench.workloads.shipped import long_context
from dflash_deploy.engine.launch import Launch
from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.records import Exam, Proof

RUNGS = (0.25, 0.92, 1.0)
"""Shares of the promised context."""

_LONG_ANSWER = 4096
_SHORT_ANSWER = 24
_SPARE_TOKENS = 64
"""For the chat template, the salt, and the drafts that a step checks beyond the answer."""
_CHARACTERS_PER_TOKEN = 3.5
"""Before the first answer tells how long this model's tokens are."""
_ENOUGH = 0.95
"""Of a rung's tokens: documents end with whole sections."""
_SLOWEST_PREFILL_TOKENS_PER_S = 100.0
_SLOWEST_TOKENS_PER_S = 0.5
_STALL_S = 600.0
_OTHER_POOL = 0.02
_MOST_EXAMPLES = 8
_LONGEST_EXAMPLE = 400


@dataclass(frozen=True)
class Promise:
    """What must hold.

    Attributes:
        context_tokens: for each user.
        kv_tokens: the pool of the server that was measured; the same configuration must have it again.
        free_mib: left on the card.
    """

    context_tokens: int
    kv_tokens: int | None
    free_mib: float | None


def prove(
    launch: Launch,
    profile: Profile,
    promise: Promise,
    *,
    kv_tokens: int | None,
    vram: Callable[[], int | None],
    total_mib: int | None,
    on_stage: Callable[[str], None],
) -> Proof:
    """Soak a server that is up, and say what came of it.

    Args:
        launch: the server.
        profile: users, and the kinds of their texts.
        promise: what must hold.
        kv_tokens: of this very server, by its log.
        vram: the card's memory in use, in MiB; asked after every round.
        total_mib: of the card.
        on_stage: told where it stands.
    """
    users, promised = profile.workload.users, promise.context_tokens
    begun = time.monotonic()
    peaks: list[int] = []
    long_answer, reached = 0, 0
    problem = _pool_problem(promise.kv_tokens, kv_tokens)

    def play(prompts: Sequence[Prompt], answer: int, prompt_tokens: int) -> str | None:
        nonlocal reached
        played = asyncio.run(_player(launch, profile, prompts, answer, prompt_tokens).round(users, "soak", 0))
        used = vram()
        if used is not None:
            peaks.append(used)
        errors = [one.error for one in played.requests if one.error]
        if errors:
            return errors[0]
        reached = max(reached, _least_context(played))
        return None

    if problem is None:
        answer = max(min(_LONG_ANSWER, promised - 256 - _SPARE_TOKENS), profile.workload.output_tokens)
        on_stage(f"soak: {answer} tokens for each of {users} at once")
        problem = play(mixed_prompts(profile.workload.tasks, users), answer, 256)
        long_answer = 0 if problem else answer
    characters = _CHARACTERS_PER_TOKEN
    for share in RUNGS:
        if problem is not None:
            break
        wanted = max(int(share * promised) - _SHORT_ANSWER - _SPARE_TOKENS, 1)
        on_stage(f"soak: {share:.0%} of {promised} tokens of context for each of {users} at once")
        reached = 0
        problem = play(_documents(int(wanted * characters)), _SHORT_ANSWER, wanted)
        if problem is None and reached < _ENOUGH * wanted:
            # Tokens are longer than was thought: now it is known how long.
            characters *= wanted / max(reached, 1)
            problem = play(_documents(int(wanted * characters)), _SHORT_ANSWER, wanted)
        elif problem is None:
            characters *= wanted / max(reached, 1)
    free_mib = total_mib - max(peaks) if total_mib is not None and peaks else None
    if (
        problem is None
        and None not in (free_mib, promise.free_mib)
        and (free_mib or 0) < (promise.free_mib or 0)
    ):
        problem = f"{free_mib} MiB are free under all that was promised, wanted at least {promise.free_mib:g}"
    exam: Exam | None = None
    if problem is None:
        exam = _examined(launch, profile, promised, on_stage)
        problem = "; ".join(exam.faults) or None
    return Proof(
        seconds=(time.monotonic() - begun) * launch.time_scale,
        answer_tokens=long_answer,
        context_tokens=reached,
        promised_tokens=promised,
        free_mib=free_mib,
        kv_tokens=kv_tokens,
        exam=exam,
        problem=problem,
    )


def _examined(launch: Launch, profile: Profile, context_tokens: int, tell: Callable[[str], None]) -> Exam:
    read_text = profile.measure.check_output
    examination: Examination = examine(
        _endpoint(launch, profile),
        sheet(context_tokens=context_tokens),
        users=profile.workload.users,
        # A simulator's words mean nothing.
        knows=read_text and not launch.simulated,
        read_text=read_text,
        on_stage=lambda stage: tell(f"exam: {stage}"),
    )
    missed = list(examination.missed.items())[:_MOST_EXAMPLES]
    return Exam(
        asked=sum(score.asked for score in examination.scores.values()),
        right=sum(score.right for score in examination.scores.values()),
        missed={name: why[:_LONGEST_EXAMPLE] for name, why in missed},
        faults=tuple(fault[:_LONGEST_EXAMPLE] for fault in examination.faults),
        repeated=examination.repeated,
        repeated_same=examination.repeated_same,
        refused=examination.refused,
    )


def _player(
    launch: Launch, profile: Profile, prompts: Sequence[Prompt], answer: int, prompt_tokens: int
) -> Player:
    users = profile.workload.users
    prefill_s = users * prompt_tokens / _SLOWEST_PREFILL_TOKENS_PER_S
    lasts_s = 60 + answer / _SLOWEST_TOKENS_PER_S + prefill_s
    return Player(
        Load(
            _endpoint(launch, profile),
            prompts,
            Sampling(answer),
            patience(
                max(_STALL_S, users * prompt_tokens / _SLOWEST_PREFILL_TOKENS_PER_S),
                lasts_s,
                launch.time_scale,
            ),
            "proof",
        )
    )


def _endpoint(launch: Launch, profile: Profile) -> Endpoint:
    return Endpoint(launch.base_url, profile.model.served_name or "default", time_scale=launch.time_scale)


def _documents(characters: int) -> list[Prompt]:
    """English ones, whose tokens are of one length."""
    return [prompt for prompt in long_context(max(characters, 200)) if prompt.language == "en"]


def _least_context(played: Round) -> int:
    return min(one.prompt_tokens + one.output_tokens for one in played.requests)


def _pool_problem(before: int | None, now: int | None) -> str | None:
    if before is None or now is None or abs(now - before) <= _OTHER_POOL * before:
        return None
    return f"started again, it has a KV pool of {now} tokens instead of {before}"
