"""Records -> texts with any number of labels: lists, separated names, or a column of 0 and 1 for each label."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

from ...errors import DataError, suggest
from ..columns import LABELS, Sample, find_columns, normalised
from ..examples import Columns, Examples, Table
from ..formats import fault
from ..source import RowSource
from .reader import counts_by_name
from .texts import TextReader

SEPARATOR = re.compile(r"[|;]")
ON, OFF = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "", "none")


class LabelSets(TextReader):
    """Any number of labels at once."""

    kind: ClassVar[str] = "multilabel"

    def looks_like(self, sample: Sample, label: str | None) -> bool:
        """Whether several label columns are named, or the label column holds lists."""
        if label is not None and len(self.label_columns(sample, label)) > 1:
            return True
        if label is None:
            label = next((name for name in sample.rows[0].values if normalised(name) in LABELS.split()), None)
        return label is not None and any(isinstance(value, list) for value in sample.column(label))

    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The columns of texts and labels; a label "a,b,c" names several columns of 0 and 1."""
        names = self.label_columns(sample, label)
        first = names[0] if names else None
        columns = find_columns(sample, text=text, text_pair=text_pair, label=first)
        return replace(columns, label=label) if len(names) > 1 else columns

    def label_columns(self, sample: Sample, label: str | None) -> tuple[str, ...]:
        """The label column, or several if `label` is a comma-separated list of columns."""
        if label is None or label in sample.names or "," not in label:
            return super().label_columns(sample, label)
        names = tuple(name.strip() for name in label.split(","))
        for name in names:
            if name not in sample.names:
                raise DataError(f'{sample.path} has no column "{name}".{suggest(name, sample.names)}')
        return names

    def label_of(
        self,
        path: RowSource,
        line: int,
        values: dict[str, object],
        names: Sequence[str],
        separator: str | None,
    ) -> object | None:
        """The labels of a record: an empty cell is the empty set, a missing cell means that the row has no label."""
        if len(names) > 1:
            return _chosen_columns(path, line, values, names)
        cell = values.get(names[0]) if names else None
        if cell is None:
            return None
        return label_set(path, line, cell, separator)

    def label_names(self, table: Table) -> tuple[str, ...]:
        """All labels, sorted."""
        names = set(chain.from_iterable(table.labels))
        if not names:
            raise DataError(f"{table.path}: no row has a label; there is nothing to learn.")
        return tuple(sorted(names))

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The texts with the numbers of their labels."""
        index = {name: number for number, name in enumerate(labels)}
        sets = []
        for line, names in zip(table.lines, table.labels, strict=True):
            for name in names:
                if name not in index:
                    raise fault(table.path, line, f'label "{name}" is not in the training data.{suggest(name, labels)}')
            sets.append(tuple(sorted(index[name] for name in names)))
        return Examples(table.texts, table.pairs, sets, table.lines)

    def doubts(self, examples: Examples, labels: tuple[str, ...]) -> list[str]:
        """The number of examples with each label and with none."""
        counts = Counter(chain.from_iterable(examples.labels))
        none = sum(not label for label in examples.labels)
        without = f"; none {none:,}" if none else ""
        return [f"Rows by label: {counts_by_name(labels, counts)}{without}.", *super().doubts(examples, labels)]


def label_set(path: RowSource, line: int, cell: object, separator: str | None = None) -> tuple[str, ...]:
    """The labels of a cell: a list, or names between separators (by default | and ;)."""
    if isinstance(cell, list | tuple):
        labels: Sequence[object] = cell
    elif separator is None:
        labels = SEPARATOR.split(str(cell))
    else:
        labels = str(cell).split(separator)
    if not all(isinstance(label, str | int) for label in labels):
        raise fault(path, line, "a list of labels contains a value that is neither a text nor a whole number.")
    names = (str(label).strip() for label in labels)
    return tuple(dict.fromkeys(name for name in names if name))


def _chosen_columns(path: RowSource, line: int, values: dict[str, object], names: Sequence[str]) -> tuple[str, ...]:
    """The columns that hold a 1."""
    chosen = []
    for name in names:
        cell = str(values.get(name)).strip().lower()
        if cell not in ON + OFF:
            raise fault(path, line, f'column "{name}" contains "{values.get(name)}", which is neither 0 nor 1.')
        if cell in ON:
            chosen.append(name)
    return tuple(chosen)
