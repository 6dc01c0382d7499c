"""The result of an evaluation: scores, results by class, and the rows with wrong predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..tasks import Task
from ..tasks.metrics import ClassScore, Score


@dataclass(frozen=True)
class Evaluation:
    """A delta's results on labelled rows."""

    task: Task
    rows: int
    scores: Mapping[str, Score]  # every metric with its interval
    by_class: tuple[ClassScore, ...]  # of each class, label, tag or entity type; empty for numbers and answers
    confusion: tuple[tuple[int, ...], ...]  # true classes (rows) by predicted ones (columns), in the order of labels
    errors: tuple[Mapping[str, Any], ...]  # the rows that were answered wrongly: line, input, gold label, answer
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
        main = f"{self.task.metric} {self.score.value:.4f}"
        return f"Evaluation({main} on {self.rows:,} rows, {len(self.errors):,} wrong)"
