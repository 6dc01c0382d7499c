"""The data of a study's tasks: how a split and sizes become a data set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from ..data import sources
from ..data.examples import Dataset, Examples
from ..data.sources import Source
from ..data.splits import subset
from ..errors import DataError, UsageError


@dataclass(frozen=True)
class Opening:
    """What it takes to open the data of a task on a base: plain values, so that another process can do the same."""

    base: str | None
    task: str
    data: str | None
    split: str
    size: int | None
    dev_size: int | None
    max_length: int
    seed: int = 0  # of the draw of training rows
    test_part: str = ""  # the part of the data that is the test set, where it is not the published one
    more_parts: tuple[str, ...] = ()  # further parts to score


def read(task: str, folder: str | None) -> Source:
    """Read a task's training file."""
    try:
        return sources.read(task, folder=folder)
    except UsageError as error:
        raise DataError(str(error)) from error


def dataset(source: Source, wanted: Opening) -> Dataset:
    """The data of a task under a protocol, cut to the sizes that are wanted.

    The dev part chooses rates and checkpoints, the test part is scored once. `holdout`: a fifth of train becomes dev
    and the published dev becomes test; sizes count both, as what-to-freeze counts them. `dev` and `test`: as
    published; without labelled test rows half of dev is held out for the test. Scored rows do not depend on the seed.
    """
    if wanted.split == "holdout":
        drawn = wanted.size if wanted.size is not None and wanted.size < len(source.published.train) else None
        whole = source.dataset("holdout", drawn, wanted.seed)
        dev, test = whole.dev, whole.more.get(wanted.test_part, whole.test)
    else:
        whole = source.dataset(seed=wanted.seed)
        whole = replace(whole, train=_cut(whole, whole.train, wanted.size, wanted.seed))
        dev, test = whole.dev, whole.test
    if test is None:
        dev, test = _halves(whole, dev)
    more = {name: _cut(whole, whole.more[name], wanted.dev_size) for name in wanted.more_parts if name in whole.more}
    cut_dev, cut_test = (_cut(whole, part, wanted.dev_size) for part in (dev, test))
    return replace(whole, dev=cut_dev, test=cut_test, more=more)


def _halves(found: Dataset, part: Examples) -> tuple[Examples, Examples]:
    """Two halves of the rows, each class in both."""
    first = subset(part, found.kind, len(part) // 2, 0)
    second = sorted(set(range(len(part))) - set(first))
    return part.take(first), part.take(second)


def _cut(found: Dataset, part: Examples, size: int | None, seed: int = 0) -> Examples:
    if size is None or size >= len(part):
        return part
    return part.take(subset(part, found.kind, size, seed))


def fingerprint(found: Dataset) -> str:
    """A digest of all rows of all parts, in order."""
    state = hashlib.sha256()
    parts: dict[str, Any] = {"train": found.train, "dev": found.dev, "test": found.test, **found.more}
    for name, part in parts.items():
        state.update(f"{name} {0 if part is None else len(part)}\n".encode())
        if part is None:
            continue
        for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
            state.update(repr(row).encode())
    return state.hexdigest()
