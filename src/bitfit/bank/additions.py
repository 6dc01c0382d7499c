"""Additions: what lanes add to the outputs of a linear layer on packed rows, forward and backward.

This module has the interface and the grafts; patches are in `sparse`. Lanes whose grafts have equal shapes are computed
in one batched product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..model.grafts import GRAFTS, Place
from .layout import Segments

LEAST_FILLED = 0.75  # the share of a block's rows that each lane of it must have

Keep = Callable[..., None]
"""Takes tensors that the backward will need."""

Tape = list[Tensor]
Gradients = dict[int, Tensor]
"""The gradient of a tensor, by the tensor's id."""


class Addition(Protocol):
    """Something added to the outputs `y` of a linear layer, in place, on the rows of some lanes."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        ...

    def forward(self, y: Tensor, x: Tensor, keep: Keep) -> None:
        """Add to the outputs `y` of the inputs `x`, in place."""
        ...

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, below: Tensor | None) -> None:
        """Compute the tensors' gradients from the gradient of `y`, and add the gradient of `x` to `below`."""
        ...


@dataclass(frozen=True)
class GraftGroup:
    """One graft at one module, for lanes whose tensors have equal shapes, stacked lane by lane."""

    place: Place
    lanes: tuple[int, ...]  # positions in the batch
    tensors: Mapping[str, Tensor]  # role -> [lanes, ...]


def by_tokens(lanes: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """The lanes in groups of similar numbers of tokens, so that there is little padding in a block."""
    groups: list[list[int]] = []
    width = 0
    for lane in sorted(lanes, key=lambda lane: -tokens[lane]):
        if not groups or tokens[lane] < LEAST_FILLED * width:
            groups.append([])
            width = tokens[lane]
        groups[-1].append(lane)
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class LaneRows:
    """The rows of some lanes of a packed tensor as one block [lanes, rows, n], shorter lanes padded.

    Padding repeats the first row of the same lane, so that NaN or infinity in one lane never reaches another. Nothing
    computed from it is used.
    """

    count: int
    rows: Tensor | slice  # the lanes' rows in the packed tensor
    padded: Tensor | None  # the packed row of each row of the block; None: `rows` are the block already
    positions: Tensor | None  # the row of the block of each of `rows`

    @classmethod
    def of(cls, segments: Segments, lanes: Sequence[int]) -> LaneRows:
        """The rows of these lanes, which must be in ascending order."""
        starts = np.array([segments.bounds[lane] for lane in lanes])
        sizes = np.array([segments.bounds[lane + 1] for lane in lanes]) - starts
        contiguous = bool((starts[1:] == starts[:-1] + sizes[:-1]).all())
        if contiguous and (sizes == sizes[0]).all():
            return cls(len(lanes), slice(int(starts[0]), int(starts[0] + sizes.sum())), None, None)
        width = int(sizes.max())
        inside = np.arange(width)
        real = inside < sizes[:, None]
        padded = starts[:, None] + np.where(real, inside, 0)
        device = segments.lane.device
        return cls(
            len(lanes),
            torch.from_numpy(padded[real]).to(device),
            torch.from_numpy(padded.reshape(-1)).to(device),
            torch.from_numpy(np.flatnonzero(real)).to(device),
        )

    def block(self, x: Tensor) -> Tensor:
        """The lanes' rows of a packed tensor as a block."""
        if self.padded is None:
            return x[self.rows].reshape(self.count, -1, x.shape[1])
        return x.index_select(0, self.padded).view(self.count, -1, x.shape[1])

    def gradient_block(self, x: Tensor) -> Tensor:
        """The same for gradients: zero where a lane has no row."""
        if self.padded is None or self.positions is None:
            return self.block(x)
        flat = x.new_zeros(len(self.padded), x.shape[1])
        flat[self.positions] = x[self.rows]
        return flat.view(self.count, -1, x.shape[1])

    def add(self, y: Tensor, block: Tensor) -> None:
        """Add a block to the lanes' rows of a packed tensor."""
        flat = block.reshape(-1, block.shape[2])
        if isinstance(self.rows, slice) or self.positions is None:
            y[self.rows] += flat
        else:
            y.index_add_(0, self.rows, flat.index_select(0, self.positions))


@dataclass(frozen=True)
class Grafted:
    """A group of grafts as an addition. A graft without `backward` is computed again under autograd."""

    group: GraftGroup
    rows: LaneRows
    columns: slice  # the outputs of the linear layer that it changes
    activation: Callable[[Tensor], Tensor]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        yield from self.group.tensors.values()

    def forward(self, y: Tensor, x: Tensor, keep: Keep) -> None:
        """Add the graft's formula on the lanes' rows of `x` to `y`."""
        source = self.rows.block(self._read(x))
        if x is y and self.rows.padded is None:  # the block is a view, and what is kept must not change with `y`
            source = source.clone()
        keep(source)
        change = GRAFTS[self.group.place.graft].forward(source, self.group.tensors, self.activation)
        self.rows.add(y[:, self.columns], change)

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, below: Tensor | None) -> None:
        """Compute the gradients of the graft's tensors, and add that of its inputs to `below`, unless it is None."""
        source = tape.pop()
        tensors = self.group.tensors
        trained = {role: tensor for role, tensor in tensors.items() if tensor.requires_grad}
        if not trained and below is None:
            return
        block = self.rows.gradient_block(above[:, self.columns])
        computed = GRAFTS[self.group.place.graft].backward(source, tensors, block)
        if computed is None:
            computed = self._by_autograd(source, block)
        d_source, d_tensors = computed
        for role, tensor in trained.items():
            gradients[id(tensor)] = d_tensors[role]
        if below is not None:
            self.rows.add(self._read(below), d_source)

    def _read(self, x: Tensor) -> Tensor:
        """The part of a layer's inputs or outputs that the graft reads; of the outputs, those of its matrix only."""
        return x[:, self.columns] if GRAFTS[self.group.place.graft].reads_output else x

    def _by_autograd(self, source: Tensor, above: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradients of the inputs and of the tensors that train."""
        source = source.detach().requires_grad_()
        tensors = self.group.tensors
        leaves = {role: tensor.detach().requires_grad_(tensor.requires_grad) for role, tensor in tensors.items()}
        roles = [role for role, leaf in leaves.items() if leaf.requires_grad]
        with torch.enable_grad():
            change = GRAFTS[self.group.place.graft].forward(source, leaves, self.activation)
        d_source, *d_leaves = torch.autograd.grad(change, [source, *(leaves[role] for role in roles)], above)
        return d_source, dict(zip(roles, d_leaves, strict=True))
