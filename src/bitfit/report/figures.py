"""The figures of a study: each kind is one value, a function from findings to panels, and a new one is one more value.

A panel is small, so that a phone shows it at its size. The panels of a figure share their scale.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..errors import StudyError, suggest
from ..study.grid import Point
from ..study.spec import Figure, Part, Study
from ..study.store import Result
from . import changemap, drawing
from .claim_tests import TESTS, mean_change
from .drawing import MARKERS, SOFT, Panel, colour
from .findings import Cell, Findings
from .quantities import gap, moved
from .statistics import Estimate, place, summary

SPACED = 1.5  # by which factor at least the marks of an axis of training rows lie apart
MOST = 100.0  # points
TAIL = 0.025  # of each side of a 95% interval
Draw = Callable[[Figure, Study, Sequence[Findings]], list[Panel]]


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure: its name in study files, how it is drawn, and what a reader must know of it."""

    name: str
    draw: Draw
    key: str


@dataclass(frozen=True)
class Dot:
    """A value with its interval, where there is one."""

    label: str
    value: float
    low: float | None
    high: float | None
    colour: str
    marker: str = "o"
    published: float | None = None


def check(study: Study) -> None:
    """Raise StudyError for a kind of figure that does not exist."""
    for figure in study.figures:
        if figure.kind not in KINDS:
            raise StudyError(f'{study.name}: {figure.name}: no kind "{figure.kind}".{suggest(figure.kind, KINDS)}')


def panels(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """The panels of a figure for every base with results."""
    with drawing.style():
        return KINDS[figure.kind].draw(figure, study, [findings for findings in bases if findings.done])


# ---- what a figure is drawn from


def _methods(figure: Figure, findings: Findings) -> list[str]:
    return [name for name in findings.methods if not figure.methods or name in figure.methods]


def _tasks(figure: Figure, bases: Sequence[Findings]) -> list[str]:
    """The figure's tasks; where none of them was run, those that were."""
    ran = list(dict.fromkeys(task for findings in bases for task in findings.tasks))
    return [task for task in ran if task in figure.tasks] or ran


def without_its_tasks(figure: Figure, bases: Sequence[Findings]) -> list[Findings]:
    """The bases on which none of a figure's tasks was run, so that it shows others."""
    return [findings for findings in bases if figure.tasks and not set(figure.tasks) & set(findings.tasks)]


def equal_figure(figure: Figure, others: Sequence[Figure], bases: Sequence[Findings]) -> Figure | None:
    """The first of some figures that shows the same as this one; None if there is none."""
    content = _content(figure, bases)
    return next((other for other in others if _content(other, bases) == content), None)


def _content(figure: Figure, bases: Sequence[Findings]) -> tuple[Any, ...]:
    """What decides the panels of a figure."""
    shown = [(findings.base, tuple(_tasks(figure, [findings]))) for findings in bases]
    return (replace(figure, name="", caption="", tasks=()), shown)


def _panels_of_places(figure: Figure, bases: Sequence[Findings]) -> Iterator[tuple[Findings, str]]:
    for findings in bases:
        for task in _tasks(figure, [findings]):
            yield findings, task


def shared_limits(values: Iterable[float], margin: float = 0.06) -> tuple[float, float]:
    """The ends of an axis that holds all values; no score is above 100, whatever its interval says."""
    known = [value for value in values if math.isfinite(value)]
    low, high = max(min(known), -MOST), min(max(known), MOST)
    room = margin * (high - low) or max(0.5, 0.05 * abs(high))
    return low - room, high + room


def _markers(bases: Sequence[Findings]) -> dict[str, str]:
    return {findings.base: MARKERS[n % len(MARKERS)] for n, findings in enumerate(bases)}


def _kind(findings: Findings, method: str) -> str:
    return findings.study.method(method).kind


def _curve_axes(entries: int) -> tuple[Any, Any]:
    """A panel with room below it for a legend of so many entries."""
    return drawing.axes(2.1 + 0.15 * math.ceil(entries / 2))


def _legend(axes: Any, title: str | None = None) -> None:
    """A legend below the axes, two entries a line."""
    handles = axes.get_legend_handles_labels()
    axes.figure.legend(*handles, loc="outside lower center", ncols=2, handlelength=1.4, title=title)


# ---- dots with intervals


def dots(title: str, rows: Sequence[Dot], limits: tuple[float, float], label: str, baseline: float | None) -> Panel:
    """Dots on one axis, a line for each label; several dots of a label stand below each other."""
    labels = list(dict.fromkeys(row.label for row in rows))
    shown = [_wrapped(name) for name in labels]
    line = 0.3 if any("\n" in label for label in shown) else 0.2
    figure, axes = drawing.axes(0.75 + line * len(labels) + 0.06 * len(rows))
    for number, name in enumerate(labels):
        same = [row for row in rows if row.label == name]
        for n, row in enumerate(same):
            y = number + (n - (len(same) - 1) / 2) * min(0.24, 0.7 / len(same))
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [y, y], color=row.colour, linewidth=1.3, solid_capstyle="butt")
            axes.plot([row.value], [y], marker=row.marker, color=row.colour, markersize=4, linestyle="none")
            if row.published is not None:
                axes.plot([row.published], [y], marker="d", mfc="none", mec=SOFT, markersize=5, linestyle="none")
    if baseline is not None:
        axes.axvline(baseline, color=SOFT, linestyle=(0, (3, 3)), linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels=shown, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(*limits)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(drawing.printable(label), parse_math=False)
    words = "; ".join(f"{row.label} {row.value:.1f}" for row in rows)
    return Panel(title, figure, f"{title}: {words}")


def _wrapped(name: str, width: int = 26) -> str:
    """A label in at most two lines."""
    lines = textwrap.wrap(drawing.printable(name), width, max_lines=2, placeholder="…")
    return "\n".join(lines)


def _panels_of_dots(
    figure: Figure, bases: Sequence[Findings], rows_of: Callable[[Findings, str], list[Dot]], label: str, zero: bool
) -> list[Panel]:
    """A panel for each task with the dots of all bases, on one axis."""
    markers = _markers(bases)
    by_task: dict[str, list[Dot]] = {}
    for findings, task in _panels_of_places(figure, bases):
        rows = [replace(row, marker=markers[findings.base]) for row in rows_of(findings, task)]
        by_task.setdefault(task, []).extend(rows)
    ends = [0.0] if zero else []
    for row in chain.from_iterable(by_task.values()):
        ends += [end for end in (row.value, row.low, row.high, row.published) if end is not None]
    drawn = []
    for task, rows in by_task.items():
        if rows:
            with_task = [findings for findings in bases if task in findings.tasks]
            baseline = 0.0 if zero else _majority(with_task, task)
            axis_label = label or _metric_and_rows(with_task, task)
            drawn.append(dots(_task_title(task, with_task), rows, shared_limits(ends), axis_label, baseline))
    return drawn


def _majority(bases: Sequence[Findings], task: str) -> float | None:
    known = {round(findings.majority(task, findings.size(task)), 6) for findings in bases}
    return known.pop() if len(known) == 1 else None


def _metric_and_rows(bases: Sequence[Findings], task: str) -> str:
    """The metric, the number of test rows and of seeds."""
    first = bases[0]
    size = first.size(task)
    seeds = {point.seed for findings in bases for point in findings.results if point.task == task}
    rows = first.test_rows(task, size)
    words = [first.metric(task, size).replace("_", " ") or "score"]
    if rows:
        words.append(f"{rows:,} test rows")
    words.append("1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds")
    return ", ".join(words)


def _task_title(task: str, bases: Sequence[Findings]) -> str:
    return f"{task} · {bases[0].base}" if len(bases) == 1 else task


def cell_dot(findings: Findings, cell: Cell, label: str, rate: float | None = None) -> Dot | None:
    """The mean score of a cell with its interval from seeds and test rows."""
    trials = list(findings.at(cell, rate).values())
    if not trials:
        return None
    published = findings.published_score(cell) if rate is None else None
    return replace(_score_dot(findings, cell, label, trials), published=published)


def _score_dot(findings: Findings, cell: Cell, label: str, trials: Sequence[Result], metric: str | None = None) -> Dot:
    """The mean score of some trials of a cell with its interval from seeds and test rows."""
    scores = [findings.points(result, metric) for result in trials]
    from_rows = statistics.fmean(findings.row_variance(result, metric) for result in trials)
    score = place(findings.base, cell[1], scores, from_rows)
    low, high = score.interval or (None, None)
    return Dot(label, score.effect, low, high, colour(_kind(findings, cell[0])))


def _score_dots(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    def rows(findings: Findings, task: str) -> list[Dot]:
        cells = [(name, task, findings.size(task)) for name in _methods(figure, findings)]
        dots = [cell_dot(findings, cell, cell[0], figure.rate) for cell in cells]
        return [dot for dot in dots if dot is not None]

    return _panels_of_dots(figure, bases, rows, "", zero=False)


def _failed_dots(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """Scores with and without the runs that failed."""

    def rows(findings: Findings, task: str) -> list[Dot]:
        dots = []
        for name in _methods(figure, findings):
            cell = (name, task, findings.size(task))
            chosen = list(findings.chosen(cell).values())
            successful = [result for result in chosen if not findings.failed(result)]
            failed = len(chosen) - len(successful)
            if chosen:
                label = f"{name} ({failed} failed)" if failed else name
                dots.append(_score_dot(findings, cell, label, chosen))
            if failed and successful:
                dots.append(_score_dot(findings, cell, f"{name}, the others", successful))
        return dots

    return _panels_of_dots(figure, bases, rows, "", zero=False)


def _dot(label: str, values: Sequence[float], paint: str) -> Dot:
    mean = summary(values)
    return Dot(label, mean.mean, mean.low, mean.high, paint)


def _gap_dots(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    def rows(findings: Findings, task: str) -> list[Dot]:
        dots = []
        for name in _methods(figure, findings):
            chosen = findings.chosen((name, task, findings.size(task))).values()
            values = [value for result in chosen if (value := gap(result)) is not None]
            if values:
                dots.append(_dot(name, values, colour(_kind(findings, name))))
        return dots

    return _panels_of_dots(figure, bases, rows, "train score - test score, points", zero=True)


def _spread_dots(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    def rows(findings: Findings, task: str) -> list[Dot]:
        dots = []
        for name in _methods(figure, findings):
            values = findings.scores((name, task, findings.size(task)))
            if len(values) > 1:
                paint = colour(_kind(findings, name))
                dots.append(Dot(name, statistics.stdev(values), None, None, paint))
        return dots

    return _panels_of_dots(figure, bases, rows, "standard deviation over seeds, points", zero=True)


# ---- curves


def _loss_curves(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """Training loss (solid) and dev loss (dashed), a colour for each method; a line for each rate of a fixed grid."""
    drawn = []
    for findings, task in _panels_of_places(figure, bases):
        for names in _together(figure, findings):
            panel, axes = _curve_axes(max(len(names), len(findings.study.method(names[0]).rates)))
            some = False
            for name in names:
                some = _losses(axes, findings, (name, task, findings.size(task))) or some
            if some:
                axes.set_xlabel("epoch")
                axes.set_ylabel("loss")
                by_rate = len(names) == 1 and _by_rate(findings, names[0])
                if by_rate:
                    axes.set_yscale("log")
                    axes.yaxis.set_major_formatter("{x:g}")
                _legend(axes, "rate" if by_rate else None)
                title = " · ".join([task, *(names if len(names) == 1 else ()), findings.base])
                drawn.append(Panel(title, panel, f"Training and dev loss of {', '.join(names)} on {task}"))
    for scale in ("linear", "log"):
        _share_heights([panel for panel in drawn if panel.figure.axes[0].get_yscale() == scale])
    return drawn


def _together(figure: Figure, findings: Findings) -> list[list[str]]:
    """The methods that share a panel: all with a chosen rate. A method with a fixed grid of rates has its own panel."""
    names = _methods(figure, findings)
    alone = [name for name in names if _by_rate(findings, name)]
    shared = [name for name in names if name not in alone]
    return [*([shared] if shared else []), *([name] for name in alone)]


def _by_rate(findings: Findings, name: str) -> bool:
    method = findings.study.method(name)
    return method.fixed and len(method.rates) > 1


def _losses(axes: Any, findings: Findings, cell: Cell) -> bool:
    if _by_rate(findings, cell[0]):
        return _losses_by_rate(axes, findings, cell)
    trials = list(findings.chosen(cell).values())
    paint = colour(_kind(findings, cell[0]))
    train = [_points(result.loss) for result in trials if result.loss]
    dev = [_points(result.evaluations) for result in trials if result.evaluations]
    _rounds(axes, train, paint, "-", cell[0])
    _rounds(axes, dev, paint, "--", "")
    return bool(train or dev)


def _points(lines: Sequence[Sequence[float]], column: int = 1, scale: float = 1.0) -> list[tuple[float, float]]:
    """Epochs with one column of a trial's history; a log axis has no room for 0."""
    return [(line[0], scale * line[column]) for line in lines if line[column] > 0 or column != 1]


def _losses_by_rate(axes: Any, findings: Findings, cell: Cell) -> bool:
    from matplotlib import colormaps

    points = [point for point in findings.cells.get(cell, ()) if findings.results[point] is not None]
    rates = sorted({point.lr for point in points})
    for n, rate in enumerate(rates):
        paint = colormaps["viridis"](n / max(1, len(rates) - 1) * 0.9)
        trials = findings.at(cell, rate).values()
        curves = [_points(result.loss) for result in trials if result.loss]
        _rounds(axes, curves, paint, "-", f"{rate:g}")
    return bool(points)


def _rounds(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], paint: Any, line: str, label: str) -> None:
    """Every round thin, their median bold."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    for curve in curves if len(curves) > 1 else ():
        axes.plot(*zip(*curve, strict=True), color=paint, linewidth=0.6, alpha=0.45, linestyle=line)
    bold = _median(curves)
    axes.plot(*zip(*bold, strict=True), color=paint, linewidth=1.5, linestyle=line, label=_wrapped(label) or None)


def _median(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The median of curves that share their x, as far as all of them go."""
    middle = []
    for points in zip(*curves, strict=False):
        middle.append((points[0][0], statistics.median([y for _, y in points])))
    return middle


def _score_curves(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    drawn = []
    for findings, task in _panels_of_places(figure, bases):
        panel, axes = _curve_axes(len(_methods(figure, findings)))
        names = []
        for name in _methods(figure, findings):
            trials = findings.chosen((name, task, findings.size(task))).values()
            curves = [_points(result.evaluations, 2, 100) for result in trials]
            if any(curves):
                _rounds(axes, curves, colour(_kind(findings, name)), "-", name)
                names.append(name)
        if names:
            axes.set_xlabel("epoch")
            axes.set_ylabel(f"dev {findings.metric(task, findings.size(task)).replace('_', ' ')}")
            _legend(axes)
            title = f"{task} · {findings.base}"
            drawn.append(Panel(title, panel, f"Dev score over training of {', '.join(names)} on {task}"))
    _share_heights(drawn)
    return drawn


def _share_heights(drawn: Sequence[Panel]) -> None:
    """Give the panels of a figure one y axis, so that they can be compared."""
    axes = [panel.figure.axes[0] for panel in drawn]
    if axes:
        low = min(one.get_ylim()[0] for one in axes)
        high = max(one.get_ylim()[1] for one in axes)
        for one in axes:
            one.set_ylim(low, high)


def _size_curves(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """Scores against the number of training rows."""
    drawn, ends = [], []
    for findings, task in _panels_of_places(figure, bases):
        names = _methods(figure, findings)
        panel, axes = _curve_axes(len(names))
        for n, name in enumerate(names):
            xs, dots = [], []
            for size in findings.sizes(task):
                cell = (name, task, size)
                trials = list(findings.at(cell, figure.rate).values())
                if trials and findings.rows(task, size):
                    # Beside each other, so that intervals do not hide one another.
                    xs.append(findings.rows(task, size) * 1.03 ** (n - len(names) / 2))
                    dots.append(_score_dot(findings, cell, name, trials, figure.metric or None))
            if dots:
                _draw_sizes(axes, xs, dots)
                ends += [end for dot in dots for end in (dot.value, dot.low, dot.high) if end is not None]
        if axes.lines:
            _label_sizes(axes, findings, task, figure.metric)
            drawn.append(Panel(f"{task} · {findings.base}", panel, f"Score against training rows on {task}"))
    for one in drawn:
        one.figure.axes[0].set_ylim(*shared_limits(ends))
    return drawn


def _draw_sizes(axes: Any, xs: Sequence[float], dots: Sequence[Dot]) -> None:
    paint = dots[0].colour
    axes.plot(xs, [dot.value for dot in dots], color=paint, marker="o", markersize=3, label=_wrapped(dots[0].label))
    for x, dot in zip(xs, dots, strict=True):
        if dot.low is not None and dot.high is not None:
            axes.plot([x, x], [dot.low, dot.high], color=paint, linewidth=1)


def _label_sizes(axes: Any, findings: Findings, task: str, metric: str) -> None:
    from matplotlib.ticker import NullLocator

    rows = sorted({findings.rows(task, size) for size in findings.sizes(task) if findings.rows(task, size)})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    shown: list[int] = []
    for count in rows:
        if not shown or count / shown[-1] > SPACED:
            shown.append(count)
    axes.set_xticks(shown, labels=[f"{count:,}" for count in shown])
    axes.set_xlabel("training rows")
    name = metric or findings.metric(task, findings.size(task))
    axes.set_ylabel(f"{name.replace('_', ' ')}, {findings.test_rows(task, findings.size(task)):,} test rows")
    _legend(axes)


def _base_curves(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """What methods lose against the reference, by parameters of the base."""
    drawn = []
    ordered = sorted(bases, key=lambda findings: findings.parameters)
    for task in _tasks(figure, bases):
        panel, axes = _curve_axes(len(study.methods) - 1)
        for name in [method.name for method in study.methods if method.name != figure.reference]:
            xs, ys = [], []
            for findings in ordered:
                size = findings.size(task) if task in findings.tasks else None
                reference = findings.summary((figure.reference, task, size))
                other = findings.summary((name, task, size))
                if reference and other:
                    xs.append(findings.parameters / 1e6)
                    ys.append(reference.mean - other.mean)
            if xs:
                axes.plot(xs, ys, marker="o", markersize=4, color=colour(study.method(name).kind), label=_wrapped(name))
        if axes.lines:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("millions of parameters of the base")
            axes.set_ylabel(f"points below {figure.reference}")
            axes.axhline(0.0, color=SOFT, linestyle=(0, (3, 3)), linewidth=0.8)
            _legend(axes)
            drawn.append(Panel(task, panel, f"Points lost against {figure.reference} by size of the base on {task}"))
    return drawn


# ---- means over places


def against(reference: str, study: Study, bases: Sequence[Findings]) -> dict[str, Estimate]:
    """The difference of every method to a reference, over all places that have both, as the verdicts have it."""
    differences = {}
    for method in study.methods:
        estimate = TESTS["greater"].estimate(Part("greater", method.name, reference), bases)
        if method.name != reference and estimate is not None:
            differences[method.name] = estimate
    return differences


def _against(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    differences = against(figure.reference, study, bases)
    paints = {name: colour(study.method(name).kind) for name in differences}
    return _over_places("all tasks", differences, paints, f"points above {figure.reference}", bases)


def _term_shares(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """How much each term moves under a method, as a share of the term that moves most."""
    drawn = []
    for name in figure.methods:
        shares = {}
        for term in figure.terms:
            estimate = TESTS["does_not_move"].estimate(Part("does_not_move", name, terms=(term,)), bases)
            if estimate is not None:
                shares[term] = estimate
        paints = dict.fromkeys(shares, colour(study.method(name).kind))
        drawn += _over_places(name, shares, paints, "mean change, % of the largest", bases)
    return drawn


def _over_places(
    title: str, rows: dict[str, Estimate], paints: dict[str, str], label: str, bases: Sequence[Findings]
) -> list[Panel]:
    """A line for each estimate: its places as small marks, its mean and interval above them."""
    if not rows:
        return []
    seen = list(chain.from_iterable(estimate.places for estimate in rows.values()))
    shown_bases = {one.base for one in seen}
    markers = {base: marker for base, marker in _markers(bases).items() if base in shown_bases}
    panel, axes = drawing.axes(0.85 + 0.32 * len(rows) + 0.15 * math.ceil(len(markers) / 2))
    low, high = shared_limits([0.0, *(one.effect for one in seen)], 0.12)
    for y, (name, estimate) in enumerate(rows.items()):
        for one in estimate.places:
            axes.plot([one.effect], [y + 0.2], marker=markers[one.base], color=paints[name], markersize=3, alpha=0.5)
        ends = estimate.interval(TAIL)
        if ends is not None:
            shown = [max(ends[0], low), min(ends[1], high)]
            axes.plot(shown, [y - 0.15] * 2, color=paints[name], linewidth=1.6, solid_capstyle="butt")
        axes.plot([estimate.mean], [y - 0.15], marker="|", color=drawing.INK, markersize=9, markeredgewidth=1.6)
    axes.axvline(0.0, color=SOFT, linestyle=(0, (3, 3)), linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels=[_wrapped(name) for name in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(low, high)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(drawing.printable(label), parse_math=False)
    for base, marker in markers.items():
        axes.plot([], [], marker=marker, color=SOFT, linestyle="none", markersize=4, label=base)
    _legend(axes)
    words = "; ".join(f"{name} {estimate.mean:+.1f}" for name, estimate in rows.items())
    return [Panel(title, panel, f"{label}: {words}")]


# ---- maps


def _maps(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """Change maps on one scale."""
    maps = []
    for findings, task in _panels_of_places(figure, bases):
        for name in _methods(figure, findings):
            change = mean_change(findings, name, task)
            kept = {term: row for term, row in change.items() if any(row) or term in figure.terms}
            if any(any(row) for row in kept.values()):
                maps.append((" · ".join([task, name, findings.base]), kept))
    top = max((changemap.largest(change) for _, change in maps), default=0.0)
    return [
        Panel(title, changemap.figure(change, "", top), f"Mean absolute change by term and layer: {title}")
        for title, change in maps
    ]


def _change_scatter(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    drawn = []
    for findings, task in _panels_of_places(figure, bases):
        dots = []
        for name in _methods(figure, findings):
            chosen = list(findings.chosen((name, task, findings.size(task))).values())
            changes = [change for result in chosen if (change := moved(result)) is not None]
            if changes:
                score = statistics.fmean(findings.points(result) for result in chosen)
                dots.append((statistics.median(changes), score, name))
        if dots:
            drawn.append(_scatter(f"{task} · {findings.base}", dots, findings, task))
    return drawn


def _scatter(title: str, dots: Sequence[tuple[float, float, str]], findings: Findings, task: str) -> Panel:
    panel, axes = _curve_axes(len(dots))
    for number, (x, y, name) in enumerate(dots, 1):
        paint = colour(_kind(findings, name))
        axes.plot([x], [y], marker="o", color=paint, linestyle="none", markersize=4, label=f"{number} {_wrapped(name)}")
        axes.annotate(str(number), (x, y), (4, 2), textcoords="offset points", fontsize=6.5, color=SOFT)
    axes.set_xlabel("mean absolute change of what it trained")
    axes.set_ylabel(_metric_and_rows([findings], task))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    _legend(axes)
    return Panel(title, panel, f"Score against change: {title}")


def _heat_maps(figure: Figure, study: Study, bases: Sequence[Findings]) -> list[Panel]:
    """Dev scores by rate and batch size, on one scale."""
    maps = []
    all_scores: list[float] = []
    for findings, task in _panels_of_places(figure, bases):
        for name in _methods(figure, findings):
            points = findings.cells.get((name, task, findings.size(task)), [])
            rates = sorted({point.lr for point in points})
            batches = sorted({point.batch for point in points})
            table = []
            for rate in rates:
                table.append([_dev_score(findings, points, rate, batch) for batch in batches])
            scores = [score for score in chain.from_iterable(table) if score is not None]
            if scores:
                all_scores += scores
                maps.append((" · ".join([task, name, findings.base]), rates, batches, table))
    return [_heat(*heat_map, min(all_scores), max(all_scores)) for heat_map in maps]


def _heat(
    title: str,
    rates: Sequence[float],
    batches: Sequence[int],
    table: Sequence[Sequence[float | None]],
    low: float,
    high: float,
) -> Panel:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    panel, axes = drawing.axes(0.8 + 0.28 * len(rates))
    span = high - low or 1.0
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            if value is not None:
                share = (value - low) / span
                axes.add_patch(Rectangle((column, row), 1, 1, color=colormaps["Blues"](0.05 + 0.85 * share)))
                ink = "white" if share > 0.6 else drawing.INK
                axes.text(column + 0.5, row + 0.5, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=7)
    axes.set_xlim(0, len(batches))
    axes.set_ylim(len(rates), 0)
    axes.set_xticks([n + 0.5 for n in range(len(batches))], labels=[str(batch) for batch in batches])
    axes.set_yticks([n + 0.5 for n in range(len(rates))], labels=[f"{rate:g}" for rate in rates])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("rate")
    return Panel(title, panel, f"Dev score by rate and batch size: {title}")


def _dev_score(findings: Findings, points: Sequence[Point], rate: float, batch: int) -> float | None:
    trials: list[Result | None] = [
        findings.results[point] for point in points if (point.lr, point.batch) == (rate, batch)
    ]
    scores = [score for result in trials if result is not None and (score := result.score("dev")) is not None]
    return 100 * statistics.fmean(scores) if scores else None


_LINES = "Lines are 95% intervals of the mean from seeds and test rows."
_INTERVALS = f"{_LINES} The dashed line is the majority class, where it is in view."
_GAPS = "Lines are 95% intervals of the mean over seeds."
_PLACES = (
    "A small mark is one task on one base, a stroke the mean over them, the line its 95% interval, cut where it leaves "
    "the figure. Few bases make it wide."
)
_ROUNDS = "Thin lines are single seeds, the bold one is their median, at the chosen rate."
_LOSSES = f"Training loss is solid, dev loss dashed. {_ROUNDS}"
KINDS = {
    kind.name: kind
    for kind in (
        FigureKind("dots", _score_dots, _INTERVALS),
        FigureKind(
            "failed", _failed_dots, f"A run that ends no better than the majority class has failed. {_INTERVALS}"
        ),
        FigureKind("gap", _gap_dots, _GAPS),
        FigureKind("spread", _spread_dots, ""),
        FigureKind("loss", _loss_curves, _LOSSES),
        FigureKind("score", _score_curves, _ROUNDS),
        FigureKind("sizes", _size_curves, _LINES),
        FigureKind("models", _base_curves, ""),
        FigureKind("against", _against, _PLACES),
        FigureKind("terms", _term_shares, _PLACES),
        FigureKind("map", _maps, "All maps of the figure have one scale."),
        FigureKind("change", _change_scatter, ""),
        FigureKind("heat", _heat_maps, "Dev scores; the shades of all panels have one scale."),
    )
}
