"""Lanes: where the values of one delta or trial lie in its row of a bank, and what they start from."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..delta.delta import Delta
from ..errors import DeltaError, UsageError
from ..model.anatomy import HEADS
from ..model.resolution import Start
from ..model.selection import Selection
from ..model.task_model import Model, fresh


@dataclass(frozen=True)
class Slot:
    """Where entries of one tensor lie in a lane's row."""

    name: str
    index: Tensor | None  # flat entries of the tensor; None: all of it
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Lane:
    """The slots of one lane, the values it starts from, and how many of them train."""

    slots: tuple[Slot, ...]
    start: Tensor
    trained: int


@dataclass(frozen=True)
class VectorLayout:
    """Memory layout of a lane's vectors; lanes with equal layouts are gathered in one slice."""

    vectors: tuple[tuple[str, int, int, bool], ...]  # name, offset, size, whether it trains
    sparse: frozenset[str]  # tensors that the lane holds by entries

    @classmethod
    def of(cls, lane: Lane, known: Container[str]) -> VectorLayout:
        """The layout of a lane's vectors among the tensors in `known`."""
        whole = (s for s in lane.slots if s.index is None and len(s.shape) == 1 and s.name in known)
        vectors = tuple((s.name, s.offset, s.size, s.offset < lane.trained) for s in whole)
        return cls(vectors, frozenset(s.name for s in lane.slots if s.index is not None))


@dataclass(frozen=True)
class Piece:
    """Entries of one tensor before they have a place in the row."""

    name: str
    index: Array | None
    shape: tuple[int, ...]
    values: Tensor


def lane_to_train(
    model: Model, selection: Selection, head: str = "full", starts: Sequence[Start] = (), seed: int = 0
) -> Lane:
    """A lane at its start: the selected entries as the base has them (or as `starts` says) and a seeded head."""
    if head not in HEADS:
        raise UsageError(f"--head {head}: must be one of {', '.join(HEADS)}")
    trained: list[Piece] = []
    constant: list[Piece] = []
    grafts = model.graft_starts(seed)
    changed = _start_values(model, starts, grafts, seed)
    nothing: Array = np.empty(0, np.int64)
    for name in model.anatomy.shapes:
        if name not in selection.entries and name not in changed:
            continue
        original = model.original(name).detach().cpu()
        shape = tuple(original.shape)
        values, touched = changed.get(name, (original.reshape(-1), nothing))
        index = selection.entries.get(name, nothing)  # None: all entries
        if index is None or index.size:
            trained.append(Piece(name, index, shape, _take(values, index)))
        rest = nothing if index is None else _minus(touched, index, values.numel())
        if rest is None or rest.size:
            constant.append(Piece(name, rest, shape, _take(values, rest)))
    for name, number in model.anatomy.constants:
        constant.append(Piece(name, None, (1,), torch.tensor([number])))
    for name, value in model.head_start(seed).items():
        trains = head == "full" or (head == "bias" and name.endswith("bias"))
        (trained if trains else constant).append(Piece(name, None, tuple(value.shape), value.reshape(-1)))
    return _lay_out(trained, constant)


def lane_of_delta(model: Model, delta: Delta) -> Lane:
    """A lane with the values of a finished delta; nothing of it trains."""
    delta.check(model.base)
    pieces = []
    for name, (index, values) in sorted(delta.entries.items()):  # the same order in every delta, for one form of lane
        known = name in model.base.parameters or name in model.base.target.lacking
        shape = tuple(model.original(name).shape) if known else values.shape
        pieces.append(Piece(name, index, shape, torch.from_numpy(np.array(values)).reshape(-1)))
    lacking = set(model.head) - set(delta.tensors)
    if lacking or set(delta.head) - set(model.head):
        raise DeltaError(f"the delta's head does not fit its task ({', '.join(sorted(lacking)) or 'unknown tensors'})")
    for name, values in sorted(delta.head.items()):
        if tuple(values.shape) != model.head[name]:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, its task needs {model.head[name]}")
        pieces.append(Piece(name, None, tuple(values.shape), torch.from_numpy(np.array(values)).reshape(-1)))
    return _lay_out([], pieces)


def settled(lanes: Sequence[Lane], device: torch.device) -> list[Lane]:
    """The lanes without their start values, which the bank holds now; equal slots are held once."""
    known: dict[tuple[Slot, ...], tuple[Slot, ...]] = {}
    settled = []
    for lane in lanes:
        slots = tuple(s if s.index is None else replace(s, index=s.index.to(device)) for s in lane.slots)
        if all(slot.index is None for slot in slots):
            slots = known.setdefault(slots, slots)
        settled.append(Lane(slots, torch.empty(0), lane.trained))
    return settled


def _start_values(
    model: Model, starts: Sequence[Start], grafts: Mapping[str, Tensor], seed: int
) -> dict[str, tuple[Tensor, Array | None]]:
    """Tensor -> its values at the start and which of its entries differ from the base (None: all)."""
    changed: dict[str, tuple[Tensor, Array | None]] = {}
    for name, values in grafts.items():
        changed[name] = (values.reshape(-1), None)
    generator = torch.Generator().manual_seed(seed + 1)
    spread = float(getattr(model.base.config, "initializer_range", 0.02))
    for start in starts:
        for name, index in start.selection.entries.items():
            original = model.original(name).detach().cpu()
            before, touched = changed.get(name, (original.reshape(-1), np.empty(0, np.int64)))
            shape = tuple(original.shape)
            new = torch.zeros(shape) if start.kind == "zero" else fresh(name, shape, spread, generator)
            values = before.clone()
            where = slice(None) if index is None else torch.tensor(index)
            values[where] = new.reshape(-1)[where]
            both = None if index is None or touched is None else np.union1d(touched, index)
            changed[name] = (values, both)
    return changed


def _take(values: Tensor, index: Array | None) -> Tensor:
    return values if index is None else values[torch.tensor(index)]


def _minus(touched: Array | None, index: Array, size: int) -> Array | None:
    """The touched entries that are not in `index`; None stands for all entries of a tensor of this size."""
    if touched is None and not index.size:
        return None
    everything = np.arange(size) if touched is None else touched
    return np.setdiff1d(everything, index, assume_unique=True)


def _lay_out(trained: list[Piece], constant: list[Piece]) -> Lane:
    """The pieces one after the other, those that train first."""
    slots, offset = [], 0
    for piece in trained + constant:
        index = None if piece.index is None else torch.from_numpy(np.array(piece.index))
        slots.append(Slot(piece.name, index, piece.shape, offset, piece.values.numel()))
        offset += piece.values.numel()
    flat = [piece.values for piece in trained + constant]
    start = torch.cat(flat) if flat else torch.zeros(0)
    return Lane(tuple(slots), start, sum(piece.values.numel() for piece in trained))
