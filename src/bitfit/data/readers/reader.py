"""What the reader of a kind of task must do: find columns, read records, number labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ..columns import Sample
from ..examples import Columns, Examples, Table
from ..source import RowSource

Record = tuple[int, Any, str | None]
"""The line, text and second text of a record."""


class Reader(ABC):
    """Records of a file -> examples of one kind of task."""

    kind: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()  # file endings that only this kind uses
    labelled: ClassVar[bool] = True  # whether the answers are names, so that a delta must list them
    by_class: ClassVar[bool] = False  # whether splits and subsets keep the share of each class
    by_pair: ClassVar[bool] = False  # whether a split keeps examples with the same second text together

    def looks_like(self, sample: Sample, label: str | None) -> bool:
        """Whether the first records of a file can only be meant for this kind."""
        return False

    @abstractmethod
    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The columns of a file: those asked for, the others by their names or contents."""

    def label_columns(self, sample: Sample, label: str | None) -> tuple[str, ...]:
        """The columns that hold labels."""
        return () if label is None else (label,)

    @abstractmethod
    def read(self, sample: Sample, columns: Columns) -> Table:
        """All usable records with their labels as they stand in the file."""

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
        """What may be wrong with the labels, one sentence each."""
        return []
