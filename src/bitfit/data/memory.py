"""Data in memory as rows, like those of a file: frames, data sets, lists of rows, texts with labels.

Frames of pandas, polars and datasets are recognised by the module of their class, so none of these libraries is
imported or needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..errors import DataError
from .examples import Dataset, Files
from .loading import ROLES
from .source import Records, StrPath

ACCEPTED = (
    "a path, a pandas or polars DataFrame, a datasets.Dataset or DatasetDict, a list of dicts, (texts, labels), "
    'or a dict of these by split ("train", "dev", "test")'
)


class Frame(Protocol):
    """A pandas or polars DataFrame."""

    @property
    def columns(self) -> Any:
        """The names of the columns."""


class HubDataset(Protocol):
    """A datasets.Dataset."""

    @property
    def features(self) -> Any:
        """The columns and what they hold."""


Table = Frame | HubDataset | Sequence[Mapping[str, Any]] | tuple[Sequence[Any], Sequence[Any]]
"""Labelled rows in memory."""
Data = StrPath | Dataset | Table | Mapping[str, Table]
"""What `train` takes: a path or the name of a task, a data set, rows in memory, or rows in memory by split."""


def source_of_data(data: Data) -> StrPath | Dataset | Files:
    """Data in memory as files; a path or a data set as it is. TypeError for anything else."""
    return data if isinstance(data, str | os.PathLike | Dataset) else files_of(data)


def files_of(data: object) -> Files:
    """Data in memory as the splits of a data set; TypeError for anything else."""
    if not isinstance(data, Mapping):
        return Files(records_of(data))
    splits = {str(name).lower(): rows for name, rows in data.items()}
    by_role: dict[str, Records] = {}
    for name, rows in splits.items():
        role = _role(name)
        if role in by_role:
            raise DataError(f"two splits of the data mean {role}: rename or remove one")
        by_role[role] = records_of(rows, name)
    if "train" not in by_role:
        names = ", ".join(splits) or "none"
        raise TypeError(f"data by split must have a split train; it has {names}; pass {ACCEPTED}")
    more = {name: records for name, records in by_role.items() if name not in ROLES}
    return Files(by_role["train"], by_role.get("dev"), by_role.get("test"), more)


def split_of(data: Mapping[str, object], split: str | None = None) -> Records:
    """The rows of one split, by its name or role; without a name those of test, or of the only split."""
    if not data or not all(isinstance(name, str) for name in data):
        raise TypeError(f"data by split has names of splits; give {ACCEPTED}")
    by_name = {name.lower(): name for name in data}
    if split is None:
        split = next(iter(data)) if len(data) == 1 else "test"
    wanted = split.lower()
    name_of_split = by_name.get(wanted) or next((name for low, name in by_name.items() if _role(low) == wanted), None)
    if name_of_split is None:
        raise DataError(f'the data has no split "{split}"; name one with split=: {", ".join(data)}')
    return records_of(data[name_of_split], name_of_split)


def _role(split: str) -> str:
    """train, dev or test for a usual name of it, as "validation" means dev; any other name is itself."""
    for role, names in ROLES.items():
        if split in names:
            return role
    return split


def records_of(data: object, name: str = "the data") -> Records:
    """Rows in memory; TypeError for anything that is not a table of rows or (texts, labels)."""
    if isinstance(data, Records):
        return data
    library = type(data).__module__.partition(".")[0]
    rows_in = _LIBRARIES.get(library, {}).get(type(data).__name__)
    rows: Sequence[Mapping[str, object]] | None = None
    if rows_in is not None:
        rows = [_plain_row(row) for row in rows_in(data)]
    elif isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        rows = [_plain_row(row) for row in data]
    elif isinstance(data, tuple) and len(data) == 2:
        rows = _labelled_texts(*data)
    if rows is None:
        raise TypeError(
            f"data of type {type(data).__module__}.{type(data).__qualname__} is not supported; pass {ACCEPTED}"
        )
    if not rows:
        raise DataError(f"{name} has no rows.")
    return Records(rows, name, data.index.tolist() if library == "pandas" else None)  # type: ignore[attr-defined]


def is_frame(data: object) -> bool:
    """Whether this is a frame or a data set of a known library."""
    library = type(data).__module__.partition(".")[0]
    return type(data).__name__ in _LIBRARIES.get(library, {})


def _pandas_rows(frame: Any) -> Iterator[Mapping[str, object]]:
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise DataError("the frame has two columns of the same name; rename one of them.")
    for values in frame.itertuples(index=False, name=None):
        yield dict(zip(names, values, strict=True))


def _polars_rows(frame: Any) -> Iterator[Mapping[str, object]]:
    yield from frame.iter_rows(named=True)


def _dataset_rows(dataset: Any) -> Iterator[Mapping[str, object]]:
    """Rows of a datasets.Dataset, with class numbers as their names."""
    names = {column: feature for column, feature in dataset.features.items() if hasattr(feature, "int2str")}
    for row in dataset:
        for column, feature in names.items():
            if isinstance(row[column], int) and row[column] >= 0:  # -1 is a hidden label
                row[column] = feature.int2str(row[column])
        yield row


_LIBRARIES: dict[str, dict[str, Callable[[Any], Iterator[Mapping[str, object]]]]] = {
    "pandas": {"DataFrame": _pandas_rows},
    "polars": {"DataFrame": _polars_rows},
    "datasets": {"Dataset": _dataset_rows},
}


def _labelled_texts(texts: object, labels: object) -> list[Mapping[str, object]]:
    """Rows of texts, pairs of texts or lists of words, each with its label."""
    items = _column(texts, "texts")
    answers = _column(labels, "labels")
    if len(items) != len(answers):
        raise DataError(f"{len(items):,} texts and {len(answers):,} labels: the numbers must be equal")
    rows: list[Mapping[str, object]] = []
    for text, label in zip(items, answers, strict=True):
        if isinstance(text, tuple):
            if len(text) != 2:
                raise TypeError(f"a tuple of {len(text)} texts; a text is one string, or a tuple of two")
            rows.append({"sentence1": text[0], "sentence2": text[1], "label": label})
        elif isinstance(text, list):
            rows.append({"tokens": text, "tags": label})
        elif isinstance(text, str):
            rows.append({"text": text, "label": label})
        else:
            raise TypeError(f"a text of type {type(text).__name__}; texts are strings, pairs of them or lists of words")
    return rows


def _column(values: object, what: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise TypeError(f"{what} must be a list, not {type(values).__name__}; pass {ACCEPTED}")
    return [_plain(value) for value in values]


def _plain_row(row: Mapping[str, object]) -> dict[str, object]:
    return {str(name): _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A cell as it would be read from a file: Python's built-in types, None for a missing value."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, str | int | bool | type(None) | dict):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, a polars Series
        return _plain(value.tolist())
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value
