"""The questions that a bench asks, mixed by task as a profile wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TypeVar, cast

from dflash_deploy.bench.workloads import Task, load

_Task = TypeVar("_Task", bound=str)

TASKS = ("instruction", "math", "code", "prose")


@cache
def prompts_by_task() -> Mapping[str, tuple[str, ...]]:
    """Our own questions that want a long answer, for each of ``TASKS``."""
    return {
        task: tuple(prompt.question for prompt in load(cast("Task", task)) if prompt.long) for task in TASKS
    }


def mixed_prompts(tasks: Mapping[_Task, float], count: int) -> tuple[str, ...]:
    """The first ``count`` questions of a mix, always the same ones in the same order.

    Every task's share comes as near to its weight as it can at each place of the sequence, so that a short
    run has the mix too.

    Args:
        tasks: weight by task; those of weight zero are left out.
        count: how many; a task's questions start over when they are used up.
    """
    total = sum(tasks.values())
    asked = dict.fromkeys((task for task, weight in tasks.items() if weight > 0), 0)
    if not asked:
        raise ValueError("no task has a weight above zero")

    def questions() -> Iterator[str]:
        place = 0
        while True:
            place += 1
            task = max(asked, key=lambda name: tasks[name] / total * place - asked[name])
            known = prompts_by_task()[task]
            yield known[asked[task] % len(known)]
            asked[task] += 1

    return tuple(islice(questions(), count))
