"""Selections: the entries of tensors that train, their set algebra, and their counts by site."""

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
class Learned:
    """How training determines the entries of a selection: it learns a gate for each entry of `operand`."""

    operand: Selection
    structured: bool  # whether each tensor has a gate too


@dataclass(frozen=True, eq=False)
class Selection:
    """An immutable set of entries: per tensor either all of it (None) or sorted flat indices."""

    entries: Mapping[str, Indices | None]
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    injected: frozenset[str] = frozenset()  # the tensors among `shapes` that grafts add to the base
    learned: Learned | None = None  # if set, training determines the entries; until then they are a sample of that size

    def __post_init__(self) -> None:
        if unknown := sorted(self.entries.keys() - self.shapes.keys()):
            raise SelectionError(f'no parameter "{unknown[0]}" in this model.')
        entries: dict[str, Indices | None] = {}
        for name in self.shapes:
            if name not in self.entries or not self.size(name):
                continue
            indices = _canonical(name, self.entries[name], self.size(name))
            if indices is None or indices.size:
                entries[name] = indices
        object.__setattr__(self, "entries", MappingProxyType(entries))
        object.__setattr__(self, "shapes", MappingProxyType(dict(self.shapes)))

    def size(self, name: str) -> int:
        """The number of entries of a tensor of the model, selected or not."""
        return math.prod(self.shapes[name])

    @property
    def count(self) -> int:
        """The number of selected entries."""
        return sum(self.selected(name) for name in self.entries)

    def selected(self, name: str) -> int:
        """The number of selected entries of a tensor."""
        if name not in self.entries:
            return 0
        indices = self.entries[name]
        return self.size(name) if indices is None else int(indices.size)

    @property
    def matrix_share(self) -> float:
        """The selected share of the entries of the base's matrices; 1 if any matrix is selected entirely."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) >= 2 and name not in self.injected]
        if any(name in self.entries and self.entries[name] is None for name in matrices):
            return 1.0
        total = sum(self.size(name) for name in matrices)
        return sum(self.selected(name) for name in matrices) / max(1, total)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        if self.shapes != other.shapes or self.entries.keys() != other.entries.keys():
            return False
        return all(_equal(indices, other.entries[name]) for name, indices in self.entries.items())

    def __add__(self, other: Selection) -> Selection:
        merged = dict(self.entries)
        for name, indices in other.entries.items():
            merged[name] = _union(merged[name], indices) if name in merged else indices
        return self._with(other, merged)

    def __and__(self, other: Selection) -> Selection:
        common = {}
        for name, indices in self.entries.items():
            if name in other:
                common[name] = _common(indices, other.entries[name])
        return self._with(other, common)

    def __sub__(self, other: Selection) -> Selection:
        rest = dict(self.entries)
        for name, indices in other.entries.items():
            if name in rest:
                rest[name] = _without(rest[name], indices, self.size(name))
        return self._with(other, rest)

    def _with(self, other: Selection, entries: Mapping[str, Indices | None]) -> Selection:
        if self.shapes != other.shapes:
            raise SelectionError("selections of different models cannot be combined: their parameters differ.")
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Selection(entries, self.shapes, notes, self.injected | other.injected)


def _canonical(name: str, indices: Indices | None, size: int) -> Indices | None:
    """A sorted, unique, read-only copy of the indices, or None if they are the whole tensor."""
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
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b)


def _union(a: Indices | None, b: Indices | None) -> Indices | None:
    return None if a is None or b is None else np.union1d(a, b)


def _common(a: Indices | None, b: Indices | None) -> Indices | None:
    if a is None:
        return b
    if b is None:
        return a
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
    """The number of selected entries of each term of the model, in the papers' order."""
    if anatomy.shapes != selection.shapes:
        raise SelectionError("this selection belongs to another model: its parameters differ.")
    counts = dict.fromkeys(anatomy.terms, 0)
    for site in anatomy.sites:
        counts[site.term] += overlap(site, selection)
    return counts


def overlap(site: Site, selection: Selection) -> int:
    """The number of selected entries of a site."""
    if site.name not in selection:
        return 0
    indices = selection.entries[site.name]
    if indices is None:
        return site.size
    if site.whole:
        return indices.size
    span = site.span(site.axis)
    position = np.unravel_index(indices, site.shape)[site.axis]
    return int(np.count_nonzero((position >= span.start) & (position < span.stop)))


def of_sites(anatomy: Anatomy, wanted: Callable[[Site], bool]) -> Selection:
    """All entries of the sites that `wanted` accepts."""
    sites: dict[str, list[Site]] = {}
    for site in filter(wanted, anatomy.sites):
        sites.setdefault(site.name, []).append(site)
    entries = {name: _joined(members) for name, members in sites.items()}
    return Selection(entries, anatomy.shapes, injected=anatomy.injected)


def _joined(sites: list[Site]) -> Indices | None:
    """The flat indices of all sites of one tensor; None if they are the whole tensor."""
    # Sites are disjoint, so they cover the tensor if their sizes add up to its size.
    if sum(site.size for site in sites) == math.prod(sites[0].shape):
        return None
    return np.concatenate([_flat(site) for site in sites])


def _flat(site: Site) -> Indices:
    """The flat indices of a site in its tensor."""
    spans = [site.span(axis) for axis in range(len(site.shape))]
    inside = tuple(slice(span.start, span.stop) for span in spans)
    return np.arange(math.prod(site.shape), dtype=np.int64).reshape(site.shape)[inside].ravel()
