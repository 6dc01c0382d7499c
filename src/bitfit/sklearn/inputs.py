"""What `fit` and `predict` take as texts, pairs of texts, sentences and tags, checked as scikit-learn does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.readers.tagging import split_words

TEXTS = "a list, array or Series of texts, or a frame with one column of texts, or two for pairs"


@dataclass(frozen=True)
class Inputs:
    """Texts or pairs of texts, with the columns they come from if they were a frame."""

    texts: list[str]
    pairs: list[str] | None
    columns: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def width(self) -> int:
        """How many texts a row has: 1, or 2 for pairs."""
        return 1 if self.pairs is None else 2


def texts_of(X: object) -> Inputs:
    """Texts or pairs; TypeError or ValueError for anything else."""
    table = _table(X)
    if not len(table):
        raise ValueError("Found array with 0 sample(s); pass at least one text.")
    for value in table.flat:
        if not isinstance(value, str):
            raise TypeError(f"a text of type {type(value).__name__}; pass {TEXTS}")
    columns = [column.tolist() for column in table.T]
    return Inputs(columns[0], columns[1] if len(columns) == 2 else None, _names(X))


def _table(X: object) -> Any:
    """The cells in one or two columns."""
    if isinstance(X, str | bytes):
        raise TypeError(f"a single text; pass {TEXTS}")
    if isinstance(X, Iterable) and not hasattr(X, "__len__"):
        X = list(X)
    table = np.asarray(X, dtype=object)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.shape[1] not in (1, 2):
        raise ValueError(f"an input of shape {table.shape}; pass {TEXTS}")
    return table


def _names(X: Any) -> tuple[str, ...] | None:
    names = getattr(X, "columns", None)
    if names is None or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def sentences_of(X: object) -> list[tuple[str, ...]]:
    """Sentences as words; a sentence that is a text is split into words."""
    sentences = []
    for sentence in _rows(X, "sentences"):
        words = split_words(sentence) if isinstance(sentence, str) else tuple(_rows(sentence, "words"))
        if not all(isinstance(word, str) for word in words):
            raise TypeError("a word that is not a string; a sentence is a list of words, or a text")
        sentences.append(words)
    if not sentences:
        raise ValueError("Found array with 0 sample(s); pass at least one sentence.")
    return sentences


def tags_of(y: object, sentences: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The tags of each sentence, one per word."""
    rows = [tuple(map(str, _rows(tags, "tags"))) for tags in _rows(y, "lists of tags")]
    if len(rows) != len(sentences):
        raise ValueError(f"Found input variables with inconsistent numbers of samples: {[len(sentences), len(rows)]}")
    for number, (words, tags) in enumerate(zip(sentences, rows, strict=True)):
        if len(words) != len(tags):
            raise ValueError(f"sentence {number} has {len(words)} words and {len(tags)} tags")
    return rows


def _rows(values: object, what: str) -> Iterable[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"expected a list of {what}, not {type(values).__name__}")
    return values
