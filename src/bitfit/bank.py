"""The bank: K deltas on one frozen base, each row of a batch computed under the delta it names.

This path works for every transformers model. A lane's rows pass through the stock model with the lane's values in
the places of the base's: a whole tensor as it is, chosen entries written over a copy. So a lane is the stock model
to the bit, rows of different lanes share no sum, and the base's weights exist once.

Values and gradients are lane-major [K, P]: row k is lane k, trained entries first, then what only differs from the
base (a frozen random head, re-initialised entries).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .anatomy import HEADS, Site
from .delta import INDEX, VALUE, Delta
from .errors import DeltaError, UsageError
from .model import Model, fresh
from .rows import Rows
from .selection import Selection, parse_init, select
from .tensorfile import Array, Tensors


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
    """What one lane wears: its slots, the values it starts from, and how many of them train."""

    slots: tuple[Slot, ...]
    start: Tensor
    trained: int


@dataclass(frozen=True)
class Piece:
    """Entries of one tensor before they have a place in the row."""

    name: str
    index: Array | None
    shape: tuple[int, ...]
    values: Tensor


def lane_to_train(model: Model, selection: Selection, head: str = "full", init: str = "keep", seed: int = 0) -> Lane:
    """A lane at its start: the selected entries as the base has them (or as `init` says) and a seeded head."""
    if head not in HEADS:
        raise UsageError(f"--head {head}: must be one of {', '.join(HEADS)}")
    trained: list[Piece] = []
    constant: list[Piece] = []
    starts = _init_starts(model, init, seed)
    for name in (site for site in model.anatomy.shapes if site in selection.entries or site in starts):
        shape, original = tuple(model.original(name).shape), model.original(name).detach().cpu().reshape(-1)
        values, touched = starts.get(name, (original, np.empty(0, np.int64)))
        index = selection.entries[name] if name in selection.entries else np.empty(0, np.int64)
        if index is None or index.size:
            trained.append(Piece(name, index, shape, _take(values, index)))
        rest = np.empty(0, np.int64) if index is None else _minus(touched, index, values.numel())
        if rest is None or rest.size:
            constant.append(Piece(name, rest, shape, _take(values, rest)))
    for name, value in model.head_start(seed).items():
        trains = head == "full" or (head == "bias" and name.endswith("bias"))
        (trained if trains else constant).append(Piece(name, None, tuple(value.shape), value.reshape(-1)))
    return _lay_out(trained, constant)


def lane_of_delta(model: Model, delta: Delta) -> Lane:
    """A lane that wears a finished delta; nothing of it trains."""
    delta.check(model.base)
    pieces = []
    for name, (index, values) in delta.entries.items():
        shape = tuple(model.original(name).shape)
        pieces.append(Piece(name, index, shape, torch.from_numpy(np.array(values)).reshape(-1)))
    lacking = set(model.head) - set(delta.tensors)
    if lacking or set(delta.head) - set(model.head):
        raise DeltaError(f"the delta's head does not fit its task ({', '.join(sorted(lacking)) or 'unknown tensors'})")
    for name, values in delta.head.items():
        if tuple(values.shape) != model.head[name]:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, its task needs {model.head[name]}")
        pieces.append(Piece(name, None, tuple(values.shape), torch.from_numpy(np.array(values)).reshape(-1)))
    return _lay_out([], pieces)


class Bank:
    """A model wearing K lanes. Each lane's rows see the base under that lane alone; the base stays untouched."""

    def __init__(self, model: Model, lanes: Sequence[Lane]) -> None:
        device = next(model.encoder.parameters()).device
        self.model = model
        self.lanes = list(lanes)
        self.values = torch.zeros(len(lanes), max(lane.start.numel() for lane in lanes), device=device)
        self.gradients = torch.zeros(len(lanes), max(lane.trained for lane in lanes), device=device)
        self._leaves = [self._leaf_views(k) for k in range(len(lanes))]
        for k, lane in enumerate(lanes):
            self.values[k, : lane.start.numel()] = lane.start.to(device)

    def logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The outputs of each lane's rows, under that lane; with `streams`, dropout is on and seeded per lane."""
        out = {}
        with self._training(streams is not None):
            for k, own in rows.items():
                if streams is not None:
                    torch.manual_seed(streams[k])
                with self._wearing(k):
                    out[k] = self.model(own)
        return out

    def trained(self, k: int) -> Tensor:
        """Lane k's trained values as one flat view, with its gradient attached: what an optimiser takes."""
        flat = self.values[k, : self.lanes[k].trained].detach().requires_grad_()
        flat.grad = self.gradients[k, : self.lanes[k].trained]
        return flat

    def tensors(self, k: int) -> Tensors:
        """Lane k as a delta names it: parameter -> values, or its indices and values."""
        named: dict[str, list[tuple[Array | None, Array]]] = {}
        for slot in self.lanes[k].slots:
            values = self.values[k, slot.offset : slot.offset + slot.size].cpu().numpy()
            index = None if slot.index is None else slot.index.cpu().numpy()
            named.setdefault(slot.name, []).append((index, values if index is not None else values.reshape(slot.shape)))
        table: Tensors = {}
        for name, parts in named.items():
            table.update(_named_arrays(name, parts))
        return table

    @contextmanager
    def _training(self, on: bool) -> Iterator[None]:
        # Evaluation is the resting state, so that no evaluation can leave the next step without dropout.
        if on:
            self.model.train()
        try:
            yield
        finally:
            if on:
                self.model.eval()

    @contextmanager
    def _wearing(self, k: int) -> Iterator[None]:
        originals: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for name, tensor in self._effective(k).items():
                for module, attribute in self.model.places[name]:
                    originals.append((module, attribute, module._parameters[attribute]))
                    module._parameters[attribute] = tensor  # type: ignore[assignment]
            yield
        finally:
            for module, attribute, parameter in reversed(originals):
                module._parameters[attribute] = parameter

    def _effective(self, k: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for slot, leaf in self._leaves[k]:
            if slot.index is None:
                tensors[slot.name] = leaf
            else:
                under = tensors.get(slot.name, self.model.original(slot.name).detach())
                tensors[slot.name] = under.reshape(-1).index_copy(0, slot.index, leaf).view(slot.shape)
        return tensors

    def _leaf_views(self, k: int) -> list[tuple[Slot, Tensor]]:
        # Each leaf is a view of the flat row and its gradient a view of the flat gradients, so that autograd fills,
        # and the optimiser reads, one buffer per lane.
        leaves = []
        for slot in self.lanes[k].slots:
            shape = slot.shape if slot.index is None else (slot.size,)
            leaf = self.values[k, slot.offset : slot.offset + slot.size].detach().view(shape)
            if slot.offset < self.lanes[k].trained:
                leaf.requires_grad_()
                leaf.grad = self.gradients[k, slot.offset : slot.offset + slot.size].view(shape)
            device_slot = slot if slot.index is None else _on_device(slot, self.values.device)
            leaves.append((device_slot, leaf))
        return leaves


def change_map(model: Model, tensors: Mapping[str, Array]) -> dict[str, list[float | None]]:
    """Mean absolute change per term and layer against the base, as the papers draw it; None where a term is absent."""
    sums: dict[tuple[str, int | None], tuple[float, int]] = {}
    for site in model.anatomy.sites:
        change = _site_change(model, site, tensors)
        total, count = sums.get((site.term, site.layer), (0.0, 0))
        if change.size:
            sums[site.term, site.layer] = total + float(change.sum(dtype=np.float64)), count + change.size
    table: dict[str, list[float | None]] = {}
    for (term, layer), (total, count) in sums.items():
        row = table.setdefault(term, [None] * (1 if layer is None else model.anatomy.layers))
        row[layer or 0] = total / count
    return {term: table[term] for term in model.anatomy.terms if term in table}


def _site_change(model: Model, site: Site, tensors: Mapping[str, Array]) -> Array:
    base = model.original(site.name).detach().cpu().numpy()
    span = site.span(site.axis)
    if site.name in tensors:
        difference = np.abs(tensors[site.name] - base)
        return difference if site.whole else np.take(difference, span, axis=site.axis)
    if site.name + INDEX not in tensors:
        return np.empty(0, np.float32)
    index, values = tensors[site.name + INDEX], tensors[site.name + VALUE]
    place = np.unravel_index(index, base.shape)[site.axis]
    inside = (place >= span.start) & (place < span.stop)
    change: Array = np.abs(values[inside] - base.reshape(-1)[index[inside]])
    return change


def _init_starts(model: Model, init: str, seed: int) -> dict[str, tuple[Tensor, Array | None]]:
    starts: dict[str, tuple[Tensor, Array | None]] = {}
    generator = torch.Generator().manual_seed(seed + 1)
    spread = float(getattr(model.base.config, "initializer_range", 0.02))
    for step in parse_init(init):
        if step.kind == "keep":
            continue
        chosen = select(model.anatomy, step.selection, seed)
        for name, index in chosen.entries.items():
            original = model.original(name).detach().cpu()
            before, touched = starts.get(name, (original.reshape(-1), np.empty(0, np.int64)))
            shape = tuple(original.shape)
            new = torch.zeros(shape) if step.kind == "zero" else fresh(name, shape, spread, generator)
            values = before.clone()
            where = slice(None) if index is None else torch.tensor(index)
            values[where] = new.reshape(-1)[where]
            both = None if index is None or touched is None else np.union1d(touched, index)
            starts[name] = (values, both)
    return starts


def _take(values: Tensor, index: Array | None) -> Tensor:
    return values if index is None else values[torch.tensor(index)]


def _minus(touched: Array | None, index: Array, size: int) -> Array | None:
    if touched is None and not index.size:
        return None
    everything = np.arange(size) if touched is None else touched
    return np.setdiff1d(everything, index, assume_unique=True)


def _lay_out(trained: list[Piece], constant: list[Piece]) -> Lane:
    slots, offset = [], 0
    for piece in trained + constant:
        index = None if piece.index is None else torch.from_numpy(np.array(piece.index))
        slots.append(Slot(piece.name, index, piece.shape, offset, piece.values.numel()))
        offset += piece.values.numel()
    flat = [piece.values for piece in trained + constant]
    start = torch.cat(flat) if flat else torch.zeros(0)
    return Lane(tuple(slots), start, sum(piece.values.numel() for piece in trained))


def _on_device(slot: Slot, device: torch.device) -> Slot:
    assert slot.index is not None
    return Slot(slot.name, slot.index.to(device), slot.shape, slot.offset, slot.size)


def _named_arrays(name: str, parts: list[tuple[Array | None, Array]]) -> Tensors:
    if len(parts) == 1:
        index, values = parts[0]
        if index is None:
            return {name: values.copy()}
        return {name + INDEX: index.copy(), name + VALUE: values.copy()}
    index = np.concatenate([part[0] for part in parts if part[0] is not None])
    order = np.argsort(index)
    return {name + INDEX: index[order], name + VALUE: np.concatenate([part[1] for part in parts])[order]}
