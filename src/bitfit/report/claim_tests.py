"""The tests that decide claims: each is one value, and a new one is one more value.

A test says what its effect on a place is, in words and as a number, and which p-values speak for the claim, against
it, and for a difference too small to matter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from ..study.grid import Point
from ..study.spec import Part
from ..study.store import Result
from .findings import Cell, Findings
from .quantities import QUANTITIES, moved
from .resampling import variance_from_rows
from .statistics import LEAST_SEEDS, Estimate, Place, alone, combine, place, regression, spearman

SCARCE = 500  # training rows
SIZES = {
    "all": "",
    "smallest": ", fewest training rows",
    "largest": ", most training rows",
    "scarce": f", up to {SCARCE} training rows",
}
METHODS_TO_CORRELATE = 4


@dataclass(frozen=True)
class Ps:
    """p-values for a claim, against it, and for a difference that does not matter (None: does not apply)."""

    holds: float
    refuted: float
    no_difference: float | None = None


@dataclass(frozen=True)
class Decision:
    """How an estimate decides a part: its p-values, and the values that the interval must exclude."""

    p_values: Callable[[Part, Estimate], Ps]
    bounds: Callable[[Part], tuple[float, ...]]


@dataclass(frozen=True)
class ClaimTest:
    """How one kind of comparison is made."""

    name: str
    words: Callable[[Part], str]
    unit: Callable[[Part], str]
    effects: Callable[[Part, Findings], Iterator[Place]]
    decision: Decision
    combined: Callable[[Part, Sequence[tuple[Findings, Place]]], Estimate | None] | None = None
    inner_rates: bool = True  # whether a cell whose best rate is at the edge is left out
    of_learning: bool = False  # whether it says nothing of a method that did not learn the task

    def estimate(self, part: Part, bases: Sequence[Findings]) -> Estimate | None:
        """The effect over all places of these bases that count."""
        effects = []
        for findings in bases:
            if is_about(part, findings):
                effects += [(findings, effect) for effect in self.effects(part, findings)]
        if self.combined is not None:
            return self.combined(part, effects)
        places = [effect for _, effect in effects]
        if part.base and len(places) == 1:
            return alone(places[0], LEAST_SEEDS)
        return combine(places)


def is_about(part: Part, findings: Findings) -> bool:
    """Whether a part speaks of a base: of all of them, unless it names one."""
    return not part.base or findings.base.rpartition("/")[2] == part.base


# ---- decisions


def _greater(part: Part, estimate: Estimate) -> Ps:
    return Ps(estimate.p("above", part.by), estimate.p("below", part.by), estimate.p_within(part.margin))


def _not_worse(part: Part, estimate: Estimate) -> Ps:
    """Non-inferiority: worse by less than the margin."""
    return Ps(estimate.p("above", -part.margin), estimate.p("below", -part.margin))


def _below(part: Part, estimate: Estimate) -> Ps:
    return Ps(estimate.p("below", part.margin), estimate.p("above", part.margin))


def _within(part: Part, estimate: Estimate) -> Ps:
    outside = 2 * min(estimate.p("above", part.margin), estimate.p("below", -part.margin))
    return Ps(estimate.p_within(part.margin), min(1.0, outside))


GREATER = Decision(_greater, lambda part: (part.by,))
NOT_WORSE = Decision(_not_worse, lambda part: (-part.margin,))
BELOW = Decision(_below, lambda part: (part.margin,))
WITHIN = Decision(_within, lambda part: (-part.margin, part.margin))


# ---- effects on places


def places_of(part: Part, findings: Findings) -> dict[str, list[int | None]]:
    """The tasks a part is about, each with its training sizes that count."""
    chosen: dict[str, list[int | None]] = {}
    for task, size in findings.places(part.tasks):
        if (task not in part.not_tasks or size is not None) and not too_few(part, findings, task, size):
            chosen.setdefault(task, []).append(size)
    limited = {task: _sizes(part, sizes) for task, sizes in chosen.items()}
    return {task: sizes for task, sizes in limited.items() if sizes}


def _sizes(part: Part, sizes: list[int | None]) -> list[int | None]:
    if part.sizes == "scarce":
        return [size for size in sizes if size is not None and size <= SCARCE]
    if part.sizes == "all":
        return sizes
    if len(sizes) < 2:  # a single size is neither the smallest nor the largest
        return []
    return sizes[:1] if part.sizes == "smallest" else sizes[-1:]


def _one_place(base: str, task: str, by_size: Sequence[Place]) -> Iterator[Place]:
    """The sizes of a task as one place: they share test rows, and smaller subsets lie within larger ones."""
    if len(by_size) == 1:
        yield by_size[0]
    elif by_size:
        effect = statistics.fmean(one.effect for one in by_size)
        variance = statistics.fmean(one.variance for one in by_size)
        freedom = min(one.freedom for one in by_size)
        seeds = min(one.seeds for one in by_size)
        known = all(one.rows_known for one in by_size)
        yield Place(base, task, effect, variance, freedom, seeds, by_size[0].rows, rows_known=known)


def compared(part: Part, findings: Findings, cells: Sequence[Cell]) -> dict[int, tuple[Result, ...]]:
    """The chosen trials of cells, by the seeds that all of them have; none if a cell's rate is at the edge."""
    if any(findings.at_edge(cell) for cell in cells):
        return {}
    chosen = [findings.chosen(cell) for cell in cells]
    shared = set.intersection(*(set(trials) for trials in chosen))
    together = {}
    for seed in sorted(shared):
        together[seed] = tuple(trials[seed] for trials in chosen)
    return together


def _difference(part: Part, findings: Findings, task: str, size: int | None) -> Place | None:
    """a - b on one place."""
    if collapsed_pairs(part, findings, task, size) or not_learnt(part, findings, task, size):
        return None
    cells = [(part.a, task, size), (part.b, task, size)]
    trials = compared(part, findings, cells)
    quantity = QUANTITIES[part.quantity]
    a, b = (quantity.by_seed(findings, cell) for cell in cells)
    effects = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not trials or not effects:
        return None
    if part.quantity != "score":
        return place(findings.base, task, effects)
    pairs = [(first, second) for first, second in trials.values()]
    from_rows = variance_from_rows(pairs, findings.part(pairs[0][0]))
    return place(findings.base, task, effects, from_rows, findings.test_rows(task, size))


def _paired(part: Part, findings: Findings) -> Iterator[Place]:
    for task, sizes in places_of(part, findings).items():
        by_size = [_difference(part, findings, task, size) for size in sizes]
        yield from _one_place(findings.base, task, [effect for effect in by_size if effect is not None])


def _values(part: Part, findings: Findings) -> Iterator[Place]:
    for task, sizes in places_of(part, findings).items():
        by_size = []
        for size in sizes:
            cell = (part.a, task, size)
            values = QUANTITIES[part.quantity].by_seed(findings, cell)
            vacuous = not_learnt(part, findings, task, size) or too_short(part, findings, task, size)
            if values and not vacuous and not findings.at_edge(cell):
                by_size.append(place(findings.base, task, list(values.values())))
        yield from _one_place(findings.base, task, by_size)


def _above_majority(part: Part, findings: Findings) -> Iterator[Place]:
    """The rate that dev chose for each seed minus the majority class, where the reference b learnt the task."""
    for task in part.tasks or findings.trained_tasks:
        size = findings.size(task) if task in findings.tasks else None
        if not _learnt(findings, (part.b, task, size)):
            continue
        chosen = _chosen_by_seed(findings, (part.a, task, size))
        if chosen:
            above = [findings.points(result) - 100 * result.majority for result in chosen]
            from_rows = statistics.fmean(findings.row_variance(result) for result in chosen)
            yield place(findings.base, task, above, from_rows, findings.test_rows(task, size))


def _chosen_by_seed(findings: Findings, cell: Cell) -> list[Result]:
    """For each seed of a cell the trial at the rate that dev chose for this seed."""
    by_seed: dict[int, list[Point]] = {}
    for point in findings.cells.get(cell, ()):
        by_seed.setdefault(point.seed, []).append(point)
    chosen = []
    for points in by_seed.values():
        best = findings.choice(points)
        for point in points:
            result = findings.results[point]
            if result is not None and best == (point.lr, point.batch):
                chosen.append(result)
    return chosen


def collapsed_pairs(part: Part, findings: Findings, task: str, size: int | None) -> list[tuple[str, str]]:
    """The compared methods of which neither learnt the task: that both are at the majority class says nothing."""
    pairs = [(part.a, part.b)] if part.b else []
    if part.pair:
        pairs.append((part.pair[0], part.pair[1]))
    collapsed = []
    for first, second in pairs:
        if not _learnt(findings, (first, task, size)) and not _learnt(findings, (second, task, size)):
            collapsed.append((first, second))
    return collapsed


def not_learnt(part: Part, findings: Findings, task: str, size: int | None) -> list[str]:
    """The methods that did not learn the task, where only one that learns it says something.

    A method that learns nothing has no generalisation gap, converges at once, and its biases move by chance.
    """
    if not (QUANTITIES[part.quantity].of_learning or TESTS[part.test].of_learning):
        return []
    named = [name for name in (part.a, part.b) if name]
    return [name for name in named if not _learnt(findings, (name, task, size))]


def too_short(part: Part, findings: Findings, task: str, size: int | None) -> bool:
    """Whether no trial of a cell could have exceeded the margin of a part, however it went."""
    most = QUANTITIES[part.quantity].most
    trials = findings.chosen((part.a, task, size)).values()
    return most is not None and not part.b and all(most(result) <= part.margin for result in trials)


def too_few(part: Part, findings: Findings, task: str, size: int | None) -> bool:
    """Whether a place has fewer training rows than those that a part is about."""
    return findings.rows(task, size) < part.least_rows


def _learnt(findings: Findings, cell: Cell) -> bool:
    """Whether a method beat the majority class beyond its interval."""
    lows = [findings.lower_end(result) for result in findings.chosen(cell).values()]
    return bool(lows) and statistics.fmean(lows) > findings.majority(cell[1], cell[2])


def _term_changes(part: Part, findings: Findings) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """For each task the mean change of every bias term with a value in each layer, seed by seed."""
    for task, sizes in places_of(part, findings).items():
        cell = (part.a, task, sizes[-1])
        if findings.at_edge(cell) or not_learnt(part, findings, task, sizes[-1]):
            continue
        tables = []
        for result in findings.chosen(cell).values():
            layered = [term for term, row in result.change.items() if term.startswith("b_") and len(row) > 1]
            means = {term: moved(result, [term]) for term in layered}
            known = {term: mean for term, mean in means.items() if mean is not None}
            if known and max(known.values()) > 0:
                tables.append(known)
        if tables:
            yield task, tables


def _largest_share(part: Part, findings: Findings) -> Iterator[Place]:
    for task, tables in _term_changes(part, findings):
        shares = []
        for table in tables:
            named = [table[term] for term in part.terms if term in table]
            if named:
                shares.append(100 * max(named) / max(table.values()))
        if shares:
            yield place(findings.base, task, shares)


def _lead_over_others(part: Part, findings: Findings) -> Iterator[Place]:
    for task, tables in _term_changes(part, findings):
        leads = []
        for table in tables:
            others = [mean for term, mean in table.items() if term not in part.terms]
            if others and all(term in table for term in part.terms):
                least = min(table[term] for term in part.terms)
                leads.append(100 * (least - max(others)) / max(table.values()))
        if leads:
            yield place(findings.base, task, leads)


def mean_change(findings: Findings, method: str, task: str) -> dict[str, list[float | None]]:
    """The change map of a method on a task, averaged over seeds."""
    maps = [result.change for result in findings.chosen((method, task, findings.size(task))).values() if result.change]
    averaged: dict[str, list[float | None]] = {}
    for term in maps[0] if maps else ():
        rows = [one[term] for one in maps if term in one]
        averaged[term] = [_mean_of_known(values) for values in zip(*rows, strict=True)]
    return averaged


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _map_likeness(part: Part, findings: Findings) -> Iterator[Place]:
    """The mean rank correlation of the change maps of two tasks, over all pairs of tasks.

    It is one effect for each base: pairs that share a task are not independent.
    """
    maps = _flat_maps(part, findings)
    correlations = []
    for (_, first), (_, second) in combinations(maps.items(), 2):
        correlation = spearman(first, second) if len(first) == len(second) else None
        if correlation is not None:
            correlations.append(correlation)
    if correlations:
        yield Place(findings.base, "all tasks", statistics.fmean(correlations), tasks=tuple(maps))


def _flat_maps(part: Part, findings: Findings) -> dict[str, list[float]]:
    """For each task the changes of all terms that have a value in every layer, term by term."""
    maps = {}
    for task in places_of(part, findings):
        size = findings.size(task)
        if findings.at_edge((part.a, task, size)) or not_learnt(part, findings, task, size):
            continue
        change = mean_change(findings, part.a, task)
        layered = {term: row for term, row in change.items() if len(row) > 1 and any(row)}
        if layered:
            changes = chain.from_iterable(layered[term] for term in sorted(layered))
            maps[task] = [value or 0.0 for value in changes]
    return maps


def _change_and_score(part: Part, findings: Findings) -> Iterator[Place]:
    """The rank correlation over methods of how much they changed and how well they score.

    All methods are taken at one rate, as in the paper: a larger rate changes more, whatever it trains.
    """
    for task, sizes in places_of(part, findings).items():
        correlations = []
        for seed, rate in _common_rates(findings, task, sizes[-1]).items():
            pairs = []
            for point in _points_of(findings, task, sizes[-1]):
                result = findings.results[point]
                if result is not None and (point.seed, point.lr) == (seed, rate):
                    change = moved(result)
                    if change is not None:
                        pairs.append((change, findings.points(result)))
            if len(pairs) >= METHODS_TO_CORRELATE:
                correlations.append(spearman([x for x, _ in pairs], [y for _, y in pairs]))
        known = [correlation for correlation in correlations if correlation is not None]
        if known:
            yield place(findings.base, task, known)


def _points_of(findings: Findings, task: str, size: int | None) -> list[Point]:
    return [point for point in findings.results if (point.task, point.size) == (task, size)]


def _common_rates(findings: Findings, task: str, size: int | None) -> dict[int, float]:
    """For each seed the rate that most methods were trained at; of several, the one with the best dev scores."""
    scores: dict[int, dict[float, list[float]]] = {}
    for point in _points_of(findings, task, size):
        result = findings.results[point]
        if result is not None and moved(result) is not None:
            by_rate = scores.setdefault(point.seed, {})
            by_rate.setdefault(point.lr, []).append(result.score("dev") or 0.0)
    common = {}
    for seed, by_rate in scores.items():
        common[seed] = max(by_rate, key=lambda rate: (len(by_rate[rate]), statistics.fmean(by_rate[rate])))
    return common


def _slopes(part: Part, findings: Findings) -> Iterator[Place]:
    """How fast a - b falls with each doubling of the training rows."""
    for task, sizes in places_of(part, findings).items():
        curves: dict[int, list[tuple[float, float]]] = {}
        for size in sizes:
            if collapsed_pairs(part, findings, task, size):
                continue
            cells = [(part.a, task, size), (part.b, task, size)]
            for seed, (a, b) in compared(part, findings, cells).items():
                doublings = math.log2(findings.rows(task, size) or 1)
                curves.setdefault(seed, []).append((doublings, findings.points(a) - findings.points(b)))
        slopes = [-_slope(curve) for curve in curves.values() if len(dict(curve)) > 1]
        if slopes:
            yield place(findings.base, task, slopes)


def _slope(curve: Sequence[tuple[float, float]]) -> float:
    return statistics.linear_regression([x for x, _ in curve], [y for _, y in curve]).slope


def _by_size_of_base(part: Part, effects: Sequence[tuple[Findings, Place]]) -> Estimate | None:
    """How much a - b grows with each halving of the base's parameters."""
    if not effects:
        return None
    halvings = [-math.log2(findings.parameters) for findings, _ in effects]
    return regression(halvings, [effect for _, effect in effects])


def _differences_of_differences(part: Part, findings: Findings) -> Iterator[Place]:
    """(a - b) minus the difference of the other pair."""
    for task, sizes in places_of(part, findings).items():
        by_size = []
        for size in sizes:
            if collapsed_pairs(part, findings, task, size):
                continue
            cells = [(name, task, size) for name in (part.a, part.b, *part.pair)]
            effects = []
            for trials in compared(part, findings, cells).values():
                a, b, c, d = (findings.points(result) for result in trials)
                effects.append((a - b) - (c - d))
            if effects:
                by_size.append(place(findings.base, task, effects, rows=findings.test_rows(task, size)))
        yield from _one_place(findings.base, task, by_size)


# ---- words


def _pair(part: Part) -> str:
    words = QUANTITIES[part.quantity].words
    return f"{words}, {part.a} minus {part.b}" if words else f"{part.a} minus {part.b}"


def _scope(part: Part) -> str:
    """The training sizes and tasks that a part is about, where it is not about all of them."""
    tasks = f", on {', '.join(part.tasks)}" if part.tasks else ""
    rows = f", from {part.least_rows:,} training rows" if part.least_rows else ""
    return f"{SIZES[part.sizes]}{rows}{tasks}"


def _unit(part: Part) -> str:
    return QUANTITIES[part.quantity].unit


def _value_words(part: Part) -> str:
    return f"{QUANTITIES[part.quantity].words} of {part.a} < {part.margin:g}{_scope(part)}"


TESTS = {
    test.name: test
    for test in (
        ClaimTest(
            "greater", lambda part: f"{_pair(part)} > {part.by:g}{_scope(part)}", _unit, _paired, GREATER
        ),
        ClaimTest(
            "as_good_as", lambda part: f"{_pair(part)} > -{part.margin:g}{_scope(part)}", _unit, _paired, NOT_WORSE
        ),
        ClaimTest(
            "equal", lambda part: f"|{_pair(part)}| < {part.margin:g}{_scope(part)}", _unit, _paired, WITHIN
        ),
        ClaimTest("below", _value_words, _unit, _values, BELOW),
        ClaimTest(
            "not_above_majority",
            lambda part: f"{part.a} minus majority class < {part.margin:g}, where {part.b} learns",
            _unit, _above_majority, BELOW, inner_rates=False,
        ),
        ClaimTest(
            "does_not_move",
            lambda part: f"change of {', '.join(part.terms)} < {part.margin:g}% of the largest term's",
            lambda part: "%", _largest_share, BELOW, of_learning=True,
        ),
        ClaimTest(
            "moves_most",
            lambda part: f"{' and '.join(part.terms)} change more than any other bias term",
            lambda part: "% of the largest", _lead_over_others, GREATER, of_learning=True,
        ),
        ClaimTest(
            "maps_alike",
            lambda part: f"mean rank correlation of the change maps of two tasks > {part.by:g}",
            lambda part: "(rho)", _map_likeness, GREATER, of_learning=True,
        ),
        ClaimTest(
            "unrelated",
            lambda part: f"|rank correlation of change and score over methods, at one rate| < {part.margin:g}",
            lambda part: "(rho)", _change_and_score, WITHIN, inner_rates=False,
        ),
        ClaimTest(
            "shrinks_with_size",
            lambda part: f"fall of {part.a} minus {part.b} per doubling of the training rows > 0",
            lambda part: "points", _slopes, GREATER,
        ),
        ClaimTest(
            "same_trend",
            lambda part: f"|fall of {part.a} minus {part.b} per doubling of the training rows| < {part.margin:g}",
            lambda part: "points", _slopes, WITHIN,
        ),
        ClaimTest(
            "smaller_bases_lose_more",
            lambda part: f"growth of {part.a} minus {part.b} per halving of the base > 0",
            lambda part: "points", _paired, GREATER, _by_size_of_base,
        ),
        ClaimTest(
            "same_difference",
            lambda part: f"|({part.a} minus {part.b}) minus ({' minus '.join(part.pair)})| < {part.margin:g}",
            _unit, _differences_of_differences, WITHIN,
        ),
    )
}  # fmt: skip
