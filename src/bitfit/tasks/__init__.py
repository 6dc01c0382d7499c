"""The kinds of task: what each does with texts, outputs and labels."""

from __future__ import annotations

from . import answering, tagging, texts  # each kind joins KINDS by being defined
from .task import KINDS, Task

__all__ = ["KINDS", "Task", "answering", "tagging", "texts"]
