"""Verdicts on claims: four outcomes, each by a separate test, corrected over the claims of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from ..errors import StudyError, suggest
from ..study.spec import Claim, Part, Study
from .claim_tests import TESTS, ClaimTest, Ps, collapsed_pairs, is_about, not_learnt, too_few, too_short
from .findings import Cell, Findings
from .quantities import QUANTITIES, Quantity
from .statistics import LEAST_SEEDS, LEVEL, MOST_PLACES, Estimate, Place, holm

Outcome = Literal["holds", "refuted", "no difference that matters", "open"]
HOLDS: Outcome = "holds"
REFUTED: Outcome = "refuted"
NO_DIFFERENCE: Outcome = "no difference that matters"
OPEN: Outcome = "open"

LEAST_PLACES = 3  # below which nothing is decided
# What a verdict needs to be general, that is, to hold beyond the places that were run.
GENERAL_PLACES = 5
GENERAL_TASKS = 3
GENERAL_BASES = 3


@dataclass(frozen=True)
class Levels:
    """The levels, by Holm's correction over claims, that a part's p-values must stay below."""

    holds: float = LEVEL
    refuted: float = LEVEL
    no_difference: float = LEVEL


@dataclass(frozen=True)
class Comparison:
    """One part of a claim, computed."""

    part: Part
    estimate: Estimate | None
    by_base: dict[str, Estimate]
    left_out: tuple[str, ...]
    not_run: tuple[str, ...] = ()  # methods that are missing on a place where others were run
    levels: Levels = Levels()

    @property
    def test(self) -> ClaimTest:
        """The test of the part."""
        return TESTS[self.part.test]

    @property
    def quantity(self) -> Quantity:
        """What is compared."""
        return QUANTITIES[self.part.quantity]

    @property
    def says(self) -> str:
        """What is tested, in words."""
        return self.test.words(self.part)

    @property
    def ps(self) -> Ps | None:
        """Its p-values, uncorrected; None with too few places."""
        estimate = self.estimate
        if estimate is None or len(estimate.places) < self.least_places or not estimate.spreads:
            return None
        return self.test.decision.p_values(self.part, estimate)

    @property
    def least_places(self) -> int:
        """How many places a test needs: one, if the claim is about one task on one base."""
        return 1 if self.part.base else LEAST_PLACES

    @property
    def outcome(self) -> Outcome:
        """The outcome at the corrected levels; a difference too small to matter takes precedence."""
        ps = self.ps
        if ps is None:
            return OPEN
        if ps.no_difference is not None and ps.no_difference < self.levels.no_difference:
            return NO_DIFFERENCE
        if ps.holds < self.levels.holds:
            return HOLDS
        return REFUTED if ps.refuted < self.levels.refuted else OPEN

    @property
    def level(self) -> float:
        """The level of the interval shown: that of the test that decided."""
        if self.outcome == REFUTED:
            return self.levels.refuted
        if self.outcome == NO_DIFFERENCE:
            return self.levels.no_difference
        return self.levels.holds

    @property
    def general(self) -> bool:
        """Whether there are enough places for a general verdict."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """What a general verdict lacks."""
        places = self.estimate.places if self.estimate else ()
        tasks = set(chain.from_iterable(one.all_tasks for one in places))
        wanted = (
            ("place", len(places), 1 if self.part.base else GENERAL_PLACES),
            ("task", len(tasks), min(GENERAL_TASKS, len(self.part.tasks) or GENERAL_TASKS)),
            ("base", len({one.base for one in places}), 1 if self.part.base else GENERAL_BASES),
            ("seed", self._seeds_of_one_place, LEAST_SEEDS),
        )
        return [_count(need - have, f"more {name}") for name, have, need in wanted if have < need]

    @property
    def _seeds_of_one_place(self) -> int:
        """The seeds of the only place of a claim about one base; several places need no number of seeds."""
        places = self.estimate.places if self.estimate else ()
        return places[0].seeds if self.part.base and len(places) == 1 else LEAST_SEEDS

    @property
    def needs(self) -> str:
        """What would decide it, in words; empty if it is decided.

        Its effect is taken as it was seen: the farther it is from the bound, the fewer places are needed.
        """
        if self.missing:
            first = f"run {' and '.join(self.not_run)}; " if self.not_run else ""
            rows = f" with {self.part.least_rows:,} training rows" if self.part.least_rows else ""
            return f"{first}needs {', '.join(self.missing)}{rows}"
        if self.outcome != OPEN or self.estimate is None:
            return ""
        mean = self.estimate.mean
        distance = min(abs(mean - bound) for bound in self.test.decision.bounds(self.part))
        if not self.estimate.spreads or distance <= 0:
            return f"more places ({self.why_open})"
        places = self.estimate.places_to_see(distance, self.level)
        about = f"more than {MOST_PLACES}" if places is None else f"about {places}"
        return f"{about} places like these, if the effect stays at {mean:+.1f} {self.test.unit(self.part)}"

    @property
    def why_open(self) -> str:
        """Why it is open, in a few words; empty if it is decided."""
        if self.outcome != OPEN:
            return ""
        estimate = self.estimate
        if estimate is None:
            return self.quantity.missing or "no place has numbers for it"
        places = len(estimate.places)
        if places < self.least_places:
            return f"{_count(places, 'place')}; a test needs {self.least_places}"
        if not estimate.spreads:
            return _why_no_spread(estimate.places[0]) if places == 1 else "the places do not vary"
        return f"the interval over {_count(places, 'place')} does not exclude {_bounds(self.part)}"


def _why_no_spread(one: Place) -> str:
    """Why a single place decides nothing."""
    if one.variance <= 0:
        return "single numbers without a spread"
    if one.seeds < LEAST_SEEDS:
        seeds = "one seed" if one.seeds == 1 else f"{one.seeds} seeds"
        return f"{seeds}; a test needs {LEAST_SEEDS}"
    return "the chance in the test rows is not known"


def _bounds(part: Part) -> str:
    """The values that the interval of a part would have to exclude, in words."""
    bounds = TESTS[part.test].decision.bounds(part)
    return " and ".join(f"{bound:+g}" if bound else "0" for bound in bounds)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Verdict:
    """A claim with its comparisons."""

    claim: Claim
    comparisons: tuple[Comparison, ...]
    published: tuple[Comparison, ...] = ()  # the same comparisons on the numbers that the paper prints

    @property
    def outcome(self) -> Outcome:
        """The claim holds if all parts hold; one part that is refuted, or makes no difference, decides against it."""
        return combined([comparison.outcome for comparison in self.comparisons])

    @property
    def published_outcome(self) -> Outcome | None:
        """The outcome on the paper's numbers; None if it prints none for this claim."""
        known = [one for one in self.published if one.estimate is not None]
        return combined([one.outcome for one in self.published]) if known else None

    @property
    def why_published_is_open(self) -> str:
        """Why the paper's numbers decide nothing; empty if they do, or if it prints none."""
        if self.published_outcome != OPEN:
            return ""
        reasons = dict.fromkeys(one.why_open for one in self.published if one.why_open)
        return "; ".join(reasons)

    @property
    def general(self) -> bool:
        """Whether there are enough places for a general verdict on every part."""
        return bool(self.comparisons) and all(comparison.general for comparison in self.comparisons)

    @property
    def needs(self) -> str:
        """What would decide the claim."""
        if self.claim.untested and self.outcome == OPEN:
            return self.claim.untested
        undecided = [comparison for comparison in self.comparisons if comparison.needs]
        least = min(undecided, key=lambda one: len(one.estimate.places) if one.estimate else 0, default=None)
        return least.needs if least is not None else ""


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a claim from those of its parts."""
    for against in (REFUTED, NO_DIFFERENCE):
        if against in outcomes:
            return against
    return HOLDS if outcomes and set(outcomes) == {HOLDS} else OPEN


def check(study: Study) -> None:
    """Raise StudyError for a claim test or a quantity that does not exist."""
    for claim in study.claims:
        for part in claim.parts:
            for what, name, known in (("test", part.test, TESTS), ("quantity", part.quantity, QUANTITIES)):
                if name not in known:
                    raise StudyError(f'{study.name}: claim {claim.id}: no {what} "{name}".{suggest(name, known)}')
            if part.test == "same_difference" and len(part.pair) != 2:
                raise StudyError(f"{study.name}: claim {claim.id}: pair = {list(part.pair)}: must be two methods")


def judge(study: Study, bases: Sequence[Findings], published: Sequence[Findings] = ()) -> list[Verdict]:
    """The verdicts of a study over all bases it was run on, and of the numbers its paper prints."""
    check(study)
    here = _judged(study, bases)
    in_paper = _judged(study, published)
    return [Verdict(claim, here[claim.id], in_paper[claim.id]) for claim in study.claims]


def _judged(study: Study, bases: Sequence[Findings]) -> dict[str, tuple[Comparison, ...]]:
    compared = {}
    for claim in study.claims:
        compared[claim.id] = [_compare(part, bases) for part in claim.parts]
    levels = _levels(compared)
    judged = {}
    for name, comparisons in compared.items():
        claim_levels = levels.get(name, Levels())
        judged[name] = tuple(replace(comparison, levels=claim_levels) for comparison in comparisons)
    return judged


def _levels(compared: dict[str, list[Comparison]]) -> dict[str, Levels]:
    """Holm's levels over claims, for each outcome separately.

    A claim holds if all its parts do, so the largest of their p-values counts. One part is enough against it, so the
    smallest is corrected for the number of parts.
    """
    holds: dict[str, float] = {}
    refuted: dict[str, float] = {}
    no_difference: dict[str, float] = {}
    for name, comparisons in compared.items():
        known = [ps for comparison in comparisons if (ps := comparison.ps) is not None]
        if not known:
            continue
        parts = len(comparisons)
        if len(known) == parts:
            holds[name] = max(ps.holds for ps in known)
        refuted[name] = min(1.0, parts * min(ps.refuted for ps in known))
        small = [ps.no_difference for ps in known if ps.no_difference is not None]
        if small:
            no_difference[name] = min(1.0, parts * min(small))
    holds_level = _holm_levels(holds)
    refuted_level = _holm_levels(refuted)
    no_difference_level = _holm_levels(no_difference)
    levels = {}
    for name in refuted:
        parts = len(compared[name])
        levels[name] = Levels(
            holds=holds_level.get(name, LEVEL / len(refuted)),
            refuted=refuted_level[name] / parts,
            no_difference=no_difference_level.get(name, 0.0) / parts,
        )
    return levels


def _holm_levels(p_values: dict[str, float]) -> dict[str, float]:
    return {name: level for name, (_, level) in holm(p_values).items()}


def _compare(part: Part, bases: Sequence[Findings]) -> Comparison:
    test = TESTS[part.test]
    by_base = {}
    left_out: list[str] = []
    not_run: dict[str, None] = {}
    for findings in bases:
        estimate = test.estimate(part, [findings])
        if estimate is not None:
            by_base[findings.base] = estimate
        if not is_about(part, findings):
            continue
        for where, task, size in _places(part, findings):
            missing = _not_run(part, findings, task, size)
            not_run |= dict.fromkeys(missing)
            left_out += [f"{where}: {reason}" for reason in _why_left_out(part, findings, task, size, missing)]
    return Comparison(part, test.estimate(part, bases), by_base, tuple(left_out), tuple(not_run))


def _places(part: Part, findings: Findings) -> Iterator[tuple[str, str, int | None]]:
    """The places that a comparison could use: in words, and their task and size."""
    for task in part.tasks or findings.trained_tasks:
        sizes = findings.sizes(task) if task in findings.trained_tasks else []
        for size in sizes:
            rows = f" ({size:,} rows)" if size and len(sizes) > 1 else ""
            yield f"{findings.base}, {task}{rows}", task, size


def _not_run(part: Part, findings: Findings, task: str, size: int | None) -> list[str]:
    """The methods of a comparison that have no finished trial at a place."""
    known = {method.name for method in findings.study.methods}
    return [name for name in _methods(part) if name in known and not findings.chosen((name, task, size))]


def _why_left_out(part: Part, findings: Findings, task: str, size: int | None, not_run: Sequence[str]) -> Iterator[str]:
    """Why a comparison does not use a place or a cell of it. A method that was not run is the first reason."""
    for name in not_run:
        yield f"{name} was not run"
    if not_run:
        return
    if (task, size) in findings.without_evidence:
        yield "the methods do not beat the majority class"
        return
    if too_few(part, findings, task, size):
        yield f"{findings.rows(task, size):,} training rows; the claim is about {part.least_rows:,} or more"
        return
    if not TESTS[part.test].inner_rates:
        return
    collapsed = collapsed_pairs(part, findings, task, size)
    for first, second in collapsed:
        yield f"neither {first} nor {second} beats the majority class"
    for name in () if collapsed else not_learnt(part, findings, task, size):
        yield f"{name} does not beat the majority class"
    if too_short(part, findings, task, size):
        yield f"{part.a} was not trained for more than {part.margin:g} {TESTS[part.test].unit(part)}"
    for name in _methods(part):
        reason = _edge(findings, (name, task, size))
        if reason is not None:
            yield f"{name} {reason}"


def _methods(part: Part) -> list[str]:
    """The methods that a comparison names."""
    return list(dict.fromkeys(name for name in (part.a, part.b, *part.pair) if name))


def _edge(findings: Findings, cell: Cell) -> str | None:
    """Why a cell's rate is not usable; None if it is."""
    best = findings.choices.get(cell)
    if best is None or not findings.at_edge(cell):
        return None
    tried = {point.lr for point in findings.cells[cell]}
    rate = "the edge of its rates" if len(tried) > 1 else "the only rate it tried"
    return f"chose {best[0]:g}, {rate}"
