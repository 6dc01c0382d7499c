"""The summary of all studies: every claim with its effect on each base, its verdict, and what would decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .. import files
from ..study import spec
from ..study.spec import Claim, Figure, Study
from ..study.store import Results
from . import report
from .findings import Findings
from .page import Cell, Grid, plain, render
from .published import published
from .verdicts import Comparison, Outcome, Verdict, judge

TITLE = "What the papers claim, and what holds here"
OUTCOMES: tuple[Outcome, ...] = ("holds", "refuted", "no difference that matters", "open")
MAIN = "core"  # the study whose figure the summary shows


@dataclass(frozen=True)
class Judged:
    """A study with its findings and verdicts."""

    study: Study
    bases: list[Findings]
    verdicts: list[Verdict]


def write(results: Results, folder: Path | None = None) -> tuple[Path, Path]:
    """Write the summary as a page and as Markdown; returns their paths."""
    target = folder or results.folder
    html, markdown = target / "summary.html", target / "summary.md"
    judged = _judged(results)
    files.replace(html, _html(judged, results).encode())
    files.replace(markdown, _markdown(judged, results).encode())
    return html, markdown


def as_html(results: Results) -> str:
    """The summary page."""
    return _html(_judged(results), results)


def _judged(results: Results) -> list[Judged]:
    judged = []
    for name in spec.names():
        study = spec.load(name)
        bases = report.read(study, results)
        judged.append(Judged(study, bases, judge(study, bases, published(study))))
    return judged


def _html(judged: Sequence[Judged], results: Results) -> str:
    best = {claim.id: _best(claim, judged) for claim in spec.known_claims().values()}
    outcomes = [one[1].outcome if one else "open" for one in best.values()]
    counts = [(outcome, report.CSS[outcome], outcomes.count(outcome)) for outcome in OUTCOMES]
    return render(
        "summary.html",
        title=TITLE,
        conditions=_conditions(judged),
        counts=counts,
        claims=_claims(judged),
        figures=_figures(judged),
        studies=_studies(judged, results),
        method_note=report.METHOD_NOTE,
    )


def _markdown(judged: Sequence[Judged], results: Results) -> str:
    parts = [f"# {TITLE}\n", plain(_conditions(judged)) + "\n"]
    parts += [_claims(judged).markdown(), _studies(judged, results).markdown(), "## How verdicts are made\n"]
    return "\n".join([*parts, plain(report.METHOD_NOTE) + "\n"])


def _best(claim: Claim, judged: Sequence[Judged]) -> tuple[Judged, Verdict] | None:
    """The verdict on a claim from the study with most places for it; None if no study has the claim."""
    verdicts = []
    for one in judged:
        for verdict in one.verdicts:
            if verdict.claim.id == claim.id:
                verdicts.append((one, verdict))
    return max(verdicts, key=lambda pair: _places(pair[1]), default=None)


def _places(verdict: Verdict) -> int:
    counts = [len(one.estimate.places) if one.estimate else 0 for one in verdict.comparisons]
    return min(counts, default=0)


def _base_names(judged: Sequence[Judged]) -> list[str]:
    """All bases, smallest first."""
    sizes = {findings.base: findings.parameters for one in judged for findings in one.bases if findings.done}
    return sorted(sizes, key=lambda name: sizes[name])


def _claims(judged: Sequence[Judged]) -> Grid:
    names = _base_names(judged)
    rows: list[list[Cell | str]] = []
    for claim in spec.known_claims().values():
        source = f"{claim.paper}, {claim.where}"
        best = _best(claim, judged)
        if best is None:
            rows.append([Cell(claim.text, source), Cell("open", "", "text"), *("" for _ in names), "in no study"])
            continue
        _, verdict = best
        cells = [_base_cell(verdict.comparisons, name) for name in names]
        css = report.CSS[verdict.outcome]
        outcome = Cell(report.outcome_in_words(verdict), _paper_says(claim, judged), css)
        rows.append([Cell(claim.text, source), outcome, *cells, verdict.needs or "decided"])
    head = ["claim", "verdict", *names, "what would decide it"]
    caption = "Effects on each base are means over its tasks, in the unit of the claim's first comparison."
    return Grid("Claims", head, rows, caption, texts=(0, 1, len(head) - 1))


def _paper_says(claim: Claim, judged: Sequence[Judged]) -> str:
    """The outcome of the same test on the numbers in the paper, from the study with most of them."""
    verdicts = chain.from_iterable(one.verdicts for one in judged)
    known = [v for v in verdicts if v.claim.id == claim.id and v.published_outcome is not None]
    if not known:
        return ""
    most = max(known, key=_published_places)
    return f"the paper's numbers: {most.published_outcome}"


def _published_places(verdict: Verdict) -> int:
    return sum(len(comparison.estimate.places) for comparison in verdict.published if comparison.estimate)


def _base_cell(comparisons: Sequence[Comparison], base: str) -> Cell:
    """The effect of the first comparison on one base."""
    estimate = comparisons[0].by_base.get(base) if comparisons else None
    if estimate is None:
        return Cell("", "–", "missing")
    tasks = len({place.task for place in estimate.places})
    return Cell(f"{estimate.mean:+.1f}", f"{tasks} task{'s' if tasks != 1 else ''}")


def _studies(judged: Sequence[Judged], results: Results) -> Grid:
    rows: list[list[Cell | str]] = []
    for one in judged:
        done = sum(result is not None for findings in one.bases for result in findings.trials.values())
        wanted = sum(len(findings.trials) for findings in one.bases)
        bases = ", ".join(findings.base for findings in one.bases if findings.done)
        if done:
            state = f"{done:,} of {wanted:,} trials on {bases}"
        else:
            state = f"nothing run; as the paper did it: {report.cost_in_words(one.study)}"
        rows.append([Cell(one.study.name, one.study.title), state, ", ".join(one.study.covers)])
    return Grid("Studies", ["study", "what was run", "covers"], rows, texts=(0, 1, 2))


def _conditions(judged: Sequence[Judged]) -> str:
    names = _base_names(judged)
    if not names:
        return "Nothing has been run yet."
    return f"Bases: {', '.join(names)}. None of them is the papers' BERT-base, BERT-large or RoBERTa-base."


def _figures(judged: Sequence[Judged]) -> list[report.DrawnFigure]:
    """The main comparison, where it was run."""
    for one in judged:
        if one.study.name == MAIN and any(findings.done for findings in one.bases):
            figure = Figure("Scores by method", "dots", "Every task that was run; marks are bases.")
            return [report.drawn(figure, one.study, one.bases)]
    return []
