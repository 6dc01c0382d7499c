"""Our tables in the papers' own layout: our mean and deviation, the published value and the difference in each cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..study.spec import Number, Row, Study, Table
from .findings import Findings, gap
from .html import Cell, Grid
from .statistics import summary

Rows = list[list[Cell | str]]
AVERAGE = "average"
SILENT = "No evidence: even full fine-tuning (or, without it, the best method) does not beat the majority class."


def tables(study: Study, bases: Sequence[Findings]) -> list[Grid]:
    """Every table of a study; those that are not about bases once per base."""
    found = []
    for table in study.tables:
        if table.layout in ("numbers", "space"):
            found.append(_printed(table))
        elif any(row.base for row in table.rows):
            found.append(_over_bases(table, bases))
        else:
            found += [_LAYOUTS[table.layout](table, findings) for findings in bases] or [_printed(table)]
    by_size = {table.task for table in study.tables if table.layout == "sizes"}
    for findings in bases if by_size else ():
        for task in findings.tasks:
            if task not in by_size:
                name, caption = f"Training sizes, {task}", "A task that stands in none of the paper's tables."
                found.append(_by_size(Table(name, "sizes", task=task, caption=caption), findings))
    return found


def compared(values: Sequence[float], published: Number | None, kind: str = "", digits: int = 1) -> Cell:
    """Ours with its deviation over seeds; small: the paper's and how far ours is from it."""
    if not values:
        note = "" if published is None else f"paper {_published(published)}"
        return Cell("", note or "–", "missing")
    found = summary(values)
    spread = "" if found.deviation is None else f" ± {found.deviation:.{digits}f}"
    note = "no evidence" if kind == "silent" else ""
    if published is not None:
        note = f"paper {_published(published)}, {found.mean - published.value:+.{digits}f}" + (note and f"; {note}")
    return Cell(f"{found.mean:.{digits}f}{spread}", note, kind)


def _published(number: Number) -> str:
    return f"{number.value:g}" + ("" if number.deviation is None else f" ± {number.deviation:g}")


def _value(row: Row, n: int) -> Number | None:
    return row.values[n] if n < len(row.values) else None


def _title(table: Table, findings: Findings) -> str:
    return f"{table.name}, on {findings.base}"


def _printed(table: Table) -> Grid:
    rows = []
    for row in table.rows:
        cells = row.texts or tuple("–" if value is None else _published(value) for value in row.values)
        rows.append([row.label, *cells])
    return Grid(f"{table.name} (as published)", ["", *table.columns], rows, table.caption)


def _columns(table: Table, findings: Findings) -> list[str]:
    """Tasks that were run and are not the paper's, then the paper's columns."""
    named = [column for column in table.columns if column != AVERAGE]
    more = [task for task in findings.tasks if task not in named] if named or not table.columns else []
    last = [AVERAGE] if table.average or AVERAGE in table.columns else []
    return [*more, *named, *last]


def _shares(table: Table) -> list[str]:
    """The papers' column of trained parameters, where they have it."""
    return ["% param"] if any(row.share for row in table.rows) else []


def _by_task(table: Table, findings: Findings) -> Grid:
    columns = _columns(table, findings)
    shares = _shares(table)
    every = [(row, row.rate) for row in table.rows]
    for method, rate in _unlisted(table, findings):
        every.append((Row(label=f"{method} {rate:g}" if rate else method, method=method), rate))
    rows: Rows = [
        [row.label, *(row.share for _ in shares), *_task_cells(row, rate, table, columns, findings)]
        for row, rate in every
    ]
    notes = [SILENT] if any((task, findings.size(task)) in findings.silent for task in findings.tasks) else []
    return Grid(_title(table, findings), ["", *shares, *columns], rows, table.caption, notes)


def _unlisted(table: Table, findings: Findings) -> list[tuple[str, float | None]]:
    """Methods that were run and stand in no table of the paper, or in a table by rates, rates that it does not have."""
    if table.layout != "rates":
        listed = {row.method for other in findings.study.tables for row in other.rows}
        return [(method, None) for method in findings.methods if method not in listed]
    printed = [(row.method, row.rate) for row in table.rows if row.rate]
    ran = dict.fromkeys((point.method, point.lr) for point in findings.results)
    return [(m, lr) for m, lr in ran if not any(m == n and math.isclose(lr, rate) for n, rate in printed)]


def _task_cells(row: Row, rate: float | None, table: Table, columns: list[str], findings: Findings) -> list[Cell]:
    cells = []
    for column in columns:
        number = _value(row, table.columns.index(column)) if column in table.columns else None
        if column == AVERAGE:
            cells.append(_average(row, rate, table, findings, number))
            continue
        size = findings.size(column) if column in findings.tasks else None
        values = findings.scores((row.method, column, size), rate) if column in findings.tasks else []
        kind = "silent" if (column, size) in findings.silent else ""
        cells.append(compared(values, number, kind))
    return cells


def _average(row: Row, rate: float | None, table: Table, findings: Findings, number: Number | None) -> Cell:
    """The mean over the paper's tasks, where all of them were run; over those that were run otherwise, said so."""
    wanted = [column for column in table.columns if column != AVERAGE] or list(findings.study.tasks)
    means = []
    for task in wanted:
        found = findings.summary((row.method, task, findings.size(task)), rate) if task in findings.tasks else None
        if found is not None:
            means.append(found.mean)
    if not means:
        return compared([], number)
    if len(means) < len(wanted):
        return Cell(f"{math.fsum(means) / len(means):.1f}", f"{len(means)} of {len(wanted)} tasks")
    return compared([math.fsum(means) / len(means)], number or _published_average(row, wanted, table))


def _published_average(row: Row, tasks: list[str], table: Table) -> Number | None:
    known = [_value(row, table.columns.index(task)) for task in tasks if task in table.columns]
    values = [number.value for number in known if number is not None]
    return Number(round(math.fsum(values) / len(values), 1)) if values and len(values) == len(tasks) else None


def _by_size(table: Table, findings: Findings) -> Grid:
    task = table.task if table.task in findings.tasks else ""
    sizes = findings.sizes(task)[::-1] if task else []
    columns = list(dict.fromkeys([*table.columns, *map(_size_name, sizes)]))
    rows: Rows = [[row.label, *_size_cells(row, row.rate, table, columns, sizes, findings)] for row in table.rows]
    for method in findings.methods if task else ():
        extra = Row(label=f"{method}, chosen rate", method=method)
        rows.append([extra.label, *_size_cells(extra, None, table, columns, sizes, findings)])
    notes = [SILENT] if any((task, size) in findings.silent for size in sizes) else []
    return Grid(_title(table, findings), ["", *columns], rows, table.caption, notes)


def _size_name(size: int | None) -> str:
    """The column of a size; where training rows were capped, the largest does not stand under `all`."""
    return "all" if size is None else str(size)


def _size_cells(row: Row, rate: float | None, table: Table, columns: list[str], sizes: Sequence[int | None],
                findings: Findings) -> list[Cell]:  # fmt: skip
    own = {_size_name(size): size for size in sizes}
    cells = []
    for column in columns:
        number = _value(row, table.columns.index(column)) if column in table.columns else None
        cell = (row.method, table.task, own.get(column))
        values = findings.scores(cell, rate, table.metric or None) if column in own else []
        cells.append(compared(values, number, "silent" if cell[1:] in findings.silent else ""))
    return cells


def _over_bases(table: Table, bases: Sequence[Findings]) -> Grid:
    """Rows that name a base stand beside its own run; other bases get rows of their own below."""
    columns = list(dict.fromkeys([*table.columns, *(task for f in bases for task in f.tasks)]))
    cells = _best_rates if table.layout == "best" else _task_cells
    shares = _shares(table)
    rows: list[list[Cell | str]] = []
    for row in table.rows:
        ran = next((f for f in bases if f.base == row.base), None)
        if ran is not None:
            found = cells(row, None, table, columns, ran)
        else:
            found = [compared([], _value(row, n)) for n in range(len(columns))]
        rows.append([row.label, *(row.share for _ in shares), *found])
    listed = {row.base for row in table.rows}
    for findings in bases:
        if findings.base not in listed:
            for method in findings.methods:
                extra = Row(label=f"{findings.base}: {method}", method=method)
                rows.append([extra.label, *("" for _ in shares), *cells(extra, None, table, columns, findings)])
    notes = [SILENT] if any(findings.silent for findings in bases) else []
    return Grid(table.name, ["", *shares, *columns], rows, table.caption, notes)


def _best_rates(row: Row, _: float | None, table: Table, columns: list[str], findings: Findings) -> list[Cell]:
    cells = []
    for column in columns:
        number = _value(row, table.columns.index(column)) if column in table.columns else None
        best = findings.choices.get((row.method, column, findings.size(column))) if column in findings.tasks else None
        note = "" if number is None else f"paper {number.value:g}"
        cells.append(Cell(f"{best[0]:g}" if best else "", note or ("" if best else "–"), "" if best else "missing"))
    return cells


def _best_point(table: Table, findings: Findings) -> Grid:
    """The best point of a grid: its dev score, rate and batch size."""
    rows: Rows = []
    for row in table.rows:
        cell = (row.method, table.task, findings.size(table.task) if table.task in findings.tasks else None)
        best, chosen = findings.choices.get(cell), findings.chosen(cell)
        values = [100 * s for result in chosen.values() if (s := result.score("dev")) is not None]
        rate, batch = _value(row, 1), _value(row, 2)
        numbers = [
            compared(values, _value(row, 0), digits=2),
            Cell(f"{best[0]:g}" if best else "", f"paper {rate.value:g}" if rate else ""),
            Cell(str(best[1]) if best else "", f"paper {batch.value:g}" if batch else ""),
        ]
        rows.append([row.label, *numbers])
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption)


def _tested(table: Table, findings: Findings) -> Grid:
    """Trained parameters, head included, and the test score."""
    rows: Rows = []
    for row in table.rows:
        cell = (row.method, table.task, findings.size(table.task) if table.task in findings.tasks else None)
        counted = next((result.trained for result in findings.chosen(cell).values() if result.trained), None)
        paper = _value(row, 0)
        trained = Cell(f"{counted:,}" if counted else "", f"paper {paper.value:,.0f}" if paper else "")
        rows.append([row.label, trained, compared(findings.scores(cell), _value(row, 1), digits=2)])
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption)


def _metrics(table: Table, findings: Findings) -> Grid:
    ours = {result.task: result.metric for result in findings.done}
    rows = [[row.label, *row.texts] for row in table.rows]
    rows.append(["ours", *(ours.get(column, "–") for column in table.columns)])
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption)


_LAYOUTS: dict[str, Callable[[Table, Findings], Grid]] = {
    "tasks": _by_task, "rates": _by_task, "sizes": _by_size, "best": _best_point, "test": _tested, "metrics": _metrics,
}  # fmt: skip


# ---- tables that every study has


def audit(findings: Findings) -> Grid:
    """What each method trains, counted, by part."""
    rows = []
    for method, parts in findings.manifest["audit"].items():
        trained = sum(parts[name] for name in ("encoder", "embedding", "pooler", "head"))
        without = trained - parts["head"]
        cells = [f"{parts[name]:,}" for name in ("encoder", "embedding", "pooler", "head")]
        rows.append([method, *cells, f"{trained:,}", f"{without / (parts['total'] or 1):.3%}"])
    head = ["", "layers", "embedding", "pooler", "head", "trained in all", "% without head"]
    note = "Counted from the base, with a head for two classes; the papers' percentages leave the head out."
    return Grid(f"Parameters trained, {findings.base}", head, rows, note)


def gaps(findings: Findings) -> Grid:
    """Train and dev score of the kept checkpoint and their difference."""
    rows = []
    for method in findings.methods:
        cells: list[Cell | str] = [method]
        for task in findings.tasks:
            chosen = findings.chosen((method, task, findings.size(task))).values()
            values = [value for result in chosen if (value := gap(result)) is not None]
            train = [100 * score for result in chosen if (score := result.score("train")) is not None]
            cell = compared(values, None)
            cells.append(Cell(cell.text, f"train {math.fsum(train) / len(train):.1f}" if train else "–", cell.kind))
        rows.append(cells)
    return Grid(f"Generalisation gap, {findings.base}", ["", *findings.tasks], rows, "Train minus dev, in points.")


def costs(findings: Findings) -> Grid:
    """Seconds per trial and peak memory by method."""
    rows = []
    for method in findings.methods:
        done = [result for point, result in findings.trials.items() if result is not None and point.method == method]
        if done:
            seconds = [result.cost.get("seconds", 0.0) for result in done]
            memory = max(result.cost.get("memory", 0.0) for result in done)
            lost = sum(result.status == "diverged" for result in done)
            rows.append([method, str(len(done)), str(lost), f"{math.fsum(seconds) / len(seconds):.1f}",
                         f"{math.fsum(seconds) / 60:.1f}", f"{memory / 1e6:,.0f}" if memory else "–"])  # fmt: skip
    head = ["", "trials", "diverged", "s per trial", "min in all", "peak MB"]
    note = "Trials of one pass share its time and memory; wall time on whatever else the machine was doing."
    return Grid(f"Time and memory, {findings.base}", head, rows, note)


def counted_wins(findings: Findings, table: Table) -> str | None:
    """Wins and losses of our BitFit against the published Diff-Prune row, where a table has both."""
    row = next((row for row in table.rows if row.label == "(V) Diff-Prune"), None)
    if row is None:
        return None
    wins = losses = 0
    for n, task in enumerate(table.columns):
        number = _value(row, n)
        found = findings.summary(("BitFit", task, findings.size(task))) if task in findings.tasks else None
        if number is not None and found is not None:
            wins, losses = wins + (found.mean > number.value), losses + (found.mean < number.value)
    return f"Ours on {findings.base} against the published Diff-Prune row (V): {wins} wins, {losses} losses."
