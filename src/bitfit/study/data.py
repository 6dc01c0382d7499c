"""The data sets of a study's tasks, by split and sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from ..data import sources
from ..data.examples import Dataset, Examples, Kind
from ..data.sources import Source
from ..data.splits import subset
from ..errors import DataError, UsageError


@dataclass(frozen=True)
class Opening:
    """Which data to open: a task, its split and sizes, and the base that it is encoded for.

    It holds plain values, so that another process can open the same data.
    """

    base: str | None
    task: str
    data: str | None
    split: str
    size: int | None
    dev_size: int | None
    max_length: int
    seed: int = 0  # of the draw of training rows
    test_part: str = ""  # the split that is the test set, if it is not the published one
    more_parts: tuple[str, ...] = ()  # further splits to score


def read(task: str, folder: str | None) -> Source:
    """Read a task's training file."""
    try:
        return sources.read(task, folder=folder)
    except UsageError as error:
        raise DataError(str(error)) from error


def dataset(source: Source, opening: Opening) -> Dataset:
    """The data of a task under a protocol, cut to the requested sizes.

    Dev chooses rates and checkpoints, test is scored once. `holdout`: a fifth of train becomes dev and the published
    dev becomes test; sizes count both, as what-to-freeze counts them. `dev` and `test`: as published; without labelled
    test rows half of dev is held out as test. Scored rows do not depend on the seed.
    """
    if opening.split == "holdout":
        size = opening.size
        if size is not None and size >= len(source.published.train):
            size = None
        data = source.dataset("holdout", size, opening.seed)
        test = data.more.get(opening.test_part, data.test)
    else:
        data = source.dataset(seed=opening.seed)
        data = replace(data, train=_cut(data.train, data.kind, opening.size, opening.seed))
        test = data.test
    dev = data.dev
    if test is None:
        dev, test = _halves(dev, data.kind)
    more = {}
    for name in opening.more_parts:
        if name in data.more:
            more[name] = _cut(data.more[name], data.kind, opening.dev_size)
    dev = _cut(dev, data.kind, opening.dev_size)
    test = _cut(test, data.kind, opening.dev_size)
    return replace(data, dev=dev, test=test, more=more)


def _halves(examples: Examples, kind: Kind) -> tuple[Examples, Examples]:
    """Two halves of the examples, each class in both."""
    first = subset(examples, kind, len(examples) // 2, 0)
    second = sorted(set(range(len(examples))) - set(first))
    return examples.take(first), examples.take(second)


def _cut(examples: Examples, kind: Kind, size: int | None, seed: int = 0) -> Examples:
    """At most `size` of the examples."""
    if size is None or size >= len(examples):
        return examples
    return examples.take(subset(examples, kind, size, seed))


def fingerprint(data: Dataset) -> str:
    """A digest of all rows of all splits, in order."""
    state = hashlib.sha256()
    splits: dict[str, Any] = {"train": data.train, "dev": data.dev, "test": data.test, **data.more}
    for name, examples in splits.items():
        state.update(f"{name} {0 if examples is None else len(examples)}\n".encode())
        if examples is None:
            continue
        for row in zip(examples.texts, examples.pairs or examples.texts, examples.labels, strict=True):
            state.update(repr(row).encode())
    return state.hexdigest()
