"""Splits and subsets of examples: seeded, by class, with equal texts on one side."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, islice

from ..errors import DataError
from .examples import Examples, Kind, agree, duplicates
from .readers import reader_of
from .readers.reader import Reader

DEV_SHARE, DEV_MOST = 0.1, 2000


def _strata(examples: Examples, reader: Reader) -> list[int]:
    """The class of each example; one stratum for all where there are no classes."""
    return [int(label) for label in examples.labels] if reader.by_class else [0] * len(examples)


def split(examples: Examples, kind: Kind, seed: int, share: float | None = None) -> tuple[list[int], list[int]]:
    """Indices of train and dev: this share (10%, at most about 2,000) of every class, equal texts on one side.

    A text with conflicting labels stays in train, so that every class keeps an example there and dev is clean.
    Kinds that say so (questions on one context) keep equal second texts together.
    """
    reader = reader_of(kind)
    strata = _strata(examples, reader)
    groups: defaultdict[int, list[list[int]]] = defaultdict(list)
    for group in duplicates(examples, reader.by_pair):
        if reader.by_pair or agree(examples, group):
            groups[strata[group[0]]].append(group)
    share = share or min(DEV_SHARE, DEV_MOST / max(1, len(examples)))
    rng = random.Random(f"split {seed}")
    sizes = sorted(Counter(strata).items())
    dev = set(chain.from_iterable(_dev_part(groups[stratum], size, share, rng) for stratum, size in sizes))
    return [i for i in range(len(examples)) if i not in dev], sorted(dev)


def _dev_part(groups: list[list[int]], size: int, share: float, rng: random.Random) -> list[int]:
    rng.shuffle(groups)
    wanted = max(1, round(share * size)) if size > 1 else 0
    chosen: list[int] = []
    for group in groups:
        if len(chosen) + len(group) <= wanted:
            chosen += group
    smallest = min(groups, key=len, default=[])
    return smallest if wanted and not chosen and len(smallest) < size else chosen


def subset(examples: Examples, kind: Kind, size: int, seed: int) -> list[int]:
    """Indices of exactly so many examples, each class with its share; a smaller subset lies within a larger one."""
    if not 1 <= size <= len(examples):
        raise DataError(f"Train size {size:,} is not between 1 and the {len(examples):,} training rows there are.")
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, stratum in enumerate(_strata(examples, reader_of(kind))):
        members[stratum].append(i)
    pools = [members[stratum] for stratum in sorted(members)]
    rng = random.Random(f"subset {seed}")
    for pool in pools:
        rng.shuffle(pool)
    turns = islice(_interleaved([len(pool) for pool in pools]), size)
    return sorted(pools[k].pop() for k in turns)


def _interleaved(sizes: list[int]) -> Iterator[int]:
    """Class after class so that every prefix holds each class's share rounded down or up.

    The j-th member of a class must appear in the slots where its class's share passes from j to j + 1;
    taking the earliest deadline first always meets all of them (unit jobs with release times).
    """
    total = sum(sizes)
    jobs = ((j * total // size, -(-(j + 1) * total // size), k) for k, size in enumerate(sizes) for j in range(size))
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[int, int]] = []
    for slot in range(total):
        while waiting and waiting[-1][0] <= slot:
            heapq.heappush(ready, waiting.pop()[1:])
        yield heapq.heappop(ready)[1]


def folds(examples: Examples, kind: Kind, count: int, seed: int) -> list[list[int]]:
    """Indices in so many folds, each class spread evenly over them, equal texts in one fold."""
    reader = reader_of(kind)
    strata = _strata(examples, reader)
    groups = list(duplicates(examples, reader.by_pair))
    random.Random(f"folds {seed}").shuffle(groups)
    groups.sort(key=lambda group: strata[group[0]])  # stable: the order within a class stays random
    found: list[list[int]] = [[] for _ in range(count)]
    for place, group in enumerate(groups):
        found[place % count] += group
    return [sorted(fold) for fold in found if fold]
