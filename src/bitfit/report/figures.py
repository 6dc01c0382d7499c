"""The figures of a study: each kind is one function from findings to a few small charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..study.grid import Point
from ..study.spec import Figure, Number, Study
from ..study.store import Result
from . import charts
from .charts import Bar, Curve
from .findings import Findings, gap, moved
from .html import Html, join, tag
from .statistics import median, standard_deviation, summary

Cells = Sequence[str]


def figures(study: Study, bases: Sequence[Findings]) -> list[tuple[Figure, Html]]:
    """Every figure of a study, drawn for every base."""
    drawn = []
    for figure in study.figures:
        if figure.kind == "models":
            parts = [_models(study, bases)]
        else:
            parts = [_KINDS[figure.kind](figure, findings) for findings in bases if findings.done]
        drawn.append((figure, join(part for part in parts if part) or _empty()))
    return drawn


def _empty() -> Html:
    return tag("p", "Nothing to draw yet: no trial this figure needs is done.", class_="empty")


def _group(parts: Sequence[Html], names: Cells = ()) -> Html:
    if not parts:
        return Html("")
    key = charts.legend({name: charts.colour(n) for n, name in enumerate(names)}) if names else ""
    return join([key, tag("div", *parts, class_="figures")])


def _methods(figure: Figure, findings: Findings) -> list[str]:
    return [name for name in findings.methods if not figure.methods or name in figure.methods]


def _tasks(figure: Figure, findings: Findings) -> list[str]:
    """The figure's tasks; where none of them was run, those that were."""
    named = [task for task in findings.tasks if not figure.tasks or task in figure.tasks]
    return named or findings.tasks


def _published(study: Study, method: str, task: str) -> float | None:
    for table in study.tables:
        for row in table.rows:
            if row.method == method and task in table.columns and row.values and not row.base and row.rate is None:
                number = row.values[table.columns.index(task)]
                if isinstance(number, Number):
                    return number.value
    return None


def _title(findings: Findings, *words: str) -> str:
    return " · ".join([*words, findings.base])


def _bars(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        rows = []
        for method in _methods(figure, findings):
            found = findings.summary((method, task, findings.size(task)))
            if found is not None:
                rows.append(Bar(method, found.mean, found.low, found.high, _published(findings.study, method, task)))
        if rows:
            drawing = charts.bars(rows, 100 * findings.majority(task, findings.size(task)))
            parts.append(charts.figure(_title(findings, task), drawing))
    return _group(parts)


def _failed(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        rows = []
        for method in _methods(figure, findings):
            chosen = findings.chosen((method, task, findings.size(task))).values()
            kept = [findings.points(result) for result in chosen if not findings.failed(result)]
            every = [findings.points(result) for result in chosen]
            lost = len(every) - len(kept)
            if every:
                rows.append(_bar(method, every, f" ({lost} failed)" if lost else ""))
            if lost and kept:
                rows.append(_bar(f"{method}, without", kept, ""))
        if rows:
            drawing = charts.bars(rows, 100 * findings.majority(task, findings.size(task)))
            parts.append(charts.figure(_title(findings, task), drawing))
    return _group(parts)


def _bar(label: str, values: Sequence[float], note: str) -> Bar:
    found = summary(values)
    return Bar(label, found.mean, found.low, found.high, note=note)


def _loss(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        for method in _methods(figure, findings):
            cell = (method, task, findings.size(task))
            chosen = _shown(figure, findings, cell)
            train = [[(x, y) for x, y in result.loss] for result in chosen if result.loss]
            dev = [[(x, loss) for x, loss, _ in result.evaluations] for result in chosen if result.evaluations]
            curves = [*charts.rounds(train, "train", charts.COLOURS[0]), *charts.rounds(dev, "dev", charts.COLOURS[1])]
            if any(curve.points for curve in curves):
                parts.append(charts.figure(_title(findings, task, method), charts.lines(curves, "epoch", "loss")))
    return _group(parts, ("training loss", "dev loss"))


def _shown(figure: Figure, findings: Findings, cell: tuple[str, str, int | None]) -> list[Result]:
    """The chosen rate's rounds; of a method that is run to see what every rate does, all trials."""
    method = findings.study.method(cell[0])
    if method.fixed and len(method.rates) > 1:
        return [r for p in findings.cells.get(cell, ()) if (r := findings.results[p]) is not None]
    return list(findings.chosen(cell).values())


def _score(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        for n, method in enumerate(_methods(figure, findings)):
            chosen = findings.chosen((method, task, findings.size(task))).values()
            curves = [[(x, 100 * score) for x, _, score in result.evaluations] for result in chosen]
            drawn = charts.rounds([curve for curve in curves if curve], method, charts.colour(n))
            if any(curve.points for curve in drawn):
                drawing = charts.lines(drawn, "epoch", "dev score")
                parts.append(charts.figure(_title(findings, task, method), drawing))
    return _group(parts)


def _sizes(figure: Figure, findings: Findings) -> Html:
    metric = figure.metric or None
    parts, methods = [], _methods(figure, findings)
    for task in _tasks(figure, findings):
        curves = []
        for n, method in enumerate(methods):
            found = []
            for size in findings.sizes(task):
                values = findings.scores((method, task, size), metric=metric)
                if values:
                    found.append((float(findings.rows(task, size)), summary(values)))
            ends = [(x, s) for x, s in found if s.low is not None and s.high is not None]
            low, high = [(x, s.low or 0.0) for x, s in ends], [(x, s.high or 0.0) for x, s in ends]
            curves.append(Curve(method, [(x, s.mean) for x, s in found], charts.colour(n), low=low, high=high))
        if any(curve.points for curve in curves):
            rows = [float(findings.rows(task, size)) for size in findings.sizes(task) if findings.rows(task, size)]
            drawing = charts.lines(curves, "training rows", metric or "score", log=True, rows=rows)
            parts.append(charts.figure(_title(findings, task), drawing))
    return _group(parts, methods)


def _map(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        for method in _methods(figure, findings):
            change = mean_change(findings, method, task)
            if change:
                parts.append(charts.figure(_title(findings, task, method), charts.change_map(change)))
    return _group(parts)


def mean_change(findings: Findings, method: str, task: str) -> dict[str, list[float | None]]:
    """The change map of a method on a task, averaged over seeds; terms that nothing trained are left out."""
    maps = [result.change for result in findings.chosen((method, task, findings.size(task))).values() if result.change]
    table: dict[str, list[float | None]] = {}
    for term in maps[0] if maps else ():
        rows = [found[term] for found in maps if term in found]
        means = [_mean([row[layer] for row in rows]) for layer in range(len(rows[0]))]
        if any(means) or (term.startswith("b_") and "bias" in findings.study.method(method).select):
            table[term] = means
    return table


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _change(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        points = []
        for method in _methods(figure, findings):
            chosen = list(findings.chosen((method, task, findings.size(task))).values())
            changes = [change for result in chosen if (change := moved(result)) is not None]
            if changes:
                score = summary([findings.points(result) for result in chosen]).mean
                points.append((1000 * median(changes), score, method))
        if points:
            drawing = charts.scatter(points, "mean absolute change x 1000", "score")
            parts.append(charts.figure(_title(findings, task), drawing))
    return _group(parts)


def _heat(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        for method in _methods(figure, findings):
            points = findings.cells.get((method, task, findings.size(task)), [])
            rates = sorted({point.lr for point in points})
            batches = sorted({point.batch for point in points})
            rows = [[_at(findings, points, lr, batch) for batch in batches] for lr in rates]
            if any(value is not None for row in rows for value in row):
                drawing = charts.heat([f"{lr:g}" for lr in rates], [str(batch) for batch in batches], rows)
                note = tag("p", "dev score; rates down, batch sizes across", class_="small")
                parts.append(charts.figure(_title(findings, task, method), join([drawing, note])))
    return _group(parts)


def _at(findings: Findings, points: Sequence[Point], lr: float, batch: int) -> float | None:
    values = [
        100 * score
        for point in points
        if (point.lr, point.batch) == (lr, batch) and (result := findings.results[point]) is not None
        if (score := result.score("dev")) is not None
    ]
    return math.fsum(values) / len(values) if values else None


def _gap(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        rows = []
        for method in _methods(figure, findings):
            chosen = findings.chosen((method, task, findings.size(task))).values()
            values = [value for result in chosen if (value := gap(result)) is not None]
            if values:
                rows.append(_bar(method, values, ""))
        if rows:
            parts.append(charts.figure(_title(findings, task, "train - dev"), charts.bars(rows, 0.0)))
    return _group(parts)


def _spread(figure: Figure, findings: Findings) -> Html:
    parts = []
    for task in _tasks(figure, findings):
        rows = []
        for method in _methods(figure, findings):
            values = findings.scores((method, task, findings.size(task)))
            if len(values) > 1:
                rows.append(Bar(method, standard_deviation(values)))
        if rows:
            title = _title(findings, task, "standard deviation over seeds")
            parts.append(charts.figure(title, charts.bars(rows, 0.0)))
    return _group(parts)


def _models(study: Study, bases: Sequence[Findings]) -> Html:
    """What BitFit loses against full fine-tuning, by parameters of the base."""
    full, *others = [method.name for method in study.methods]
    parts, tasks = [], dict.fromkeys(task for findings in bases for task in findings.tasks)
    ordered = sorted(bases, key=lambda findings: int(findings.manifest["base"]["parameters"]))
    for task in tasks:
        curves = []
        for n, method in enumerate(others):
            found = []
            for findings in ordered:
                if task in findings.tasks:
                    size = findings.size(task)
                    a, b = findings.summary((full, task, size)), findings.summary((method, task, size))
                    if a and b:
                        found.append((findings.manifest["base"]["parameters"] / 1e6, a.mean - b.mean))
            curves.append(Curve(f"{full} - {method}", found, charts.colour(n)))
        if any(curve.points for curve in curves):
            rows = [findings.manifest["base"]["parameters"] / 1e6 for findings in ordered]
            drawing = charts.lines(curves, "millions of parameters", "points lost", log=True, rows=rows)
            parts.append(charts.figure(task, drawing))
    return _group(parts, [f"{full} - {method}" for method in others])


_KINDS: dict[str, Callable[[Figure, Findings], Html]] = {
    "bars": _bars, "failed": _failed, "loss": _loss, "score": _score, "sizes": _sizes, "map": _map, "change": _change,
    "heat": _heat, "gap": _gap, "spread": _spread,
}  # fmt: skip
