"""Answers of `predict` as lines of text and as a CSV file."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import writing
from .show import clean

if TYPE_CHECKING:
    from ..tasks import Task


def as_line(task: Task, answer: dict[str, Any]) -> str:
    """One answer for a person to read."""
    return "\t".join(clean(cell) for cell in task.line(answer))


def write_csv(path: Path, answers: Iterable[dict[str, Any]]) -> int:
    """Write answers as they come, under a header of the first answer's keys. Returns how many there were."""
    count = 0
    with writing(path) as file:
        writer = csv.writer(codecs.getwriter("utf-8")(file))
        for count, answer in enumerate(answers, 1):
            cells = _cells(answer)
            if count == 1:
                writer.writerow(cells)
            writer.writerow(cells.values())
    return count


def _cells(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer by column: a list is JSON, the score of each label has a column of its own."""
    cells: dict[str, Any] = {}
    for key, value in answer.items():
        if key == "scores" and isinstance(value, dict):
            cells |= {f"p({label})": score for label, score in value.items()}
        elif isinstance(value, list):
            cells[key] = json.dumps(value, ensure_ascii=False)
        else:
            cells[key] = value
    return cells
