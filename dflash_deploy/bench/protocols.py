"""Ways of measuring that have a name, so that two people's figures were got in the same way.

A protocol is data; ``play.run_protocol`` plays any of them against any server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dflash_deploy.bench.load import DEFAULT_STALL_S
from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.bench.workloads import Prompt, Task


@dataclass(frozen=True)
class Protocol:
    """How a server is measured.

    Attributes:
        summary: in a sentence.
        shape: ``rounds``: all users at once, and again when all are done; ``closed``: each user asks as soon
            as the last answer is there; ``ladder``: one user, prompts of given lengths.
        users: levels of users at once, one after the other.
        output_tokens: of each answer.
        warm_up: unmeasured rounds before a level (of ``rounds`` they are shown, marked cold).
        rounds: measured ones; of ``closed``: requests of each user.
        duration_s: of ``closed``: ends the level in place of ``rounds``.
        passes: of ``closed``: how often its levels are gone through, so that each has several figures.
        prompt_tokens: lengths of ``ladder``, those longer than the context left out.
        tasks: what is asked, by weight.
    """

    name: str
    summary: str
    shape: Literal["rounds", "closed", "ladder"]
    users: tuple[int, ...] = (1,)
    output_tokens: int = 1024
    warm_up: int = 1
    rounds: int = 1
    duration_s: float | None = None
    passes: int = 1
    prompt_tokens: tuple[int, ...] = ()
    tasks: tuple[tuple[Task, float], ...] = (("instruction", 1.0),)


PROTOCOLS = MappingProxyType(
    {
        one.name: one
        for one in (
            Protocol(
                "write-up-single",
                "one user, 1,024 tokens, greedy, no thinking; a cold round and three measured ones",
                "rounds",
                rounds=3,
            ),
            Protocol(
                "write-up-four",
                "four users at once, 1,024 tokens each, greedy, no thinking; a cold round and a warm one",
                "rounds",
                users=(4,),
            ),
            Protocol(
                "latency",
                "one user, short answers one after the other: the waits for the first token and the others",
                "closed",
                output_tokens=128,
                rounds=24,
                tasks=(("instruction", 1.0), ("code", 1.0), ("math", 1.0), ("prose", 1.0)),
            ),
            Protocol(
                "throughput",
                "more and more users, each asking again at once, thrice: where the total stops growing",
                "closed",
                users=(1, 2, 4, 8, 16),
                output_tokens=256,
                rounds=4,
                passes=3,
                tasks=(("instruction", 1.0), ("code", 1.0), ("math", 1.0), ("prose", 1.0)),
            ),
            Protocol(
                "soak",
                "four users without a pause for half an hour, minute by minute: does it stay as fast",
                "closed",
                users=(4,),
                output_tokens=512,
                duration_s=1800.0,
                tasks=(("instruction", 1.0), ("code", 1.0), ("math", 1.0), ("prose", 1.0)),
            ),
            Protocol(
                "context-ladder",
                "one user with longer and longer prompts: speed of prefill and of decoding at each length",
                "ladder",
                output_tokens=128,
                rounds=2,
                prompt_tokens=(1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
            ),
        )
    }
)


@dataclass(frozen=True)
class Options:
    """What a person may set of any protocol.

    Attributes:
        prompts: in place of the protocol's own.
        salt: begins every prompt, so that no cache can help; None where the workload is about caches.
        stall_s: bound on the wait for anything, in server seconds.
        estimate_tokens: take a chunk for a token where the server does not count.
        rate_per_s: of ``closed`` protocols: requests come at random at this rate in place of users who wait
            for their answers (open loop); the number of requests stays.
        seed: of that randomness.
        arrivals_s: of ``closed`` protocols: a request comes at each of these moments, for an open loop too.
    """

    prompts: Sequence[Prompt] | None = None
    salt: str | None = ""
    stall_s: float = DEFAULT_STALL_S
    estimate_tokens: bool = False
    rate_per_s: float | None = None
    seed: int = 0
    arrivals_s: tuple[float, ...] | None = None

    @property
    def open_loop(self) -> str | None:
        """How requests come where nobody waits for answers, in words; None where users do."""
        if self.arrivals_s is not None:
            return f"{len(self.arrivals_s)} given arrivals"
        return None if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"


def prompts_of(protocol: Protocol, options: Options, count: int) -> Sequence[Prompt]:
    """A person's own prompts, or the first of the protocol's."""
    return options.prompts or mixed_prompts(dict(protocol.tasks), count)
