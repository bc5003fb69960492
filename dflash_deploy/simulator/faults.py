"""What goes wrong on demand: ``DFLASH_SIM_FAULT``, several by comma.

============================  ==============================================================================
``hang:<stage>``              start-up stops in the stage and never goes on
``die:<stage>``               the scheduler dies in the stage, the process follows with SIGKILL
``slow-start:<factor>``       start-up takes so many times as long
``slow:<factor>``             every step takes so many times as long, as where heat holds a card back
``port-taken``                the address is in use: said after loading, then it hangs, as SGLang does
``dead-scheduler``            the server comes up and answers, but nothing is generated and /health is 503
``die-after:<requests>``      the scheduler dies once so many requests are finished
``die-under-load``            the scheduler dies when a second request runs beside the first
``stall:<tokens>``            every stream stops after so many tokens and stays open
``garbage``                   answers are noise with broken characters
``garbage-after:<requests>``  the same, once so many requests are finished
``repeat``                    answers repeat one phrase
``wrong-usage``               ``usage`` counts more completion tokens than were sent
``ignore-sigterm``            SIGTERM does nothing
============================  ==============================================================================

Stages: ``load``, ``draft-load``, ``sizing``, ``pools``, ``prefill-capture``, ``decode-capture``,
``draft-capture``, ``warm-up``.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (
    "load",
    "draft-load",
    "sizing",
    "pools",
    "prefill-capture",
    "decode-capture",
    "draft-capture",
    "warm-up",
)


@dataclass(frozen=True)
class Faults:
    """The faults of one run."""

    hang: frozenset[str] = frozenset()
    die: frozenset[str] = frozenset()
    slow_start: float = 1.0
    slow: float = 1.0
    port_taken: bool = False
    dead_scheduler: bool = False
    die_after: int | None = None
    die_under_load: bool = False
    stall: int | None = None
    garbage_after: int | None = None
    repeat: bool = False
    wrong_usage: bool = False
    ignore_sigterm: bool = False

    def text(self, finished: int) -> str:
        """What is wrong with an answer's words after so many: ``garbage``, ``repeat`` or nothing."""
        garbage = self.garbage_after is not None and finished >= self.garbage_after
        return "garbage" if garbage else "repeat" if self.repeat else ""


def read_faults(text: str) -> Faults:
    """Read ``DFLASH_SIM_FAULT``.

    Raises:
        ValueError: with what is wrong and what there is.
    """
    hang: set[str] = set()
    die: set[str] = set()
    switches: set[str] = set()
    numbers: dict[str, float] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition(":")
        if name in ("hang", "die"):
            if value not in STAGES:
                raise ValueError(f"{word!r}: no stage {value!r}; stages are {', '.join(STAGES)}")
            (hang if name == "hang" else die).add(value)
        elif name in ("slow-start", "slow", "die-after", "garbage-after", "stall"):
            try:
                numbers[name] = float(value)
            except ValueError:
                raise ValueError(f"{word!r}: {name} wants a number, as in {name}:3") from None
            if not 0 <= numbers[name] < 1e6:
                raise ValueError(f"{word!r}: the number must lie between 0 and a million")
        elif name in _SWITCHES and not value:
            switches.add(name)
        else:
            raise ValueError(f"unknown fault {word!r}; see the table in dflash_deploy/simulator/faults.py")
    if "garbage" in switches:
        numbers["garbage-after"] = 0
    return Faults(
        hang=frozenset(hang),
        die=frozenset(die),
        slow_start=max(numbers.get("slow-start", 1.0), 0.01),
        slow=max(numbers.get("slow", 1.0), 0.01),
        port_taken="port-taken" in switches,
        dead_scheduler="dead-scheduler" in switches,
        die_after=int(numbers["die-after"]) if "die-after" in numbers else None,
        die_under_load="die-under-load" in switches,
        stall=int(numbers["stall"]) if "stall" in numbers else None,
        garbage_after=int(numbers["garbage-after"]) if "garbage-after" in numbers else None,
        repeat="repeat" in switches,
        wrong_usage="wrong-usage" in switches,
        ignore_sigterm="ignore-sigterm" in switches,
    )


_SWITCHES = (
    "port-taken",
    "dead-scheduler",
    "die-under-load",
    "garbage",
    "repeat",
    "wrong-usage",
    "ignore-sigterm",
)
