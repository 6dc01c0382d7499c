"""Our tables in the papers' layout: our mean and deviation in each cell, the published value beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from ..study.spec import Number, Row, Study, Table
from .findings import Cell as Key
from .findings import Findings
from .page import Cell, Grid
from .quantities import gap
from .statistics import summary

Rows = list[list[Cell | str]]
AVERAGE = "average"
SHARE = "% trained"
PARTS = ("encoder", "embedding", "pooler")
MARKS = {"without-evidence": "no evidence", "edge": "rate at the edge"}
NOTES = {
    "without-evidence": "No evidence: the methods, averaged, do not beat the majority class beyond their interval.",
    "edge": "Rate at the edge: the best rate is the smallest or largest that was tried, so a better one may exist.",
}


def tables(study: Study, bases: Sequence[Findings]) -> list[Grid]:
    """The tables with numbers of ours; those that are not about bases once for each base."""
    made = []
    for table in study.tables:
        if table.layout in ("numbers", "space"):
            continue
        if any(row.base for row in table.rows):
            made += [_with_histories(_over_bases(table, bases), bases)] if bases else []
            continue
        for findings in bases:
            if _has_cells(table, findings):
                made.append(_with_histories(_LAYOUTS[table.layout](table, findings), [findings]))
    by_size = {table.task for table in study.tables if table.layout == "sizes"}
    for findings in bases if by_size else ():
        for task in findings.tasks:
            if task not in by_size:
                caption = "A task that stands in none of the paper's tables."
                table = Table(f"Training sizes, {task}", "sizes", task=task, caption=caption)
                made.append(_with_histories(_by_size(table, findings), [findings]))
    return made


def _with_histories(grid: Grid, bases: Sequence[Findings]) -> Grid:
    """A table with a note on where its bases come from."""
    histories = [findings.history for findings in bases if findings.history]
    return replace(grid, notes=(*grid.notes, *histories))


def published_tables(study: Study, bases: Sequence[Findings]) -> list[Grid]:
    """The tables as published of which rows have no number of ours beside them."""
    made = []
    for table in study.tables:
        named = any(row.base for row in table.rows)
        ours = bases and (named or any(_has_cells(table, findings) for findings in bases))
        if table.layout in ("numbers", "space") or not ours or not _complete(table, bases):
            made.append(_printed(table))
    return made


def _has_cells(table: Table, findings: Findings) -> bool:
    """Whether a base has numbers for a table."""
    return not table.task or table.task in findings.tasks


def compared(
    values: Sequence[float], number: Number | None, same: bool = False, kind: str = "", digits: int = 1
) -> Cell:
    """Ours with its deviation over seeds; beside it the paper's, with the difference where base and data agree."""
    if not values:
        note = "" if number is None else f"paper {shown(number)}"
        return Cell("", note or "–", "missing")
    ours = summary(values)
    spread = "" if ours.deviation is None else f" ± {ours.deviation:.{digits}f}"
    notes = []
    if number is not None:
        notes.append(f"paper {shown(number)}" + (f", {ours.mean - number.value:+.{digits}f}" if same else ""))
    if kind:
        notes.append(MARKS[kind])
    return Cell(f"{ours.mean:.{digits}f}{spread}", "; ".join(notes), kind)


def shown(number: Number) -> str:
    """A published number, a score with at least one decimal."""
    text = f"{number.value:g}"
    if text.isdigit() and number.value < 1000:
        text = f"{number.value:.1f}"
    return text + ("" if number.deviation is None else f" ± {number.deviation:.1f}")


def _mark(findings: Findings, cell: Key) -> str:
    if cell[1:] in findings.without_evidence:
        return "without-evidence"
    return "edge" if findings.at_edge(cell) else ""


def _notes(rows: Rows) -> list[str]:
    """The notes on the marks that a table's cells have."""
    marks = {cell.kind for row in rows for cell in row if isinstance(cell, Cell)}
    return [note for mark, note in NOTES.items() if mark in marks]


def _value(row: Row, n: int) -> Number | None:
    return row.numbers[n] if n < len(row.numbers) else None


def _title(table: Table, findings: Findings) -> str:
    return f"{table.name}, on {findings.base}"


def _printed(table: Table) -> Grid:
    rows = []
    for row in table.rows:
        cells = row.texts or tuple("–" if number is None else shown(number) for number in row.numbers)
        rows.append([row.label, *cells])
    texts = range(len(table.columns) + 1) if any(row.texts for row in table.rows) else (0,)
    return Grid(f"{table.name} (as published)", ["", *table.columns], rows, table.caption, texts=texts)


def _complete(table: Table, bases: Sequence[Findings]) -> bool:
    """Whether our tables show every number of the published one."""
    by_task = not table.task and table.layout in ("tasks", "rates", "best")
    for findings in bases:
        shown = [*findings.tasks, *([AVERAGE] if _averaged(table, findings) else [])]
        if by_task and any(column not in shown for column in table.columns):
            return False
        if _has_rates(table) and not _on_papers_base(findings):
            return False
    return True


def _has_rates(table: Table) -> bool:
    return any(row.rate is not None for row in table.rows)


def _on_papers_base(findings: Findings) -> bool:
    return findings.base in findings.paper_bases


def trained_share(findings: Findings, method: str) -> str:
    """How much of the base a method trains, without the head, counted."""
    counts = findings.manifest.audit.get(method)
    if not counts:
        return ""
    without_head = counts["total"] - counts["head"]
    return f"{_count(findings, method) / (without_head or 1):.3%}"


def _share(findings: Findings | None, row: Row) -> Cell:
    """Our share of trained parameters, and the paper's."""
    ours = trained_share(findings, row.method) if findings else ""
    return Cell(ours, f"paper {row.share}" if row.share else "", "" if ours else "missing")


def _by_task(table: Table, findings: Findings) -> Grid:
    columns = findings.tasks
    average = [AVERAGE] if _averaged(table, findings) else []
    every = [(row, row.rate) for row in _main_rows(table, findings)]
    for method, rate in _unlisted(table, findings):
        every.append((Row(label=f"{method} {rate:g}" if rate else method, method=method), rate))
    rows: Rows = []
    for row, rate in every:
        cells = _task_cells(row, rate, table, columns, findings)
        cells += [_average(row, rate, table, findings)] if average else []
        rows.append([row.label, _share(findings, row), *cells])
    return Grid(_title(table, findings), ["", SHARE, *columns, *average], rows, _caption(table, findings), _notes(rows))


def _chosen_rows(findings: Findings) -> list[Row]:
    """A row for every method at the rate that was chosen."""
    return [Row(label=f"{method}, chosen rate", method=method) for method in findings.methods]


def _main_rows(table: Table, findings: Findings) -> list[Row]:
    """The paper's rows. A base of ours has other rates, so a table by rates has a row for every method instead."""
    if not _has_rates(table):
        return list(table.rows)
    chosen = _chosen_rows(findings)
    return [*chosen, *table.rows] if _on_papers_base(findings) else chosen


def by_rate(study: Study, findings: Findings) -> list[Grid]:
    """The scores at every rate, where a table of the paper is by rates and our base has other ones."""
    made = []
    for table in study.tables:
        if table.layout == "rates" and not _on_papers_base(findings):
            columns = findings.tasks
            rows: Rows = []
            for method, rate in dict.fromkeys((point.method, point.lr) for point in findings.results):
                row = Row(label=f"{method} {rate:g}", method=method)
                rows.append([row.label, *_task_cells(row, rate, table, columns, findings)])
            made.append(Grid(f"Scores at every rate, {findings.base}", ["", *columns], rows))
    return made


def _caption(table: Table, findings: Findings) -> str:
    """The caption, with the metric of each task that was run."""
    metrics: dict[str, list[str]] = {}
    for task in findings.tasks if not table.task else [table.task]:
        metric = table.metric or findings.metric(task, findings.size(task))
        if metric:
            metrics.setdefault(metric.replace("_", " "), []).append(task)
    words = "; ".join(f"{metric} ({', '.join(tasks)})" for metric, tasks in metrics.items())
    return f"{table.caption} Metric: {words}.".strip() if words else table.caption


def _averaged(table: Table, findings: Findings) -> bool:
    """An average is shown only where all of the paper's tasks were run."""
    wanted = [column for column in table.columns if column != AVERAGE] or list(findings.study.tasks)
    return (table.average or AVERAGE in table.columns) and all(task in findings.tasks for task in wanted)


def _unlisted(table: Table, findings: Findings) -> list[tuple[str, float | None]]:
    """Methods that were run but are in no table of the paper; in a table by rates, also rates that it does not have."""
    if table.layout != "rates":
        paper_rows = chain.from_iterable(other.rows for other in findings.study.tables)
        listed = {row.method for row in paper_rows}
        return [(method, None) for method in findings.methods if method not in listed]
    if not _on_papers_base(findings):
        return []
    printed = [(row.method, row.rate) for row in table.rows if row.rate]
    unlisted: list[tuple[str, float | None]] = []
    for method, rate in dict.fromkeys((point.method, point.lr) for point in findings.results):
        if not any(method == name and math.isclose(rate, other) for name, other in printed):
            unlisted.append((method, rate))
    return unlisted


def _task_cells(row: Row, rate: float | None, table: Table, columns: list[str], findings: Findings) -> list[Cell]:
    cells = []
    for column in columns:
        number = _paper_number(row, table, column)
        if column not in findings.tasks:
            cells.append(compared([], number))
            continue
        cell = (row.method, column, findings.size(column))
        values = findings.scores(cell, rate)
        mark = _mark(findings, cell) if values and rate is None else ""
        cells.append(compared(values, number, findings.comparable(column), mark))
    return cells


def _average(row: Row, rate: float | None, table: Table, findings: Findings) -> Cell:
    """The mean over the paper's tasks."""
    wanted = [column for column in table.columns if column != AVERAGE] or list(findings.study.tasks)
    means = [findings.summary((row.method, task, findings.size(task)), rate) for task in wanted]
    known = [one.mean for one in means if one is not None]
    printed = _value(row, table.columns.index(AVERAGE)) if AVERAGE in table.columns else None
    values = [statistics.fmean(known)] if len(known) == len(wanted) else []
    return compared(values, printed, all(findings.comparable(task) for task in wanted))


def _by_size(table: Table, findings: Findings) -> Grid:
    task = table.task if table.task in findings.tasks else ""
    sizes = findings.sizes(task)[::-1] if task else []
    columns = list(map(_size_name, sizes))
    if _on_papers_base(findings):
        columns = list(dict.fromkeys([*table.columns, *columns]))
    rows: Rows = []
    for row in _main_rows(table, findings) if table.rows else _chosen_rows(findings):
        rows.append([row.label, *_size_cells(row, row.rate, table, columns, sizes, findings)])
    words = _caption(table, findings) if task else table.caption
    caption = f"{words} Columns are the rows drawn; {_split_words(findings)}".strip()
    return Grid(_title(table, findings), ["", *columns], rows, caption, _notes(rows))


def _split_words(findings: Findings) -> str:
    if findings.manifest.split == "holdout":
        return "four fifths of them train, one fifth is the dev set."
    return "all of them train."


def _size_name(size: int | None) -> str:
    """The column of a size; where training rows were capped, the largest does not stand under `all`."""
    return "all" if size is None else str(size)


def _size_cells(
    row: Row,
    rate: float | None,
    table: Table,
    columns: list[str],
    sizes: Sequence[int | None],
    findings: Findings,
) -> list[Cell]:
    by_name = {_size_name(size): size for size in sizes}
    cells = []
    for column in columns:
        number = _value(row, table.columns.index(column)) if column in table.columns else None
        if column not in by_name:
            cells.append(compared([], number))
            continue
        cell = (row.method, table.task, by_name[column])
        values = findings.scores(cell, rate, table.metric or None)
        mark = _mark(findings, cell) if values and rate is None else ""
        cells.append(compared(values, number, findings.comparable(table.task), mark))
    return cells


def _over_bases(table: Table, bases: Sequence[Findings]) -> Grid:
    """The tasks that were run, on bases that are not in the paper and then in the paper's rows."""
    ran = chain.from_iterable(findings.tasks for findings in bases)
    columns = list(dict.fromkeys(ran))
    cells_of = _best_rates if table.layout == "best" else _task_cells
    listed = {row.base for row in table.rows}
    rows: Rows = []
    for findings in bases:
        if findings.base in listed:
            continue
        for method in findings.methods:
            extra = Row(label=f"{findings.base}: {method}", method=method)
            rows.append([extra.label, _share(findings, extra), *cells_of(extra, None, table, columns, findings)])
    for row in table.rows:
        on_base = next((findings for findings in bases if findings.base == row.base), None)
        if on_base is not None:
            cells = cells_of(row, None, table, columns, on_base)
        elif any(column in table.columns for column in columns):
            cells = [compared([], _paper_number(row, table, column)) for column in columns]
        else:
            continue
        rows.append([row.label, _share(on_base, row), *cells])
    return Grid(table.name, ["", SHARE, *columns], rows, table.caption, _notes(rows))


def _paper_number(row: Row, table: Table, column: str) -> Number | None:
    """The paper's number in a column of its table; None if the table has no such column."""
    if column not in table.columns:
        return None
    return _value(row, table.columns.index(column))


def _best_rates(row: Row, _: float | None, table: Table, columns: list[str], findings: Findings) -> list[Cell]:
    cells = []
    for column in columns:
        number = _paper_number(row, table, column)
        cell = (row.method, column, findings.size(column) if column in findings.tasks else None)
        best = findings.choices.get(cell)
        notes = []
        if number is not None:
            notes.append(f"paper {number.value:g}")
        if best is None:
            cells.append(Cell("", "; ".join(notes) or "–", "missing"))
            continue
        if findings.at_edge(cell):
            notes.append(MARKS["edge"])
        cells.append(Cell(f"{best[0]:g}", "; ".join(notes), ""))
    return cells


def _cell_of(row: Row, table: Table, findings: Findings) -> Key:
    return row.method, table.task, findings.size(table.task) if table.task in findings.tasks else None


def _best_point(table: Table, findings: Findings) -> Grid:
    """The best point of a grid: its dev score, rate and batch size."""
    rows: Rows = []
    for row in table.rows:
        cell = _cell_of(row, table, findings)
        best, chosen = findings.choices.get(cell), findings.chosen(cell)
        values = [100 * score for result in chosen.values() if (score := result.score("dev")) is not None]
        rate, batch = _value(row, 1), _value(row, 2)
        rows.append([
            row.label,
            compared(values, _value(row, 0), findings.comparable(table.task), digits=2),
            Cell(f"{best[0]:g}" if best else "", f"paper {rate.value:g}" if rate else ""),
            Cell(str(best[1]) if best else "", f"paper {batch.value:g}" if batch else ""),
        ])  # fmt: skip
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption)


def _tested(table: Table, findings: Findings) -> Grid:
    """Trained parameters, head included, and the test score."""
    rows: Rows = []
    for row in table.rows:
        cell = _cell_of(row, table, findings)
        counted = next((result.trained for result in findings.chosen(cell).values() if result.trained), None)
        paper = _value(row, 0)
        trained = Cell(f"{counted:,}" if counted else "", f"paper {paper.value:,.0f}" if paper else "")
        mark = _mark(findings, cell) if counted else ""
        same = findings.comparable(table.task)
        rows.append([row.label, trained, compared(findings.scores(cell), _value(row, 1), same, mark, digits=2)])
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption, _notes(rows))


def _metrics(table: Table, findings: Findings) -> Grid:
    ours = {result.task: result.metric for result in findings.done}
    rows: Rows = [[row.label, *row.texts] for row in table.rows]
    rows.append(["ours", *(ours.get(column, "–") for column in table.columns)])
    return Grid(_title(table, findings), ["", *table.columns], rows, table.caption, texts=range(len(table.columns) + 1))


_LAYOUTS: dict[str, Callable[[Table, Findings], Grid]] = {
    "tasks": _by_task,
    "rates": _by_task,
    "sizes": _by_size,
    "best": _best_point,
    "test": _tested,
    "metrics": _metrics,
}


# ---- tables that every study has


def audit(findings: Findings) -> Grid:
    """What each method trains, counted, by part."""
    rows = []
    for method, counts in findings.manifest.audit.items():
        cells = [f"{counts[part]:,}" for part in (*PARTS, "head")]
        trained = sum(counts[part] for part in (*PARTS, "head"))
        rows.append([method, *cells, f"{trained:,}", trained_share(findings, method)])
    head = ["", "layers", "embedding", "pooler", "head", "trained in all", "% without head"]
    note = "Counted from the base, with a head for two classes; the papers' percentages leave the head out."
    return Grid(f"Parameters trained, {findings.base}", head, rows, note, _shares_in_numbers(findings))


def _shares_in_numbers(findings: Findings) -> list[str]:
    """How many entries a random share of each term has, beside the method that it is compared with."""
    notes = []
    for claim in findings.study.claims:
        for part in claim.parts:
            if part.b and _is_share(findings.study, part.a):
                share, other = _count(findings, part.a), _count(findings, part.b)
                notes.append(f"{part.a} trains {share:,} entries without the head, {part.b} {other:,}.")
    return list(dict.fromkeys(notes))


def _is_share(study: Study, method: str) -> bool:
    return study.method(method).select.startswith("each(")


def _count(findings: Findings, method: str) -> int:
    """How many parameters a method trains, without the head; 0 if they were not counted."""
    counts = findings.manifest.audit.get(method, {})
    return sum(counts.get(part, 0) for part in PARTS)


def gaps(findings: Findings) -> Grid:
    """The train score of the kept checkpoint, and by how much it is above the test score."""
    rows: Rows = []
    for method in findings.methods:
        cells: list[Cell | str] = [method]
        for task in findings.tasks:
            chosen = findings.chosen((method, task, findings.size(task))).values()
            values = [value for result in chosen if (value := gap(result)) is not None]
            train = [100 * score for result in chosen if (score := result.score("train")) is not None]
            cell = compared(values, None)
            cells.append(Cell(cell.text, f"train {statistics.fmean(train):.1f}" if train else "–", cell.kind))
        rows.append(cells)
    return Grid(f"Generalisation gap, {findings.base}", ["", *findings.tasks], rows, "Train minus test, in points.")


def costs(findings: Findings) -> Grid:
    """Seconds per trial, epochs to the best checkpoint and peak memory by method."""
    rows: Rows = []
    for method in findings.methods:
        done = [result for point, result in findings.trials.items() if result is not None and point.method == method]
        if not done:
            continue
        seconds = [result.cost.get("seconds", 0.0) for result in done]
        memory = max(result.cost.get("memory", 0.0) for result in done)
        epochs = [result.best_epoch for result in done if result.status == "done"]
        rows.append([
            method,
            str(len(done)),
            str(sum(result.status == "diverged" for result in done)),
            f"{statistics.fmean(seconds):.1f}",
            f"{math.fsum(seconds) / 60:.1f}",
            f"{statistics.median(epochs):.1f}" if epochs else "–",
            f"{memory / 1e6:,.0f}" if memory else "–",
        ])  # fmt: skip
    head = ["", "trials", "diverged", "s per trial", "min in all", "best epoch", "peak MB"]
    note = "Trials of one pass share its time and memory; wall time beside whatever else the machine was doing."
    return Grid(f"Time and memory, {findings.base}", head, rows, note)


def counted_wins(findings: Findings, table: Table) -> str | None:
    """Wins and losses of a method of ours against a published row, where a table asks for them and data agree."""
    if table.wins is None:
        return None
    method, label = table.wins
    row = next(row for row in table.rows if row.label == label)
    wins = losses = 0
    for column, number in zip(table.columns, row.numbers, strict=True):
        if number is None or column not in findings.tasks or not findings.comparable(column):
            continue
        ours = findings.summary((method, column, findings.size(column)))
        if ours is not None:
            wins += ours.mean > number.value
            losses += ours.mean < number.value
    if not wins + losses:
        return None
    return f"{method} on {findings.base} against the published row {label}: {wins} wins, {losses} losses."
