"""Finding the columns of text, second text and label: by well-known names, then by content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice

from ..errors import DataError, suggest
from .examples import Columns
from .formats import Row, rows
from .source import RowSource, StrPath, source_of

SAMPLE_ROWS = 500
MANY_CLASSES = 50
LONGEST_CLASS = 40  # characters

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text", "textpair"),
    ("texta", "textb"),
    ("sentencea", "sentenceb"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "passage"),
)
# In order of preference, compared without case, spaces and underscores.
TEXTS = (
    "text sentence review reviewtext content body comment commenttext tweet message document description abstract "
    "utterance phrase question query prompt input headline title subject"
)
LABELS = (
    "label labels target class category sentiment y gold goldlabel score rating stars star intent emotion topic "
    "polarity similarity labelname labeltext labelid"
)
# "" is the index column that pandas writes; "unnamed0" is the same column after one more round trip.
IDS = {"", "id", "ids", "idx", "index", "guid", "uuid", "uid", "rowid", "pairid", "unnamed0"}


@dataclass(frozen=True)
class Sample:
    """The first rows of a file, from which task kind and columns are inferred. They are read once, when needed."""

    path: RowSource

    @classmethod
    def of(cls, source: StrPath | RowSource | Sample) -> Sample:
        """The sample of a source; a sample is returned as it is."""
        return source if isinstance(source, Sample) else cls(source_of(source))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The first SAMPLE_ROWS rows."""
        return tuple(islice(rows(self.path), SAMPLE_ROWS))

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns, in order."""
        seen: dict[str, None] = {}
        for row in self.rows:
            seen.update(dict.fromkeys(row.values))
        return list(seen)

    def column(self, name: str) -> list[object]:
        """The values of a column; None for a row without it."""
        return [row.values.get(name) for row in self.rows]

    def check(self, columns: Sequence[str | None]) -> None:
        """Refuse a column that the file does not have, or that is named twice."""
        wanted = [name for name in columns if name is not None]
        for name in wanted:
            if name not in self.names:
                raise DataError(f'{self.path} has no column "{name}".{suggest(name, self.names)}')
            if wanted.count(name) > 1:
                raise DataError(f'Column "{name}" of {self.path} cannot be two of text, text pair and label at once.')


def find_columns(
    source: StrPath | RowSource | Sample,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """The named columns; the others by well-known names, then by their content. The label is None if unclear.

    A text column without a pair means a single text, even if another column could be its pair.
    """
    sample = Sample.of(source)
    named = (text, text_pair, label)
    sample.check(named)
    candidates = {}
    for name in sample.names:
        if name not in named and normalised(name) not in IDS:
            candidates[name] = sample.column(name)
    if text is None:
        text, text_pair = _find_text(sample, candidates, text_pair)
    if label is None:
        rest = {name: values for name, values in candidates.items() if name not in (text, text_pair)}
        label = _find_label(sample.path, rest)
    return Columns(text, text_pair, label)


def normalised(name: str) -> str:
    """A name in lower case without punctuation, spaces and underscores: SST-2, sst_2 and sst2 are the same."""
    return re.sub(r"[\W_]", "", name.lower())


def _find_text(sample: Sample, candidates: dict[str, list[object]], pair: str | None) -> tuple[str, str | None]:
    known = {normalised(name): name for name in reversed(candidates)}
    for first, second in PAIRS:
        if first in known and pair is None and second in known:
            return known[first], known[second]
        if first in known and pair is not None and normalised(pair) == second:
            return known[first], pair
    named = [known[name] for name in TEXTS.split() if name in known]
    if named:
        return named[0], pair
    texts = {}
    for name, values in candidates.items():
        if normalised(name) not in LABELS.split() and _is_mostly_text(values):
            texts[name] = values
    if not texts:
        names = ", ".join(sample.names)
        raise DataError(f"{sample.path}: no column looks like text; pass --text with one of: {names}.")
    return max(texts, key=lambda name: _text_likeness(texts[name])), pair


def _is_mostly_text(values: list[object]) -> bool:
    texts = [v for v in values if isinstance(v, str) and v.strip() and number(v) is None]
    return 2 * len(texts) > len(values)


def _text_likeness(values: list[object]) -> tuple[bool, float]:
    """A key that is larger the more a column looks like text: not like classes, then long on average."""
    mean_length = sum(len(str(v)) for v in values) / len(values)
    return not _is_class_like(values), mean_length


def _find_label(path: RowSource, rest: dict[str, list[object]]) -> str | None:
    known = {normalised(name): name for name in reversed(rest)}
    named = [known[name] for name in LABELS.split() if name in known]
    if named:
        return named[0]
    label = _only_candidate(rest)
    if label is not None and label in _distinct(rest[label]):
        raise DataError(f'{path}: the first line seems to be data ("{label}" is also a value); add a header line.')
    return label


def _only_candidate(rest: dict[str, list[object]]) -> str | None:
    """The only column that could be a label; None if there are several, since a wrong one would train without error."""
    classes = [name for name, values in rest.items() if _is_class_like(values)]
    varied = [name for name in classes if len(_distinct(rest[name])) > 1]
    numeric = [name for name, values in rest.items() if _is_numeric(values)]
    strongest = varied or numeric or classes
    return strongest[0] if len(strongest) == 1 else None


def _is_numeric(values: list[object]) -> bool:
    distinct = _distinct(values)
    return bool(distinct) and all(number(value) is not None for value in distinct)


def _distinct(values: list[object]) -> set[str]:
    return {str(v) for v in values if not is_missing(v)}


def _is_class_like(values: list[object]) -> bool:
    if not all(v is None or isinstance(v, str | int | float) for v in values):
        return False
    distinct = _distinct(values)
    most = max(2, min(MANY_CLASSES, len(values) // 2))
    return 0 < len(distinct) <= most and max(map(len, distinct)) <= LONGEST_CLASS


def number(value: object) -> float | None:
    """The number in a cell, be it a number or a text; None if there is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, str) and "_" in value:  # float() takes 1_000
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def is_missing(value: object) -> bool:
    """Whether a cell is empty."""
    return value is None or (isinstance(value, str) and not value.strip())
