"""Strategies: how a sample such as `random(all, 0.1%)` picks its entries.

A strategy is a function from a request to a selection. It gets names and shapes, a seeded random generator and, if it
asks for them, the values of the base. A package adds one with an entry point of the group "bitfit.strategies".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..errors import SelectionError
from ..plugins import Registry
from .anatomy import Anatomy, Site
from .selection import Indices, Learned, Selection, overlap


class WeightsNeeded(SelectionError):
    """A strategy that chooses by the base's weights, where only a configuration is known."""


@dataclass(frozen=True)
class Request:
    """The request to a strategy: pick `count` of the entries in `operand`."""

    anatomy: Anatomy
    operand: Selection
    count: int
    rng: np.random.Generator

    def values(self, name: str) -> Array:
        """The base's values of a tensor, flat; WeightsNeeded if only the configuration of the base is known."""
        if name in self.anatomy.injected:  # the base has no values of it
            return np.zeros(self.operand.size(name), np.float32)
        if self.anatomy.values is None:
            raise WeightsNeeded(
                "its entries are chosen by the base's weights, and this is only a configuration; "
                "pass the folder or the hub id of the base"
            )
        return self.anatomy.values(name).reshape(-1)

    def selection(self, entries: dict[str, Indices], *notes: str) -> Selection:
        """A selection of these entries of the model, with notes for the user."""
        return Selection(entries, self.anatomy.shapes, notes)


Strategy = Callable[[Request], Selection]

STRATEGIES: Registry[Strategy] = Registry(
    "bitfit.strategies",
    {
        "random": "bitfit.model.strategies:random",
        "each": "bitfit.model.strategies:each",
        "rowcol": "bitfit.model.strategies:rowcol",
        "magnitude": "bitfit.model.strategies:magnitude",
        "diff_pruning": "bitfit.model.strategies:diff_pruning",
        "diff_pruning_unstructured": "bitfit.model.strategies:diff_pruning_unstructured",
    },
)
LEARNED = ("diff_pruning", "diff_pruning_unstructured")
"""The strategies whose entries training determines; such a sample cannot be combined with other terms."""


def random(request: Request) -> Selection:
    """A uniform sample of the operand's entries, without replacement."""
    if not request.count:
        return request.selection({})
    # Sorted by name, so that the sample does not depend on the order of the model's parameters.
    operand = request.operand
    names = sorted(operand.entries)
    ends = np.cumsum([operand.selected(name) for name in names])
    drawn = np.sort(request.rng.choice(operand.count, request.count, replace=False, shuffle=False))
    chosen = {}
    for name, positions in zip(names, _per_run(drawn, ends), strict=True):
        indices = operand.entries[name]
        chosen[name] = positions if indices is None else indices[positions]
    return request.selection(chosen)


def each(request: Request) -> Selection:
    """A uniform sample within every tensor of the operand, each with its share of the entries."""
    operand = request.operand
    names = sorted(operand.entries)
    sizes = [operand.selected(name) for name in names]
    counts = _shares(sizes, request.count)
    chosen = {}
    for name, size, count in zip(names, sizes, counts, strict=True):
        indices = operand.entries[name]
        drawn = np.sort(request.rng.choice(size, count, replace=False, shuffle=False))
        chosen[name] = drawn if indices is None else indices[drawn]
    return request.selection(chosen)


def _shares(sizes: list[int], count: int) -> list[int]:
    """The count divided in proportion to the sizes; the rest after rounding goes to the largest remainders."""
    exact = [size * count / max(1, sum(sizes)) for size in sizes]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda n: shares[n] - exact[n])
    for n in by_remainder[: count - sum(shares)]:
        shares[n] += 1
    return shares


def magnitude(request: Request) -> Selection:
    """The entries of the operand with the largest absolute values in the base; of equal ones, the first by name."""
    if not request.count:
        return request.selection({})
    names = sorted(request.operand.entries)
    # An entry of the sample is among the `count` largest of its tensor: only those are compared.
    candidates = [_largest_in(request, name) for name in names]
    values = np.concatenate([tensor_values for _, tensor_values in candidates])
    ends = np.cumsum([len(indices) for indices, _ in candidates])
    positions = _per_run(largest(values, request.count), ends)
    chosen = {}
    for name, (indices, _), in_tensor in zip(names, candidates, positions, strict=True):
        chosen[name] = indices[in_tensor]
    return request.selection(chosen)


def _largest_in(request: Request, name: str) -> tuple[Indices, Array]:
    """The entries of one tensor that may belong to the sample: their indices and absolute values."""
    indices = request.operand.entries[name]
    values = np.abs(request.values(name))
    if indices is None:
        indices = np.arange(values.size)
    values = values[indices]
    positions = largest(values, min(request.count, values.size))
    return indices[positions], values[positions]


def largest(values: Array, count: int) -> Indices:
    """The ascending positions of the `count` largest values; of equal ones, the first."""
    threshold = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: count - above.size]
    return np.sort(np.concatenate([above, ties]))


def diff_pruning(request: Request) -> Selection:
    """The entries that Diff-Pruning keeps, by a gate of each entry and one of each tensor."""
    return _to_be_learned(request, structured=True)


def diff_pruning_unstructured(request: Request) -> Selection:
    """The entries that Diff-Pruning keeps, by a gate of each entry."""
    return _to_be_learned(request, structured=False)


def _to_be_learned(request: Request, structured: bool) -> Selection:
    if not request.count:
        raise SelectionError("no entries to learn")
    stand_in = each(request)
    learned = Learned(request.operand, structured)
    return Selection(stand_in.entries, stand_in.shapes, injected=request.operand.injected, learned=learned)


def _per_run(positions: Indices, ends: Indices) -> list[Indices]:
    """Sorted positions in consecutive runs that end at `ends`, split into the positions within each run."""
    runs = np.split(positions, np.searchsorted(positions, ends[:-1]))
    return [run - start for run, start in zip(runs, [0, *ends[:-1]], strict=True)]


@dataclass(frozen=True, slots=True)
class _Units:
    """The rows, or the columns, of one matrix."""

    site: Site
    by_row: bool

    @property
    def number(self) -> int:
        return len(self.site.span(0 if self.by_row else 1))

    @property
    def length(self) -> int:
        return len(self.site.span(1 if self.by_row else 0))

    def flat(self, units: Indices) -> Indices:
        """The flat indices of some of the units."""
        rows = np.array(self.site.span(0), np.int64)
        columns = np.array(self.site.span(1), np.int64)
        if self.by_row:
            rows = rows[units]
        else:
            columns = columns[units]
        return (rows[:, None] * self.site.shape[1] + columns).ravel()


def rowcol(request: Request) -> Selection:
    """Entire rows or columns of the operand's matrices, until no further one fits into the count."""
    matrices = [site for site in request.anatomy.sites if _is_matrix_of(site, request.operand)]
    if not matrices:
        raise SelectionError("no entirely selected matrix for rowcol")
    matrices.sort(key=lambda site: (site.name, site.start))
    # Either rows or columns of a matrix, at random: a row and a column of the same matrix would share an entry.
    by_row = request.rng.integers(2, size=len(matrices))
    candidates = [_Units(site, bool(flag)) for site, flag in zip(matrices, by_row, strict=True)]
    numbers = [units.number for units in candidates]
    lengths = np.repeat([units.length for units in candidates], numbers)
    order = request.rng.permutation(lengths.size)
    taken = np.sort(order[_fitting(lengths[order], request.count)])
    if not taken.size:
        raise SelectionError(
            f"{request.count:,} entries are fewer than the smallest row or column drawn, which has {lengths.min():,},"
        )
    by_matrix = _per_run(taken, np.cumsum(numbers))
    return _of_units(request, list(zip(candidates, by_matrix, strict=True)))


def _is_matrix_of(site: Site, operand: Selection) -> bool:
    return len(site.shape) == 2 and site.size > 0 and overlap(site, operand) == site.size


def _fitting(lengths: Indices, room: int) -> list[int]:
    """The positions of the lengths that are taken if each that still fits is taken in turn."""
    taken = []
    smallest = int(lengths.min())
    for position, length in enumerate(lengths.tolist()):
        if room < smallest:
            break
        if length <= room:
            taken.append(position)
            room -= length
    return taken


def _of_units(request: Request, chosen: list[tuple[_Units, Indices]]) -> Selection:
    flat: dict[str, list[Indices]] = {}
    rows = 0
    columns = 0
    for units, numbers in chosen:
        flat.setdefault(units.site.name, []).append(units.flat(numbers))
        if units.by_row:
            rows += numbers.size
        else:
            columns += numbers.size
    entries = {name: np.concatenate(indices) for name, indices in flat.items()}
    return request.selection(entries, f"{rows:,} rows and {columns:,} columns")
