"""A study's task name -> its data: the one place that knows how a study's split and sizes become a data set."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from ..data import sources
from ..data.examples import Dataset, Examples
from ..data.splits import subset
from ..errors import DataError, UsageError

OTHER_DEV = "dev_mismatched"  # of MNLI, scored by the trials of mnli
IN_DOMAIN = "dev_in_domain"  # of CoLA: what-to-freeze's test set of 527 sentences


def dataset(
    task: str, folder: str | None, split: str, size: int | None, dev_size: int | None
) -> tuple[Dataset, str | None]:
    """The data of a task under a protocol and its metric, cut to `size` training rows and `dev_size` scored ones.

    `dev`: train and dev as published. `holdout`: a fifth of train becomes dev, the published dev becomes test; sizes
    count both parts, as what-to-freeze counts them. `test`: as published, scored on test.
    """
    try:
        protocol = "holdout" if split == "holdout" else "published"
        whole, named = sources.load(task, folder=folder, protocol=protocol)
        if split == "holdout" and size is not None and size < len(whole.train) + len(whole.dev):
            whole, named = sources.load(task, folder=folder, protocol=protocol, train_size=size)
    except UsageError as error:
        raise DataError(str(error)) from error
    if split != "holdout":
        whole = replace(whole, train=_cut(whole, whole.train, size))
    if split == "holdout" and IN_DOMAIN in whole.more:
        whole = replace(whole, test=whole.more[IN_DOMAIN])
    test = None if split == "dev" or whole.test is None else _cut(whole, whole.test, dev_size)
    more = {name: _cut(whole, part, dev_size) for name, part in whole.more.items() if name == OTHER_DEV}
    found = replace(whole, dev=_cut(whole, whole.dev, dev_size), test=test, more=more)
    return found, named.metric if named else None


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
