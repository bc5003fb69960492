"""Prints how many launches each way of searching takes, on landscapes of the simulator's physics (simulated).

    python benchmarks/search_efficiency.py                with seeds that nobody tuned the search on
    python benchmarks/search_efficiency.py --ablation     our search without each of its parts besides
    python benchmarks/search_efficiency.py --seeds 1 2    other seeds
    python benchmarks/search_efficiency.py --json         the same for scripts
    python benchmarks/search_efficiency.py --set search.method='{choices: [dflash, none]}'  a wider space

A landscape is a service profile on its card with hidden deviations (``simulator.physics.residuals``) of one
seed: speed and memory of that very card, which no planner knows. A trial takes milliseconds on a virtual
clock. What dies when everybody has all the context that was promised counts for nothing. All searches have
the same budget of launches and the same space. The true best is the best of all that any of them found, of 60
configurations at random, and of a climb from the best of these that changes one flag and two flags at a time
until nothing gets better. A landscape where nothing keeps the limits is named, and not in the table.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import optuna
from virtual_trial import VirtualCard

from dflash_deploy.machine.cards import Card, load_card
from dflash_deploy.profile.load import load_profile
from dflash_deploy.profile.schema import FlagSetting, Profile
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.launching import shared_flags
from dflash_deploy.tune.learned import Experience
from dflash_deploy.tune.records import TrialRecord
from dflash_deploy.tune.search import Proposal, Rate, Search, Stop
from dflash_deploy.tune.select import KNOWN, best_of
from dflash_deploy.tune.space import Space, key_of, space_of, tidy

PROFILES = (
    "rtx5090-single-user",
    "rtx5090-four-users",
    "rtx5090-long-context",
    "pro6000",
    "dgx-spark",
    "rtx4090-single-user",
    "rtx3090-single-user",
    "h200",
)
SEEDS = (15601, 15602, 15603, 15604)
BUDGET = 40
NEAR = 0.98
OUTPUT_TOKENS = 256

Settings = dict[str, FlagSetting]


@dataclass
class Landscape:
    """One profile on one card, with the deviations of one seed."""

    name: str
    seed: int
    profile: Profile
    card: Card
    space: Space
    trials: VirtualCard
    rates: dict[str, float | None] = field(default_factory=dict)

    def run(self, settings: Settings) -> TrialRecord:
        return self.trials.run(settings)

    def holds(self, record: TrialRecord) -> bool:
        shared = shared_flags(self.profile, simulated=True)
        return self.trials.holds({flag: value for flag, value in record.flags.items() if flag not in shared})

    def known(self) -> list[Settings]:
        return [self.space.whole(known.flags) for known in self.profile.known]

    def forecaster(self, *, planned: bool = True) -> Forecaster:
        return Forecaster(
            self.profile, self.profile.engine.version, self.card.memory_mib if planned else None
        )

    def rate(self, flags: Mapping[str, FlagSetting]) -> float | None:
        key = key_of(flags)
        if key not in self.rates:
            self.rates[key] = self.forecaster().rate(flags, self.card)
        return self.rates[key]


@dataclass(frozen=True)
class Played:
    """What one search came to: its launches, in order, and the objective that it settles on."""

    land: Landscape
    records: tuple[TrialRecord, ...]
    best: float

    def launches_to(self, wanted: float) -> int | None:
        """Launches until a configuration had been found that comes up to ``wanted``, and would hold."""
        for number, record in enumerate(self.records, 1):
            if record.feasible and (record.objective or 0) >= wanted and self.land.holds(record):
                return number
        return None

    def minutes_to(self, wanted: float) -> float | None:
        launches = self.launches_to(wanted)
        return None if launches is None else sum(one.wall_s for one in self.records[:launches]) / 60

    @property
    def starved(self) -> int:
        return sum(one.ran_out for one in self.records)


Player = Callable[[Landscape], Played]


def landscape(name: str, seed: int, overrides: Sequence[str] = ()) -> Landscape:
    profile = load_profile(name, overrides=overrides)
    # Answers are shorter than the profile's, for time.
    workload = profile.workload.model_copy(update={"output_tokens": OUTPUT_TOKENS})
    profile = profile.model_copy(update={"workload": workload})
    card = load_card(profile.card or "")
    trials = VirtualCard(profile, card.id, seed, OUTPUT_TOKENS, card.memory_mib)
    return Landscape(name, seed, profile, card, space_of(profile), trials)


class Forgetful(Search):
    """Learns nothing from failures."""

    def _experience(self) -> Experience:
        return Experience(self._space)


def highest(land: Landscape, records: list[TrialRecord]) -> Played:
    """A search that settles on the highest figure it saw (of those that would hold: nobody told it)."""
    ordered = sorted((one for one in records if one.feasible), key=lambda one: -(one.objective or 0.0))
    best = next((one.objective or 0.0 for one in ordered if land.holds(one)), 0.0)
    return Played(land, tuple(records), best)


def ours(
    land: Landscape,
    *,
    kind: type[Search] = Search,
    planned: bool = True,
    prior: bool = True,
    warm: bool = True,
) -> Played:
    """The search of ``dflash-deploy tune``."""
    rate: Rate = land.rate if prior else lambda _: None
    known = (
        [Proposal(one, f"{KNOWN}{number}", "") for number, one in enumerate(land.known(), 1)] if warm else []
    )
    shared = shared_flags(land.profile, simulated=True)
    search = kind(
        land.space,
        land.forecaster(planned=planned),
        goal=land.profile.objective.optimize,
        rate=rate,
        shared=shared,
        seed=land.seed,
        known=known,
    )
    records: list[TrialRecord] = []
    while len(records) < BUDGET:
        proposal = search.ask()
        if isinstance(proposal, Stop):
            break
        record = land.trials.run(proposal.settings, number=len(records) + 1, source=proposal.source)
        if proposal.proves is not None:
            record = land.trials.proven(record, proposal.proves, proposal.settings)
        search.forecaster = search.forecaster.after(record)
        search.tell(record)
        records.append(record)
    chosen = best_of(land.profile, records)
    return Played(land, tuple(records), (chosen.objective or 0.0) if chosen else 0.0)


def at_random(land: Landscape) -> Played:
    """Configurations of the space, each as likely as another."""
    rng = random.Random(f"random/{land.name}/{land.seed}")  # noqa: S311
    records: list[TrialRecord] = []
    tried: set[str] = set()
    while len(records) < BUDGET:
        settings = land.space.settings(
            {one.flag: rng.randrange(len(one.values)) for one in land.space.dimensions}
        )
        if key_of(settings) not in tried:
            tried.add(key_of(settings))
            records.append(land.run(settings))
    return highest(land, records)


def tpe(land: Landscape, *, warm: bool = False) -> Played:
    """Optuna's TPE as it comes, a failure scored zero; ``warm`` begins with the settings that are known."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=land.seed))
    labels = {
        one.flag: {json.dumps(value): place for place, value in enumerate(one.values)}
        for one in land.space.dimensions
    }
    if warm:
        for settings in land.known():
            places = land.space.places(settings)
            study.enqueue_trial(
                {
                    one.flag: places[one.flag] if one.numeric else json.dumps(one.values[places[one.flag]])
                    for one in land.space.dimensions
                    if one.flag in places
                }
            )
    records: list[TrialRecord] = []

    def objective(trial: optuna.Trial) -> float:
        places = {
            one.flag: trial.suggest_int(one.flag, 0, len(one.values) - 1)
            if one.numeric
            else labels[one.flag][trial.suggest_categorical(one.flag, list(labels[one.flag]))]
            for one in land.space.dimensions
        }
        records.append(land.run(land.space.settings(places)))
        return (records[-1].objective or 0.0) if records[-1].feasible else 0.0

    study.optimize(objective, n_trials=BUDGET)
    return highest(land, records)


def grid(land: Landscape) -> Played:
    """As vLLM's auto_tune: the highest memory share that starts, then sequences by batched tokens.

    It begins at the first known setting, and goes on with the other flags, one inside the next, where
    auto_tune would be done.
    """
    records: list[TrialRecord] = []
    base = land.known()[0]
    dimensions = {one.flag: one for one in land.space.dimensions}
    fraction = dimensions.get("mem-fraction-static")
    for value in reversed(fraction.values if fraction else ()):
        if len(records) >= BUDGET:
            break
        base = tidy({**base, "mem-fraction-static": value or 0.9})
        records.append(land.run(base))
        if records[-1].outcome != "failed":
            break
    order = ["max-running-requests", "chunked-prefill-size", "speculative-num-draft-tokens"]
    order += [one for one in dimensions if one not in (*order, "mem-fraction-static")]
    order = [one for one in order if one in dimensions]
    for values in product(*(dimensions[one].values for one in reversed(order))):
        if len(records) >= BUDGET:
            break
        chosen = dict(zip(reversed(order), values, strict=True))
        settings = {name: value for name, value in {**base, **chosen}.items() if value is not None}
        records.append(land.run(tidy(settings)))
    return highest(land, records)


def cookbook(land: Landscape) -> Played:
    """The engine's own recipe for this model, with the profile's users: one launch, whatever comes of it."""
    recipe: Settings = {
        **land.profile.flags,
        "mem-fraction-static": 0.91,
        "chunked-prefill-size": 1024,
        "max-running-requests": land.profile.workload.users,
        "mamba-ssm-dtype": "bfloat16",
        "speculative-num-draft-tokens": 8,
    }
    return highest(land, [land.run(tidy(recipe))])


SEARCHES: dict[str, Player] = {
    "ours": ours,
    "random": at_random,
    "TPE, failures are 0": tpe,
    "TPE, known settings first": lambda land: tpe(land, warm=True),
    "grid as auto_tune": grid,
    "cookbook's setting": cookbook,
}
ABLATIONS: dict[str, Player] = {
    "ours, no plan of memory": lambda land: ours(land, planned=False),
    "ours, no speed prior": lambda land: ours(land, prior=False),
    "ours, failures teach nothing": lambda land: ours(land, kind=Forgetful),
    "ours, no known settings": lambda land: ours(land, warm=False),
}


def true_best(land: Landscape, played: list[Played]) -> float | None:
    """The best there is, as far as an ascent from the best found can tell; None where nothing holds."""
    rng = random.Random(f"best/{land.name}/{land.seed}")  # noqa: S311
    dimensions = land.space.dimensions
    best = -math.inf
    top: dict[str, int] = {}

    def look(places: dict[str, int]) -> None:
        nonlocal best, top
        record = land.run(land.space.settings(places))
        better = record.feasible and record.objective is not None and record.objective > best * (1 + 1e-6)
        if better and land.holds(record):
            best, top = record.objective or best, places

    for one in played:
        for record in one.records:
            places = land.space.places(record.flags)
            if record.feasible and len(places) == len(dimensions):
                look(places)
    for _ in range(60):
        look({one.flag: rng.randrange(len(one.values)) for one in dimensions})
    pairs = [one for one in combinations(dimensions, 2) if math.prod(len(d.values) for d in one) <= 24]
    for _ in range(3 if top else 0):
        before = best
        for changed in dimensions:
            for place in range(len(changed.values)):
                look({**top, changed.flag: place})
        if best > before:
            continue
        for first, second in pairs:
            for a, b in product(range(len(first.values)), range(len(second.values))):
                look({**top, first.flag: a, second.flag: b})
        if best <= before:
            break
    # A known setting may have a value that the space does not.
    found = max([best, *(highest(land, list(one.records)).best for one in played)])
    return found if found > 0 else None


@dataclass(frozen=True)
class Row:
    """One way of searching over all landscapes; what was not reached counts as one launch over the budget."""

    name: str
    launches: list[float]
    minutes: list[float]
    starved: list[int]
    regret: list[float]
    total: list[int]
    total_minutes: list[float]

    def as_json(self) -> dict[str, object]:
        return {
            "search": self.name,
            "launches_median": statistics.median(self.launches),
            "launches_p90": p90(self.launches),
            "reached": sum(math.isfinite(one) for one in self.launches),
            "minutes_median": statistics.median(self.minutes),
            "minutes_p90": p90(self.minutes),
            "starved_median": statistics.median(self.starved),
            "starved_p90": p90(self.starved),
            "regret_median": statistics.median(self.regret),
            "regret_p90": p90(self.regret),
            "launched_median": statistics.median(self.total),
            "all_minutes_median": statistics.median(self.total_minutes),
        }


def p90(values: list[float] | list[int]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def rows(
    lands: list[Landscape], searches: dict[str, Player], *, verbose: bool
) -> tuple[list[Row], list[Landscape]]:
    """A row for each way of searching, and the landscapes left out: nothing there keeps the limits."""
    played = {name: [search(land) for land in lands] for name, search in searches.items()}
    bests = [true_best(land, [played[name][n] for name in played]) for n, land in enumerate(lands)]
    hopeless = [land for land, best in zip(lands, bests, strict=True) if best is None]
    found = (
        []
        if len(hopeless) == len(lands)
        else [
            _row(
                name,
                [(one, best) for one, best in zip(plays, bests, strict=True) if best is not None],
                verbose=verbose,
            )
            for name, plays in played.items()
        ]
    )
    return found, hopeless


def _row(name: str, plays: list[tuple[Played, float]], *, verbose: bool) -> Row:
    """What one way of searching came to, each time beside the best there is."""
    near = [one.launches_to(NEAR * best) for one, best in plays]
    minutes = [one.minutes_to(NEAR * best) for one, best in plays]
    regret = [1 - one.best / best for one, best in plays]
    if verbose:
        for (one, _), launches, lost in zip(plays, near, regret, strict=True):
            print(
                f"  {name:30} {one.land.name:22} {one.land.seed:5} {launches or '-':>4} "
                f"of {len(one.records):3} oom {one.starved} regret {lost:6.2%}",
                file=sys.stderr,
            )
    return Row(
        name,
        [math.inf if one is None else one for one in near],
        [math.inf if one is None else one for one in minutes],
        [one.starved for one, _ in plays],
        regret,
        [len(one.records) for one, _ in plays],
        [sum(record.wall_s for record in one.records) / 60 for one, _ in plays],
    )


def table(found: list[Row]) -> Iterator[str]:
    yield (
        f"{'search':30} {'launches to 2 %':>16} {'reached':>8} {'minutes to 2 %':>15} {'OOM':>8} "
        f"{'final regret':>15} {'launched':>9} {'minutes':>8}"
    )
    yield f"{'':30} {'median    p90':>16} {'':8} {'median    p90':>15} {'med p90':>8} {'median    p90':>15}"
    for row in found:
        reached = sum(math.isfinite(one) for one in row.launches)
        yield (
            f"{row.name:30} {_told(statistics.median(row.launches)):>8} {_told(p90(row.launches)):>7} "
            f"{reached:>5}/{len(row.launches)} "
            f"{_told(statistics.median(row.minutes), 1):>7} {_told(p90(row.minutes), 1):>7} "
            f"{statistics.median(row.starved):>4.0f} {p90(row.starved):>3.0f} "
            f"{statistics.median(row.regret):>7.2%} {p90(row.regret):>7.2%} "
            f"{statistics.median(row.total):>9.0f} {statistics.median(row.total_minutes):>8.1f}"
        )


def _told(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "never" if digits else f">{BUDGET}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument("--ablation", action="store_true", help="our search without its parts besides")
    parser.add_argument("--only-ours", action="store_true", help="no other search")
    parser.add_argument("--verbose", action="store_true", help="every landscape, to stderr")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    begun = time.perf_counter()
    lands = [landscape(name, seed, given.overrides) for name in given.profiles for seed in given.seeds]
    searches = {"ours": SEARCHES["ours"]} if given.only_ours else dict(SEARCHES)
    if given.ablation:
        searches |= ABLATIONS
    found, hopeless = rows(lands, searches, verbose=given.verbose)
    if given.json:
        left_out = [{"profile": land.name, "seed": land.seed} for land in hopeless]
        print(
            json.dumps({"kind": "simulated", "rows": [row.as_json() for row in found], "left_out": left_out})
        )
        return
    print(f"{len(lands) - len(hopeless)} landscapes, at most {BUDGET} launches each (simulated)")
    for land in hopeless:
        print(f"left out: {land.name} with seed {land.seed}, where nothing that was tried keeps the limits")
    for line in table(found):
        print(line)
    print(f"took {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
