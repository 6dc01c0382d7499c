"""Splits and subsets of examples: seeded, by class, with equal texts on one side."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice

from ..errors import DataError
from .examples import Examples, Kind, agree, duplicates
from .readers import reader_of
from .readers.reader import Reader

DEV_SHARE = 0.1
DEV_MOST = 2000  # rows


def _strata(examples: Examples, reader: Reader) -> list[int]:
    """The class of each example; 0 for every example of a kind without classes."""
    if not reader.by_class:
        return [0] * len(examples)
    return [int(label) for label in examples.labels]


def split(examples: Examples, kind: Kind, seed: int, share: float | None = None) -> tuple[list[int], list[int]]:
    """Indices of train and dev. Dev gets `share` of every class (default: 10%, at most about 2,000 rows).

    Equal texts go to the same side. A text with conflicting labels stays in train, so that every class keeps an
    example there and dev is clean. Readers with `by_pair` (questions on one context) keep equal second texts together.
    """
    reader = reader_of(kind)
    strata = _strata(examples, reader)
    groups: defaultdict[int, list[list[int]]] = defaultdict(list)
    for group in duplicates(examples, reader.by_pair):
        if reader.by_pair or agree(examples, group):
            groups[strata[group[0]]].append(group)
    share = share or min(DEV_SHARE, DEV_MOST / max(1, len(examples)))
    rng = random.Random(f"split {seed}")
    dev: set[int] = set()
    for stratum, size in sorted(Counter(strata).items()):
        dev.update(_draw_dev(groups[stratum], size, share, rng))
    train = [i for i in range(len(examples)) if i not in dev]
    return train, sorted(dev)


def _draw_dev(groups: list[list[int]], size: int, share: float, rng: random.Random) -> list[int]:
    """Draw whole groups from a class of `size` examples, until they make up the share; at least the smallest group."""
    rng.shuffle(groups)
    if size < 2:
        return []
    wanted = max(1, round(share * size))
    chosen: list[int] = []
    for group in groups:
        if len(chosen) + len(group) <= wanted:
            chosen += group
    smallest = min(groups, key=len, default=[])
    if not chosen and len(smallest) < size:
        return smallest
    return chosen


def subset(examples: Examples, kind: Kind, size: int, seed: int) -> list[int]:
    """Indices of `size` examples, each class with its share; a smaller subset is contained in a larger one."""
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
    """Class numbers in an order whose every prefix holds each class's share, rounded down or up.

    The j-th member of a class must appear in the slots where its class's share passes from j to j + 1. Taking the
    earliest deadline first meets all deadlines (unit jobs with release times).
    """
    total = sum(sizes)
    waiting: list[tuple[int, int, int]] = []
    for k, size in enumerate(sizes):
        for j in range(size):
            release = j * total // size
            deadline = -(-(j + 1) * total // size)  # rounded up
            waiting.append((release, deadline, k))
    waiting.sort(reverse=True)
    ready: list[tuple[int, int]] = []
    for slot in range(total):
        while waiting and waiting[-1][0] <= slot:
            _, deadline, k = waiting.pop()
            heapq.heappush(ready, (deadline, k))
        yield heapq.heappop(ready)[1]


def folds(examples: Examples, kind: Kind, count: int, seed: int) -> list[list[int]]:
    """Indices of `count` folds. Each class is spread evenly over them; equal texts are in one fold."""
    reader = reader_of(kind)
    strata = _strata(examples, reader)
    groups = list(duplicates(examples, reader.by_pair))
    random.Random(f"folds {seed}").shuffle(groups)
    groups.sort(key=lambda group: strata[group[0]])  # stable: the order within a class stays random
    members: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        members[i % count] += group
    return [sorted(fold) for fold in members if fold]
