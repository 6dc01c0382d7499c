"""The result of an evaluation: scores, results by class, and the rows with wrong predictions."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..delta.meta import shown_score
from ..tasks import Task
from ..tasks.metrics import ClassScore, Score
from ..terminal.progress import counted


@dataclass(frozen=True)
class Evaluation:
    """A delta's results on labelled rows."""

    task: Task
    rows: int
    scores: Mapping[str, Score]  # every metric with its interval
    by_class: tuple[ClassScore, ...]  # of each class, label, tag or entity type; empty for numbers and answers
    confusion: tuple[tuple[int, ...], ...]  # true classes (rows) by predicted ones (columns), in the order of labels
    errors: tuple[Mapping[str, Any], ...]  # the wrong rows: line or index, columns with the label, answer
    notes: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.task.labels

    @property
    def score(self) -> Score:
        """The main metric."""
        return self.scores[self.task.metric]

    def __repr__(self) -> str:
        main = f"{self.task.metric} {shown_score(self.task.metric, self.score.value)}"
        return f"<Evaluation: {main} on {counted(self.rows, 'row')}, {len(self.errors):,} wrong>"

    def _repr_html_(self) -> str:
        """Tables of the scores and of the classes for notebooks."""
        scores: list[tuple[str, ...]] = [("metric", "score", "95% interval")]
        for name, score in self.scores.items():
            shown = [shown_score(name, value) for value in (score.value, score.low, score.high)]
            scores.append((name, shown[0], f"{shown[1]} to {shown[2]}"))
        tables = _table(scores)
        if self.by_class:
            classes: list[tuple[str, ...]] = [("class", "precision", "recall", "f1", "support")]
            for of_class in self.by_class:
                fractions = (of_class.precision, of_class.recall, of_class.f1)
                percentages = (f"{100 * value:.1f}" for value in fractions)
                classes.append((of_class.label, *percentages, f"{of_class.support:,}"))
            tables += _table(classes)
        return f"{tables}<p>{counted(self.rows, 'row')}; {len(self.errors):,} {self.task.wrong_means}</p>"


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows as an HTML table, the first of them its head."""
    lines = []
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        cells = "".join(f"<{cell}>{html.escape(value)}</{cell}>" for value in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
