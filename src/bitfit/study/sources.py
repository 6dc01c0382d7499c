"""A study's task name -> its data: the one place that knows where named data comes from and how it is split."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from .. import data
from ..data import Dataset
from ..errors import DataError

METRICS = {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "spearman"}
HOLDOUT = 0.2


def dataset(task: str, folder: str | None, split: str, size: int | None, dev_size: int | None) -> Dataset:
    """The data of a task under a protocol, cut to `size` training rows and `dev_size` scored ones.

    `dev`: train and dev as published. `holdout`: a fifth of train becomes dev, the published dev becomes test; sizes
    count both parts, as what-to-freeze counts them. `test`: as published, scored on test.
    """
    found = data.load(_place(task, folder))
    if split == "holdout":
        found = _held_out(found, size)
    elif size is not None and size < len(found.train):
        found = replace(found, train=found.train.take(data.subset(found.train, found.kind, size, 0)))
    if split == "dev":
        found = replace(found, test=None)
    return replace(found, dev=_cut(found, found.dev, dev_size), test=found.test and _cut(found, found.test, dev_size))


def _place(task: str, folder: str | None) -> Path:
    where = folder or os.environ.get("BITFIT_DATA")
    if where is None:
        raise DataError(f"{task}: no data; pass --data DIR, which holds {task}/train.jsonl and {task}/dev.jsonl")
    path = Path(where) / task
    if not path.is_dir():
        raise DataError(f"{task}: no folder {path}")
    return path


def _held_out(found: Dataset, size: int | None) -> Dataset:
    whole = found.train
    if size is not None and size < len(whole):
        whole = whole.take(data.subset(whole, found.kind, size, 0))
    chosen = set(data.subset(whole, found.kind, max(1, round(HOLDOUT * len(whole))), 1))
    rest = [i for i in range(len(whole)) if i not in chosen]
    return replace(found, train=whole.take(rest), dev=whole.take(sorted(chosen)), test=found.dev)


def _cut(found: Dataset, part: data.Examples, size: int | None) -> data.Examples:
    if size is None or size >= len(part):
        return part
    return part.take(data.subset(part, found.kind, size, 0))


def metric(task: str) -> str | None:
    """The papers' metric of a task; None: the kind's own."""
    return METRICS.get(task)


def fingerprint(found: Dataset) -> str:
    """A digest of all rows of all parts, in order."""
    state = hashlib.sha256()
    for name in ("train", "dev", "test"):
        part = getattr(found, name)
        state.update(f"{name} {0 if part is None else len(part)}\n".encode())
        if part is not None:
            for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
                state.update(repr(row).encode())
    return state.hexdigest()
