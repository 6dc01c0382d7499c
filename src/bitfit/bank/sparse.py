"""Entries of a matrix at their true cost: a lane adds what its few entries differ by to its own rows.

No matrix is copied and no gradient of a whole matrix is computed: forward, backward and memory grow with the number of
entries. Entries that are whole rows or columns (or any rows times any columns) are one small matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .additions import Gradients, Keep, Tape

# Shares of a matrix above which a copy of it with a dense gradient costs less than its entries. The first was measured
# (LOG.md), the second counts products: a block adds three of its size, a dense gradient one of the whole.
SCATTERED, BLOCK = 1 / 80, 1 / 4


@dataclass(frozen=True)
class Patch:
    """A lane's own values at some entries of a matrix of the base."""

    index: Tensor  # flat, ascending
    shape: tuple[int, ...]
    base: Tensor  # what the base has there
    values: Tensor

    @cached_property
    def _sides(self) -> tuple[Tensor, Tensor]:
        return self.index // self.shape[1], self.index % self.shape[1]

    @cached_property
    def block(self) -> tuple[Tensor, Tensor] | None:
        """Rows and columns, where the entries are all the places in which these meet."""
        rows, columns = (torch.unique(side) for side in self._sides)
        return (rows, columns) if len(rows) * len(columns) == len(self.index) else None

    @property
    def is_sparse(self) -> bool:
        """Whether computing with the entries is cheaper than with a patched copy of their matrix."""
        share = len(self.index) / (self.shape[0] * self.shape[1])
        return share <= SCATTERED or (share <= BLOCK and self.block is not None)

    @cached_property
    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        """The row and the column of each entry, or those of the block; None: every one of them, in order."""
        if self.block is None:
            return self._sides
        rows, columns = (None if len(s) == n else s for s, n in zip(self.block, self.shape, strict=True))
        return rows, columns

    def change(self) -> Tensor:
        """What the entries differ from the base by, in the form `sides` names them."""
        change = self.values.detach() - self.base
        return change if self.block is None else change.view(len(self.block[0]), len(self.block[1]))

    @cached_property
    def starts(self) -> Tensor:
        """Where the entries of each row of the matrix start, and where the last end."""
        return torch.searchsorted(self._sides[0], torch.arange(self.shape[0] + 1, device=self.index.device))

    def met(self, looked_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries in the rows looked up: which look-up met it, in which column, and which entry it is."""
        begin = self.starts[looked_up]
        counts = self.starts[looked_up + 1] - begin
        which = torch.repeat_interleave(counts)
        entry = torch.arange(len(which), device=which.device) + (begin - counts.cumsum(0) + counts)[which]
        return which, self._sides[1][entry], entry


@dataclass(frozen=True)
class Place:
    """A patch and the part of a layer's rows and outputs that it changes."""

    patch: Patch
    rows: slice
    outputs: slice


@dataclass(frozen=True)
class Patches:
    """The patches of all lanes on one linear layer, as an addition."""

    places: Sequence[Place]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        yield from (place.patch.values for place in self.places)

    def forward(self, y: Tensor, x: Tensor, keep: Keep) -> None:
        """Add to outputs `y` of `x` what the patches change."""
        keep(*add_changes(y, x, self.places))

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, below: Tensor | None) -> None:
        """The gradients of the patches' values; that of the inputs is added to `below`."""
        saved = [tape.pop() for _ in range(2 * len(self.places))][::-1]
        values = list(self.tensors)
        found = add_gradients(below, above, self.places, saved, [value.requires_grad for value in values])
        for value, gradient in zip(values, found, strict=True):
            if gradient is not None:
                gradients[id(value)] = gradient


def add_linear(y: Tensor, x: Tensor, places: Sequence[Place]) -> Tensor:
    """`y`, the outputs of a linear layer on `x`, with what the patches change, in place."""
    if not places:
        return y
    values = [place.patch.values for place in places]
    return _AddLinear.apply(y, x, places, *values)  # type: ignore[no-any-return, no-untyped-call]


def write_rows(y: Tensor, index: Tensor, places: Sequence[Place], padding: int | None) -> Tensor:
    """`y`, the rows of a matrix looked up by `index`, with the patches' values written in, in place.

    As in torch's embeddings the row of the padding index gets no gradient.
    """
    if not places:
        return y
    values = [place.patch.values for place in places]
    return _WriteRows.apply(y, index, places, padding, *values)  # type: ignore[no-any-return, no-untyped-call]


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, places: Sequence[Place], *values: Tensor) -> Tensor:
        ctx.places, ctx.width = places, x.shape[1]
        ctx.mark_dirty(y)
        ctx.save_for_backward(*add_changes(y, x, places))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, wanted = gradients[0], ctx.needs_input_grad
        below = gradient.new_zeros(len(gradient), ctx.width) if wanted[1] else None
        return gradient, below, None, *add_gradients(below, gradient, ctx.places, ctx.saved_tensors, wanted[3:])


def add_changes(y: Tensor, x: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """Add to outputs `y` of `x` what the patches change; what `add_gradients` needs to know of it."""
    saved = []
    for place in places:
        rows, columns = place.patch.sides
        seen, change = _take(x[place.rows], columns), place.patch.change()
        _add(y[place.rows, place.outputs], rows, seen * change if change.dim() == 1 else seen @ change.t())
        saved += [seen, change]
    return saved


def add_gradients(
    below: Tensor | None, gradient: Tensor, places: Sequence[Place], saved: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of each patch's values, where wanted; that of the inputs is added to `below`."""
    values: list[Tensor | None] = []
    for place, seen, change, trains in zip(places, saved[::2], saved[1::2], wanted, strict=True):
        rows, columns = place.patch.sides
        above = _take(gradient[place.rows, place.outputs], rows)
        own = None
        if trains:
            own = (above * seen).sum(0) if change.dim() == 1 else (above.t() @ seen).view(-1)
        if below is not None:
            _add(below[place.rows], columns, above.mul_(change) if change.dim() == 1 else above @ change)
        values.append(own)
    return values


class _WriteRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, index: Tensor, places: Sequence[Place], padding: int | None, *values: Tensor
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.met, ctx.places = [], places
        for place in places:
            own = index[place.rows]
            which, column, entry = place.patch.met(own)
            y[place.rows].index_put_((which, column), place.patch.values.detach()[entry])
            ctx.met.append((which, column, entry, None if padding is None else own[which] == padding))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        values: list[Tensor | None] = []
        for i, (place, (which, column, entry, padded)) in enumerate(zip(ctx.places, ctx.met, strict=True)):
            own = None
            if ctx.needs_input_grad[4 + i]:
                each = gradients[0][place.rows][which, column]
                each = each if padded is None else each.masked_fill(padded, 0)
                own = torch.zeros_like(place.patch.base).index_add_(0, entry, each)
            values.append(own)
        return gradients[0], None, None, None, *values


def _take(x: Tensor, columns: Tensor | None) -> Tensor:
    return x if columns is None else x.index_select(1, columns)


def _add(y: Tensor, columns: Tensor | None, change: Tensor) -> None:
    if columns is None:
        y.add_(change)
    else:
        y.index_add_(1, columns, change)
