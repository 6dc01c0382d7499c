"""The bank: K deltas on one frozen base, each row of a batch computed under the delta it names.

The stock path works for every transformers model. A lane's rows pass through the stock model with the lane's values
in the places of the base's: a whole tensor as it is, chosen entries written over a copy. So a lane is the stock model
to the bit, rows of different lanes share no sum, and the base's weights exist once. For the BERT family `packed`
computes the same numbers from the same buffers, faster.

Values and gradients are lane-major [K, P]: row k is lane k, trained entries first, then what only differs from the
base (a frozen random head, re-initialised entries).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..delta.delta import INDEX, VALUE
from ..errors import UsageError
from ..model.anatomy import HEAD
from ..model.grafts import Place
from ..model.injection import by_place
from ..model.rows import Known, Rows
from ..model.task_model import Model
from .additions import GraftGroup, alike
from .dropout import Keyed
from .lanes import Lane, Slot, VectorLayout, settled
from .packed import LaneTensors, Packed
from .row_sharing import sharing_rows
from .sparse import Patch

# Lanes share a pass to share its overhead: per token a step gets cheaper up to about 2,000 tokens and dearer again
# beyond (LOG.md has the sweep).
PASS_TOKENS = 2000


class Members(NamedTuple):
    """The lanes of a batch (None: all of them) that hold a vector at the same offset of their rows."""

    lanes: list[int] | None
    offset: int
    size: int
    trains: bool


class Bank:
    """A base wearing K lanes. Each lane's rows see the base under that lane alone; the base stays untouched.

    `models` is the model of all lanes or of each: lanes may differ in their heads. What a call costs depends on the
    lanes it names, not on how many there are.
    """

    def __init__(
        self,
        models: Model | Sequence[Model],
        lanes: Sequence[Lane],
        prefix_dropout: bool = True,
        packed: Packed | None = None,
    ) -> None:
        self.models = [models] * len(lanes) if isinstance(models, Model) else list(models)
        self.model = self.models[0]
        if len(self.models) != len(lanes) or any(model.base is not self.model.base for model in self.models):
            raise UsageError("a bank takes one model per lane, all of them on the same base")
        device = next(self.model.encoder.parameters()).device
        self.values = torch.zeros(len(lanes), max(lane.start.numel() for lane in lanes), device=device)
        self.gradients = torch.zeros(len(lanes), max(lane.trained for lane in lanes), device=device)
        for k, lane in enumerate(lanes):
            self.values[k, : lane.start.numel()] = lane.start.to(device)
        self.lanes = settled(lanes, device)
        self._leaves: dict[tuple[int, int], Tensor] = {}
        self._anchor = torch.zeros(0, requires_grad=True)
        self._packed = packed or (Packed(self.model) if Packed.supports(self.model) else None)
        known: dict[VectorLayout, VectorLayout] = {}
        inner = self._packed.inner if self._packed else ()
        layouts = [VectorLayout.of(lane, inner) for lane in lanes]
        self._layouts = [known.setdefault(layout, layout) for layout in layouts]  # equal layouts are one object
        self._grafts = _graft_layouts(self.lanes, self.model)
        if any(layout is None for layout in self._grafts):
            self._packed = None  # entries of a graft, or a graft at a place that the packed path does not compute
        elif self._packed is not None:
            names = set[str]().union(*(self._graft_names(k) for k in range(len(lanes))))
            if not self._packed.takes_grafts(names):
                self._packed = None
        self._patches: dict[int, dict[str, list[Patch]]] = {}
        # The layers below all that any lane wears: the same in every epoch, if dropout leaves them alone.
        self.frozen = 0
        if self._packed is not None and not prefix_dropout:
            self.frozen = self.model.anatomy.layers_below({slot.name for lane in lanes for slot in lane.slots})
        self.depths = [self.frozen] * len(lanes)  # the first layers of each lane that do not train
        self._settled: dict[int, frozenset[str]] = {}  # the tensors of a lane that trained and no longer do

    def freeze(self, k: int, layers: int) -> None:
        """Train lane k's first layers no longer: its backward pass ends there, and they are without dropout."""
        self.depths[k] = layers
        self._settled[k] = self.model.anatomy.names_below(layers)

    def entries(self, k: int, names: Container[str]) -> Tensor:
        """Where the entries of these tensors lie among lane k's trained values."""
        places = [torch.zeros(0, dtype=torch.int64)]
        for slot in self.lanes[k].slots:
            if slot.offset < self.lanes[k].trained and slot.name in names:
                places.append(torch.arange(slot.offset, slot.offset + slot.size))
        return torch.cat(places).to(self.values.device)

    def logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The outputs of each lane's rows, under that lane; with `streams`, dropout is on and seeded per lane."""
        if self._packed is None:
            return self.stock_logits(rows, streams)
        found = self._packed_logits(self._packed, {k: own.apart for k, own in rows.items()}, streams)
        return {k: by_row(found[k], own) for k, own in rows.items()}

    def _packed_logits(
        self, packed: Packed, rows: Mapping[int, Rows], streams: Mapping[int, int] | None
    ) -> dict[int, Tensor]:
        out: dict[int, Tensor] = {}
        for lanes in self._passes(rows):
            stacks = self._stacks(lanes)
            outputs = packed(
                [rows[k] for k in lanes],
                [self._lane_tensors(k, stacks) for k in lanes],
                stacks,
                None if streams is None else [streams[k] for k in lanes],
                [self.models[k] for k in lanes],
                self.depths[lanes[0]],
                self._graft_groups(lanes, [len(rows[k].ids) for k in lanes]),
            )
            out |= zip(lanes, outputs, strict=True)
        return out

    def prefix_bytes(self, rows: Rows, layers: int) -> int:
        """How much memory the states behind so many layers take; 0 if they cannot be kept."""
        if self._packed is None or not layers:
            return 0
        each = self.model.output_count(rows.apart) if layers == self.model.anatomy.layers else len(rows.ids)
        return each * self.model.base.width * 4

    def with_prefix(self, rows: Rows, batches: Iterable[Array]) -> Rows:
        """The rows with what the layers that are frozen in every lane make of them, computed in these batches."""
        if self._packed is None or not self.frozen:
            return rows
        return replace(rows, known=self._prefix(self._packed, rows, batches, self.frozen, None))

    def with_lane_prefix(self, rows: Rows, batches: Iterable[Array], k: int) -> Rows:
        """The rows with what lane k's frozen layers make of them, under its own values."""
        if self._packed is None or not self.depths[k]:
            return rows
        known = self._prefix(self._packed, rows.of_lane(k), batches, self.depths[k], k)
        return replace(rows, own={**rows.own, k: known})

    def _prefix(self, packed: Packed, rows: Rows, batches: Iterable[Array], layers: int, k: int | None) -> Known:
        """The states behind the first layers of lane k, or of the base."""
        by_text = layers == self.model.anatomy.layers and self.model.pool != "tokens"
        states = np.empty((len(rows.apart) if by_text else len(rows.ids), self.model.base.width), np.float32)
        for chosen in batches:
            batch = rows.take(chosen).apart
            stacks = {} if k is None else self._stacks([k])
            lane = LaneTensors({}, {}) if k is None else self._lane_tensors(k, stacks)
            grafts = [] if k is None else self._graft_groups([k], [len(batch.ids)])
            found = packed.prefix(batch, layers, lane, stacks, grafts, self.model.pool)
            states[rows.windows_of(chosen) if by_text else rows.tokens(chosen)] = found.cpu().numpy()
        return Known(layers, by_text, states)

    def stock_logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The same outputs by the stock model, lane by lane on padded batches: for every architecture."""
        out = {}
        for k, own in rows.items():
            stream = None if streams is None else streams[k]
            model, windows = self.models[k], own.apart
            worn, shared = model.swapped(self._effective(k)), sharing_rows(model.encoder, windows.lengths)
            with _training(model, streams is not None), self._dropout(stream), worn, shared:
                out[k] = by_row(model(windows), own)
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
        shapes = {slot.name: slot.shape for slot in self.lanes[k].slots}
        table: Tensors = {}
        for name, parts in named.items():
            arrays = _named_arrays(name, parts)
            # A file tells the shape of a graft's tensor only if it holds the tensor whole.
            if name not in self.model.base.parameters and len(arrays) == 2:
                values = arrays[name + VALUE]
                if values.size == math.prod(shapes[name]):
                    arrays = {name: values.reshape(shapes[name])}
            table.update(arrays)
        return table

    def _dropout(self, stream: int | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        if self._packed is not None:
            return Keyed(stream)  # the masks of the packed path, so that the two agree
        torch.manual_seed(stream)
        return nullcontext()

    def _lane_tensors(self, k: int, stacks: Mapping[str, Tensor]) -> LaneTensors:
        patches = self._patches_of(k)
        elsewhere = {*stacks, *patches, *self._graft_names(k)}
        return LaneTensors(self._effective(k, elsewhere), patches)

    def _graft_names(self, k: int) -> set[str]:
        """The names of the tensors of lane k's grafts."""
        return {slot.name for place in self._grafts[k] or () for slot in place.slots}

    def _patches_of(self, k: int) -> dict[str, list[Patch]]:
        """Lane k's matrices of which it has so few entries that the packed path adds them one by one."""
        slots = self.lanes[k].slots
        if self._packed is None or all(slot.index is None for slot in slots):
            return {}
        if k in self._patches:
            return self._patches[k]
        patches: dict[str, list[Patch]] = {}
        products, look_ups = self._packed.products, self._packed.look_ups
        for number, slot in enumerate(slots):
            if slot.name in products | look_ups and slot.index is not None and len(slot.shape) == 2:
                base = self.model.original(slot.name).detach().reshape(-1)[slot.index]
                patches.setdefault(slot.name, []).append(
                    Patch(slot.index, slot.shape, base, self._leaf(k, number, slot))
                )
        replaced = {slot.name for slot in slots if slot.index is None}
        self._patches[k] = {}
        for name, members in patches.items():
            # A look-up meets few entries, however many there are; a lane may also have the whole matrix.
            sparse = name in look_ups or all(patch.is_sparse for patch in members)
            if sparse and name not in replaced:
                self._patches[k][name] = members
        return self._patches[k]

    def _effective(self, k: int, without: Container[str] = ()) -> dict[str, Tensor]:
        """Lane k's tensors, whole: chosen entries are written over a copy of the base's tensor."""
        tensors: dict[str, Tensor] = {}
        for number, slot in enumerate(self.lanes[k].slots):
            if slot.name in without:
                continue
            leaf = self._leaf(k, number, slot)
            if slot.index is None:
                tensors[slot.name] = leaf
            else:
                under = tensors.get(slot.name, self.models[k].original(slot.name).detach())
                tensors[slot.name] = under.reshape(-1).index_copy(0, slot.index, leaf).view(slot.shape)
        return tensors

    def _leaf(self, k: int, number: int, slot: Slot) -> Tensor:
        # Each leaf is a view of the flat row and its gradient a view of the flat gradients, so that autograd fills,
        # and the optimiser reads, one buffer per lane. What does not train is not kept: thousands of lanes of views
        # would weigh as much as their values.
        shape = slot.shape if slot.index is None else (slot.size,)
        if slot.offset >= self.lanes[k].trained or slot.name in self._settled.get(k, ()):
            return self.values[k].narrow(0, slot.offset, slot.size).view(shape)
        if (k, number) not in self._leaves:
            with torch.inference_mode(False):  # a leaf first used in an evaluation must serve training too
                leaf = self.values[k].narrow(0, slot.offset, slot.size).detach().view(shape).requires_grad_()
                leaf.grad = self.gradients[k].narrow(0, slot.offset, slot.size).view(shape)
            self._leaves[k, number] = leaf
        return self._leaves[k, number]

    def _passes(self, rows: Mapping[int, Rows]) -> Iterator[list[int]]:
        """The lanes in turn; those of a pass have the same layers frozen."""
        for depth in sorted({self.depths[k] for k in rows}):
            yield from _passes({k: own for k, own in rows.items() if self.depths[k] == depth})

    def _graft_groups(self, lanes: list[int], tokens: Sequence[int]) -> list[GraftGroup]:
        """The grafts of some lanes; lanes of equal layout and about as many tokens are stacked."""
        members: dict[GraftLayout, list[int]] = {}
        for position, k in enumerate(lanes):
            layout = self._grafts[k]
            if layout:
                members.setdefault(layout, []).append(position)
        groups = []
        for layout, every in members.items():
            for positions in alike(every, tokens):
                groups += self._stacked_grafts(layout, positions, lanes)
        return groups

    def _stacked_grafts(self, layout: GraftLayout, positions: list[int], lanes: list[int]) -> list[GraftGroup]:
        slots = [slot for place in layout for slot in place.slots]
        numbers = [lanes[position] for position in positions]
        stacked: tuple[Tensor, ...] = _Gather.apply(self._anchor, self, numbers, slots)  # type: ignore[no-untyped-call]
        tensors = dict(zip(slots, stacked, strict=True))
        groups = []
        for place in layout:
            roles = {role: tensors[slot] for role, slot in zip(place.roles, place.slots, strict=True)}
            groups.append(GraftGroup(place.place, tuple(positions), roles))
        return groups

    def _stacks(self, lanes: list[int]) -> dict[str, Tensor]:
        # The vectors of all lanes of a batch are one tensor [lanes, n], so that one addition serves all lanes. In a
        # bank of several, a lane computed alone is stacked too: its bits must not depend on which others still run.
        if len(self.lanes) == 1:
            return {}
        vectors = _vectors([self._layouts[k] for k in lanes])
        stacks: tuple[Tensor, ...] = _Stacks.apply(self._anchor, self, lanes, vectors)  # type: ignore[no-untyped-call]
        return dict(zip(vectors, stacks, strict=True))


def by_row(outputs: Tensor, rows: Rows) -> Tensor:
    """The outputs of each row from those of its windows: their mean, each with the weight of its tokens."""
    if rows.windows is None:
        return outputs
    lengths = rows.apart.lengths
    row = np.repeat(np.arange(len(rows)), rows.window_counts)
    weights = torch.from_numpy((lengths / rows.lengths[row]).astype(np.float32)).to(outputs.device)
    numbers = torch.from_numpy(row).to(outputs.device)
    return outputs.new_zeros(len(rows), outputs.shape[1]).index_add(0, numbers, outputs * weights[:, None])


class _Gather(torch.autograd.Function):
    """The tensors in some slots of some lanes, [lanes, ...]; their gradients are added to the bank's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bank: Bank, lanes: list[int], slots: list[Slot]) -> tuple[Tensor, ...]:
        ctx.bank, ctx.lanes, ctx.slots = bank, lanes, slots
        ctx.set_materialize_grads(False)
        values = _values_of(bank, lanes)
        trained = bank.lanes[lanes[0]].trained
        tensors = []
        constant = []
        for slot in slots:
            tensor = values[:, slot.offset : slot.offset + slot.size].reshape(len(lanes), *slot.shape)
            tensors.append(tensor)
            if slot.offset >= trained:
                constant.append(tensor)
        ctx.mark_non_differentiable(*constant)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        lanes = torch.tensor(ctx.lanes, device=ctx.bank.gradients.device)
        for slot, gradient in zip(ctx.slots, gradients, strict=True):
            if gradient is not None:
                target = ctx.bank.gradients[:, slot.offset : slot.offset + slot.size]
                target.index_add_(0, lanes, gradient.reshape(len(ctx.lanes), -1))
        return None, None, None, None


class _Stacks(torch.autograd.Function):
    """The vectors of some lanes, the base's where a lane has none; their gradients are added to the bank's. (A leaf
    per vector would do, but for autograd's warning that a strided leaf's gradient is not contiguous.)"""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, bank: Bank, lanes: list[int], vectors: dict[str, list[Members]]
    ) -> tuple[Tensor, ...]:
        ctx.bank, ctx.lanes, ctx.vectors = bank, lanes, list(vectors.values())
        ctx.set_materialize_grads(False)
        values = _values_of(bank, lanes)
        stacks = []
        constant = []
        for name, groups in vectors.items():
            stack = _stack(bank.model.original(name).detach(), values, groups)
            stacks.append(stack)
            if not any(group.trains for group in groups):
                constant.append(stack)
        ctx.mark_non_differentiable(*constant)
        return tuple(stacks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        lanes = torch.tensor(ctx.lanes, device=ctx.bank.gradients.device)
        for groups, gradient in zip(ctx.vectors, gradients, strict=True):
            for members, offset, size, trains in groups:
                if not trains or gradient is None:
                    continue
                target = ctx.bank.gradients[:, offset : offset + size]
                if members is None:
                    target.index_add_(0, lanes, gradient)
                else:
                    target.index_add_(0, lanes[members], gradient[members])
        return None, None, None, None


def _values_of(bank: Bank, lanes: list[int]) -> Tensor:
    """The rows of these lanes; no copy where they are all lanes."""
    values = bank.values.detach()
    return values if lanes == list(range(len(bank.lanes))) else values[lanes]


def _stack(base: Tensor, values: Tensor, groups: Sequence[Members]) -> Tensor:
    """One vector of all lanes, [lanes, n]: the base's where a lane has none."""
    if groups[0].lanes is None:
        return values[:, groups[0].offset : groups[0].offset + groups[0].size]
    stack = base.repeat(len(values), 1)
    for members, offset, size, _ in groups:
        stack[members] = values[members, offset : offset + size]
    return stack


@dataclass(frozen=True)
class PlacedGraft:
    """Where a lane holds the tensors of one graft."""

    place: Place
    roles: tuple[str, ...]
    slots: tuple[Slot, ...]
    trains: tuple[bool, ...]


GraftLayout = tuple[PlacedGraft, ...]


def _graft_layouts(lanes: Sequence[Lane], model: Model) -> list[GraftLayout | None]:
    """Where each lane holds its grafts; None for a lane that holds one by entries."""
    known: dict[tuple[int, int], GraftLayout | None] = {}
    layouts = []
    for lane in lanes:
        key = (id(lane.slots), lane.trained)
        if key not in known:
            known[key] = _graft_layout(lane, model)
        layouts.append(known[key])
    return layouts


def _graft_layout(lane: Lane, model: Model) -> GraftLayout | None:
    slots = {slot.name: slot for slot in lane.slots if slot.name not in model.base.parameters}
    slots = {name: slot for name, slot in slots.items() if not name.startswith(HEAD)}
    if any(slot.index is not None for slot in slots.values()):
        return None
    layout = []
    for place, roles in by_place(slots).items():
        held = tuple(slots[name] for name in roles.values())
        trains = tuple(slot.offset < lane.trained for slot in held)
        layout.append(PlacedGraft(place, tuple(roles), held, trains))
    return tuple(layout)


def _passes(rows: Mapping[int, Rows]) -> Iterator[list[int]]:
    """The lanes in turn, as many at once as PASS_TOKENS allows."""
    lanes: list[int] = []
    tokens = 0
    for k, own in rows.items():
        if lanes and tokens + len(own.ids) > PASS_TOKENS:
            yield lanes
            lanes, tokens = [], 0
        lanes.append(k)
        tokens += len(own.ids)
    yield lanes


def _vectors(layouts: Sequence[VectorLayout]) -> dict[str, list[Members]]:
    """Where the vectors of the lanes of a batch lie, layout by layout; not those that a lane holds by entries."""
    lanes_of: dict[int, list[int]] = {}
    layout_of: dict[int, VectorLayout] = {}
    for lane, layout in enumerate(layouts):
        lanes_of.setdefault(id(layout), []).append(lane)
        layout_of[id(layout)] = layout
    by_entries = frozenset[str]().union(*(layout.sparse for layout in layout_of.values()))
    vectors: dict[str, list[Members]] = {}
    for key, lanes in lanes_of.items():
        members = None if len(lanes_of) == 1 else lanes
        for name, offset, size, trains in layout_of[key].vectors:
            if name not in by_entries:
                vectors.setdefault(name, []).append(Members(members, offset, size, trains))
    return vectors


@contextmanager
def _training(model: Model, on: bool) -> Iterator[None]:
    # Evaluation is the resting state, so that no evaluation can leave the next step without dropout.
    if on:
        model.train()
    try:
        yield
    finally:
        if on:
            model.eval()


def _named_arrays(name: str, parts: list[tuple[Array | None, Array]]) -> Tensors:
    if len(parts) == 1:
        index, values = parts[0]
        if index is None:
            return {name: values.copy()}
        return {name + INDEX: index.copy(), name + VALUE: values.copy()}
    index = np.concatenate([part[0] for part in parts if part[0] is not None])
    order = np.argsort(index)
    return {name + INDEX: index[order], name + VALUE: np.concatenate([part[1] for part in parts])[order]}
