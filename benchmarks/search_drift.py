"""Prints whether a study picks the right configuration on a machine that changes meanwhile (simulated).

    python benchmarks/search_drift.py
    python benchmarks/search_drift.py --seeds 1 2 --json

The landscapes are those of ``search_efficiency.py``. While a study goes on, every step takes longer (heat),
or less long (another program leaves the card), by up to 4 %. What a configuration is worth is its figure
on the undisturbed machine: "behind" is how far the picked one is behind the best that was launched, and "told
wrong" by how much the gain over the first known setting that the study tells is off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from search_efficiency import OUTPUT_TOKENS, PROFILES, Landscape, Settings, landscape, ours, p90
from virtual_trial import VirtualCard

from dflash_deploy.tune.gain import gain
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.search import Proposal, Search
from dflash_deploy.tune.select import KNOWN, best_of, compared, proof_of

SEEDS = (31, 32)
MOST = 0.04
WRONG = 0.01

Slow = Callable[[int], float]
"""By a trial's number, how many times as long every step takes then."""


class Trusting(Search):
    """Takes every measurement for what it is: nothing is started again but the best."""

    def proof(self, best: TrialRecord | None = None) -> Proposal | None:
        best = best or best_of(self.forecaster.profile, self.records)
        if best is None or proof_of(best, self.records) is not None:
            return None
        return super().proof(best)


def steady(number: int) -> float:  # noqa: ARG001
    """No drift."""
    return 1.0


def heats_up(number: int) -> float:
    """Quickly at first, as a card does."""
    return 1 + MOST * (1 - math.exp(-(number - 1) / 2.5))


def wears_on(number: int) -> float:
    """A little with each trial, over ten of them."""
    return 1 + MOST * min(number - 1, 10) / 10


def is_left_alone(number: int) -> float:
    """Somebody works on the machine until the second trial has ended."""
    return 1 + (MOST if number <= 2 else 0.0)


@dataclass(frozen=True)
class Outcome:
    """Of one study."""

    launched: int
    behind: float
    told_wrong: float | None


@dataclass(frozen=True)
class Row:
    """One way to judge over all landscapes."""

    name: str
    played: list[Outcome]

    @property
    def behind(self) -> list[float]:
        return [one.behind for one in self.played]

    @property
    def told_wrong(self) -> list[float]:
        return [one.told_wrong for one in self.played if one.told_wrong is not None]

    @property
    def launched(self) -> float:
        return statistics.median(one.launched for one in self.played)

    def as_json(self) -> dict[str, object]:
        return {
            "study": self.name,
            "launched_median": self.launched,
            "behind_median": statistics.median(self.behind),
            "behind_p90": p90(self.behind),
            "wrong": sum(one > WRONG for one in self.behind),
            "studies": len(self.played),
            "told_wrong_median": statistics.median(self.told_wrong),
            "told_wrong_p90": p90(self.told_wrong),
        }


def play(land: Landscape, kind: type[Search], slow: Slow, *, clocks: bool) -> Outcome:
    profile = land.profile
    card = VirtualCard(
        profile, land.card.id, land.seed, OUTPUT_TOKENS, land.card.memory_mib, slow=slow, clocks=clocks
    )
    records = ours(replace(land, trials=card), kind=kind).records
    worth = [land.run(own(land, one)).objective or 0.0 for one in records if one.feasible and land.holds(one)]
    picked = best_of(profile, records)
    if picked is None or not worth:
        return Outcome(len(records), 0.0, None)
    truly = land.run(own(land, picked))
    lost = 1 - (truly.objective or 0.0) / max(worth)
    known = next((one for one in records if one.source.startswith(KNOWN) and one.objective), None)
    if known is None or known.number == picked.number:
        return Outcome(len(records), lost, None)
    goal = profile.objective.optimize
    told = gain(*compared(profile, picked, known, records), goal)
    true = gain(truly, land.run(own(land, known)), goal)
    return Outcome(len(records), lost, abs(told.median - true.median) if told and true else None)


def own(land: Landscape, record: TrialRecord) -> Settings:
    return {flag: value for flag, value in record.flags.items() if flag not in land.trials.shared}


def rows(lands: list[Landscape]) -> list[Row]:
    found = []
    for drift in (steady, heats_up, wears_on, is_left_alone):
        for name, kind, clocks in (
            ("nothing started again", Trusting, False),
            ("ours", Search, False),
            ("ours, card tells its clocks", Search, True),
        ):
            played = [play(land, kind, drift, clocks=clocks) for land in lands]
            label = f"{drift.__name__.replace('_', ' ')}: {name}"
            found.append(Row(label, played))
            print(f"  {label}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = rows([landscape(name, seed) for name in given.profiles for seed in given.seeds])
    if given.json:
        print(json.dumps({"kind": "simulated", "rows": [row.as_json() for row in found]}))
        return
    print(
        f"{'machine: study (simulated)':45} {'launched':>8} {'behind, p90':>12} {'by > 1 %':>9} "
        f"{'told wrong':>10} {'p90':>6}"
    )
    for row in found:
        wrong = sum(one > WRONG for one in row.behind)
        print(
            f"{row.name:45} {row.launched:>8.0f} {p90(row.behind):>12.2%} {wrong:>6}/{len(row.behind)} "
            f"{statistics.median(row.told_wrong):>10.1%} {p90(row.told_wrong):>6.1%}"
        )


if __name__ == "__main__":
    main()
