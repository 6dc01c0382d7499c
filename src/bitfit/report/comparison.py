"""A comparison of methods: scores with intervals, paired differences, costs, and what to use."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from .. import files
from ..data.memory import Data
from ..model.base import Base
from ..model.language import is_learned
from ..study.compare import TIMED_SEED, Contest, Contestant, Say, run_contest
from ..study.methods import CompareOptions, ComparePlan
from ..study.store import Result
from ..terminal.progress import bar_of, notes_of
from ..training.checkpoint import SECONDS
from ..training.loop import Watch
from . import drawing
from .drawing import Panel
from .figures import Dot, dots, shared_limits
from .page import Cell, Grid, markup, plain, render
from .report import Drawing
from .resampling import score_variance, variance_from_rows
from .statistics import LEVEL, Place, alone, holm, place, t_quantile

TITLE = "Methods compared"
REFERENCE = "bitfit"
MARGIN = 1.0  # points that a smaller method may cost and still be advised
LOWEST = {"matthews": -100.0, "pearson": -100.0, "spearman": -100.0, "r2": -math.inf}  # other scores are never below 0
NOTE = (
    "Every method has the same rows, seeds, batch size and epochs. Each tries the same number of rates on the first "
    "seed, up to two more if the best is the smallest or largest, and keeps the best on dev rows. The head only is "
    "solved on the frozen base and has no rate. All others train by the plain recipe from the same random head of each "
    "seed; the default recipe of bitfit train may score higher. The test rows take part in no choice. Intervals are "
    "95% and come from seeds and test rows together; differences are paired by seed and by test row (bootstrap). A "
    "difference is called clear if its p-value, by Holm's correction for the number of methods, is below 5%."
)


@dataclass(frozen=True)
class Line:
    """One method: its score, its difference to the reference and what it costs. Scores are percentages."""

    name: str
    select: str
    inject: str
    autofreeze: bool
    rate: float | None  # None for the head only, which is solved
    scores: tuple[float, ...]  # by seed; empty if a training diverged
    score: float | None
    interval: tuple[float, float] | None
    difference: float | None  # to the reference; None for the reference itself
    difference_interval: tuple[float, float] | None
    p: float | None  # of the difference, corrected
    trained: int  # entries of the base, or added to it
    share: float  # of the model, head included on both sides
    bytes: float | None  # of the delta file
    seconds: float  # of one training
    cpu: float  # seconds of CPU time of one training, over all threads
    memory: float  # peak of the process, in bytes; 0 where the system does not tell
    predict: float | None  # seconds per text
    mixed: float | None  # time of a mixed batch, by that of a batch of one delta


@dataclass(frozen=True)
class Advice:
    """What to use, how sure that is, and the sentence that says so."""

    method: str | None
    sure: bool
    text: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods compared on one data set."""

    contest: Contest
    reference: str
    lines: tuple[Line, ...]
    advice: Advice
    notes: tuple[str, ...]

    def line(self, name: str) -> Line:
        """The line of a method."""
        return next(line for line in self.lines if line.name == name)

    def json(self) -> dict[str, Any]:
        """The comparison as `bitfit compare --json` prints it."""
        contest = self.contest
        return {
            "data": contest.data,
            "base": contest.base,
            "task": contest.kind,
            "metric": contest.metric,
            "rows": dict(contest.rows),
            "baseline": contest.baseline,
            "seeds": contest.extent.seeds,
            "rates": contest.extent.rates,
            "widenings": contest.extent.widenings,
            "epochs": contest.epochs,
            "batch": contest.batch,
            "reference": self.reference,
            "methods": [asdict(line) for line in self.lines],
            "advice": asdict(self.advice),
            "notes": list(self.notes),
        }

    def table(self) -> Grid:
        """The table of the page."""
        return _table(self)

    def __repr__(self) -> str:
        names = ", ".join(line.name for line in self.lines)
        advised = "nothing" if self.advice.method is None else self.advice.method
        sure = "sure" if self.advice.sure else "not sure"
        return f"<Comparison on {self.contest.data} of {names}; advised: {advised} ({sure})>"

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return render("table.html", grid=self.table(), text=self.advice.text)

    def write(self, folder: str | Path) -> tuple[Path, Path]:
        """Write the page, the same in Markdown and the numbers as JSON; where page and Markdown are."""
        target = Path(folder)
        page, markdown = target / "compare.html", target / "compare.md"
        files.replace(page, self.page().encode())
        files.replace(markdown, self.markdown().encode())
        files.replace(target / "compare.json", (json.dumps(self.json(), ensure_ascii=False) + "\n").encode())
        return page, markdown

    def page(self) -> str:
        """The page."""
        drawings = []
        for panel in _panels(self):
            drawings.append(Drawing(panel.title, panel.words, markup(drawing.svg(panel.figure))))
        return render(
            "compare.html", title=f"{TITLE} on {self.contest.data}", conditions=_conditions(self.contest),
            advice=self.advice, grid=self.table(), drawings=drawings, notes=self.notes, note=NOTE, command=self.command,
        )  # fmt: skip

    def markdown(self) -> str:
        """The same in Markdown."""
        parts = [f"# {plain(TITLE)} on {plain(self.contest.data)}\n", f"**{plain(self.advice.text)}**\n"]
        parts += [plain(_conditions(self.contest)) + "\n", self.table().markdown(), plain(NOTE) + "\n"]
        parts += [f"- {plain(text)}" for text in self.notes]
        return "\n".join(parts) + "\n"

    @property
    def command(self) -> str | None:
        """The command that trains what is advised; None if nothing is, or for data in memory."""
        contest = self.contest
        if self.advice.method is None or contest.source is None:
            return None
        line = self.line(self.advice.method)
        words = ["bitfit", "train", contest.source, *contest.options]
        if contest.base_given is not None:
            words += ["--base", contest.base_given]
        words += ["--select", line.select]
        if line.inject != "none":
            words += ["--inject", line.inject]
        if line.autofreeze:
            words += ["--autofreeze"]
        if line.autofreeze or is_learned(line.select):  # these have no recipe that chooses
            words += ["--lr", f"{line.rate:g}", "--epochs", str(contest.epochs)]
        return shlex.join(words)


def compare(
    source: Data,
    base: Base | str | None = None,
    *,
    out: str | Path | None = None,
    watch: Watch | None = None,
    say: Say | None = None,
    quiet: bool = False,
    checkpoint_seconds: float = SECONDS,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Train several methods on labelled data and compare their scores and costs.

    The source is what `train` takes. `methods` are names or selections; `budget` is a duration, such as "10m", that
    the comparison is shrunk to fit. The other options are those of `bitfit compare`. With `out` the page, the numbers
    and all results are written to that folder, and the same call goes on after an interruption. Notes and progress
    are shown on stderr; `quiet=True` shows none, and `say` and `watch` take them instead.
    """
    plan, saying = ComparePlan.of(options), notes_of(say, quiet)
    with bar_of(watch, quiet) as progress:
        contest = run_contest(
            source, base, plan, out=out, watch=progress, say=saying, checkpoint_seconds=checkpoint_seconds
        )
    comparison = judge(contest)
    if out is not None:
        comparison.write(out)
    return comparison


# ---- the numbers


def judge(contest: Contest) -> Comparison:
    """The lines of all methods and the advice."""
    names = [one.method.name for one in contest.contestants]
    done = [one for one in contest.contestants if _scores(one)]
    reference = REFERENCE if REFERENCE in names else names[0]
    base = next((one for one in done if one.method.name == reference), None)
    against = {} if base is None else _against(base, done)
    lines = tuple(_line(one, against.get(one.method.name)) for one in contest.contestants)
    notes = list(contest.notes)
    for line in lines:
        if line.score is None:
            notes.append(f"{line.name}: the loss was not a number on a seed, so it is not compared.")
    if len(contest.contestants[0].chosen) < 2:
        notes.append(
            "One seed: intervals know nothing of the chance in a training, and times and memory are of shared passes."
        )
    if not all(found.effect.rows_known for found in against.values()):
        notes.append(
            f"For {contest.metric} the test rows, as they are stored, cannot be resampled: a difference whose chance "
            "in the test rows is not known has no interval and is not called clear."
        )
    return Comparison(contest, reference, lines, advise(contest), tuple(notes))


@dataclass(frozen=True)
class Difference:
    """The paired difference of a method to another, its two-sided p-value by Holm's correction, and Holm's level."""

    effect: Place
    p: float
    level: float  # that the p-value before the correction had to be below

    @property
    def detectable(self) -> float | None:
        """The smallest difference that would be called clear; None where the chance in the test rows is not known."""
        if not self.effect.rows_known:
            return None
        return t_quantile(1 - self.level / 2, self.effect.freedom) * math.sqrt(self.effect.variance)


def _against(base: Contestant, done: Sequence[Contestant]) -> dict[str, Difference]:
    """The differences of all other methods to `base`."""
    places = {one.method.name: _difference(one, base) for one in done if one is not base}
    corrected = holm({name: _p(effect) for name, effect in places.items()})
    return {name: Difference(effect, *corrected[name]) for name, effect in places.items()}


def _difference(one: Contestant, base: Contestant) -> Place:
    """How much better a method is than another, in points, by seed and by test row."""
    by_seed = [a - b for a, b in zip(_scores(one), _scores(base), strict=True)]
    pairs = list(zip(one.chosen, base.chosen, strict=True))
    return place("", one.method.name, by_seed, variance_from_rows(pairs, "test"), one.chosen[0].rows["test"])


def _p(effect: Place) -> float:
    """The two-sided p-value of no difference."""
    estimate = alone(effect)
    return min(1.0, 2 * min(estimate.p("above", 0.0), estimate.p("below", 0.0)))


def _scores(one: Contestant) -> list[float]:
    """The test score of each seed in percent; nothing if a training diverged."""
    scores = [result.score("test") for result in one.chosen]
    return [100 * score for score in scores if score is not None] if None not in scores else []


def _line(one: Contestant, against: Difference | None) -> Line:
    scores = _scores(one)
    first = one.chosen[0]
    mean = place("", "", scores, score_variance(one.chosen, "test"), first.rows["test"]) if scores else None
    alone = one.chosen[min(TIMED_SEED, len(one.chosen) - 1)].cost  # on other seeds it shared a pass with others
    costs = [cost for cost in _costs(one.searched) if "bytes" in cost]
    cost = costs[0] if costs else {}
    difference = against.effect if against is not None else None
    return Line(
        name=one.method.name,
        select=one.method.select,
        inject=one.method.inject,
        autofreeze=one.method.autofreeze,
        rate=one.rate,
        scores=tuple(scores),
        score=mean.effect if mean is not None else None,
        interval=None if mean is None else _possible(mean.interval, first.metric),
        difference=difference.effect if difference is not None else None,
        difference_interval=difference.interval if difference is not None else None,
        p=against.p if against is not None else None,
        trained=one.trained,
        share=first.trained / first.total if first.total else 0.0,
        bytes=cost.get("bytes"),
        seconds=alone["seconds"],
        cpu=alone["cpu"],
        memory=alone["memory"],
        predict=cost.get("predict"),
        mixed=cost.get("mixed"),
    )


def _possible(interval: tuple[float, float] | None, metric: str) -> tuple[float, float] | None:
    """An interval cut to the scores that the metric can have."""
    return None if interval is None else (max(LOWEST.get(metric, 0.0), interval[0]), min(100.0, interval[1]))


def _costs(results: Sequence[Result]) -> list[dict[str, float]]:
    return [dict(result.cost) for result in results]


# ---- the advice


def advise(contest: Contest) -> Advice:
    """The method with the best score; one that trains less if it is shown to cost at most MARGIN points."""
    done = [one for one in contest.contestants if _scores(one)]
    if len(done) < 2:
        return Advice(None, False, "Nothing can be advised: fewer than two methods finished.")
    best = max(done, key=lambda one: (statistics.fmean(_scores(one)), -one.trained))
    against = _against(best, done)
    tied = [one for one in done if one is not best and against[one.method.name].p >= LEVEL]
    smaller = sorted((one for one in tied if one.trained < best.trained), key=lambda one: one.trained)
    for one in smaller:
        difference = against[one.method.name].effect
        if difference.interval is not None and difference.interval[0] > -MARGIN:
            return Advice(one.method.name, True, _smaller_text(one, best, difference))
    shown = f"Use {best.method.name} here: it has the best score, {statistics.fmean(_scores(best)):.1f}"
    if not tied:
        return Advice(best.method.name, True, f"{shown}, clearly ahead of every other method.")
    return Advice(best.method.name, False, f"{shown}. {_doubt(contest, tied, smaller, against)}")


def _smaller_text(one: Contestant, best: Contestant, difference: Place) -> str:
    low, high = difference.interval or (difference.effect, difference.effect)
    return (
        f"Use {one.method.name} here: {best.method.name} has the best score, but {one.method.name} trains "
        f"{_trained(one)} instead of {_trained(best)}, and that costs at most {MARGIN:g} point "
        f"({_points(difference.effect)}, 95% interval {_points(low)} to {_points(high)})."
    )


def _doubt(
    contest: Contest, tied: Sequence[Contestant], smaller: Sequence[Contestant], against: dict[str, Difference]
) -> str:
    """Which methods the best one cannot be told from, and how large a difference would have been seen."""
    others = len(contest.contestants) - 1
    if len(tied) == others > 2:
        subject = f"none of the other {others} methods can"
    else:
        subject = f"{_listed([one.method.name for one in tied])} cannot"
    nearest = max(tied, key=lambda one: against[one.method.name].effect.effect)
    detectable = against[nearest.method.name].detectable
    seeds = len(contest.contestants[0].chosen)
    text = (
        f"This is not sure: {subject} be told from it with {contest.rows['test']:,} test rows and "
        f"{seeds} seed{'s' if seeds > 1 else ''}; "
    )
    if detectable is None:
        text += f"the chance in the test rows is not known for {contest.metric}."
    else:
        text += f"against {nearest.method.name} a difference below {detectable:.1f} points would not show."
    if smaller:
        text += f" The smallest of these is {smaller[0].method.name}, which trains {_trained(smaller[0])}."
    return text


def _trained(one: Contestant) -> str:
    return f"{one.trained:,} parameters" if one.trained else "the head only"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---- the page


def _points(value: float) -> str:
    # `z` writes a difference that rounds to zero as +0.0.
    return f"{value:+z.1f}".replace("-", "\N{MINUS SIGN}")


def _percent(value: float) -> str:
    return f"{value:z.1f}".replace("-", "\N{MINUS SIGN}")


def _range(interval: tuple[float, float] | None, signed: bool = False) -> str:
    if interval is None:
        return ""
    low, high = (_points(end) if signed else _percent(end) for end in interval)
    return f"{low} to {high}"


def _table(comparison: Comparison) -> Grid:
    contest = comparison.contest
    rows: list[list[Cell | str]] = []
    for line in sorted(
        comparison.lines, key=lambda line: -math.inf if line.score is None else line.score, reverse=True
    ):
        rows.append(_row(line, comparison))
    metric = contest.metric.replace("_", " ")
    head = [
        "method", f"test {metric}", f"against {comparison.reference}", "trained", "delta", "training", "peak memory",
        "prediction", "mixed batch",
    ]  # fmt: skip
    notes = (
        f"Baseline without a model: {100 * contest.baseline:.1f}. trained: the share of all parameters, with the head, "
        "and their number without it. training: one training with its evaluations on dev; CPU time counts all threads. "
        "peak memory: of the process. prediction: one text by itself. mixed batch: time for texts of several deltas in "
        "one batch, by the time for the same texts under one delta.",
    )
    return Grid("Scores and costs", head, rows, notes=notes)


def _row(line: Line, comparison: Comparison) -> list[Cell | str]:
    what = line.select
    if line.inject != "none":
        what += f", {line.inject}"
    if line.autofreeze:
        what += ", AutoFreeze"
    rate = "solved" if line.rate is None else f"rate {line.rate:g}"
    name = Cell(line.name, f"{what}; {rate}")
    costs: list[Cell | str] = [
        Cell(f"{line.share:.3%}", f"{line.trained:,}"),
        "" if line.bytes is None else _size(line.bytes),
        Cell(_seconds(line.seconds), f"{_seconds(line.cpu)} of CPU"),
        _size(line.memory) if line.memory else "",
        "" if line.predict is None else f"{1000 * line.predict:.1f} ms",
        "" if line.mixed is None else f"{line.mixed:.2f} x",
    ]
    if line.score is None:
        return [name, Cell("diverged", "", "missing"), "", *costs]
    score = Cell(_percent(line.score), _range(line.interval))
    return [name, score, _difference_cell(line, comparison.reference), *costs]


def _difference_cell(line: Line, reference: str) -> Cell:
    if line.difference is None or line.p is None:
        return Cell("", "the reference" if line.name == reference else "", "missing")
    clear = line.p < LEVEL
    words = ("clearly better" if line.difference > 0 else "clearly worse") if clear else "not clear"
    kind = ("holds" if line.difference > 0 else "refuted") if clear else "open"
    known = line.difference_interval is not None
    detail = f"{_range(line.difference_interval, signed=True)}, {words}" if known else words
    return Cell(_points(line.difference), detail, kind)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _conditions(contest: Contest) -> str:
    rows = contest.rows
    extent = contest.extent
    return (
        f"{contest.base} on {contest.data} ({contest.kind}): {rows['train']:,} train, {rows['dev']:,} dev and "
        f"{rows['test']:,} test rows; {_counted(extent.seeds, 'seed')}, {_counted(extent.rates, 'rate')} per method, "
        f"{_counted(contest.epochs, 'epoch')}, batch size {contest.batch}."
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _panels(comparison: Comparison) -> list[Panel]:
    """Scores, and differences to the reference, with their intervals."""
    done = sorted((line for line in comparison.lines if line.score is not None), key=lambda line: -(line.score or 0.0))
    families = {one.method.name: one.method.kind for one in comparison.contest.contestants}
    scores, differences = [], []
    for line in done:
        paint = drawing.colour(families[line.name])
        if line.score is not None:
            scores.append(_dot(line.name, line.score, line.interval, paint))
        if line.difference is not None:
            differences.append(_dot(line.name, line.difference, line.difference_interval, paint))
    drawn = []
    with drawing.style():
        if scores:
            label = f"test {comparison.contest.metric.replace('_', ' ')}"
            drawn.append(dots("Scores", scores, _limits(scores), label, None))
        if differences:
            limits = _limits(differences, 0.0)
            drawn.append(dots(f"Differences to {comparison.reference}", differences, limits, "points", 0.0))
    return drawn


def _dot(name: str, value: float, interval: tuple[float, float] | None, paint: str) -> Dot:
    low, high = interval or (None, None)
    return Dot(name, value, low, high, paint)


def _limits(shown: Sequence[Dot], *more: float) -> tuple[float, float]:
    ends = [*more]
    for dot in shown:
        ends += [end for end in (dot.value, dot.low, dot.high) if end is not None]
    return shared_limits(ends)
