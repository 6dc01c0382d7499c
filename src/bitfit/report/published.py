"""The numbers a paper prints as findings, so that its claims can be judged by the same tests as ours."""

from __future__ import annotations

from ..study.grid import Point
from ..study.manifest import BaseFacts, Manifest
from ..study.spec import Method, Number, Row, Study, Table
from ..study.store import Result
from .findings import Findings

LAYOUTS = ("tasks", "rates", "sizes", "test")
TEST_SCORE = 1  # its column in a table of layout `test`


def published(study: Study) -> list[Findings]:
    """What the paper's tables say of each base; scores of a hidden test set are compared with each other only."""
    found: dict[tuple[str, bool], dict[Point, Result | None]] = {}
    for table in study.tables:
        if table.layout in LAYOUTS:
            for row in table.rows:
                if row.method or row.numbers_of:
                    base = row.base or study.protocol.bases[0]
                    results = found.setdefault((base, bool(row.numbers_of)), {})
                    for point, result in _results(study, table, row, base):
                        results.setdefault(point, result)
    return [Findings(study, _manifest(study, base), results) for (base, _), results in found.items()]


def _results(study: Study, table: Table, row: Row, base: str) -> list[tuple[Point, Result]]:
    method = study.method(row.numbers_of or row.method)
    results = []
    for task, size, number in _cells(table, row):
        if task in study.trained_tasks:
            results.append(_result(method, task, size, row.rate, number, base))
    return results


def _cells(table: Table, row: Row) -> list[tuple[str, int | None, Number]]:
    """The scores of a row, each with its task and training size."""
    cells = []
    for column, (name, number) in enumerate(zip(table.columns, row.numbers, strict=False)):
        if number is None or (table.layout == "test" and column != TEST_SCORE):
            continue
        if table.layout == "sizes":
            cells.append((table.task, None if name == "all" else int(name), number))
        else:
            cells.append((table.task or name, None, number))
    return cells


def _result(
    method: Method, task: str, size: int | None, rate: float | None, number: Number, base: str
) -> tuple[Point, Result]:
    point = Point(method.name, task, size, rate or method.rates[0], 1, 0)
    score = number.value / 100
    scores = {part: {"score": [score, score, score]} for part in ("dev", "test")}
    rows = {"train": size} if size else {}
    result = Result("", "done", base, task, "score", {}, {"train": 1, **rows}, majority=0.0, scores=scores)
    return point, result


def _manifest(study: Study, base: str) -> Manifest:
    return Manifest(study=study.name, base=BaseFacts(base, ""), split=study.protocol.split, runs=(), published=True)
