"""Answers of `predict` as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .show import clean

if TYPE_CHECKING:
    from ..tasks import Task


def as_line(task: Task, answer: dict[str, Any]) -> str:
    """One answer for a person to read."""
    return "\t".join(clean(cell) for cell in task.line(answer))
