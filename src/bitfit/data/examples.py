"""Labelled examples: what the readers return and the tasks take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .source import RowSource

if TYPE_CHECKING:
    from .on_disk import DiskTexts

Kind = str
"""The name of a kind of task, such as "classification": a key of data.readers.READERS and of tasks.KINDS."""


class Answer(NamedTuple):
    """A gold answer and where it begins in its context."""

    text: str
    start: int


@dataclass(frozen=True)
class Columns:
    """The columns of text, second text and label; `numbered`: a cell may hold the number of a label, not its name."""

    text: str
    text_pair: str | None = None
    label: str | None = None
    numbered: bool = False
    separator: str | None = None  # between several labels in a cell; None: | or ;


@dataclass(frozen=True)
class Files:
    """The files a data set consists of."""

    train: RowSource
    dev: RowSource | None = None
    test: RowSource | None = None
    more: Mapping[str, RowSource] = field(default_factory=dict)  # further sets to score, by name


@dataclass(frozen=True)
class Examples:
    """Texts, and if known their labels and the lines of the file that they came from.

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
        from .on_disk import DiskTexts  # imports numpy, which --help does without

        indices = list(indices)

        def take(column: list[Any]) -> list[Any]:
            if isinstance(column, DiskTexts):
                return column.take(indices)
            if isinstance(column, array):
                return array(column.typecode, [column[i] for i in indices])
            return [column[i] for i in indices] if column else []

        pairs = None if self.pairs is None else take(self.pairs)
        return Examples(take(self.texts), pairs, take(self.labels), take(self.lines))

    def __add__(self, other: Examples) -> Examples:
        """These examples followed by the others."""
        pairs = None if self.pairs is None or other.pairs is None else self.pairs + other.pairs
        return Examples(self.texts + other.texts, pairs, self.labels + other.labels, self.lines + other.lines)


@dataclass(frozen=True)
class Table:
    """The usable records of a file, with the labels as written in the file."""

    path: RowSource
    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any]
    lines: list[int]
    notes: list[str]


@dataclass(frozen=True)
class Dataset:
    """The examples of every split and what training must know of them; `notes` are sentences for the user."""

    train: Examples
    dev: Examples
    test: Examples | None
    kind: Kind
    labels: tuple[str, ...]
    columns: Columns
    notes: tuple[str, ...]
    more: Mapping[str, Examples] = field(default_factory=dict)
    held_out: bool = False  # whether dev was split off the training rows and may be trained on in the end


def duplicates(examples: Examples, by_pair: bool = False) -> Iterator[list[int]]:
    """Indices grouped by equal text and second text (or by the second alone), in order of first appearance."""
    from .on_disk import DiskTexts

    second = examples.pairs or examples.texts
    first = second if by_pair else examples.texts
    if isinstance(first, DiskTexts) and isinstance(second, DiskTexts):
        yield from _equal_on_disk(first, second)
        return
    groups: dict[tuple[Any, str], list[int]] = {}
    for i, key in enumerate(zip(first, second, strict=True)):
        groups.setdefault(key, []).append(i)
    yield from groups.values()


def _equal_on_disk(first: DiskTexts, second: DiskTexts) -> Iterator[list[int]]:
    """The same for texts that are not in memory: compared by digests, which take 16 bytes each."""
    import numpy as np

    digests = np.concatenate([first.digests(), second.digests()], axis=1) if second is not first else first.digests()
    order = np.lexsort(digests.T)  # stable: equal texts stay in their order
    differs = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    del digests
    starts = np.concatenate([[0], np.flatnonzero(differs) + 1, [len(order)]])
    if not len(order):
        return
    for group in np.argsort(order[starts[:-1]], kind="stable"):
        yield order[starts[group] : starts[group + 1]].tolist()


def agree(examples: Examples, group: list[int]) -> bool:
    """Whether these examples have the same label."""
    return len(group) == 1 or len({examples.labels[i] for i in group}) == 1


def conflicts(examples: Examples) -> int:
    """The number of repeated texts with different labels."""
    return sum(not agree(examples, group) for group in duplicates(examples))


def skipped(path: RowSource, what: str, lines: list[int]) -> list[str]:
    """A note on rows that were skipped, with their first line numbers; no note if there are none."""
    if not lines:
        return []
    plural = "" if len(lines) == 1 else "s"
    return [f"Skipped {len(lines):,} row{plural} of {path.name} with {what} (line{plural} {shortened(lines)})."]


def shortened(items: Sequence[object], most: int = 5) -> str:
    """The first `most` items, comma-separated."""
    more = ", ..." if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
