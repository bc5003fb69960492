"""The questions that a bench asks, mixed by task as a profile wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar, cast

from dflash_deploy.bench.workloads import Prompt, Task, load

_Task = TypeVar("_Task", bound=str)


def mixed_prompts(tasks: Mapping[_Task, float], count: int) -> tuple[Prompt, ...]:
    """The first ``count`` questions of a mix, always the same ones in the same order.

    Every task's share comes as near to its weight as it can at each place of the sequence, so that a short
    run has the mix too. Of a task that has questions for long answers these alone are taken.

    Args:
        tasks: weight by task; those of weight zero are left out.
        count: how many; a task's questions start over when they are used up.
    """
    total = sum(tasks.values())
    asked = dict.fromkeys((task for task, weight in tasks.items() if weight > 0), 0)
    if not asked:
        raise ValueError("no task has a weight above zero")

    def questions() -> Iterator[Prompt]:
        place = 0
        while True:
            place += 1
            task = max(asked, key=lambda name: tasks[name] / total * place - asked[name])
            known = lasting(cast("Task", task))
            yield known[asked[task] % len(known)]
            asked[task] += 1

    return tuple(islice(questions(), count))


def lasting(task: Task) -> tuple[Prompt, ...]:
    """A task's prompts that want long answers; where there is none all of them, marked as short."""
    long = tuple(prompt for prompt in load(task) if prompt.long)
    return long or tuple(replace(prompt, short=True) for prompt in load(task))
