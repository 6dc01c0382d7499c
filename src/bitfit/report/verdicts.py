"""Claims -> verdicts: four outcomes, each by its own test, corrected over the claims of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import StudyError, suggest
from ..study.spec import Claim, Part, Study
from .claim_tests import TESTS, ClaimTest, Ps
from .findings import Findings
from .quantities import QUANTITIES
from .statistics import LEVEL, Estimate, holm

Outcome = Literal["holds", "refuted", "no difference that matters", "open"]
HOLDS: Outcome = "holds"
REFUTED: Outcome = "refuted"
NO_DIFFERENCE: Outcome = "no difference that matters"
OPEN: Outcome = "open"

LEAST_PLACES = 3  # below which nothing is decided
GENERAL_PLACES, GENERAL_TASKS, GENERAL_BASES = 5, 3, 3  # for a verdict that speaks beyond the places at hand


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
    levels: Levels = Levels()

    @property
    def test(self) -> ClaimTest:
        """How it is tested."""
        return TESTS[self.part.test]

    @property
    def says(self) -> str:
        """What is tested, in words."""
        return self.test.words(self.part)

    @property
    def ps(self) -> Ps | None:
        """Its p-values, uncorrected; None with too few places."""
        found = self.estimate
        if found is None or len(found.places) < LEAST_PLACES or not found.spreads:
            return None
        return self.test.decide(self.part, found)

    @property
    def outcome(self) -> Outcome:
        """What follows at the corrected levels; a difference too small to matter is said first."""
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
        return {
            REFUTED: self.levels.refuted,
            NO_DIFFERENCE: self.levels.no_difference,
        }.get(self.outcome, self.levels.holds)

    @property
    def general(self) -> bool:
        """Whether there are places enough for a verdict beyond them."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """What a general verdict lacks."""
        places = self.estimate.places if self.estimate else ()
        wanted = (
            ("place", len(places), GENERAL_PLACES),
            ("task", len({one.task for one in places}), min(GENERAL_TASKS, len(self.part.tasks) or GENERAL_TASKS)),
            ("base", len({one.base for one in places}), GENERAL_BASES),
        )
        return [_count(need - have, f"more {name}") for name, have, need in wanted if have < need]

    @property
    def needs(self) -> str:
        """What would decide it, in words; empty if it is decided."""
        if self.missing:
            return f"needs {', '.join(self.missing)}"
        if self.outcome != OPEN or self.estimate is None:
            return ""
        seen, wanted = self.estimate.detectable(self.levels.holds), self.part.margin
        if seen is None or wanted <= 0:
            return ""
        places = math.ceil(len(self.estimate.places) * (seen / wanted) ** 2)
        return f"about {places} places would show a difference of {wanted:g} {self.test.unit(self.part)}"


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
        """All parts must hold; one that is refuted, or makes no difference, decides against."""
        return combined([comparison.outcome for comparison in self.comparisons])

    @property
    def published_outcome(self) -> Outcome | None:
        """What the paper's own numbers say; None where it prints none for this."""
        known = [one for one in self.published if one.estimate is not None]
        return combined([one.outcome for one in self.published]) if known else None

    @property
    def general(self) -> bool:
        """Whether the outcome speaks beyond the places that were run."""
        return bool(self.comparisons) and all(comparison.general for comparison in self.comparisons)

    @property
    def needs(self) -> str:
        """What would decide the claim."""
        if self.claim.untested:
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
    ours = _judged(study, bases)
    theirs = _judged(study, published)
    return [Verdict(claim, ours[claim.id], theirs[claim.id]) for claim in study.claims]


def _judged(study: Study, bases: Sequence[Findings]) -> dict[str, tuple[Comparison, ...]]:
    compared = {}
    for claim in study.claims:
        compared[claim.id] = [_compare(part, bases) for part in claim.parts]
    levels = _levels(compared)
    judged = {}
    for name, comparisons in compared.items():
        own = levels.get(name, Levels())
        judged[name] = tuple(Comparison(one.part, one.estimate, one.by_base, one.left_out, own) for one in comparisons)
    return judged


def _levels(compared: dict[str, list[Comparison]]) -> dict[str, Levels]:
    """Holm's levels over claims, for each outcome apart.

    A claim holds when all its parts do (their largest p counts). One part is enough against it, so its smallest p is
    corrected for the number of parts.
    """
    holds, refuted, no_difference = {}, {}, {}
    for name, comparisons in compared.items():
        ps = [one.ps for one in comparisons]
        known = [one for one in ps if one is not None]
        if not known:
            continue
        count = len(comparisons)
        if len(known) == count:
            holds[name] = max(one.holds for one in known)
        refuted[name] = min(1.0, count * min(one.refuted for one in known))
        small = [one.no_difference for one in known if one.no_difference is not None]
        if small:
            no_difference[name] = min(1.0, count * min(small))
    at = [holm(family) for family in (holds, refuted, no_difference)]
    levels = {}
    for name in refuted:
        parts = len(compared[name])
        levels[name] = Levels(
            at[0][name][1] if name in at[0] else LEVEL / len(refuted),
            at[1][name][1] / parts,
            at[2][name][1] / parts if name in at[2] else 0.0,
        )
    return levels


def _compare(part: Part, bases: Sequence[Findings]) -> Comparison:
    test = TESTS[part.test]
    by_base = {}
    for findings in bases:
        found = test.estimate(part, [findings])
        if found is not None:
            by_base[findings.base] = found
    left_out = [text for findings in bases for text in _left_out(part, findings)]
    return Comparison(part, test.estimate(part, bases), by_base, tuple(left_out))


def _left_out(part: Part, findings: Findings) -> list[str]:
    """The places and cells that a comparison could have used and did not, with the reason."""
    told = []
    for task in part.tasks or findings.trained_tasks:
        for size in findings.sizes(task) if task in findings.trained_tasks else ():
            where = f"{findings.base}, {task}" + (f" ({size:,} rows)" if size and len(findings.sizes(task)) > 1 else "")
            if (task, size) in findings.without_evidence:
                told.append(f"{where}: the methods do not beat the majority class")
                continue
            for name in dict.fromkeys(filter(None, (part.a, part.b, *part.pair))):
                best = findings.choices.get((name, task, size))
                if best is not None and findings.at_edge((name, task, size)):
                    tried = {point.lr for point in findings.cells[name, task, size]}
                    how = "the edge of its rates" if len(tried) > 1 else "the only rate it tried"
                    told.append(f"{where}: {name} chose {best[0]:g}, {how}")
    return told
