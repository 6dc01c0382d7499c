"""The summary of all studies: every claim with its effect on each base, its verdict, and what would decide it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .. import files
from ..study import forecast, spec
from ..study.spec import Claim, Study
from ..study.store import Results
from . import drawing, report
from .figures import KINDS, TAIL, against, panels
from .findings import Findings
from .page import Cell, Grid, plain, render
from .published import published
from .tables import trained_share
from .verdicts import OPEN, Comparison, Outcome, Verdict, judge

TITLE = "What the papers claim, and what holds here"
OUTCOMES: tuple[Outcome, ...] = ("holds", "refuted", "no difference that matters", "open")
OURS = "ours"  # the paper of claims that are our own
MAIN = "core"  # the study whose methods the summary compares
REFERENCE = "Full"
OVER_PLACES = ("against", "terms")  # the kinds of figures that the summary shows


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
    files.replace(html, _html(judged).encode())
    saved = _save_figures(judged, target / "figures")
    files.replace(markdown, _markdown(judged, saved).encode())
    return html, markdown


def as_html(results: Results) -> str:
    """The summary page."""
    return _html(_judged(results))


def _judged(results: Results) -> list[Judged]:
    judged = []
    for name in spec.names():
        study = spec.load(name)
        bases = report.read(study, results)
        judged.append(Judged(study, bases, judge(study, bases, published(study))))
    return judged


def _html(judged: Sequence[Judged]) -> str:
    best = {claim.id: _best(claim, judged) for claim in spec.known_claims().values()}
    outcomes = [one[1].outcome if one else "open" for one in best.values()]
    counts = [(outcome, report.CSS[outcome], outcomes.count(outcome)) for outcome in OUTCOMES]
    return render(
        "summary.html",
        title=TITLE,
        conditions=_conditions(judged),
        counts=counts,
        claims=_claims(judged),
        without_numbers=_claims_without_numbers(judged),
        methods=_methods(judged),
        figures=_figures(judged),
        studies=_studies(judged),
        method=report.METHOD,
    )


def _markdown(judged: Sequence[Judged], figures: Sequence[str] = ()) -> str:
    parts = [f"# {TITLE}\n", plain(_conditions(judged)) + "\n"]
    parts += [_methods(judged).markdown(), *figures, _claims(judged).markdown()]
    parts += [_claims_without_numbers(judged).markdown()]
    parts += [_studies(judged).markdown()]
    parts.append("## How verdicts are made\n")
    parts.append("".join(f"- {plain(text)}\n" for text in report.METHOD))
    return "\n".join(parts)


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
    """The claims with numbers of ours, those that are decided first."""
    names = _base_names(judged)
    decided: list[list[Cell | str]] = []
    undecided: list[list[Cell | str]] = []
    for claim in spec.known_claims().values():
        best = _best(claim, judged)
        if best is None or not _places(best[1]):
            continue
        one, verdict = best
        cells = [_base_cell(verdict.comparisons, name) for name in names]
        outcome = _outcome_cell(claim, one, verdict, judged)
        row: list[Cell | str] = [_claim_cell(claim, verdict), outcome, verdict.needs or "decided", *cells]
        (undecided if verdict.outcome == OPEN else decided).append(row)
    head = ["claim", "verdict", "what would decide it", *names]
    caption = (
        f"{report.PLACE_NOTE} Effects on each base are means over its tasks, of the claim's first comparison. Verdicts "
        "are those of the study with most places, corrected over the claims of that study."
    )
    return Grid("Claims", head, [*decided, *undecided], caption, texts=(0, 1, 2))


def _claims_without_numbers(judged: Sequence[Judged]) -> Grid:
    rows: list[list[Cell | str]] = []
    for claim in spec.known_claims().values():
        best = _best(claim, judged)
        if best is None or not _places(best[1]):
            outcome = Cell("open", _paper_says(claim, judged), "open")
            rows.append([_claim_cell(claim), outcome, _a_run(claim, judged)])
    caption = "Claims that no place has numbers for yet."
    head = ["claim", "verdict", "what would decide it"]
    return Grid("Claims without numbers", head, rows, caption, texts=range(len(head)))


def _a_run(claim: Claim, judged: Sequence[Judged]) -> Cell:
    """The studies that test a claim, and why those that were run say nothing of it yet."""
    names, reasons = [], []
    for one in judged:
        for verdict in one.verdicts:
            if verdict.claim.id == claim.id:
                names.append(one.study.name)
                if any(findings.done for findings in one.bases):
                    reasons += [reason for part in verdict.comparisons if (reason := _why_nothing(part))]
    if not names:
        return Cell("in no study")
    so_far = f"so far {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
    return Cell(f"a run of {' or '.join(names)}", so_far)


def _why_nothing(comparison: Comparison) -> str:
    """Why a comparison has no place although its study was run."""
    if comparison.estimate is not None:
        return ""
    return comparison.left_out[0] if comparison.left_out else comparison.why_open


def _claim_cell(claim: Claim, verdict: Verdict | None = None) -> Cell:
    """The claim and its source; a study may test it in another form, which is then said."""
    source = f"{claim.paper}, {claim.where}"
    if verdict is not None and verdict.claim.text != claim.text:
        return Cell(claim.text, f"{source}. Tested here: {verdict.claim.text}")
    return Cell(claim.text, source)


def _outcome_cell(claim: Claim, one: Judged, verdict: Verdict, judged: Sequence[Judged]) -> Cell:
    """The verdict, what the paper's numbers say, and the way to the study's page."""
    css = report.CSS[verdict.outcome]
    notes = [_paper_says(claim, judged)]
    if verdict.outcome != OPEN:
        ran = [findings for findings in one.bases if findings.done]
        conditions = "the conditions are above" if one.study.name == MAIN else report.settings_of(ran)
        notes.append(f"judged by {one.study.name}: {conditions}")
    return Cell(report.outcome_in_words(verdict), "; ".join(filter(None, notes)), css, _page(one.study))


def _page(study: Study) -> str:
    """The report of a study, seen from the summary."""
    return f"{study.name}/report.html"


def _paper_says(claim: Claim, judged: Sequence[Judged]) -> str:
    """The outcome of the same test on the paper's numbers, from the study with most of them, and why it is open."""
    verdicts = chain.from_iterable(one.verdicts for one in judged)
    known = [v for v in verdicts if v.claim.id == claim.id and v.published_outcome is not None]
    if not known:
        return "" if claim.paper == OURS else "the paper prints no numbers by task for it"
    most = max(known, key=_published_places)
    why = f" ({most.why_published_is_open})" if most.why_published_is_open else ""
    return f"the paper's numbers: {most.published_outcome}{why}"


def _published_places(verdict: Verdict) -> int:
    return sum(len(comparison.estimate.places) for comparison in verdict.published if comparison.estimate)


def _base_cell(comparisons: Sequence[Comparison], base: str) -> Cell:
    """The effect of the first comparison on one base."""
    estimate = comparisons[0].by_base.get(base) if comparisons else None
    if estimate is None:
        return Cell("", "–", "missing")
    first = comparisons[0]
    tasks = len(set(chain.from_iterable(place.all_tasks for place in estimate.places)))
    unit = first.test.unit(first.part)
    return Cell(f"{estimate.mean:+.1f}", f"{unit}, {tasks} task{'s' if tasks != 1 else ''}")


def _studies(judged: Sequence[Judged]) -> Grid:
    """Every study: what was run of it, and what it costs in a small form and as the paper did it."""
    rows: list[list[Cell | str]] = []
    for one in judged:
        study = one.study
        trials = list(chain.from_iterable(findings.trials.values() for findings in one.bases))
        done = sum(result is not None for result in trials)
        bases = ", ".join(findings.base for findings in one.bases if findings.done)
        state = f"{done:,} of {len(trials):,} trials on {bases}" if done else "not run"
        small = report.hours(forecast.small_cost(study).operations / forecast.CORE)
        published = report.hours(forecast.published_cost(study).operations / forecast.GPU)
        name = Cell(study.name, study.title, link=_page(study) if done else "")
        rows.append([name, state, small, published if study.of_a_paper else "–", _covers(study)])
    head = ["study", "what was run", "small, core hours", "as published, GPU hours", "covers"]
    return Grid("Studies", head, rows, _how_to_run(), texts=(0, 1, 4))


def _covers(study: Study) -> str:
    """What a study covers, with the paper named once."""
    if not study.of_a_paper:
        return "no single table or figure"
    items = [text.removeprefix(f"{study.paper} ") for text in study.covers]
    return f"{study.paper}: {', '.join(items)}"


def _how_to_run() -> str:
    options = shlex.join(["--base", forecast.SMALL_BASE, *forecast.SMALL.words()])
    return (
        "Hours are estimates: of one core for a small run, and of a GPU with 10 TFLOP/s for the paper's bases and all "
        f"data. A small run is: bitfit study run NAME {options}, with fewer epochs where the paper has fewer. "
        f"{report.WHERE}"
    )


def _conditions(judged: Sequence[Judged]) -> str:
    names = _base_names(judged)
    if not names:
        return "Nothing has been run yet."
    papers = set(chain.from_iterable(one.study.protocol.bases for one in judged if one.study.of_a_paper))
    theirs = [name for name in names if name in papers]
    which = f"Of the papers' bases: {', '.join(theirs)}." if theirs else "None of them is a base of the papers."
    settings = report.all_conditions(_ran(judged))
    shown = f" The main comparison ran on: {settings}" if settings else ""
    return f"Bases: {', '.join(names)}. {which}{shown} Every study's page has its conditions."


def _main(judged: Sequence[Judged]) -> Judged | None:
    """The main comparison, where it was run."""
    for one in judged:
        if one.study.name == MAIN and any(findings.done for findings in one.bases):
            return one
    return None


def _ran(judged: Sequence[Judged]) -> list[Findings]:
    """The bases that the main comparison was run on."""
    main = _main(judged)
    return [findings for findings in main.bases if findings.done] if main else []


def _methods(judged: Sequence[Judged]) -> Grid:
    """The methods of the main comparison against full fine-tuning, over all places."""
    main = _main(judged)
    rows: list[list[Cell | str]] = []
    differences = against(REFERENCE, main.study, _ran(judged)) if main else {}
    for name, estimate in differences.items():
        ends = estimate.interval(TAIL)
        interval = f"{ends[0]:+.1f} to {ends[1]:+.1f}" if ends else "–"
        tasks = len({one.task for one in estimate.places})
        bases = len({one.base for one in estimate.places})
        places = Cell(str(len(estimate.places)), f"{tasks} tasks, {bases} bases")
        worst, best = min(one.effect for one in estimate.places), max(one.effect for one in estimate.places)
        range_ = f"{worst:+.1f}, {best:+.1f}"
        rows.append([name, f"{estimate.mean:+.1f}", interval, range_, places, _trained(name, judged)])
    head = ["method", f"against {REFERENCE}", "95% interval", "worst, best place", "places", "trained"]
    caption = (
        f"Test scores in points minus those of {REFERENCE} on the same task, base and seed. Trained is the share of "
        "the base that is trained, without the head. Intervals are for other tasks and bases; they are not corrected "
        "for the number of methods."
    )
    return Grid("Main comparison", head, rows, caption)


def _trained(method: str, judged: Sequence[Judged]) -> str:
    """The smallest and the largest share of a base that a method trains."""
    shares = sorted(share for findings in _ran(judged) if (share := trained_share(findings, method)))
    if not shares:
        return "–"
    return shares[0] if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"


def _figures(judged: Sequence[Judged]) -> list[report.DrawnFigure]:
    """The figures of the main comparison over places; its scores are on its own page."""
    main = _main(judged)
    if main is None:
        return []
    return [report.drawn(figure, main.study, main.bases) for figure in main.study.figures if figure.kind in OVER_PLACES]


def _save_figures(judged: Sequence[Judged], folder: Path) -> list[str]:
    """Save the figures over places as PNG; returns them as Markdown."""
    main = _main(judged)
    lines: list[str] = []
    for figure in main.study.figures if main else ():
        if figure.kind not in OVER_PLACES or main is None:
            continue
        for panel in panels(figure, main.study, main.bases):
            path = drawing.save(panel, folder, figure.kind, "png")
            lines.append(f"![{plain(panel.words)}]({folder.name}/{path.name})\n\n{KINDS[figure.kind].key}\n")
    return lines
