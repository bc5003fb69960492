"""One configuration as advice looks at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Generic, TypeVar

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.launch import Flags, FlagValue
from dflash_deploy.engine.sglang.versions import VersionFacts, facts, order, state_slots_per_request

_SMALL_CARD_MIB = 35 * 1024
_IMPLICIT_REQUESTS = 48


class Weight(IntEnum):
    """How much an advice matters; the smallest comes first."""

    REFUSED = 0
    """The server does not start so."""
    FITS = 1
    """With this change it fits."""
    WRONG = 2
    """It serves wrong answers, dies while serving, or lets strangers in."""
    SLOW = 3
    """It costs much speed or most of the capacity."""
    MEMORY = 4
    """It costs memory that a pool needs."""
    NOTHING = 5
    """The flag does nothing here."""
    NOTE = 6
    """Worth knowing."""


C = TypeVar("C")


@dataclass(frozen=True)
class Row(Generic[C]):
    """One row of a table of advice: when it holds of a case, and what is said then."""

    id: str
    weight: Weight
    when: Callable[[C], bool]
    text: str | Callable[[C], str]

    def words(self, case: C) -> str:
        """What is said of a case."""
        return self.text if isinstance(self.text, str) else self.text(case)


@dataclass(frozen=True)
class Advice:
    """One thing to know of a configuration, and the change that helps.

    Attributes:
        flags: the flags to set; None takes one away.
        cost: what the flag costs as it is, or what the change gives up.
        evidence: where this is known from.
        stage: where the start ends because of it; None where it does not.
    """

    id: str
    text: str
    flags: Mapping[str, FlagValue | None]
    cost: str
    evidence: str
    weight: Weight
    stage: Stage | None = None


@dataclass(frozen=True)
class Model:
    """What advice needs to know of a target and its draft; None where it is not known.

    Attributes:
        hybrid: it has recurrent layers, and so a state cache.
        lm_head: number format of the output head.
        draft_dflash2: the draft is of the class ``DFlash2DraftModel``.
        draft_block: tokens that the draft was trained to give.
    """

    path: str = ""
    hybrid: bool | None = None
    vision: bool = False
    lm_head: str | None = None
    kv_cache_dtype: str | None = None
    state_dtype: str | None = None
    draft_dflash2: bool = False
    draft_block: int | None = None


@dataclass(frozen=True)
class Case:
    """One configuration to advise on.

    Attributes:
        flags: by their newest names.
        argv: the arguments as they were written, empty where there are none.
        card_memory_mib: total memory, None where the card is not known.
        compute_capability: such as ``12.0``.
        unified: the card's memory is the host's too.
    """

    flags: Flags
    version: str
    users: int = 1
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: Model = field(default_factory=Model)
    card_memory_mib: int | None = None
    compute_capability: str | None = None
    unified: bool = False

    @cached_property
    def release(self) -> VersionFacts:
        """Facts of the version."""
        return facts(self.version)

    def since(self, release: str) -> bool:
        """The version is this release or a newer one."""
        return order(self.release.release) >= order(release)

    def on(self, name: str) -> bool:
        """A switch is set."""
        return self.flags.get(name) is True

    def given(self, name: str) -> bool:
        """A flag stands in the command."""
        return name in self.flags

    def number(self, name: str) -> float | None:
        """A flag's number, None where it is left out."""
        value = self.flags.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, name: str) -> int | None:
        """A flag's whole number, None where it is left out."""
        value = self.number(name)
        return None if value is None else int(value)

    def text(self, name: str) -> str:
        """A flag's text, empty where it is left out."""
        value = self.flags.get(name)
        return value if isinstance(value, str) else ""

    @property
    def algorithm(self) -> str:
        """The way draft tokens are made, empty without one."""
        return self.text("speculative-algorithm").upper()

    @property
    def small_card(self) -> bool:
        """A card of up to 32 GB."""
        return self.card_memory_mib is not None and self.card_memory_mib < _SMALL_CARD_MIB

    @property
    def architecture(self) -> int | None:
        """Major compute capability: 8 for Ampere and Ada, 9 for Hopper, 10 and 12 for Blackwell."""
        major = (self.compute_capability or "").partition(".")[0]
        return int(major) if major.isdigit() else None

    @property
    def decode_graphs(self) -> bool:
        """Decode runs in CUDA graphs."""
        off = self.on("disable-cuda-graph") or self.on("disable-decode-cuda-graph")
        return not off and self.text("cuda-graph-backend-decode") != "disabled"

    @property
    def prefill_graphs(self) -> bool:
        """Prefill runs in CUDA graphs."""
        off = self.on("disable-cuda-graph") or self.on("disable-prefill-cuda-graph")
        return not off and self.text("cuda-graph-backend-prefill") != "disabled"

    @property
    def radix(self) -> bool:
        """The prefix cache is on."""
        return not self.on("disable-radix-cache")

    @property
    def overlap(self) -> bool:
        """The overlap schedule is on."""
        return not self.on("disable-overlap-schedule")

    @property
    def strategy(self) -> str:
        """How the state cache works with the prefix cache."""
        return self.text("mamba-radix-cache-strategy") or "auto"

    @property
    def slots_per_request(self) -> int:
        """State slots that each request takes."""
        return state_slots_per_request(self.strategy, radix_cache=self.radix, overlap=self.overlap)

    @property
    def slots(self) -> int | None:
        """State slots given."""
        return self.whole("max-mamba-cache-size")

    @property
    def served_by_slots(self) -> int:
        """Requests at once that the state slots given are enough for."""
        return (self.slots or 0) // self.slots_per_request

    @property
    def wanted(self) -> int:
        """Requests that are to run at once."""
        return max(self.users, self.whole("max-running-requests") or 1)

    @property
    def requests(self) -> int | None:
        """The limit of running requests, None where the engine works it out."""
        given = self.whole("max-running-requests")
        return given if given is not None else _IMPLICIT_REQUESTS if self.algorithm else None

    @property
    def draft_tokens(self) -> int | None:
        """Tokens checked in one verify step, as far as flags and draft tell."""
        given = self.whole("speculative-num-draft-tokens")
        if self.algorithm == "DFLASH":
            return self.whole("speculative-dflash-block-size") or given or self.model.draft_block or 16
        return given

    @property
    def gamma(self) -> int | None:
        """Block size of DSPARK."""
        return self.whole("speculative-dspark-block-size") or self.model.draft_block

    @property
    def default_batch(self) -> int | None:
        """Largest decode graph where no flag says it."""
        if self.card_memory_mib is None:
            return None
        return self.release.defaults_for(self.card_memory_mib).decode_bs

    @property
    def quantized_head(self) -> bool:
        """The output head is not a dense matrix."""
        dense = ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32", "shared")
        return self.model.lm_head is not None and self.model.lm_head not in dense
