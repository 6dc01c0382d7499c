"""A selection: which entries of which tensors train. The value, its set algebra, and its counts by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..errors import SelectionError
from .anatomy import Anatomy, Site

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Selection:
    """An immutable set of entries: per tensor either all of it (None) or sorted flat indices."""

    entries: Mapping[str, Indices | None]
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    injected: frozenset[str] = frozenset()  # the tensors among `shapes` that grafts add to the base

    def __post_init__(self) -> None:
        if unknown := sorted(self.entries.keys() - self.shapes.keys()):
            raise SelectionError(f'no parameter "{unknown[0]}" in this model.')
        kept: dict[str, Indices | None] = {}
        for name in self.shapes:
            if name not in self.entries or not self.size(name):
                continue
            indices = _canonical(name, self.entries[name], self.size(name))
            if indices is None or indices.size:
                kept[name] = indices
        object.__setattr__(self, "entries", MappingProxyType(kept))
        object.__setattr__(self, "shapes", MappingProxyType(dict(self.shapes)))

    def size(self, name: str) -> int:
        """How many entries a tensor of the model has, selected or not."""
        return math.prod(self.shapes[name])

    @property
    def count(self) -> int:
        """How many entries are selected."""
        return sum(self.size(name) if indices is None else indices.size for name, indices in self.entries.items())

    @property
    def matrix_share(self) -> float:
        """The selected share of the base's matrices; 1 as soon as one of them is selected whole."""
        total = selected = 0
        for name, shape in self.shapes.items():
            if len(shape) < 2 or name in self.injected:
                continue
            total += self.size(name)
            if name in self.entries:
                indices = self.entries[name]
                if indices is None:
                    return 1.0
                selected += indices.size
        return selected / max(1, total)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        same = self.shapes == other.shapes and self.entries.keys() == other.entries.keys()
        return same and all(_equal(indices, other.entries[name]) for name, indices in self.entries.items())

    def __add__(self, other: Selection) -> Selection:
        merged = dict(self.entries)
        for name, theirs in other.entries.items():
            merged[name] = _union(merged[name], theirs) if name in merged else theirs
        return self._with(other, merged)

    def __and__(self, other: Selection) -> Selection:
        common = {}
        for name, indices in self.entries.items():
            if name in other:
                common[name] = _common(indices, other.entries[name])
        return self._with(other, common)

    def __sub__(self, other: Selection) -> Selection:
        rest = dict(self.entries)
        for name, theirs in other.entries.items():
            if name in rest:
                rest[name] = _without(rest[name], theirs, self.size(name))
        return self._with(other, rest)

    def _with(self, other: Selection, entries: Mapping[str, Indices | None]) -> Selection:
        if self.shapes != other.shapes:
            raise SelectionError("selections of different models cannot be combined: their parameters differ.")
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Selection(entries, self.shapes, notes, self.injected | other.injected)


def _canonical(name: str, indices: Indices | None, size: int) -> Indices | None:
    """A sorted, unique, read-only copy of the indices, or None where they are the whole tensor."""
    if indices is None:
        return None
    copied = np.array(indices, dtype=np.int64)
    if (np.diff(copied) <= 0).any():
        copied = np.unique(copied)
    if copied.size and (copied[0] < 0 or copied[-1] >= size):
        raise SelectionError(f'an index lies outside "{name}", which has {size:,} entries.')
    copied.flags.writeable = False
    return None if copied.size == size else copied


def _equal(a: Indices | None, b: Indices | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)


def _union(a: Indices | None, b: Indices | None) -> Indices | None:
    return None if a is None or b is None else np.union1d(a, b)


def _common(a: Indices | None, b: Indices | None) -> Indices | None:
    if a is None or b is None:
        return b if a is None else a
    return np.intersect1d(a, b, assume_unique=True)


def _without(a: Indices | None, b: Indices | None, size: int) -> Indices:
    if b is None:
        return np.empty(0, np.int64)
    if a is not None:
        return np.setdiff1d(a, b, assume_unique=True)
    rest = np.ones(size, bool)
    rest[b] = False
    return np.flatnonzero(rest)


def count_by_term(anatomy: Anatomy, selection: Selection) -> dict[str, int]:
    """How many entries of each term the model offers are selected, in the papers' order."""
    if anatomy.shapes != selection.shapes:
        raise SelectionError("this selection belongs to another model: its parameters differ.")
    counts = dict.fromkeys(anatomy.terms, 0)
    for site in anatomy.sites:
        counts[site.term] += overlap(site, selection)
    return counts


def overlap(site: Site, selection: Selection) -> int:
    """How many entries of a site are selected."""
    if site.name not in selection:
        return 0
    indices = selection.entries[site.name]
    if indices is None:
        return site.size
    if site.whole:
        return indices.size
    span = site.span(site.axis)
    along = indices // math.prod(site.shape[site.axis + 1 :]) % site.shape[site.axis]
    return int(np.count_nonzero((along >= span.start) & (along < span.stop)))


def of_sites(anatomy: Anatomy, wanted: Callable[[Site], bool]) -> Selection:
    """All entries of the sites that `wanted` accepts."""
    sites: dict[str, list[Site]] = {}
    for site in filter(wanted, anatomy.sites):
        sites.setdefault(site.name, []).append(site)
    entries = {name: _joined(members) for name, members in sites.items()}
    return Selection(entries, anatomy.shapes, injected=anatomy.injected)


def _joined(sites: list[Site]) -> Indices | None:
    # Sites of a tensor are disjoint, so equal sizes mean equal sets and nothing needs to be materialised.
    if sum(site.size for site in sites) == math.prod(sites[0].shape):
        return None
    return np.concatenate([_flat(site) for site in sites])


def _flat(site: Site) -> Indices:
    """The flat indices of a site in its tensor."""
    spans = [site.span(axis) for axis in range(len(site.shape))]
    inside = tuple(slice(span.start, span.stop) for span in spans)
    return np.arange(math.prod(site.shape), dtype=np.int64).reshape(site.shape)[inside].ravel()
