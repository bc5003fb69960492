"""What failures teach of configurations not tried: by physics where it orders them, else by habit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_deploy.engine.boot import Stage
from dflash_deploy.profile.schema import FlagSetting
from dflash_deploy.tune.feasible import Forecaster, Prospect
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.space import Settings, Space
from dflash_deploy.tune.steady import kind_of

HUNGRY = frozenset(
    {
        "mem-fraction-static",
        "max-total-tokens",
        "max-mamba-cache-size",
        "mamba-full-memory-ratio",
        "max-running-requests",
        "chunked-prefill-size",
        "speculative-num-draft-tokens",
        "cuda-graph-max-bs-decode",
    }
)
"""Numbers of which more never takes less memory."""

_HARDLY = 0.05
_STEP_MIB = 40.0
"""Two plans of one machine are compared more closely than this, but hardly."""
_UNTRIED = 0.4
"""Chance of a value with which a start has failed, and none has served."""

_EARLY = frozenset({Stage.ARGUMENTS, Stage.IMPORTS, Stage.LOAD, Stage.DRAFT_LOAD})


@dataclass(frozen=True)
class Experience:
    """What is known from trials that failed.

    Attributes:
        starved: settings of those that ran out of memory.
        headroom_mib: the plan's for the roomiest of them, and what a limit on free memory wanted beyond;
            ``ready_mib`` for those that lost a graph.
        proven_mib: what that limit wanted in proofs, by kind of configuration.
        context: the plan's for the largest that could not be sized.
        failed: starts that ended early, by flag and value, where no start with it has come up.
    """

    space: Space
    starved: tuple[Mapping[str, FlagSetting], ...] = ()
    headroom_mib: float | None = None
    proven_mib: Mapping[Hashable, float] = field(default_factory=dict)
    ready_mib: float | None = None
    context: int | None = None
    failed: Mapping[tuple[str, int], int] | None = None

    @classmethod
    def of(cls, records: Sequence[TrialRecord], forecaster: Forecaster, space: Space) -> Experience:
        """What these trials teach, held against the plan as it is now."""
        starved: list[Mapping[str, FlagSetting]] = []
        headrooms: list[float] = []
        proven: dict[Hashable, float] = {}
        readies: list[float] = []
        contexts: list[int] = []
        failed: Counter[tuple[str, int]] = Counter()
        came_up: set[tuple[str, int]] = set()
        for record in records:
            stage = record.boot.stage if record.boot else Stage.ARGUMENTS
            values = set(space.places(record.flags).items())
            if record.outcome in ("served", "infeasible", "degraded") and record.launched:
                came_up |= values
            prospect = forecaster.prospect(record.flags)
            if record.outcome == "degraded" and prospect is not None:
                readies.append(prospect.ready_mib)
            lacking = _lacking_mib(record, forecaster)
            if prospect is not None and lacking is not None:
                enough = prospect.headroom_mib + lacking - _STEP_MIB
                if record.proof is None:
                    headrooms.append(enough)
                else:
                    kind = kind_of(record.flags)
                    proven[kind] = max(enough, proven.get(kind, enough))
            if record.outcome not in ("failed", "unstable"):
                continue
            if stage in _EARLY and not record.ran_out:
                failed.update(values)
            elif stage is Stage.SIZING and prospect is not None:
                contexts.append(prospect.context)
            elif record.ran_out:
                starved.append(record.flags)
                if prospect is not None:
                    headrooms.append(prospect.headroom_mib)
        return cls(
            space,
            tuple(starved),
            max(headrooms, default=None),
            proven,
            max(readies, default=None),
            max(contexts, default=None),
            {value: times for value, times in failed.items() if value not in came_up},
        )

    def chance(self, settings: Settings, prospect: Prospect | None) -> float:
        """That none of the failures comes again."""
        if any(self._hungrier(settings, one) for one in self.starved):
            return 0.0
        chance = 1.0
        for value in self.space.places(settings).items():
            chance *= _UNTRIED ** (self.failed or {}).get(value, 0)
        if prospect is None:
            # Without a plan nobody knows how much was lacking: what is hardly less hungry hardly fits.
            return chance * min((self._relief(settings, one) for one in self.starved), default=1.0)
        below = (
            (prospect.headroom_mib, self.headroom_mib),
            (prospect.headroom_mib, self.proven_mib.get(kind_of(settings))),
            (prospect.ready_mib, self.ready_mib),
        )
        if any(known is not None and own <= known + _STEP_MIB for own, known in below):
            chance *= _HARDLY
        if self.context is not None and prospect.context <= 1.02 * self.context:
            chance *= _HARDLY
        return chance

    def _hungrier(self, settings: Settings, than: Settings) -> bool:
        """It takes no less memory in any flag, and is the same in those that physics does not order."""
        for dimension in self.space.dimensions:
            own, other = settings.get(dimension.flag), than.get(dimension.flag)
            if own == other:
                continue
            if dimension.flag not in HUNGRY or not _more(own, other):
                return False
        return True

    def _relief(self, settings: Settings, than: Settings) -> float:
        """How much less memory it asks for than what ran out of it, up to 1; 1 where physics cannot tell."""
        relief = 0.0
        for dimension in self.space.dimensions:
            own, other = dimension.place_of(settings), dimension.place_of(than)
            if own == other:
                continue
            if dimension.flag not in HUNGRY or own is None or other is None:
                return 1.0
            if _more(than.get(dimension.flag), settings.get(dimension.flag)):
                relief += 2 * abs(own - other) / len(dimension.values)
        return min(relief, 1.0)


def _lacking_mib(record: TrialRecord, forecaster: Forecaster) -> float | None:
    """How much more should have been free; None where enough was, or where nobody looked."""
    limit = forecaster.profile.objective.constraints.get("free_vram_mib")
    if limit is None or limit.min is None:
        return None
    if record.proof is not None and record.proof.free_mib is not None:
        lacking = limit.min - record.proof.free_mib
        return lacking if lacking > 0 else None
    return record.violations["free_vram_mib"] * limit.min if "free_vram_mib" in record.violations else None


def _more(own: FlagSetting | None, other: FlagSetting | None) -> bool:
    # A limit that is left out is none at all.
    if own is None:
        return True
    return isinstance(own, int | float) and isinstance(other, int | float) and own > other
