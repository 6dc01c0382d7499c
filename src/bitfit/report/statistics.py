"""Statistics that decide claims: an effect per place, a random-effects mean over places, one-sided tests, Holm.

A place is one task on one base. Seeds and test rows give each place an interval; only the variation between places
says whether a claim holds elsewhere, because the seeds of one place share their task, their base and their test rows.
scipy and numpy are imported where they are used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.05
POWER = 0.8
MOST_PLACES = 100  # beyond which it is not said how many would decide a claim
LEAST_SEEDS = 3  # below which a claim about a single place is not tested
Side = Literal["above", "below"]


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and 95% interval of the mean of some values; None where one value says nothing."""

    count: int
    mean: float
    deviation: float | None
    low: float | None
    high: float | None


def summary(values: Sequence[float]) -> Summary:
    """Summarise the scores of several seeds."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Summary(count, mean, None, None, None)
    deviation = math.sqrt(variance(values))
    reach = t_quantile(0.975, count - 1) * deviation / math.sqrt(count)
    return Summary(count, mean, deviation, mean - reach, mean + reach)


def variance(values: Sequence[float]) -> float:
    """The sample variance; the standard library's is exact, and too slow for simulations."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@dataclass(frozen=True)
class Place:
    """The effect on one task of one base, with the variance that its seeds and test rows explain."""

    base: str
    task: str
    effect: float
    variance: float = 0.0
    freedom: float = math.inf
    seeds: int = 1
    rows: int = 0
    tasks: tuple[str, ...] = ()  # the tasks, where the effect is one over several of them
    rows_known: bool = True  # False if the effect varies with the test rows, and by how much is not known

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks that the effect was measured on."""
        return self.tasks or (self.task,)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval from seeds and test rows; None where neither is known, or only what seeds explain."""
        if self.variance <= 0 or not self.rows_known:
            return None
        reach = t_quantile(0.975, self.freedom) * math.sqrt(self.variance)
        return self.effect - reach, self.effect + reach


def place(base: str, task: str, by_seed: Sequence[float], from_rows: float | None = 0.0, rows: int = 0) -> Place:
    """A place from its effect for each seed and the variance of their mean over the test rows, None if not known.

    No effect is known better than to one test row, whatever the seeds agree on.
    """
    effect = statistics.fmean(by_seed)
    from_seeds = variance(by_seed) / len(by_seed) if len(by_seed) > 1 else 0.0
    one_row = (100 / rows) ** 2 if rows else 0.0
    total = from_seeds + max(from_rows or 0.0, one_row)
    # Welch and Satterthwaite: the seeds' share of the variance is known as well as there are seeds.
    freedom = (len(by_seed) - 1) * (total / from_seeds) ** 2 if from_seeds > 0 else math.inf
    return Place(base, task, effect, total, freedom, len(by_seed), rows, rows_known=from_rows is not None)


@dataclass(frozen=True)
class Spread:
    """A standard error and its degrees of freedom."""

    error: float
    freedom: float


@dataclass(frozen=True)
class Estimate:
    """A mean over places and the standard errors it may have; a test uses the one that decides least."""

    mean: float
    spreads: tuple[Spread, ...]
    places: tuple[Place, ...]

    def p(self, side: Side, bound: float) -> float:
        """One-sided p-value of the claim that the true mean lies above (below) the bound."""
        ahead = self.mean - bound if side == "above" else bound - self.mean
        if not self.spreads:
            return 1.0
        return max(_p_value(ahead, spread) for spread in self.spreads)

    def p_within(self, margin: float) -> float:
        """Two one-sided tests: p-value of the claim that the true mean is less than the margin away from 0."""
        return max(self.p("above", -margin), self.p("below", margin))

    def interval(self, level: float = LEVEL) -> tuple[float, float] | None:
        """The interval that excludes a bound exactly where the one-sided test at this level does."""
        if not self.spreads:
            return None
        reach = max(t_quantile(1 - level, spread.freedom) * spread.error for spread in self.spreads)
        return self.mean - reach, self.mean + reach

    def detectable(self, level: float = LEVEL) -> float | None:
        """The smallest true difference that a one-sided test at this level finds with a power of 80%."""
        if not self.spreads:
            return None
        return max(
            (t_quantile(1 - level, spread.freedom) + t_quantile(POWER, spread.freedom)) * spread.error
            for spread in self.spreads
        )

    def places_to_see(self, difference: float, level: float = LEVEL) -> int | None:
        """How many places like these a test with a power of 80% needs for a true difference; None above MOST_PLACES.

        The standard error falls with the root of the number of places, and the degrees of freedom grow with it.
        """
        have = len(self.places)
        for wanted in range(have, MOST_PLACES + 1):
            more = wanted / have
            spreads = tuple(Spread(spread.error / math.sqrt(more), spread.freedom * more) for spread in self.spreads)
            seen = Estimate(self.mean, spreads, self.places).detectable(level)
            if seen is not None and seen <= difference:
                return wanted
        return None


def combine(places: Sequence[Place]) -> Estimate | None:
    """The random-effects mean over places.

    Its standard error is the larger of two: Hartung and Knapp's over places, and one for effects that the places of a
    task or of a base share, which adds the variance between tasks and the variance between bases (Satterthwaite's
    degrees of freedom). Where places of one kind are missing, the part of that kind is left out.
    """
    if not places:
        return None
    weights = _weights(places)
    mean = math.fsum(weight * one.effect for weight, one in zip(weights, places, strict=True))
    if len(places) < 2:
        return Estimate(mean, (), tuple(places))
    spreads = [_hartung_knapp(places, weights, mean), _crossed(places, weights)]
    explained = math.fsum(weight**2 * one.variance for weight, one in zip(weights, places, strict=True))
    enough = [_at_least(spread, explained) for spread in spreads if spread is not None]
    return Estimate(mean, tuple(spread for spread in enough if spread.error > 0), tuple(places))


def alone(one: Place, least_seeds: int = 1) -> Estimate:
    """The effect on a single place, for a claim about that place only; its seeds and test rows give the error.

    Without the variance over test rows there is no error, because seeds alone explain too little of it. Neither is
    there one with fewer seeds than `least_seeds`: the variance over seeds is then not known well enough.
    """
    known = one.variance > 0 and one.rows_known and one.seeds >= least_seeds
    spreads = (Spread(math.sqrt(one.variance), one.freedom),) if known else ()
    return Estimate(one.effect, spreads, (one,))


def _weights(places: Sequence[Place]) -> list[float]:
    """Random-effects weights: inverse variances with the variance between places added, summing to 1."""
    between = _between(places)
    total = [one.variance + between for one in places]
    if min(total) <= 0:
        return [1 / len(places)] * len(places)
    inverse = [1 / value for value in total]
    return [value / math.fsum(inverse) for value in inverse]


def _between(places: Sequence[Place]) -> float:
    """Paule and Mandel's variance between places: the one that makes the weighted squares as large as expected."""
    from scipy.optimize import brentq

    effects = [one.effect for one in places]
    observed = variance(effects) if len(effects) > 1 else 0.0
    if observed <= 0:
        return 0.0
    if min(one.variance for one in places) <= 0:  # a weight would be infinite
        return observed
    most = observed * len(places)
    if _excess(0.0, places) <= 0 or _excess(most, places) >= 0:
        return 0.0
    return float(brentq(_excess, 0.0, most, args=(places,)))


def _excess(between: float, places: Sequence[Place]) -> float:
    """By how much the weighted squares exceed what this variance between places lets expect."""
    weights = [1 / (one.variance + between) for one in places]
    weighted = [weight * one.effect for weight, one in zip(weights, places, strict=True)]
    mean = math.fsum(weighted) / math.fsum(weights)
    squares = [weight * (one.effect - mean) ** 2 for weight, one in zip(weights, places, strict=True)]
    return math.fsum(squares) - (len(places) - 1)


def _hartung_knapp(places: Sequence[Place], weights: Sequence[float], mean: float) -> Spread:
    squares = math.fsum(w * (one.effect - mean) ** 2 for w, one in zip(weights, places, strict=True))
    freedom = len(places) - 1
    return Spread(math.sqrt(squares / freedom), freedom)


def _crossed(places: Sequence[Place], weights: Sequence[float]) -> Spread | None:
    """The standard error where places of one task, and places of one base, have something in common."""
    by_task = _between_groups(places, weights, [one.task for one in places])
    by_base = _between_groups(places, weights, [one.base for one in places])
    known = [part for part in (by_task, by_base) if part is not None]
    total = math.fsum(part for part, _ in known)
    if total <= 0:
        return None
    freedom = total**2 / math.fsum(part**2 / freedom for part, freedom in known if part > 0)
    return Spread(math.sqrt(total), freedom)


def _between_groups(
    places: Sequence[Place], weights: Sequence[float], groups: Sequence[str]
) -> tuple[float, int] | None:
    """The variance that groups of places add to the mean, and its degrees of freedom; None for a single group."""
    effects: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    for one, weight, group in zip(places, weights, groups, strict=True):
        effects.setdefault(group, []).append(one.effect)
        shares[group] = shares.get(group, 0.0) + weight
    if len(effects) < 2:
        return None
    between = variance([statistics.fmean(values) for values in effects.values()])
    return math.fsum(share**2 for share in shares.values()) * between, len(effects) - 1


def _at_least(spread: Spread, known: float) -> Spread:
    """A standard error no smaller than what seeds and test rows alone explain."""
    return spread if spread.error**2 >= known else Spread(math.sqrt(known), spread.freedom)


def regression(xs: Sequence[float], places: Sequence[Place]) -> Estimate | None:
    """The slope of effects over x, with an intercept for each task; None where x does not vary within a task.

    x is a property of the base, so the bases are what was sampled: places of one base share what is special to it.
    The error therefore comes from the mean residual of each base. With fewer than three bases there is none.
    """
    centred_x, centred_y = _within_tasks(xs, places), _within_tasks([one.effect for one in places], places)
    below = math.fsum(x * x for x in centred_x)
    if below <= 0:
        return None
    slope = math.fsum(x * y for x, y in zip(centred_x, centred_y, strict=True)) / below
    residuals = [y - slope * x for x, y in zip(centred_x, centred_y, strict=True)]
    spreads = [_over_places(residuals, places, below), _over_bases(centred_x, residuals, places, below)]
    known = tuple(spread for spread in spreads if spread is not None and spread.error > 0)
    return Estimate(slope, known if len(known) == len(spreads) else (), tuple(places))


def _over_places(residuals: Sequence[float], places: Sequence[Place], below: float) -> Spread | None:
    """The standard error of a slope whose places vary independently."""
    freedom = len(places) - len({one.task for one in places}) - 1
    if freedom < 1:
        return None
    left = math.fsum(residual**2 for residual in residuals)
    return Spread(math.sqrt(left / freedom / below), freedom)


def _over_bases(
    xs: Sequence[float], residuals: Sequence[float], places: Sequence[Place], below: float
) -> Spread | None:
    """The standard error of a slope where the places of a base share an effect."""
    sums: dict[str, float] = {}
    shared: dict[str, list[float]] = {}
    for x, residual, one in zip(xs, residuals, places, strict=True):
        sums[one.base] = sums.get(one.base, 0.0) + x
        shared.setdefault(one.base, []).append(residual)
    freedom = len(shared) - 2
    if freedom < 1:
        return None
    between = math.fsum(statistics.fmean(values) ** 2 for values in shared.values()) / freedom
    return Spread(math.sqrt(between * math.fsum(total**2 for total in sums.values())) / below, freedom)


def _within_tasks(values: Sequence[float], places: Sequence[Place]) -> list[float]:
    """Values as distances from the mean of their task."""
    by_task: dict[str, list[float]] = {}
    for value, one in zip(values, places, strict=True):
        by_task.setdefault(one.task, []).append(value)
    return [value - statistics.fmean(by_task[one.task]) for value, one in zip(values, places, strict=True)]


def holm(values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Holm's correction: for each name the corrected p-value and the level its p-value had to stay below."""
    order = sorted(values, key=lambda name: values[name])
    corrected: dict[str, tuple[float, float]] = {}
    worst, level, failed = 0.0, LEVEL, False
    for rank, name in enumerate(order):
        left = len(order) - rank
        worst = max(worst, min(1.0, left * values[name]))
        # After the first that fails no other is tested: they keep its level.
        level = level if failed else LEVEL / left
        failed = failed or worst >= LEVEL
        corrected[name] = worst, level
    return corrected


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Rank correlation; None where one side is constant."""
    from scipy.stats import spearmanr

    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return float(spearmanr(xs, ys).statistic)


def t_quantile(share: float, freedom: float) -> float:
    """The value below which a share of Student's distribution lies."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(share) if math.isinf(freedom) else stdtrit(freedom, share))


def _p_value(ahead: float, spread: Spread) -> float:
    from scipy.special import ndtr, stdtr

    t = -ahead / spread.error
    return float(ndtr(t) if math.isinf(spread.freedom) else stdtr(spread.freedom, t))
