"""What repeated measurements allow one to say, down to three rounds: intervals, comparisons, when to stop.

Two servers are compared by the logarithm of their ratio. Where there are rounds enough for it at the wanted
confidence, the interval is that of Wilcoxon's rank tests (Hodges & Lehmann 1963, "Estimates of location
based on rank tests"), which is exact whatever the noise looks like and does not mind single slow rounds.
With fewer rounds it is Student's, which is right for normal noise and too wide for noise with long tails
(Benjamini 1983, "Is the t test really conservative when the parent distribution is long-tailed?"). A
bootstrap is neither: with three rounds it covers the median in three of four cases at best.
``benchmarks/statistics_verdicts.py`` shows how often each is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, pairwise
from statistics import NormalDist, fmean, median, stdev
from typing import Literal

Verdict = Literal["faster", "slower", "indistinguishable"]

_LEAST_TOLD = 5e-4
"""Ratios nearer to one than this read as 0.0 %, and no clock or scheduler is as steady."""

_LARGEST_EXACT = 40
"""Rounds up to which rank tests are counted out; beyond, their normal approximation is as good."""

_MOST_RANKED = 1000
"""Rounds up to which every pair is looked at; the mean of more is as normal as one could wish."""

_MOST_TREND = 400
"""Places of a trend; more rounds are taken together by their medians."""

_SIGMAS_PER_MAD = 1.4826  # of a normal distribution
_FAR_SIGMAS = 3.5  # Iglewicz & Hoaglin 1993, "How to detect and handle outliers"
_LEAST_SIGMA = 0.005
"""Share of the median below which a spread is not believed, when few rounds happen to agree."""

_LINGERS = NormalDist().inv_cdf(0.975)
_LEAST_WARM_UP = 0.03
"""Share of the median by which a round must differ from later ones to count as warm-up."""


@dataclass(frozen=True)
class Interval:
    """A median, and where the true one lies with the confidence that was asked for."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """How two servers compare.

    Attributes:
        ratio: how many times faster A is than B, 1.03 for three per cent.
        low: lower end of its interval, 0 where nothing can be said.
        high: upper end, infinite where nothing can be said.
        verdict: of A; ``indistinguishable`` where the interval holds 1.
        confidence: of the interval, all looks at the data taken together.
        rounds: measurements of the arm with fewer.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict
    confidence: float
    rounds: int

    @property
    def words(self) -> str:
        """One sentence for a person."""
        return self.sentence("A")

    def sentence(self, name: str, than: str | None = None) -> str:
        """The same about a server called ``name``, compared with one called ``than``."""
        if self.verdict == "indistinguishable":
            about = f"{name} and {than}: " if than else ""
            if not math.isfinite(self.high):
                return f"{about}too few rounds to tell"
            interval = f"{_percent(self.confidence)} % interval {_signed(self.low)} … {_signed(self.high)} %"
            return f"{about}indistinguishable: keep the simpler ({interval})"
        verdict = self.verdict if than is None else f"{self.verdict} than {than}"
        ends = (self.low - 1, self.high - 1) if self.verdict == "faster" else (1 - self.high, 1 - self.low)
        return (
            f"{name} is {verdict} by {abs(self.ratio - 1) * 100:.1f} % "
            f"({_percent(self.confidence)} % interval {ends[0] * 100:.1f} … {ends[1] * 100:.1f})"
        )


@dataclass(frozen=True)
class Drift:
    """A trend over the rounds.

    Attributes:
        share: change from the first round to the last by the trend, as a share of the median.
        significant: such a trend comes by chance in less than one run of twenty.
    """

    share: float
    significant: bool


@dataclass(frozen=True)
class Looks:
    """One of several looks at data that grow, each of which may end the measuring.

    The error allowed is spent in proportion to the rounds: a look has the share of it that the rounds since
    the look before are of all (Kim & DeMets 1987, "Design and analysis of group sequential tests based on
    the type I error spending rate function", with rho = 1). The sum of all bounds the probability that any
    of them errs, so the intervals hold at every look together (Jennison & Turnbull 1989, "Interim analyses:
    the repeated confidence interval approach").

    Attributes:
        at: rounds after which one looks, ascending (``look_after``); the last is where measuring ends.
        rounds: rounds there are now; one of ``at``.
    """

    at: tuple[int, ...]
    rounds: int

    def error_now(self, error: float) -> float:
        """The share of ``error`` that this look may spend."""
        place = self.at.index(self.rounds)
        before = self.at[place - 1] if place else 0
        return error * (self.rounds - before) / self.at[-1]


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The median with its interval: between order statistics, which is what a bootstrap of it converges to.

    Two of the values themselves hold the true median with a probability that the binomial distribution gives
    (David & Nagaraja 2003, "Order Statistics", 7.1). Below six rounds not even the extremes reach 95 %; the
    interval is then Student's, infinite for a single value.

    Raises:
        ValueError: there are no values, or one is no number.
    """
    known = sorted(_finite(values))
    middle, half = median(known), (1 - confidence) / 2
    inside, tail = -1, 0.0
    for below in range(len(known) // 2):
        tail += math.comb(len(known), below) * 0.5 ** len(known)
        if tail > half:
            break
        inside = below
    if inside >= 0:
        return Interval(middle, known[inside], known[-1 - inside])
    low, high = _student_interval(known, 1 - confidence)
    return Interval(middle, min(low, middle), max(high, middle))


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median, in the values' unit."""
    middle = median(_finite(values))
    return median(abs(value - middle) for value in values)


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    paired: bool,
    confidence: float = 0.95,
    higher_is_better: bool = True,
    looks: Looks | None = None,
) -> Comparison:
    """Compare two servers by their rounds.

    The interval tells of these rounds: what differs from one start of a server to the next is in it only if
    the rounds come from several starts.

    Args:
        a: one figure a round, such as tokens/s; all above zero.
        b: the same of the other server.
        paired: round *n* of both met the same questions and conditions, so that it is compared with its like.
        confidence: share of such intervals that hold the true ratio.
        higher_is_better: False for times.
        looks: which look at growing data this is; the interval is then as much wider as it takes for all
            looks together to keep ``confidence``.

    Raises:
        ValueError: a figure is not above zero, or a pair lacks its other half.
    """
    ours, theirs = _logarithms(a), _logarithms(b)
    if not higher_is_better:
        ours, theirs = [-value for value in ours], [-value for value in theirs]
    error = 1 - confidence if looks is None else looks.error_now(1 - confidence)
    if paired:
        differences = [x - y for x, y in zip(ours, theirs, strict=True)]
        middle, low, high = _paired_interval(differences, error)
    else:
        middle, low, high = _unpaired_interval(ours, theirs, error)
    ratio = _exp(middle)
    verdict: Verdict = "indistinguishable"
    if abs(ratio - 1) >= _LEAST_TOLD:
        verdict = "faster" if low > 0 else "slower" if high < 0 else verdict
    rounds = min(len(a), len(b))
    return Comparison(ratio, _exp(low), _exp(high), verdict, confidence, rounds)


def look_after(min_rounds: int, max_rounds: int) -> tuple[int, ...]:
    """Rounds after which to look: each time half as many more, for every look costs some confidence."""
    if not 1 <= min_rounds <= max_rounds:
        raise ValueError("one round or more, and no more at least than at most")
    at = [min_rounds]
    while at[-1] < max_rounds:
        coming = at[-1] + max(1, at[-1] // 2)
        # A look shortly before the last would leave little confidence to either.
        at.append(max_rounds if coming * 1.2 > max_rounds else coming)
    return tuple(at)


def decided(comparison: Comparison, *, worth: float = 0.01) -> bool:
    """More rounds would change nothing: one is faster, or neither by as much as ``worth`` (a share)."""
    if comparison.verdict != "indistinguishable":
        return True
    return 1 - worth < comparison.low and comparison.high < 1 + worth


def compare_live(
    run_a: Callable[[], float],
    run_b: Callable[[], float],
    *,
    min_rounds: int = 3,
    max_rounds: int = 32,
    confidence: float = 0.95,
    worth: float = 0.01,
    higher_is_better: bool = True,
) -> Comparison:
    """Measure two live servers in turn (A B, B A, …) until the answer is clear or ``max_rounds`` are spent.

    Turning the order about cancels a steady drift. All looks together err no more often than
    ``1 - confidence``.

    Args:
        run_a: one round of A: its figure. What it raises ends the comparison.
        run_b: one round of B.
        min_rounds: pairs before the first look.
        max_rounds: pairs at most.
        confidence: of the verdict.
        worth: smallest difference that matters, as a share.
        higher_is_better: False for times.
    """
    at = look_after(min_rounds, max_rounds)
    a: list[float] = []
    b: list[float] = []
    while True:
        if len(a) % 2:
            b.append(run_b())
            a.append(run_a())
        else:
            a.append(run_a())
            b.append(run_b())
        if len(a) not in at:
            continue
        found = compare(
            a,
            b,
            paired=True,
            confidence=confidence,
            higher_is_better=higher_is_better,
            looks=Looks(at, len(a)),
        )
        # That nothing is there to find is no claim that errs as "faster" does: each look may see it afresh.
        plain = compare(a, b, paired=True, confidence=confidence, higher_is_better=higher_is_better)
        alike = plain.verdict == "indistinguishable" and decided(plain, worth=worth)
        if len(a) == max_rounds or decided(found, worth=worth) or alike:
            return found


def warm_up_rounds(values: Sequence[float]) -> int:
    """How many rounds at the start are unlike the later half: they are warming up, not results."""
    if len(values) < 3:
        return 0
    later = values[len(values) // 2 :]
    middle = median(later)
    bound = max(_FAR_SIGMAS * _SIGMAS_PER_MAD * mad(later), _LEAST_WARM_UP * abs(middle))
    count = 0
    while count < len(values) // 2 and abs(values[count] - middle) > bound:
        count += 1
    return count


def drift(values: Sequence[float]) -> Drift:
    """The trend over the rounds: Theil and Sen's slope, tested by Kendall's rank correlation with time."""
    known = _thinned(_finite(values))
    count = len(known)
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    if not pairs:
        return Drift(0.0, significant=False)
    slope = median((known[other] - known[one]) / (other - one) for one, other in pairs)
    # Those that are equal might be either.
    above = sum(known[other] > known[one] for one, other in pairs)
    equal = sum(known[other] == known[one] for one, other in pairs)
    rising = above + equal // 2
    middle = median(known)
    share = slope * (count - 1) / abs(middle) if middle else 0.0
    return Drift(share, significant=2 * _inversions_at_most(count, min(rising, len(pairs) - rising)) <= 0.05)


def linger(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether what makes a round of either server quick or slow lasts for several, of pairs in their order.

    Every interval takes rounds for independent, so it is too narrow then. Told by the correlation of each
    ratio with the next (Bartlett 1946, "On the theoretical specification and sampling properties of
    autocorrelated time-series"), which comes by chance in one of forty; a dozen pairs begin to tell it.
    """
    ratios = [x - y for x, y in zip(_logarithms(a), _logarithms(b), strict=True)]
    middle, count = fmean(ratios), len(ratios)
    away = [ratio - middle for ratio in ratios]
    total = sum(one * one for one in away)
    following = sum(one * other for one, other in pairwise(away))
    return total > 0 and following / total > _LINGERS / math.sqrt(count) - 1 / count


def _thinned(values: Sequence[float]) -> Sequence[float]:
    size = -(-len(values) // _MOST_TREND)
    return [median(values[at : at + size]) for at in range(0, len(values), size)]


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Places of the rounds that lie far from the rest: 3.5 standard deviations by the MAD, or more."""
    middle = median(_finite(values))
    sigma = max(_SIGMAS_PER_MAD * mad(values), _LEAST_SIGMA * abs(middle))
    return tuple(place for place, value in enumerate(values) if abs(value - middle) > _FAR_SIGMAS * sigma)


def _finite(values: Sequence[float]) -> Sequence[float]:
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("one value or more, and each a finite number")
    return values


def _logarithms(values: Sequence[float]) -> list[float]:
    if min(_finite(values)) <= 0:
        raise ValueError("a figure that is not above zero has no ratio")
    return [math.log(value) for value in values]


def _paired_interval(differences: Sequence[float], error: float) -> tuple[float, float, float]:
    count = len(differences)
    if count > _MOST_RANKED:
        return fmean(differences), *_student_interval(differences, error)
    averages = sorted((x + y) / 2 for x, y in combinations_with_replacement(differences, 2))
    inside = _signed_rank_quantile(count, error)
    if inside is None:
        return median(averages), *_student_interval(differences, error)
    return median(averages), averages[inside], averages[-1 - inside]


def _unpaired_interval(a: Sequence[float], b: Sequence[float], error: float) -> tuple[float, float, float]:
    if max(len(a), len(b)) > _MOST_RANKED:
        return fmean(a) - fmean(b), *_welch_interval(a, b, error)
    differences = sorted(x - y for x in a for y in b)
    inside = _rank_sum_quantile(len(a), len(b), error)
    if inside is None:
        return median(differences), *_welch_interval(a, b, error)
    return median(differences), differences[inside], differences[-1 - inside]


def _student_interval(values: Sequence[float], error: float) -> tuple[float, float]:
    count, middle = len(values), fmean(values)
    if count < 2:
        return -math.inf, math.inf
    half = _student_quantile(1 - error / 2, count - 1) * stdev(values) / math.sqrt(count)
    return middle - half, middle + half


def _welch_interval(a: Sequence[float], b: Sequence[float], error: float) -> tuple[float, float]:
    if min(len(a), len(b)) < 2:
        return -math.inf, math.inf
    of_a, of_b = stdev(a) ** 2 / len(a), stdev(b) ** 2 / len(b)
    total, middle = of_a + of_b, fmean(a) - fmean(b)
    if not total:
        return middle, middle
    freedom = total**2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    half = _student_quantile(1 - error / 2, max(1, math.floor(freedom))) * math.sqrt(total)
    return middle - half, middle + half


@cache
def _student_quantile(probability: float, freedom: int) -> float:
    """By halving; probabilities above one half."""
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < probability:
        low, high = high, high * 2
        if high > 1e12:
            return math.inf
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < probability else (low, middle)
    return high


def _student_share(value: float, freedom: int) -> float:
    """Student's distribution function for whole degrees of freedom (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom == 1:
        return 0.5 + angle / math.pi
    term = cosine if freedom % 2 else 1.0
    total = term
    for step in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= (step - 1) / step * cosine**2
        total += term
    within = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return 0.5 + within / 2


@cache
def _signed_rank_quantile(count: int, error: float) -> int | None:
    """How many averages at either end lie outside the interval; None where even all inside errs too often."""
    if count > _LARGEST_EXACT:
        mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return _last_below(mean, deviation, error)
    return _quantile(_signed_rank_ways(count), error)


@cache
def _rank_sum_quantile(a: int, b: int, error: float) -> int | None:
    if max(a, b) > _LARGEST_EXACT:
        return _last_below(a * b / 2, math.sqrt(a * b * (a + b + 1) / 12), error)
    return _quantile(_rank_sum_ways(a, b), error)


def _last_below(mean: float, deviation: float, error: float) -> int | None:
    last = math.floor(mean + NormalDist().inv_cdf(error / 2) * deviation - 0.5)
    return last if last >= 0 else None


def _quantile(ways: Sequence[int], error: float) -> int | None:
    total, so_far = sum(ways), 0
    for place, count in enumerate(ways):
        so_far += count
        if 2 * so_far > error * total:
            return place - 1 if place else None
    return None


@cache
def _signed_rank_ways(count: int) -> tuple[int, ...]:
    """Subsets of the ranks 1 … ``count`` by their sum."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    return tuple(ways)


@cache
def _rank_sum_ways(a: int, b: int) -> tuple[int, ...]:
    """Arrangements of ``a`` and ``b`` values by Mann and Whitney's count: a Gaussian binomial coefficient."""
    ways = [1]
    for factor in range(1, a + 1):
        ways = _divided(_times_one_less(ways, b + factor), factor)
    return tuple(ways)


def _times_one_less(ways: Sequence[int], power: int) -> list[int]:
    """The polynomial times 1 - x**power."""
    product = [*ways, *([0] * power)]
    for place, number in enumerate(ways):
        product[place + power] -= number
    return product


def _divided(ways: Sequence[int], power: int) -> list[int]:
    """The polynomial divided by 1 - x**power, which divides it."""
    quotient = list(ways)
    for place in range(power, len(quotient)):
        quotient[place] += quotient[place - power]
    return quotient[: len(quotient) - power]


def _inversions_at_most(count: int, most: int) -> float:
    """Share of the orders of ``count`` things with so many inversions or fewer."""
    if count > _LARGEST_EXACT:
        mean = count * (count - 1) / 4
        deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 72)
        return NormalDist(mean, deviation).cdf(most + 0.5)
    ways = [1]
    for length in range(2, count + 1):
        ways = _divided(_times_one_less(ways, length), 1)
    return sum(ways[: most + 1]) / sum(ways)


def _exp(value: float) -> float:
    # An interval may reach further than a float does.
    return math.exp(value) if value < 700 else math.inf


def _percent(share: float) -> str:
    return f"{share * 100:.4g}"


def _signed(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
