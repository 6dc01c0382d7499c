"""Claims -> verdicts: each comparison by a named test on paired seed x task blocks, all of a study Holm-corrected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..study.spec import Claim, Part, Study
from .findings import Findings, moved
from .statistics import LEVEL, holm, p_above, p_equal, slope, spearman, summary

HOLDS, FAILS, OPEN = "holds", "does not hold", "not enough evidence"
SCARCE = 500  # training rows
LEAST = 3  # blocks, below which nothing is decided
SIZES = {
    "all": "",
    "smallest": ", fewest training rows",
    "largest": ", most training rows",
    "scarce": f", up to {SCARCE} training rows",
}


@dataclass(frozen=True)
class Comparison:
    """One part of a claim, computed: differences in points, their test and what follows."""

    part: Part
    says: str
    test: str
    differences: tuple[float, ...]
    places: str
    unit: str = "points"
    p: float | None = None  # corrected
    verdict: str = OPEN

    @property
    def shown(self) -> str:
        """The mean difference with its interval."""
        if not self.differences:
            return "no paired blocks"
        found = summary(self.differences)
        reach = "" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        return f"{found.mean:+.2f}{reach} {self.unit}, n = {found.count}"


@dataclass(frozen=True)
class Verdict:
    """A claim with its comparisons."""

    claim: Claim
    comparisons: tuple[Comparison, ...]

    @property
    def verdict(self) -> str:
        """All parts must hold; one that does not decides against."""
        found = {comparison.verdict for comparison in self.comparisons}
        return FAILS if FAILS in found else OPEN if OPEN in found or not found else HOLDS


def judge(study: Study, bases: Sequence[Findings]) -> list[Verdict]:
    """The verdicts of a study over all bases it was run on."""
    drawn = [(claim, [_compare(part, bases) for part in claim.parts]) for claim in study.claims]
    tested = [c for _, comparisons in drawn for c in comparisons if len(c.differences) >= LEAST]
    corrected = dict(zip(map(id, tested), holm([_p(c) for c in tested]), strict=True))
    return [
        Verdict(claim, tuple(_decide(c, corrected.get(id(c))) for c in comparisons)) for claim, comparisons in drawn
    ]


def _p(comparison: Comparison) -> float:
    part, differences = comparison.part, comparison.differences
    if part.test in ("equal", "same", "unrelated"):
        return p_equal(differences, part.margin)
    if part.test == "not_worse":
        return p_above(differences, -part.margin)
    if part.test in ("nothing", "still", "small"):
        return p_above([-value for value in differences], -part.margin)
    return p_above(differences, part.by)


def _decide(comparison: Comparison, p: float | None) -> Comparison:
    if p is None:
        return comparison
    verdict = HOLDS if p < LEVEL else FAILS if _refuted(comparison) else OPEN
    return replace(comparison, p=p, verdict=verdict)


def _refuted(comparison: Comparison) -> bool:
    """Whether the data speak against the claim, not merely fail to support it."""
    part, found = comparison.part, summary(comparison.differences)
    assert found.low is not None and found.high is not None
    if part.test in ("equal", "same"):
        return (found.low > 0 or found.high < 0) and abs(found.mean) > part.margin
    if part.test == "not_worse":
        return found.high < 0 and found.mean < -part.margin
    if part.test in ("nothing", "still", "small"):
        return found.low > part.margin
    if part.test == "unrelated":
        return found.low > part.margin or found.high < -part.margin
    if part.test == "greater":  # refuted when even the upper end of the interval is too little to matter
        return found.low <= part.by and found.high < max(part.margin, part.by)
    return found.high < 0


# ---- the differences each test is made on


def _compare(part: Part, bases: Sequence[Findings]) -> Comparison:
    if part.test == "smaller_base":
        return _smaller_base(part, bases)
    differences: list[float] = []
    places = []
    for findings in bases:
        tasks = [task for task in part.tasks or findings.own if task in findings.own]
        tasks = [task for task in tasks if task not in part.except_ or findings.size(task) is not None]
        found = {task: _DIFFERENCES[part.test](replace(part, tasks=(task,)), findings) for task in tasks}
        differences += [value for values in found.values() for value in values]
        if any(found.values()):
            places.append(f"{findings.base}: {', '.join(task for task in tasks if found[task])}")
    where = "; ".join(places) or "no place counts as evidence"
    says, test, unit = _words(part)
    return Comparison(part, says, test, tuple(differences), where, unit)


def _words(part: Part) -> tuple[str, str, str]:
    what = "" if part.quantity == "score" else f"{_NAMES[part.quantity]} of "
    unit = "epochs" if part.quantity == "epochs" else "points"
    pair, at = f"{what}{part.a} - {part.b}", SIZES[part.sizes]
    t, tost = "paired t-test, one-sided", "two one-sided paired t-tests (equivalence)"
    return {
        "greater": (f"{pair} > {part.by:g}{at}", t, unit),
        "equal": (f"|{pair}| < {part.margin:g}{at}", tost, unit),
        "not_worse": (f"{pair} > -{part.margin:g}{at}", t + " (non-inferiority)", unit),
        "small": (f"{what}{part.a} < {part.margin:g}{at}", "one-sided t-test", unit),
        "nothing": (f"{part.a} - majority < {part.margin:g}", "one-sided t-test", unit),
        "still": (
            f"change of {', '.join(part.terms)} < {part.margin:g}% of the largest term's",
            "one-sided t-test",
            "%",
        ),
        "most": (f"{' and '.join(part.terms)} change more than any other term", "one-sided t-test", "% of the largest"),
        "unrelated": (f"|rank correlation of change and score| < {part.margin:g}", "two one-sided t-tests", "(rho)"),
        "shrinks": (
            f"{part.a} - {part.b} falls with log2 of the training rows",
            "one-sided t-test",
            "points per halving",
        ),
        "same": (f"|({part.a} - {part.b}) - ({' - '.join(part.with_)})| < {part.margin:g}", tost, unit),
    }[part.test]


_NAMES = {
    "gap": "generalisation gap",
    "fall": "late fall",
    "area": "gentleness of the loss",
    "epochs": "epochs to best",
    "spread": "spread over seeds",
    "failed": "share of failed runs",
}


def _sizes(part: Part, findings: Findings) -> list[tuple[str, int | None]]:
    places = list(findings.blocks(part.tasks))
    if part.sizes == "all":
        return places
    kept: list[tuple[str, int | None]] = []
    for task in dict.fromkeys(task for task, _ in places):
        own = [size for other, size in places if other == task]
        if part.sizes == "scarce":
            kept += [(task, size) for size in own if size is not None and size <= SCARCE]
        elif len(own) > 1:  # one size is neither
            kept.append((task, own[0] if part.sizes == "smallest" else own[-1]))
    return kept


def _paired(part: Part, findings: Findings) -> list[float]:
    found = []
    for task, size in _sizes(part, findings):
        a, b = (findings.quantity(part.quantity, (name, task, size)) for name in (part.a, part.b))
        found += [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    return found


def _small(part: Part, findings: Findings) -> list[float]:
    return [
        value
        for task, size in _sizes(part, findings)
        for value in findings.quantity(part.quantity, (part.a, task, size)).values()
    ]


def _nothing(part: Part, findings: Findings) -> list[float]:
    # Here a silent place is the very thing that is claimed.
    places = [(t, s) for t in part.tasks or findings.tasks for s in findings.sizes(t)]
    return [
        findings.points(result) - 100 * result.majority
        for task, size in places
        for point in findings.cells.get((part.a, task, size), ())
        if (result := findings.results[point]) is not None
    ]


def _term_means(findings: Findings, part: Part) -> list[dict[str, float]]:
    tables = []
    for task, size in findings.blocks(part.tasks):
        for result in findings.chosen((part.a, task, size)).values():
            means = {term: moved(result, [term]) for term in result.change if term.startswith("b_")}
            layered = {t: m for t, m in means.items() if m is not None and len(result.change[t]) > 1}
            if layered:
                tables.append(layered)
    return tables


def _still(part: Part, findings: Findings) -> list[float]:
    tables = _term_means(findings, part)
    return [100 * t.get(term, 0.0) / max(t.values()) for t in tables if max(t.values()) > 0 for term in part.terms]


def _most(part: Part, findings: Findings) -> list[float]:
    found = []
    for table in _term_means(findings, part):
        rest = [value for term, value in table.items() if term not in part.terms]
        own = [table[term] for term in part.terms if term in table]
        if rest and own:
            found.append(100 * (min(own) - max(rest)) / max(table.values()))
    return found


def _unrelated(part: Part, findings: Findings) -> list[float]:
    found = []
    for task, size in findings.blocks(part.tasks):
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for method in findings.methods:
            for seed, result in findings.chosen((method, task, size)).items():
                change = moved(result)
                if change is not None:
                    by_seed.setdefault(seed, []).append((change, findings.points(result)))
        rhos = [spearman(*zip(*pairs, strict=True)) for pairs in by_seed.values() if len(pairs) >= LEAST + 1]
        found += [rho for rho in rhos if rho is not None]
    return found


def _shrinks(part: Part, findings: Findings) -> list[float]:
    found = []
    for task in part.tasks or findings.tasks:
        curves: dict[int, list[tuple[float, float]]] = {}
        for place, size in findings.blocks([task]):
            a, b = (findings.quantity("score", (name, place, size)) for name in (part.a, part.b))
            for seed in a.keys() & b.keys():
                rows = findings.rows(place, size)
                curves.setdefault(seed, []).append((math.log2(rows), a[seed] - b[seed]))
        slopes = [slope(*zip(*curve, strict=True)) for _, curve in sorted(curves.items()) if len(curve) > 1]
        found += [-value for value in slopes if value is not None]
    return found


def _same(part: Part, findings: Findings) -> list[float]:
    found = []
    for task, size in _sizes(part, findings):
        named = [findings.quantity(part.quantity, (name, task, size)) for name in (part.a, part.b, *part.with_)]
        for seed in sorted(set.intersection(*(set(values) for values in named))):
            a, b, c, d = (values[seed] for values in named)
            found.append((a - b) - (c - d))
    return found


def _smaller_base(part: Part, bases: Sequence[Findings]) -> Comparison:
    """Per task and seed: the loss on the smallest base minus that on the largest."""
    ordered = sorted(bases, key=lambda findings: int(findings.manifest["base"]["parameters"]))
    found: list[float] = []
    if len(ordered) > 1:
        small, large = ordered[0], ordered[-1]
        losses = []
        for findings in (small, large):
            own: dict[tuple[str, int | None, int], float] = {}
            for task, size in findings.blocks(part.tasks):
                a, b = (findings.quantity("score", (name, task, size)) for name in (part.a, part.b))
                own |= {(task, size, seed): a[seed] - b[seed] for seed in a.keys() & b.keys()}
            losses.append(own)
        found = [losses[0][block] - losses[1][block] for block in sorted(losses[0].keys() & losses[1].keys(), key=str)]
    where = ", ".join(findings.base for findings in ordered)
    says = f"{part.a} - {part.b} is larger on the smallest base than on the largest"
    return Comparison(part, says, "paired t-test, one-sided", tuple(found), where)


_DIFFERENCES = {
    "greater": _paired, "equal": _paired, "not_worse": _paired, "small": _small, "nothing": _nothing,
    "still": _still, "most": _most, "unrelated": _unrelated, "shrinks": _shrinks, "same": _same,
}  # fmt: skip
