"""Sparse changes of a matrix: a lane that trains few entries of it adds their effect to its rows.

No matrix is copied and no gradient of a whole matrix is computed: time and memory grow with the number of entries.
Entries that are entire rows or columns, or a block of some rows and some columns, are one small matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .additions import Gradients, Keep, Tape

# Shares of a matrix above which a patched copy with a dense gradient is cheaper than computing with the entries.
SCATTERED = 1 / 80  # measured (LOG.md)
BLOCK = 1 / 4  # by counting: a block needs three products of its size, a dense gradient one of the matrix's size


@dataclass(frozen=True)
class Patch:
    """A lane's values of some entries of a matrix of the base."""

    index: Tensor  # flat, ascending
    shape: tuple[int, ...]
    base: Tensor  # the base's values of these entries
    values: Tensor

    @cached_property
    def _coordinates(self) -> tuple[Tensor, Tensor]:
        """The row and the column of each entry."""
        return self.index // self.shape[1], self.index % self.shape[1]

    @cached_property
    def block(self) -> tuple[Tensor, Tensor] | None:
        """The rows and columns of the entries, if the entries are a block of them; None if they are scattered."""
        rows, columns = (torch.unique(coordinate) for coordinate in self._coordinates)
        return (rows, columns) if len(rows) * len(columns) == len(self.index) else None

    @property
    def is_sparse(self) -> bool:
        """Whether computing with the entries is cheaper than with a patched copy of their matrix."""
        share = len(self.index) / (self.shape[0] * self.shape[1])
        return share <= SCATTERED or (share <= BLOCK and self.block is not None)

    @cached_property
    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        """The row and the column of each entry, or the rows and the columns of the block; None: all of them."""
        if self.block is None:
            return self._coordinates
        rows, columns = self.block
        height, width = self.shape
        return None if len(rows) == height else rows, None if len(columns) == width else columns

    def change(self) -> Tensor:
        """The difference of the entries to the base: a vector, or a matrix if they are a block."""
        change = self.values.detach() - self.base
        if self.block is None:
            return change
        rows, columns = self.block
        return change.view(len(rows), len(columns))

    @cached_property
    def starts(self) -> Tensor:
        """The first entry of each row of the matrix, and the number of entries."""
        rows, _ = self._coordinates
        return torch.searchsorted(rows, torch.arange(self.shape[0] + 1, device=self.index.device))

    def entries_in(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries in some rows of the matrix: which of `rows` it is in, its column, and its number."""
        start = self.starts[rows]
        counts = self.starts[rows + 1] - start
        which = torch.repeat_interleave(counts)
        entry = torch.arange(len(which), device=which.device) + (start - counts.cumsum(0) + counts)[which]
        _, columns = self._coordinates
        return which, columns[entry], entry


@dataclass(frozen=True)
class PlacedPatch:
    """A patch and the rows and outputs of a linear layer that it changes."""

    patch: Patch
    rows: slice
    outputs: slice


@dataclass(frozen=True)
class Patches:
    """The patches of all lanes on one linear layer, as an addition."""

    patches: Sequence[PlacedPatch]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        yield from (placed.patch.values for placed in self.patches)

    def forward(self, y: Tensor, x: Tensor, keep: Keep) -> None:
        """Add the effect of the patches to the outputs `y` of the inputs `x`."""
        keep(*add_changes(y, x, self.patches))

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, below: Tensor | None) -> None:
        """Compute the gradients of the patches' values, and add the gradient of the inputs to `below`."""
        saved = [tape.pop() for _ in range(2 * len(self.patches))][::-1]
        values = list(self.tensors)
        computed = add_gradients(below, above, self.patches, saved, [value.requires_grad for value in values])
        for value, gradient in zip(values, computed, strict=True):
            if gradient is not None:
                gradients[id(value)] = gradient


def add_linear(y: Tensor, x: Tensor, patches: Sequence[PlacedPatch]) -> Tensor:
    """Add the effect of the patches to `y`, the outputs of a linear layer on `x`, in place. Returns `y`."""
    if not patches:
        return y
    values = [placed.patch.values for placed in patches]
    return _AddLinear.apply(y, x, patches, *values)  # type: ignore[no-any-return, no-untyped-call]


def write_rows(y: Tensor, index: Tensor, patches: Sequence[PlacedPatch], padding: int | None) -> Tensor:
    """Write the patches' values into `y`, the rows of an embedding matrix at `index`, in place. Returns `y`.

    As in torch's embeddings, the row of the padding index gets no gradient.
    """
    if not patches:
        return y
    values = [placed.patch.values for placed in patches]
    return _WriteRows.apply(y, index, patches, padding, *values)  # type: ignore[no-any-return, no-untyped-call]


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, patches: Sequence[PlacedPatch], *values: Tensor) -> Tensor:
        ctx.patches = patches
        ctx.width = x.shape[1]
        ctx.mark_dirty(y)
        ctx.save_for_backward(*add_changes(y, x, patches))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        above = gradients[0]
        wanted = ctx.needs_input_grad
        below = above.new_zeros(len(above), ctx.width) if wanted[1] else None
        return above, below, None, *add_gradients(below, above, ctx.patches, ctx.saved_tensors, wanted[3:])


def add_changes(y: Tensor, x: Tensor, patches: Sequence[PlacedPatch]) -> list[Tensor]:
    """Add the effect of the patches to the outputs `y` of the inputs `x`; returns what `add_gradients` needs."""
    saved = []
    for placed in patches:
        rows, columns = placed.patch.sides
        inputs = _take(x[placed.rows], columns)
        change = placed.patch.change()
        added = inputs * change if change.dim() == 1 else inputs @ change.t()
        _add(y[placed.rows, placed.outputs], rows, added)
        saved += [inputs, change]
    return saved


def add_gradients(
    below: Tensor | None,
    gradient: Tensor,
    patches: Sequence[PlacedPatch],
    saved: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient of each patch's values, if wanted; the gradient of the inputs is added to `below`."""
    d_values: list[Tensor | None] = []
    for placed, inputs, change, trains in zip(patches, saved[::2], saved[1::2], wanted, strict=True):
        rows, columns = placed.patch.sides
        above = _take(gradient[placed.rows, placed.outputs], rows)
        is_block = change.dim() == 2
        d_patch = None
        if trains:
            d_patch = (above.t() @ inputs).view(-1) if is_block else (above * inputs).sum(0)
        if below is not None:
            _add(below[placed.rows], columns, above @ change if is_block else above.mul_(change))
        d_values.append(d_patch)
    return d_values


class _WriteRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, index: Tensor, patches: Sequence[PlacedPatch], padding: int | None, *values: Tensor
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.patches = patches
        ctx.written = []
        for placed in patches:
            looked_up = index[placed.rows]
            which, column, entry = placed.patch.entries_in(looked_up)
            y[placed.rows].index_put_((which, column), placed.patch.values.detach()[entry])
            is_padding = None if padding is None else looked_up[which] == padding
            ctx.written.append((which, column, entry, is_padding))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        d_values: list[Tensor | None] = []
        for i, (placed, written) in enumerate(zip(ctx.patches, ctx.written, strict=True)):
            if not ctx.needs_input_grad[4 + i]:
                d_values.append(None)
                continue
            which, column, entry, is_padding = written
            above = gradients[0][placed.rows][which, column]
            if is_padding is not None:
                above = above.masked_fill(is_padding, 0)
            d_values.append(torch.zeros_like(placed.patch.base).index_add_(0, entry, above))
        return gradients[0], None, None, None, *d_values


def _take(x: Tensor, columns: Tensor | None) -> Tensor:
    return x if columns is None else x.index_select(1, columns)


def _add(y: Tensor, columns: Tensor | None, change: Tensor) -> None:
    if columns is None:
        y.add_(change)
    else:
        y.index_add_(1, columns, change)
