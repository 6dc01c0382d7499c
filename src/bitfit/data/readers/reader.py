"""The interface of a reader: find columns, read records, number labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

from ..columns import Sample, number
from ..examples import Columns, Examples, Table
from ..source import RowSource

MOST_COUNTED = 10  # labels whose rows are counted in a note

Record = tuple[int, Any, str | None]
"""The line, text and second text of a record."""


def first_known(known: Sequence[str], names: Collection[str]) -> str | None:
    """The first of the well-known names that is among the names; None if none is."""
    return next((name for name in known if name in names), None)


class Reader(ABC):
    """Records of a file -> examples of one kind of task."""

    kind: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()  # file endings that only this kind uses
    labelled: ClassVar[bool] = True  # whether the answers are names, so that a delta must list them
    by_class: ClassVar[bool] = False  # whether splits and subsets keep the share of each class
    by_pair: ClassVar[bool] = False  # whether a split keeps examples with the same second text together

    def looks_like(self, sample: Sample, label: str | None) -> bool:
        """Whether the first records of a file can belong to this kind only."""
        return False

    @abstractmethod
    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The columns of a file: the named ones, and the others by their names or contents."""

    def label_columns(self, sample: Sample, label: str | None) -> tuple[str, ...]:
        """The columns that hold labels."""
        return () if label is None else (label,)

    @abstractmethod
    def read(self, sample: Sample, columns: Columns) -> Table:
        """All usable records, with the labels as written in the file."""

    @abstractmethod
    def stream(self, path: RowSource, columns: Columns) -> Iterator[Record]:
        """Line, text and second text of every record, one by one."""

    @abstractmethod
    def label_names(self, table: Table) -> tuple[str, ...]:
        """The names of all labels in a table, in the order of their numbers."""

    @abstractmethod
    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The records with labels as a task takes them; `numbered`: a file may also give a label's number."""

    def doubts(self, examples: Examples, labels: tuple[str, ...]) -> list[str]:
        """Notes on what may be wrong with the labels, one sentence each."""
        return []


def counts_by_name(labels: Sequence[str], counts: Counter[int]) -> str:
    """How often each label occurs, the most frequent first; names that are numbers are quoted."""
    shown = []
    for index, count in counts.most_common(MOST_COUNTED):
        name = f'"{labels[index]}"' if number(labels[index]) is not None else labels[index]
        shown.append(f"{name} {count:,}")
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
