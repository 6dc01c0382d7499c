"""Readers of texts with one label each: a class or a number."""

from __future__ import annotations

import math
import re
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import ClassVar

from ...errors import DataError, suggest
from ..columns import MANY_CLASSES, Sample, find_columns, is_missing, number
from ..examples import Columns, Examples, Table, conflicts, shortened, skipped
from ..formats import fault, rows
from ..on_disk import number_column, text_column
from ..source import RowSource
from .reader import Reader, Record, counts_by_name

FEW_FLOATS = 20  # up to this number of different values, whole-numbered floats are taken as classes
MANY_NUMBERS = 30  # from this number of numeric classes on, a note asks whether they are amounts


class TextReader(Reader):
    """A text, or two, and one cell with the label."""

    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The named columns; the others by well-known names, then by their content."""
        return find_columns(sample, text=text, text_pair=text_pair, label=label)

    def read(self, sample: Sample, columns: Columns) -> Table:
        """All records with a text and a label."""
        path = sample.path
        names = self.label_columns(sample, columns.label)
        texts, pairs, lines = text_column(), text_column(), number_column()
        labels: list[object] = []
        empty: list[int] = []
        unlabelled: list[int] = []
        for line, values in rows(path):
            text, pair = texts_of(path, line, values, columns)
            if not text.strip() or (pair is not None and not pair.strip()):
                empty.append(line)
                continue
            label = self.label_of(path, line, values, names, columns.separator)
            if label is None:
                unlabelled.append(line)
            else:
                lines.append(line)
                texts.append(text)
                if pair is not None:
                    pairs.append(pair)
                labels.append(sys.intern(label) if type(label) is str else label)  # few labels, many rows
        notes = [*skipped(path, "an empty text", empty), *skipped(path, "no label", unlabelled)]
        if not labels:
            raise DataError(f"{path} has no usable row. {' '.join(notes)}")
        return Table(path, texts, pairs if columns.text_pair else None, labels, lines, notes)

    def stream(self, path: RowSource, columns: Columns) -> Iterator[Record]:
        """Line, text and second text of every record, empty texts included, so that predictions match the rows."""
        for line, values in rows(path):
            yield line, *texts_of(path, line, values, columns)

    @abstractmethod
    def label_of(
        self,
        path: RowSource,
        line: int,
        values: dict[str, object],
        names: Sequence[str],
        separator: str | None,
    ) -> object | None:
        """The label of a record as written in its label columns; None if it has no label."""


class ScalarReader(TextReader):
    """The label is one word or number."""

    def label_of(
        self,
        path: RowSource,
        line: int,
        values: dict[str, object],
        names: Sequence[str],
        separator: str | None,
    ) -> object | None:
        """The value of the label column; None if the cell is empty."""
        label = values.get(names[0]) if names else None
        if isinstance(label, list | tuple | dict | bytes):
            cell_type = type(label).__name__
            raise fault(
                path, line, f"a {cell_type} is not a label; use one word or number per row, or --task multilabel."
            )
        return None if is_missing(label) else label

    def doubts(self, examples: Examples, labels: tuple[str, ...]) -> list[str]:
        """A note on texts that occur with different labels."""
        count = conflicts(examples)
        if not count:
            return []
        texts = "texts have" if count > 1 else "text has"
        return [f"{count:,} repeated {texts} conflicting labels."]


class Classes(ScalarReader):
    """One of several classes."""

    kind: ClassVar[str] = "classification"
    by_class: ClassVar[bool] = True

    def label_names(self, table: Table) -> tuple[str, ...]:
        """All classes, sorted: by value if they are whole numbers."""
        names = {class_name(label) for label in table.labels}
        if len(names) == 1:
            raise DataError(f'{table.path}: every label is "{names.pop()}"; at least two classes are needed.')
        if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
            return tuple(sorted(names, key=lambda name: (int(name), name)))
        return tuple(sorted(names))

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The texts with the numbers of their classes."""
        index: dict[str, int] = {}
        if numbered:  # the files of a named task hold the names of its labels or their numbers
            index = {str(i): i for i in range(len(labels))}
        index |= {name: i for i, name in enumerate(labels)}
        ids = [index.get(class_name(label), -1) for label in table.labels]
        if -1 in ids:
            row = ids.index(-1)
            name = class_name(table.labels[row])
            problem = "not a label of the task" if numbered else "not in the training data"
            raise fault(table.path, table.lines[row], f'label "{name}" is {problem}.{suggest(name, labels)}')
        return Examples(table.texts, table.pairs, ids, table.lines)

    def doubts(self, examples: Examples, labels: tuple[str, ...]) -> list[str]:
        """The number of examples per class, and notes on what may be wrong with the classes."""
        counts = Counter(examples.labels)
        notes = [f"Rows by class: {counts_by_name(labels, counts)}.", *super().doubts(examples, labels)]
        notes += _several_in_one(labels)
        notes += _too_many(labels)
        similar = [" and ".join(names) for names in _spellings(labels).values() if len(names) > 1]
        if similar:
            notes.append(f"Classes that differ only in case: {shortened(similar)}.")
        single = [name for i, name in enumerate(labels) if counts[i] == 1]
        if single:
            share = f"{len(single):,} of {len(labels):,} classes have one example, which stays in train"
            notes.append(f"{share}: {shortened(single)}.")
        return notes


class Numbers(ScalarReader):
    """A number."""

    kind: ClassVar[str] = "regression"
    labelled: ClassVar[bool] = False

    def label_names(self, table: Table) -> tuple[str, ...]:
        """No names: labels are numbers."""
        return ()

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The texts with their numbers."""
        values = [_finite(table.path, *item) for item in zip(table.lines, table.labels, strict=True)]
        return Examples(table.texts, table.pairs, values, table.lines)


def infer_kind(table: Table) -> tuple[str, list[str]]:
    """Classification or regression, and why: float labels mean regression, unless they are a few whole numbers."""
    numbers = [number(label) for label in table.labels]
    _refuse_decimal_commas(table)
    if not any(map(_is_float, table.labels)) or not _all_numbers(table, numbers):
        return Classes.kind, []
    values = {_finite(table.path, *item) for item in zip(table.lines, table.labels, strict=True)}
    if len(values) <= FEW_FLOATS and all(value.is_integer() for value in values):
        return Classes.kind, ["The float labels are all whole numbers, so they are taken as classes."]
    if len(values) == 1:
        raise DataError(f"{table.path}: every label is {values.pop()}; there is nothing to learn.")
    return Numbers.kind, [f"Float labels, so this is a regression, from {min(values):g} to {max(values):g}."]


def texts_of(path: RowSource, line: int, values: dict[str, object], columns: Columns) -> tuple[str, str | None]:
    """The text of a record, and the second text if there is a column for it; an empty cell is an empty text."""
    text = _text(path, line, columns.text, values.get(columns.text))
    if columns.text_pair is None:
        return text, None
    return text, _text(path, line, columns.text_pair, values.get(columns.text_pair))


def class_name(value: object) -> str:
    """The name of a class; 1, "1", 1.0 and "1.0" are the same, because pandas turns the first into the last."""
    name = str(value).strip()
    if isinstance(value, bool):
        return name.lower()
    whole_number = re.fullmatch(r"(-?\d+)\.0*", name)
    return whole_number[1] if whole_number else name


def _text(path: RowSource, line: int, name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict | bytes):
        raise fault(path, line, f'column "{name}" contains a {type(value).__name__}, not a text.')
    return "" if value is None else str(value)


def _is_float(value: object) -> bool:
    """Whether a label is a float: by its type, or written with a decimal point or an exponent."""
    if isinstance(value, str):
        return number(value) is not None and any(sign in value for sign in ".eE")
    return isinstance(value, float | Decimal)


def _refuse_decimal_commas(table: Table) -> None:
    """Raise DataError if all labels are numbers and some are written with a comma, like 3,5."""
    texts = [label.strip() for label in table.labels if isinstance(label, str)]
    if len(texts) < len(table.labels) or not all(re.fullmatch(r"-?\d+(,\d+)?", text) for text in texts):
        return
    for line, text in zip(table.lines, texts, strict=True):
        if "," in text:
            raise fault(table.path, line, f'label "{text}" has a decimal comma; write {text.replace(",", ".")}.')


def _all_numbers(table: Table, numbers: list[float | None]) -> bool:
    """Whether every label is a number; DataError if most are floats, so that the others must be mistakes."""
    if None not in numbers:
        return True
    floats = sum(map(_is_float, table.labels))
    if len(set(numbers)) > MANY_CLASSES and 2 * floats > len(numbers):
        row = numbers.index(None)
        _finite(table.path, table.lines[row], table.labels[row])
    return False


def _finite(path: RowSource, line: int, label: object) -> float:
    value = number(label)
    if value is None or not math.isfinite(value):
        raise fault(path, line, f'label "{label}" is not a finite number, but the other labels are.')
    return value


def _several_in_one(labels: tuple[str, ...]) -> list[str]:
    """A note on classes that look like several labels in one cell: names that recur between separators."""
    composed = [name for name in labels if re.search(r"[^|;][|;][^|;]", name)]
    counts = Counter(chain.from_iterable(map(_separated, labels)))
    if not any(counts[label] > 1 for label in chain.from_iterable(map(_separated, composed))):
        return []
    return [f'"{composed[0]}" looks like several labels in one cell; --task multilabel reads them one by one.']


def _separated(name: str) -> list[str]:
    return [label.strip() for label in re.split(r"[|;]", name)]


def _too_many(labels: tuple[str, ...]) -> list[str]:
    """A note on classes that are so many that they may be amounts, or the wrong column."""
    all_numeric = all(number(name) is not None for name in labels)
    if all_numeric and len(labels) >= MANY_NUMBERS:
        count = f"{len(labels):,} different whole numbers are taken as classes"
        return [f"{count}; if they are amounts, pass --task regression."]
    if len(labels) > MANY_CLASSES:
        return [f"There are {len(labels):,} classes; is this the right label column?"]
    return []


def _spellings(labels: tuple[str, ...]) -> dict[str, list[str]]:
    """The classes grouped by their names without case."""
    groups: dict[str, list[str]] = {}
    for name in labels:
        groups.setdefault(name.casefold(), []).append(name)
    return groups
