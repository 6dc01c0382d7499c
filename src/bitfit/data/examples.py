"""Labelled examples as values: what files become, and what tasks take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["classification", "regression", "multilabel", "tagging", "answering"]


class Answer(NamedTuple):
    """A gold answer and where it begins in its context."""

    text: str
    start: int


@dataclass(frozen=True)
class Columns:
    """Which columns hold the text, its pair and the label, and whether a label may stand there by its number."""

    text: str
    text_pair: str | None = None
    label: str | None = None
    numbered: bool = False


@dataclass(frozen=True)
class Files:
    """The files a data set consists of."""

    train: Path
    dev: Path | None = None
    test: Path | None = None
    more: Mapping[str, Path] = field(default_factory=dict)  # further sets to score, by name


@dataclass(frozen=True)
class Examples:
    """Texts, with their labels and the lines they came from as far as these are known.

    A text is a string, in tagging a tuple of words; a question's pair is its context. A label is a class number, a
    float, a tuple of class numbers (in tagging one per word, -1 where there is none), or a tuple of Answers.
    """

    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> Examples:
        """The examples at these indices, in this order."""
        indices = list(indices)
        pairs = None if self.pairs is None else [self.pairs[i] for i in indices]
        labels, lines = ([column[i] for i in indices] if column else [] for column in (self.labels, self.lines))
        return Examples([self.texts[i] for i in indices], pairs, labels, lines)


@dataclass(frozen=True)
class Table:
    """The usable records of a file, their labels as they stand there."""

    path: Path
    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any]
    lines: list[int]
    notes: list[str]


@dataclass(frozen=True)
class Dataset:
    """Everything training needs to know about the data, with notes for the user, one sentence each."""

    train: Examples
    dev: Examples
    test: Examples | None
    kind: Kind
    labels: tuple[str, ...]
    columns: Columns
    notes: tuple[str, ...]
    more: Mapping[str, Examples] = field(default_factory=dict)


def skipped(path: Path, what: str, lines: list[int]) -> list[str]:
    """A note on rows that are left out, with the first lines; nothing if there are none."""
    shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    plural = "" if len(lines) == 1 else "s"
    note = f"Skipped {len(lines):,} row{plural} of {path.name} with {what} (line{plural} {shown})."
    return [note] if lines else []
