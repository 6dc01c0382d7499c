"""Statistics that decide claims: means, intervals, paired t-tests, equivalence, Holm. Exact, in plain Python.

No numpy and no scipy: a report must open in a blink, and a few hundred numbers need neither; tests check against scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation over the values and a 95% interval of the mean; None where one value says nothing."""

    count: int
    mean: float
    deviation: float | None
    low: float | None
    high: float | None


def summary(values: Sequence[float]) -> Summary:
    """What several rounds come to."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Summary(count, mean, None, None, None)
    deviation = standard_deviation(values)
    reach = quantile(0.975, count - 1) * deviation / math.sqrt(count)
    return Summary(count, mean, deviation, mean - reach, mean + reach)


def standard_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation, divided by n - 1."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def p_above(differences: Sequence[float], bound: float = 0.0) -> float:
    """One-sided paired t-test: how surprising these differences are if their true mean is not above `bound`."""
    found = summary(differences)
    assert found.deviation is not None
    if found.deviation < 1e-9:  # blocks that do not vary show what is within a margin, and no more than that
        return 0.0 if bound < 0 and found.mean > bound + 1e-9 else 1.0
    t = (found.mean - bound) / (found.deviation / math.sqrt(found.count))
    return 1 - distribution(t, found.count - 1)


def p_equal(differences: Sequence[float], margin: float) -> float:
    """Two one-sided tests: how surprising these differences are if the true mean is at least `margin` away from 0."""
    return max(p_above(differences, -margin), p_above([-value for value in differences], -margin))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values that keep the chance of any false alarm among them at its level."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, worst = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = worst
    return corrected


def distribution(t: float, freedom: int) -> float:
    """Student's distribution function."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=256)
def quantile(share: float, freedom: int) -> float:
    """The t below which a share of Student's distribution lies, by bisection."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if distribution(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction."""
    tiny = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _away(1 + term * d, tiny), _away(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Rank correlation; None where one side is constant."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) + 1) / 2
    above = math.fsum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    below = math.sqrt(math.fsum((x - mean) ** 2 for x in a) * math.fsum((y - mean) ** 2 for y in b))
    return above / below if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    ranks = [0.0] * len(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for place in range(start, stop + 1):
            ranks[order[place]] = (start + stop) / 2 + 1
        start = stop + 1
    return ranks


def median(values: Sequence[float]) -> float:
    """The middle value."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def slope(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The slope of the least-squares line; None where x does not vary."""
    x0, y0 = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    below = math.fsum((x - x0) ** 2 for x in xs)
    return math.fsum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / below if below else None
