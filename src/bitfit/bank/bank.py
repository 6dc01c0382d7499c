"""The bank: K deltas (lanes) on one frozen base, each row of a batch computed under its lane.

The stock path works for every transformers model. A lane's rows pass through the stock model while the lane's tensors
replace the base's: whole tensors directly, single entries by a copy of the tensor. So a lane equals the stock model
bit for bit, rows of different lanes share no sum, and the base's weights exist once. For the BERT family `packed`
computes the same outputs from the same buffers, faster; `blocked` may copy the base's matrices for it, once for all
banks.

Values and gradients are lane-major [K, P]: row k is lane k, trained entries first, then constants that differ from the
base (a frozen random head, re-initialised entries).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..delta.delta import INDEX, VALUE
from ..errors import UsageError
from ..model.anatomy import HEAD, PAIR
from ..model.grafts import Place
from ..model.injection import by_place
from ..model.rows import Known, Rows
from ..model.task_model import Model
from .additions import GraftGroup, by_tokens
from .dropout import Keyed
from .lanes import Lane, Slot, VectorLayout, without_values
from .packed import LaneTensors, Packed
from .row_sharing import sharing_rows
from .sparse import Patch

# Lanes share a pass to share its overhead. The cost of a step per token falls up to about 2,000 tokens and rises again
# beyond (LOG.md has the sweep).
PASS_TOKENS = 2000


class Members(NamedTuple):
    """The lanes of a batch (None: all of them) that hold a vector at the same offset of their rows."""

    lanes: list[int] | None
    offset: int
    size: int
    trains: bool


class Bank:
    """K lanes on one base. Each lane's rows are computed with the tensors of that lane alone; the base never changes.

    `models` is the model of all lanes, or one model per lane: lanes may differ in their heads and in their grafts. The
    cost of a call depends on the lanes in it, not on the number of lanes in the bank. At most `most_frozen` layers are
    computed once.
    """

    def __init__(
        self,
        models: Model | Sequence[Model],
        lanes: Sequence[Lane],
        prefix_dropout: bool = True,
        packed: Packed | None = None,
        most_frozen: int | None = None,
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
        self.lanes = without_values(lanes, device)
        self._leaves: dict[tuple[int, int], Tensor] = {}
        self._anchor = torch.zeros(0, requires_grad=True)
        self._packed = packed or (Packed(self.model) if Packed.supports(self.model) else None)
        known: dict[VectorLayout, VectorLayout] = {}
        inner = self._packed.inner if self._packed else ()
        layouts = [VectorLayout.of(lane, inner) for lane in lanes]
        self._layouts = [known.setdefault(layout, layout) for layout in layouts]  # equal layouts are one object
        self._grafts = _graft_layouts(self.lanes, self.model)
        if any(layout is None for layout in self._grafts):
            self._packed = None  # it does not compute single entries of a graft
        elif self._packed is not None:
            names = set[str]().union(*(self._graft_names(k) for k in range(len(lanes))))
            if not self._packed.takes_grafts(names):
                self._packed = None
        self._patches: dict[int, dict[str, list[Patch]]] = {}
        # The layers below everything that any lane changes: without dropout their outputs are the same in every epoch.
        self.frozen = 0
        if self._packed is not None and not prefix_dropout:
            self.frozen = min(map(_unchanged_layers, self.models, lanes))
            if most_frozen is not None:
                self.frozen = min(self.frozen, most_frozen)
        self.depths = [self.frozen] * len(lanes)  # the first layers of each lane that do not train
        self._settled: dict[int, frozenset[str]] = {}  # the tensors of a lane that trained and no longer do

    def freeze(self, k: int, layers: int) -> None:
        """Stop training lane k's first layers: its backward pass ends there, and they have no dropout."""
        self.depths[k] = layers
        self._settled[k] = self.models[k].anatomy.names_below(layers)

    def entries(self, k: int, names: Container[str]) -> Tensor:
        """The indices of these tensors' entries among lane k's trained values."""
        indices = [torch.zeros(0, dtype=torch.int64)]
        for slot in self.lanes[k].slots:
            if slot.offset < self.lanes[k].trained and slot.name in names:
                indices.append(torch.arange(slot.offset, slot.offset + slot.size))
        return torch.cat(indices).to(self.values.device)

    def logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The logits of each lane's rows; with `streams`, dropout is on and seeded per lane."""
        if self._packed is None:
            return self.stock_logits(rows, streams)
        windows = {k: lane_rows.by_window for k, lane_rows in rows.items()}
        outputs = self._packed_logits(self._packed, windows, streams)
        return {k: by_row(self.models[k], outputs[k], lane_rows) for k, lane_rows in rows.items()}

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
        """The bytes that the outputs of the first `layers` layers take; 0 if they cannot be stored."""
        if self._packed is None or not layers:
            return 0
        after_all = layers == self.model.anatomy.layers
        states = self.model.output_count(rows.by_window) if after_all else len(rows.ids)
        return states * self.model.base.width * 4

    def with_prefix(self, rows: Rows, batches: Iterable[Array]) -> Rows:
        """The rows with the outputs of the layers that are frozen in every lane, computed in these batches."""
        if self._packed is None or not self.frozen:
            return rows
        return replace(rows, known=self._prefix(self._packed, rows, batches, self.frozen, None))

    def with_lane_prefix(self, rows: Rows, batches: Iterable[Array], k: int) -> Rows:
        """The rows with the outputs of lane k's frozen layers, which may hold values that lane k has trained."""
        if self._packed is None or not self.depths[k]:
            return rows
        known = self._prefix(self._packed, rows.of_lane(k), batches, self.depths[k], k)
        return replace(rows, known_by_lane={**rows.known_by_lane, k: known})

    def _prefix(self, packed: Packed, rows: Rows, batches: Iterable[Array], layers: int, k: int | None) -> Known:
        """The outputs of the first `layers` layers of lane k; without k, of the base."""
        by_text = layers == self.model.anatomy.layers and self.model.pool != "tokens"
        count = len(rows.by_window) if by_text else len(rows.ids)
        states = np.empty((count, self.model.base.width), np.float32)
        for chosen in batches:
            batch = rows.take(chosen).by_window
            stacks = {} if k is None else self._stacks([k])
            lane = LaneTensors({}, {}) if k is None else self._lane_tensors(k, stacks)
            grafts = [] if k is None else self._graft_groups([k], [len(batch.ids)])
            outputs = packed.prefix(batch, layers, lane, stacks, grafts, self.model.pool)
            states[rows.windows_of(chosen) if by_text else rows.tokens(chosen)] = outputs.cpu().numpy()
        return Known(layers, by_text, states)

    def stock_logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The same logits by the stock model, lane by lane on padded batches: for every architecture."""
        out = {}
        for k, lane_rows in rows.items():
            stream = None if streams is None else streams[k]
            model = self.models[k]
            windows = lane_rows.by_window
            swapped = model.swapped(self._effective(k))
            shared_rows = sharing_rows(model.encoder, windows.lengths)
            with (
                _training(model, streams is not None),
                self._dropout(stream, lane_rows.before[0]),
                swapped,
                shared_rows,
            ):
                out[k] = by_row(model, model(windows), lane_rows)
        return out

    def trained(self, k: int) -> Tensor:
        """Lane k's trained values as one flat view, with its gradient attached, for an optimiser."""
        flat = self.values[k, : self.lanes[k].trained].detach().requires_grad_()
        flat.grad = self.gradients[k, : self.lanes[k].trained]
        return flat

    def tensors(self, k: int) -> Tensors:
        """Lane k's tensors as in a delta: parameter -> values, or its indices and values."""
        by_name: dict[str, list[tuple[Array | None, Array]]] = {}
        for slot in self.lanes[k].slots:
            values = self.values[k, slot.offset : slot.offset + slot.size].cpu().numpy()
            if slot.index is None:
                by_name.setdefault(slot.name, []).append((None, values.reshape(slot.shape)))
            else:
                by_name.setdefault(slot.name, []).append((slot.index.cpu().numpy(), values))
        shapes = {slot.name: slot.shape for slot in self.lanes[k].slots}
        tensors: Tensors = {}
        for name, slots in by_name.items():
            arrays = _named_arrays(name, slots)
            # A file shows the shape of a graft's tensor only if it holds the whole tensor.
            if name not in self.model.base.parameters and len(arrays) == 2:
                values = arrays[name + VALUE]
                if values.size == math.prod(shapes[name]):
                    arrays = {name: values.reshape(shapes[name])}
            tensors.update(arrays)
        return tensors

    def _dropout(self, stream: int | None, before: int) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        if self._packed is not None:
            return Keyed(stream, before=before)  # the masks of the packed path, so that the two agree
        torch.manual_seed(stream + before)  # workers that share a batch draw different masks
        return nullcontext()

    def _lane_tensors(self, k: int, stacks: Mapping[str, Tensor]) -> LaneTensors:
        """Lane k's tensors that are neither stacked with other lanes' nor tensors of grafts, and its patches."""
        patches = self._patches_of(k)
        excluded = {*stacks, *patches, *self._graft_names(k)}
        return LaneTensors(self._effective(k, excluded), patches)

    def _graft_names(self, k: int) -> set[str]:
        """The names of the tensors of lane k's grafts."""
        grafts = self._grafts[k] or ()
        slots = chain.from_iterable(graft.slots for graft in grafts)
        return {slot.name for slot in slots}

    def _patches_of(self, k: int) -> dict[str, list[Patch]]:
        """Lane k's patches: matrices of which it has so few entries that the packed path computes with the entries."""
        slots = self.lanes[k].slots
        if self._packed is None or all(slot.index is None for slot in slots):
            return {}
        if k in self._patches:
            return self._patches[k]
        patches: dict[str, list[Patch]] = {}
        look_ups = self._packed.look_ups
        patchable = self._packed.products | look_ups
        for number, slot in enumerate(slots):
            if slot.name in patchable and slot.index is not None and len(slot.shape) == 2:
                base = self.model.original(slot.name).detach().reshape(-1)[slot.index]
                patches.setdefault(slot.name, []).append(
                    Patch(slot.index, slot.shape, base, self._leaf(k, number, slot))
                )
        replaced = {slot.name for slot in slots if slot.index is None}
        self._patches[k] = {}
        for name, members in patches.items():
            # A look-up reads few rows of its matrix, so that even many entries are cheap.
            sparse = name in look_ups or all(patch.is_sparse for patch in members)
            if sparse and name not in replaced:
                self._patches[k][name] = members
        return self._patches[k]

    def _effective(self, k: int, without: Container[str] = ()) -> dict[str, Tensor]:
        """Lane k's tensors as whole tensors: single entries are written into a copy of the base's tensor."""
        tensors: dict[str, Tensor] = {}
        for number, slot in enumerate(self.lanes[k].slots):
            if slot.name in without:
                continue
            leaf = self._leaf(k, number, slot)
            if slot.index is None:
                tensors[slot.name] = leaf
            else:
                before = tensors.get(slot.name, self.models[k].original(slot.name).detach())
                tensors[slot.name] = before.reshape(-1).index_copy(0, slot.index, leaf).view(slot.shape)
        return tensors

    def _leaf(self, k: int, number: int, slot: Slot) -> Tensor:
        # Each leaf is a view of the flat row and its gradient a view of the flat gradients, so that autograd fills,
        # and the optimiser reads, one buffer per lane. Views of constants are not cached: with thousands of lanes the
        # views would take as much memory as the values.
        shape = slot.shape if slot.index is None else (slot.size,)
        if slot.offset >= self.lanes[k].trained or slot.name in self._settled.get(k, ()):
            return self.values[k].narrow(0, slot.offset, slot.size).view(shape)
        if (k, number) not in self._leaves:
            with torch.inference_mode(False):  # a leaf first used in an evaluation must also work in training
                leaf = self.values[k].narrow(0, slot.offset, slot.size).detach().view(shape).requires_grad_()
                leaf.grad = self.gradients[k].narrow(0, slot.offset, slot.size).view(shape)
            self._leaves[k, number] = leaf
        return self._leaves[k, number]

    def _passes(self, rows: Mapping[int, Rows]) -> Iterator[list[int]]:
        """The lanes of each pass: they have the same number of frozen layers."""
        for depth in sorted({self.depths[k] for k in rows}):
            yield from _passes({k: lane_rows for k, lane_rows in rows.items() if self.depths[k] == depth})

    def _graft_groups(self, lanes: list[int], tokens: Sequence[int]) -> list[GraftGroup]:
        """The grafts of some lanes; those of lanes with equal layouts and similar numbers of tokens are stacked."""
        by_layout: dict[GraftLayout, list[int]] = {}
        for position, k in enumerate(lanes):
            layout = self._grafts[k]
            if layout:
                by_layout.setdefault(layout, []).append(position)
        groups = []
        for layout, members in by_layout.items():
            for positions in by_tokens(members, tokens):
                groups += self._stacked_grafts(layout, positions, lanes)
        return groups

    def _stacked_grafts(self, layout: GraftLayout, positions: list[int], lanes: list[int]) -> list[GraftGroup]:
        slots = list(chain.from_iterable(graft.slots for graft in layout))
        numbers = [lanes[position] for position in positions]
        stacked: tuple[Tensor, ...] = _Gather.apply(self._anchor, self, numbers, slots)  # type: ignore[no-untyped-call]
        tensors = dict(zip(slots, stacked, strict=True))
        groups = []
        for graft in layout:
            by_role = {role: tensors[slot] for role, slot in zip(graft.roles, graft.slots, strict=True)}
            groups.append(GraftGroup(graft.place, tuple(positions), by_role))
        return groups

    def _stacks(self, lanes: list[int]) -> dict[str, Tensor]:
        # A vector of all lanes of a batch is one tensor [lanes, n], so that one addition serves all lanes. In a bank
        # of several lanes, a lane computed alone is stacked too: its bits must not depend on which others still run.
        if len(self.lanes) == 1:
            return {}
        vectors = _vectors([self._layouts[k] for k in lanes])
        stacks: tuple[Tensor, ...] = _Stacks.apply(self._anchor, self, lanes, vectors)  # type: ignore[no-untyped-call]
        return dict(zip(vectors, stacks, strict=True))


def _unchanged_layers(model: Model, lane: Lane) -> int:
    """How many of the first layers a lane leaves as the base has them."""
    return model.anatomy.layers_below({slot.name for slot in lane.slots})


def by_row(model: Model, outputs: Tensor, rows: Rows) -> Tensor:
    """The outputs of each row from those of its windows: their mean, each with the weight of its tokens.

    The head of a pair reads both windows, so that its outputs are those of the row.
    """
    if rows.windows is None or model.pool == PAIR:
        return outputs
    lengths = rows.by_window.lengths
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
    """The vectors of some lanes, and the base's for lanes without them; their gradients are added to the bank's.

    (Leaves would do, were it not for autograd's warning that the gradient of a strided leaf is not contiguous.)
    """

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
    """The values of these lanes; not copied if they are all lanes of the bank."""
    values = bank.values.detach()
    if lanes == list(range(len(bank.lanes))):
        return values
    return values[lanes]


def _stack(base: Tensor, values: Tensor, groups: Sequence[Members]) -> Tensor:
    """One vector of all lanes, [lanes, n]; the base's for lanes without it."""
    if groups[0].lanes is None:
        return values[:, groups[0].offset : groups[0].offset + groups[0].size]
    stack = base.repeat(len(values), 1)
    for members, offset, size, _ in groups:
        stack[members] = values[members, offset : offset + size]
    return stack


@dataclass(frozen=True)
class GraftSlots:
    """The slots of a lane that hold the tensors of one graft."""

    place: Place
    roles: tuple[str, ...]
    slots: tuple[Slot, ...]
    trains: tuple[bool, ...]


GraftLayout = tuple[GraftSlots, ...]


def _graft_layouts(lanes: Sequence[Lane], model: Model) -> list[GraftLayout | None]:
    """The layout of each lane's grafts; None for a lane that has only some entries of a graft's tensor."""
    known: dict[tuple[int, int], GraftLayout | None] = {}
    layouts = []
    for lane in lanes:
        key = (id(lane.slots), lane.trained)
        if key not in known:
            known[key] = _graft_layout(lane, model)
        layouts.append(known[key])
    return layouts


def _graft_layout(lane: Lane, model: Model) -> GraftLayout | None:
    slots = {}
    for slot in lane.slots:
        if slot.name not in model.base.parameters and not slot.name.startswith(HEAD):
            slots[slot.name] = slot
    if any(slot.index is not None for slot in slots.values()):
        return None
    layout = []
    for place, names in by_place(slots).items():
        graft_slots = tuple(slots[name] for name in names.values())
        trains = tuple(slot.offset < lane.trained for slot in graft_slots)
        layout.append(GraftSlots(place, tuple(names), graft_slots, trains))
    return tuple(layout)


def _passes(rows: Mapping[int, Rows]) -> Iterator[list[int]]:
    """The lanes in groups of at most PASS_TOKENS tokens, or of one lane."""
    lanes: list[int] = []
    tokens = 0
    for k, lane_rows in rows.items():
        if lanes and tokens + len(lane_rows.ids) > PASS_TOKENS:
            yield lanes
            lanes, tokens = [], 0
        lanes.append(k)
        tokens += len(lane_rows.ids)
    yield lanes


def _vectors(layouts: Sequence[VectorLayout]) -> dict[str, list[Members]]:
    """The lanes of a batch that hold each vector, by layout; without vectors of which a lane has only entries."""
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
    # Training mode lasts for this block only, so that no evaluation can leave the next step without dropout.
    if on:
        model.train()
    try:
        yield
    finally:
        if on:
            model.eval()


def _named_arrays(name: str, slots: list[tuple[Array | None, Array]]) -> Tensors:
    """A tensor's arrays as in a delta, from the indices and values of its slots."""
    if len(slots) == 1:
        index, values = slots[0]
        if index is None:
            return {name: values.copy()}
        return {name + INDEX: index.copy(), name + VALUE: values.copy()}
    index = np.concatenate([slot_index for slot_index, _ in slots if slot_index is not None])
    values = np.concatenate([slot_values for _, slot_values in slots])
    order = np.argsort(index)
    return {name + INDEX: index[order], name + VALUE: values[order]}
