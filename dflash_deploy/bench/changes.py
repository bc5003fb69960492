"""A named protocol, with what a person wants otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dflash_deploy.bench.protocols import PROTOCOLS, Protocol
from dflash_deploy.bench.workloads import TASKS, Task
from dflash_deploy.errors import DeployError, ExitCode

_MOST_USERS = 1024
_MOST_INPUT_TOKENS = 2_000_000


@dataclass(frozen=True)
class Changes:
    """What a person wants otherwise than a protocol has it; None leaves it.

    Attributes:
        users: levels by comma.
        input_tokens: lengths of prompts on a ladder, by comma.
        seconds: that each level of a ``closed`` protocol takes.
        tasks: a mix as ``read_tasks`` takes it.
        own_prompts: from a file, in place of the tasks.
        open_loop: requests come whether others are answered or not.
    """

    users: str | None = None
    input_tokens: str | None = None
    output_tokens: int | None = None
    rounds: int | None = None
    cold: int | None = None
    seconds: float | None = None
    tasks: str | None = None
    own_prompts: bool = False
    open_loop: bool = False


def changed(name: str, changes: Changes) -> Protocol:
    """A protocol by its name, with changes.

    Its name says so where it asks something else: then its figures are not those of the protocol.

    Raises:
        DeployError: there is no such protocol, or it has nothing that could be changed so.
    """
    protocol = PROTOCOLS.get(name)
    if protocol is None:
        raise DeployError(
            f"there is no protocol {name!r}",
            fix=f"protocols are {', '.join(PROTOCOLS)}",
            exit_code=ExitCode.USAGE,
        )
    if protocol.shape != "closed" and (changes.seconds or changes.open_loop):
        closed = ", ".join(one.name for one in PROTOCOLS.values() if one.shape == "closed")
        raise DeployError(
            f"{name} goes in rounds: it takes neither a rate nor arrivals nor seconds",
            fix=f"add --protocol with one of {closed}",
            exit_code=ExitCode.USAGE,
        )
    if changes.users and changes.open_loop:
        raise DeployError(
            "an open loop has no number of users: requests come whether others are answered or not",
            fix="leave out --users, or --rate and --arrivals",
            exit_code=ExitCode.USAGE,
        )
    if protocol.shape != "ladder" and changes.input_tokens:
        raise DeployError(
            f"{name} asks its prompts as they are: they have no length to be set",
            fix="add --protocol context-ladder",
            exit_code=ExitCode.USAGE,
        )
    if protocol.shape == "ladder" and changes.cold is not None:
        raise DeployError(f"{name} has no cold rounds", fix="leave out --cold", exit_code=ExitCode.USAGE)
    wanted = replace(
        protocol,
        prompt_tokens=_read_lengths(changes.input_tokens) if changes.input_tokens else protocol.prompt_tokens,
        users=read_levels(changes.users) if changes.users else (1,) if changes.open_loop else protocol.users,
        output_tokens=changes.output_tokens or protocol.output_tokens,
        warm_up=protocol.warm_up if changes.cold is None else changes.cold,
        # A level that lasts is told by the minute, and an open loop by its requests.
        passes=1 if changes.seconds or changes.open_loop else protocol.passes,
        duration_s=changes.seconds or (None if changes.rounds else protocol.duration_s),
        tasks=tuple(read_tasks(changes.tasks).items()) if changes.tasks else protocol.tasks,
    )
    other = wanted != protocol or changes.own_prompts or changes.open_loop
    return replace(
        wanted,
        name=f"{name} (changed)" if other else name,
        rounds=changes.rounds or protocol.rounds,
    )


def read_tasks(text: str) -> dict[Task, float]:
    """A mix as a person writes it: ``code`` or ``instruction=2,code=1``.

    Raises:
        DeployError: an unknown task, or a weight that is none.
    """
    mix: dict[Task, float] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = word.partition("=")
        task = next((one for one in TASKS if one == name), None)
        try:
            share = float(weight or 1)
        except ValueError:
            share = math.nan
        if task is None or not 0 <= share < math.inf:
            raise DeployError(
                f"{word!r} is no task with its weight",
                fix=f"tasks are {', '.join(TASKS)}; write code, or instruction=2,code=1",
                exit_code=ExitCode.USAGE,
            )
        mix[task] = share
    if not sum(mix.values()):
        raise DeployError("no task is asked for", exit_code=ExitCode.USAGE)
    return mix


def _read_lengths(text: str) -> tuple[int, ...]:
    words = [part.strip() for part in text.split(",")]
    if not all(_is_number(word, _MOST_INPUT_TOKENS) for word in words):
        raise DeployError(
            f"{text!r} are no lengths of prompts", fix="write 8192, or 1024,8192", exit_code=ExitCode.USAGE
        )
    return tuple(sorted({int(word) for word in words}))


def read_levels(text: str) -> tuple[int, ...]:
    """Load levels by comma.

    Raises:
        DeployError: one is no number of users.
    """
    words = [part.strip() for part in text.split(",")]
    if not all(_is_number(word, _MOST_USERS) for word in words):
        raise DeployError(
            f"{text!r} are no numbers of users", fix="write 4, or 1,2,4", exit_code=ExitCode.USAGE
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _is_number(word: str, most: int) -> bool:
    return word.isdecimal() and len(word) <= len(str(most)) and 1 <= int(word) <= most
