"""A study's task name -> its data: the one place that knows how a study's split and sizes become a data set."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from ..data import sources
from ..data.examples import Dataset, Examples
from ..data.sources import Source
from ..data.splits import subset
from ..errors import DataError, UsageError

OTHER_DEV = "dev_mismatched"  # of MNLI, scored by the trials of mnli
IN_DOMAIN = "dev_in_domain"  # of CoLA: what-to-freeze's test set of 527 sentences


def read(task: str, folder: str | None) -> Source:
    """Read a task's training file."""
    try:
        return sources.read(task, folder=folder)
    except UsageError as error:
        raise DataError(str(error)) from error


def dataset(source: Source, split: str, size: int | None, dev_size: int | None) -> Dataset:
    """The data of a task under a protocol, cut to `size` training rows and `dev_size` scored ones.

    `dev`: train and dev as published. `holdout`: a fifth of train becomes dev, the published dev becomes test; sizes
    count both parts, as what-to-freeze counts them. `test`: as published, scored on test.
    """
    if split == "holdout":
        rows = len(source.published.train)
        whole = source.dataset("holdout", size if size is not None and size < rows else None)
        test = whole.more.get(IN_DOMAIN, whole.test)
    else:
        whole = source.dataset()
        whole = replace(whole, train=_cut(whole, whole.train, size))
        test = None if split == "dev" else whole.test
    more = {name: _cut(whole, part, dev_size) for name, part in whole.more.items() if name == OTHER_DEV}
    scored = None if test is None else _cut(whole, test, dev_size)
    return replace(whole, dev=_cut(whole, whole.dev, dev_size), test=scored, more=more)


def _cut(found: Dataset, part: Examples, size: int | None) -> Examples:
    if size is None or size >= len(part):
        return part
    return part.take(subset(part, found.kind, size, 0))


def fingerprint(found: Dataset) -> str:
    """A digest of all rows of all parts, in order."""
    state = hashlib.sha256()
    parts: dict[str, Any] = {"train": found.train, "dev": found.dev, "test": found.test, **found.more}
    for name, part in parts.items():
        state.update(f"{name} {0 if part is None else len(part)}\n".encode())
        if part is not None:
            for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
                state.update(repr(row).encode())
    return state.hexdigest()
