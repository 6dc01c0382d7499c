"""Lanes: the layout of one delta's or trial's values in its row of a bank, and their start values."""

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
    """The slice of a lane's row of values that holds entries of one tensor."""

    name: str
    index: Tensor | None  # flat entries of the tensor; None: all of it
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Lane:
    """The slots of one lane, its start values, and the number of values that train, which come first."""

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
        vectors = []
        sparse = []
        for slot in lane.slots:
            if slot.index is not None:
                sparse.append(slot.name)
            elif len(slot.shape) == 1 and slot.name in known:
                vectors.append((slot.name, slot.offset, slot.size, slot.offset < lane.trained))
        return cls(tuple(vectors), frozenset(sparse))


@dataclass(frozen=True)
class Entries:
    """Entries of one tensor and their values, before they get a slot."""

    name: str
    index: Array | None
    shape: tuple[int, ...]
    values: Tensor


def lane_to_train(
    model: Model, selection: Selection, head: str = "full", starts: Sequence[Start] = (), seed: int = 0
) -> Lane:
    """A lane before training: the selected entries with the base's values (or those of `starts`), and a seeded head."""
    if head not in HEADS:
        raise UsageError(f"--head {head}: must be one of {', '.join(HEADS)}")
    trained: list[Entries] = []
    constant: list[Entries] = []
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
            trained.append(Entries(name, index, shape, _take(values, index)))
        rest = nothing if index is None else _minus(touched, index, values.numel())
        if rest is None or rest.size:
            constant.append(Entries(name, rest, shape, _take(values, rest)))
    for name, number in model.anatomy.constants:
        constant.append(Entries(name, None, (1,), torch.tensor([number])))
    for name, value in model.head_start(seed).items():
        entries = Entries(name, None, tuple(value.shape), value.reshape(-1))
        if head_trains(head, name):
            trained.append(entries)
        else:
            constant.append(entries)
    return _laid_out(trained, constant)


def head_trains(head: str, name: str) -> bool:
    """Whether a tensor of the head trains under `--head`."""
    return head == "full" or (head == "bias" and name.endswith("bias"))


def lane_of_delta(model: Model, delta: Delta) -> Lane:
    """A lane with the values of a finished delta; nothing of it trains."""
    delta.check(model.base)
    entries = []
    for name, (index, values) in sorted(delta.entries.items()):  # sorted, so that alike deltas have equal layouts
        known = name in model.base.parameters or name in model.base.target.lacking
        shape = tuple(model.stored(name).shape) if known else values.shape
        entries.append(Entries(name, index, shape, torch.from_numpy(np.array(values)).reshape(-1)))
    missing = sorted(set(model.head) - set(delta.tensors))
    unknown = sorted(set(delta.head) - set(model.head))
    if missing:
        raise DeltaError(f"the delta's head does not fit its task: {', '.join(missing)} is missing")
    if unknown:
        raise DeltaError(f"the delta's head does not fit its task: {', '.join(unknown)} is unknown")
    for name, values in sorted(delta.head.items()):
        if tuple(values.shape) != model.head[name]:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, its task needs {model.head[name]}")
        entries.append(Entries(name, None, tuple(values.shape), torch.from_numpy(np.array(values)).reshape(-1)))
    return _laid_out([], entries)


def without_values(lanes: Sequence[Lane], device: torch.device) -> list[Lane]:
    """The lanes without their start values, once a bank holds these; lanes with equal slots share one object."""
    known: dict[tuple[Slot, ...], tuple[Slot, ...]] = {}
    emptied = []
    for lane in lanes:
        slots = tuple(s if s.index is None else replace(s, index=s.index.to(device)) for s in lane.slots)
        if all(slot.index is None for slot in slots):
            slots = known.setdefault(slots, slots)
        emptied.append(Lane(slots, torch.empty(0), lane.trained))
    return emptied


def _start_values(
    model: Model, starts: Sequence[Start], grafts: Mapping[str, Tensor], seed: int
) -> dict[str, tuple[Tensor, Array | None]]:
    """Tensor -> its start values, and the entries that differ from the base (None: all)."""
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
            positions = slice(None) if index is None else torch.tensor(index)
            values[positions] = new.reshape(-1)[positions]
            if index is None or touched is None:
                changed[name] = (values, None)
            else:
                changed[name] = (values, np.union1d(touched, index))
    return changed


def _take(values: Tensor, index: Array | None) -> Tensor:
    return values if index is None else values[torch.tensor(index)]


def _minus(touched: Array | None, index: Array, size: int) -> Array | None:
    """The touched entries that are not in `index`; None means all entries of a tensor of this size."""
    if touched is None:
        if not index.size:
            return None
        touched = np.arange(size)
    return np.setdiff1d(touched, index, assume_unique=True)


def _laid_out(trained: list[Entries], constant: list[Entries]) -> Lane:
    """A lane with these entries one after the other, those that train first."""
    slots = []
    offset = 0
    for entries in trained + constant:
        index = None if entries.index is None else torch.from_numpy(np.array(entries.index))
        slots.append(Slot(entries.name, index, entries.shape, offset, entries.values.numel()))
        offset += entries.values.numel()
    values = [entries.values for entries in trained + constant]
    start = torch.cat(values) if values else torch.zeros(0)
    return Lane(tuple(slots), start, sum(entries.values.numel() for entries in trained))
