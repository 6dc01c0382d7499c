"""The kinds of task: what each does with texts, outputs and labels."""

from __future__ import annotations

from .task import KINDS, Task, Text

__all__ = ["KINDS", "Task", "Text"]
