"""How often the verdicts on two servers are right, and what they cost in rounds.

Servers are made up: rounds with 1 % noise, a drift of up to 0.2 % a round that both share, and one round in
twenty that is 5 … 30 % slow. Two that differ by 2 % should be told apart in 95 % of cases, two that are equal
be called different in 5 % at most, although the data are looked at again and again as they grow.

    python benchmarks/statistics_verdicts.py [--studies 2000] [--seed 1]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable

from dflash_deploy.bench.statistics import compare, compare_live, median_interval

NOISE = 0.01
DRIFT = 0.002
SLOW_SHARE, SLOW_BY = 0.05, (0.05, 0.30)


class Bench:
    """Two made-up servers on one machine, whose state drifts for both alike."""

    def __init__(self, ratio: float, chance: random.Random) -> None:
        self._ratio = ratio
        self._chance = chance
        self._drift = chance.uniform(-DRIFT, DRIFT)
        self._round = 0

    def a(self) -> float:
        return self._ratio * self.b()

    def b(self) -> float:
        self._round += 1
        speed = 100 * (1 + self._drift * self._round) * math.exp(self._chance.gauss(0, NOISE))
        slow = self._chance.random() < SLOW_SHARE
        return speed * (1 - self._chance.uniform(*SLOW_BY)) if slow else speed


def sequential(studies: int, seed: int) -> bool:
    """Live comparisons that stop when clear; whether the aims are met."""
    print(f"compare_live, 3 to 32 pairs of rounds, {studies} studies each:")
    print("  true difference   faster   slower   indistinguishable   pairs: mean  median  p90")
    shares = {}
    for ratio in (1.0, 1.01, 1.02, 1.05, 1.2):
        chance = random.Random(f"{seed} {ratio}")  # noqa: S311 - no secrets
        verdicts: Counter[str] = Counter()
        rounds = []
        for _ in range(studies):
            bench = Bench(ratio, chance)
            found = compare_live(bench.a, bench.b)
            verdicts[found.verdict] += 1
            rounds.append(found.rounds)
        share = {
            verdict: verdicts[verdict] / studies for verdict in ("faster", "slower", "indistinguishable")
        }
        shares[ratio] = share
        print(
            f"  {(ratio - 1) * 100:13.0f} %  {share['faster']:7.1%}  {share['slower']:7.1%}  "
            f"{share['indistinguishable']:18.1%}   {statistics.mean(rounds):11.1f}  "
            f"{statistics.median(rounds):6.0f}  {sorted(rounds)[int(0.9 * studies)]:3d}"
        )
    right, wrong = shares[1.02]["faster"], shares[1.0]["faster"] + shares[1.0]["slower"]
    met = right >= 0.95 and wrong <= 0.05
    print(
        f"  2 % told: {right:.1%} (aim: 95 % or more); equal called different: {wrong:.1%} (aim: 5 % or less)"
    )
    return met


def fixed(studies: int, seed: int) -> bool:
    """Intervals of a given number of rounds: how many hold the truth; whether nine in ten and more do."""
    print(f"\n95 % intervals that hold the truth, {studies} studies each (aim: 95 %):")
    print("  rounds   paired ratio   unpaired ratio   median   bootstrap of the median")
    worst = 1.0
    for count in (3, 4, 5, 6, 8, 12, 20):
        chance = random.Random(f"{seed} fixed {count}")  # noqa: S311 - no secrets
        held = [0, 0, 0, 0]
        for _ in range(studies):
            bench = Bench(1.02, chance)
            a: list[float] = []
            b: list[float] = []
            for number in range(count):
                arms = [(a, bench.a), (b, bench.b)]
                for figures, play in reversed(arms) if number % 2 else arms:
                    figures.append(play())
            steady = [100 * math.exp(chance.gauss(0, NOISE)) for _ in range(count)]
            other = [100 * math.exp(chance.gauss(0, NOISE)) for _ in range(count)]
            for place, (truth, low, high) in enumerate(
                [
                    (1.02, *ends(compare(a, b, paired=True))),
                    (1.0, *ends(compare(steady, other, paired=False))),
                    (100.0, *ends(median_interval(steady))),
                    (100.0, *bootstrap(steady, chance)),
                ]
            ):
                held[place] += low <= truth <= high
        shares = [one / studies for one in held]
        worst = min(worst, *shares[:3])
        print(f"  {count:6d}  {shares[0]:13.1%}  {shares[1]:15.1%}  {shares[2]:7.1%}  {shares[3]:24.1%}")
    return worst >= 0.935


def ends(interval: object) -> tuple[float, float]:
    return interval.low, interval.high  # type: ignore[attr-defined]  # an Interval or a Comparison


def bootstrap(values: list[float], chance: random.Random) -> tuple[float, float]:
    """The percentile bootstrap, for comparison."""
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(200))
    return medians[5], medians[194]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    checks: list[Callable[[int, int], bool]] = [sequential, fixed]
    met = [check(given.studies, given.seed) for check in checks]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
