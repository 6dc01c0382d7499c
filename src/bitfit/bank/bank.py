"""The bank: K deltas on one frozen base, each row of a batch computed under the delta it names.

The stock path works for every transformers model. A lane's rows pass through the stock model with the lane's values
in the places of the base's: a whole tensor as it is, chosen entries written over a copy. So a lane is the stock model
to the bit, rows of different lanes share no sum, and the base's weights exist once. For the BERT family `packed`
computes the same numbers from the same buffers, faster.

Values and gradients are lane-major [K, P]: row k is lane k, trained entries first, then what only differs from the
base (a frozen random head, re-initialised entries).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..delta.delta import INDEX, VALUE, Delta
from ..errors import DeltaError, UsageError
from ..model.anatomy import HEADS, Site
from ..model.resolution import Start
from ..model.rows import Known, Rows
from ..model.selection import Selection
from ..model.task_model import Model, fresh
from .dropout import Keyed
from .packed import Packed, Wear
from .row_sharing import sharing_rows
from .sparse import Patch

# Lanes share a pass to share its overhead: per token a step gets cheaper up to about 2,000 tokens and dearer again
# beyond (LOG.md has the sweep).
PASS_TOKENS = 2000


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
class Form:
    """Where a lane holds its whole vectors. Lanes of one form are read together, however many they are."""

    vectors: tuple[tuple[str, int, int, bool], ...]  # name, offset, size, whether it trains
    sparse: frozenset[str]  # tensors that the lane holds by entries

    @classmethod
    def of(cls, lane: Lane, known: Container[str]) -> Form:
        """The form of a lane as to the tensors in `known`."""
        whole = (s for s in lane.slots if s.index is None and len(s.shape) == 1 and s.name in known)
        vectors = tuple((s.name, s.offset, s.size, s.offset < lane.trained) for s in whole)
        return cls(vectors, frozenset(s.name for s in lane.slots if s.index is not None))


Part = tuple[list[int] | None, int, int, bool]
"""Some lanes of a batch (None: all of them) and the offset, the size and the training of a vector there."""


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
    changed = _start_values(model, starts, seed)
    for name in (site for site in model.anatomy.shapes if site in selection.entries or site in changed):
        shape, original = tuple(model.original(name).shape), model.original(name).detach().cpu().reshape(-1)
        values, touched = changed.get(name, (original, np.empty(0, np.int64)))
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
    for name, (index, values) in sorted(delta.entries.items()):  # the same order in every delta, for one form of lane
        shape = tuple(model.original(name).shape)
        pieces.append(Piece(name, index, shape, torch.from_numpy(np.array(values)).reshape(-1)))
    lacking = set(model.head) - set(delta.tensors)
    if lacking or set(delta.head) - set(model.head):
        raise DeltaError(f"the delta's head does not fit its task ({', '.join(sorted(lacking)) or 'unknown tensors'})")
    for name, values in sorted(delta.head.items()):
        if tuple(values.shape) != model.head[name]:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, its task needs {model.head[name]}")
        pieces.append(Piece(name, None, tuple(values.shape), torch.from_numpy(np.array(values)).reshape(-1)))
    return _lay_out([], pieces)


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
        self.lanes = _settled(lanes, device)
        self._leaves: dict[tuple[int, int], Tensor] = {}
        self._anchor = torch.zeros(0, requires_grad=True)
        self._packed = packed or (Packed(self.model) if Packed.supports(self.model) else None)
        known: dict[Form, Form] = {}
        inner = self._packed.inner if self._packed else ()
        forms = (Form.of(lane, inner) for lane in lanes)
        self._forms = [known.setdefault(form, form) for form in forms]
        self._patches: dict[int, dict[str, list[Patch]]] = {}
        # The layers below all that any lane wears: the same in every epoch, if dropout leaves them alone.
        self.frozen = 0
        if self._packed is not None and not prefix_dropout:
            self.frozen = self.model.anatomy.layers_below({slot.name for lane in lanes for slot in lane.slots})

    def logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The outputs of each lane's rows, under that lane; with `streams`, dropout is on and seeded per lane."""
        if self._packed is None:
            return self.stock_logits(rows, streams)
        out: dict[int, Tensor] = {}
        for lanes in _passes(rows):
            own, stacks = [rows[k] for k in lanes], self._stacks(lanes)
            worn, models = [self._wear(k, stacks) for k in lanes], [self.models[k] for k in lanes]
            given = None if streams is None else [streams[k] for k in lanes]
            out |= zip(lanes, self._packed(own, worn, stacks, given, models, self.frozen), strict=True)
        return out

    def prefix_bytes(self, rows: Rows) -> int:
        """How much memory the states of the frozen layers take; 0 if there is no such layer."""
        each = self.model.output_count(rows) if self.frozen == self.model.anatomy.layers else len(rows.ids)
        return each * self.model.base.width * 4 if self.frozen else 0

    def with_prefix(self, rows: Rows, batches: Iterable[Array]) -> Rows:
        """The rows with what the frozen layers make of them, computed once, in these batches."""
        if self._packed is None or not self.frozen:
            return rows
        by_text = self.frozen == self.model.anatomy.layers and self.model.pool != "tokens"
        states = np.empty((len(rows) if by_text else len(rows.ids), self.model.base.width), np.float32)
        for chosen in batches:
            found = self._packed.prefix(rows.take(chosen), self.frozen).cpu().numpy()
            states[chosen if by_text else rows.tokens(chosen)] = found
        return replace(rows, known=Known(self.frozen, by_text, states))

    def stock_logits(self, rows: Mapping[int, Rows], streams: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The same outputs by the stock model, lane by lane on padded batches: for every architecture."""
        out = {}
        for k, own in rows.items():
            stream = None if streams is None else streams[k]
            model = self.models[k]
            worn, shared = model.wearing(self._effective(k)), sharing_rows(model.encoder, own.lengths)
            with _training(model, streams is not None), self._dropout(stream), worn, shared:
                out[k] = model(own)
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

    def _dropout(self, stream: int | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        if self._packed is not None:
            return Keyed(stream)  # the masks of the packed path, so that the two agree
        torch.manual_seed(stream)
        return nullcontext()

    def _wear(self, k: int, stacks: Mapping[str, Tensor]) -> Wear:
        patches = self._few_entries(k)
        return Wear(self._effective(k, {*stacks, *patches}), patches)

    def _few_entries(self, k: int) -> dict[str, list[Patch]]:
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
        # A look-up meets few entries, however many there are; a tensor worn whole is no patch.
        whole = {slot.name for slot in slots if slot.index is None}
        few = {n: own for n, own in patches.items() if n not in whole and (n in look_ups or all(p.few for p in own))}
        return self._patches.setdefault(k, few)

    def _effective(self, k: int, without: Container[str] = ()) -> dict[str, Tensor]:
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
        if slot.offset >= self.lanes[k].trained:
            return self.values[k].narrow(0, slot.offset, slot.size).view(shape)
        if (k, number) not in self._leaves:
            with torch.inference_mode(False):  # a leaf first used in an evaluation must serve training too
                leaf = self.values[k].narrow(0, slot.offset, slot.size).detach().view(shape).requires_grad_()
                leaf.grad = self.gradients[k].narrow(0, slot.offset, slot.size).view(shape)
            self._leaves[k, number] = leaf
        return self._leaves[k, number]

    def _stacks(self, lanes: list[int]) -> dict[str, Tensor]:
        # The vectors of all lanes of a batch are one tensor [lanes, n], so that one addition serves all lanes. In a
        # bank of several a lane that is left alone keeps this form: its bits must not depend on who else is there.
        if len(self.lanes) == 1:
            return {}
        places = _places([self._forms[k] for k in lanes])
        stacks: tuple[Tensor, ...] = _Stacks.apply(self._anchor, self, lanes, places)  # type: ignore[no-untyped-call]
        return dict(zip(places, stacks, strict=True))


class _Stacks(torch.autograd.Function):
    """The vectors of some lanes, the base's where a lane has none; their gradients are added to the bank's. (A leaf
    per vector would do, but for autograd's warning that a strided leaf's gradient is not contiguous.)"""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, bank: Bank, lanes: list[int], places: dict[str, list[Part]]
    ) -> tuple[Tensor, ...]:
        ctx.bank, ctx.lanes, ctx.parts = bank, lanes, list(places.values())
        ctx.set_materialize_grads(False)
        values = bank.values.detach()
        if lanes != list(range(len(bank.lanes))):
            values = values[lanes]
        stacks = []
        for name, parts in places.items():
            where, offset, size, _ = parts[0]
            if where is None:
                stacks.append(values[:, offset : offset + size])
                continue
            stack = bank.model.original(name).detach().repeat(len(lanes), 1)
            for where, offset, size, _ in parts:
                stack[where] = values[where, offset : offset + size]
            stacks.append(stack)
        still = (stack for stack, parts in zip(stacks, ctx.parts, strict=True) if not any(p[3] for p in parts))
        ctx.mark_non_differentiable(*still)
        return tuple(stacks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        lanes = torch.tensor(ctx.lanes, device=ctx.bank.gradients.device)
        for parts, gradient in zip(ctx.parts, gradients, strict=True):
            for where, offset, size, trains in parts:
                if trains and gradient is not None:
                    rows, own = (lanes, gradient) if where is None else (lanes[where], gradient[where])
                    ctx.bank.gradients[:, offset : offset + size].index_add_(0, rows, own)
        return None, None, None, None


def outputs(bank: Bank, k: int, rows: Rows, batches: Iterable[Array]) -> Array:
    """Lane k's outputs for all rows, in their order, computed in these batches."""
    model = bank.models[k]
    parts: list[tuple[Array, Array]] = []
    with torch.inference_mode():
        for chosen in batches:
            logits = bank.logits({k: rows.take(chosen)})[k].cpu().numpy()
            parts.append((model.output_places(rows, chosen), logits))
    out = np.zeros((model.output_count(rows), parts[0][1].shape[1] if parts else 0), np.float32)
    for places, logits in parts:
        out[places] = logits
    return out


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


def _start_values(model: Model, starts: Sequence[Start], seed: int) -> dict[str, tuple[Tensor, Array | None]]:
    """Tensor -> its values at the start and which of its entries differ from the base (None: all)."""
    changed: dict[str, tuple[Tensor, Array | None]] = {}
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


def _places(forms: Sequence[Form]) -> dict[str, list[Part]]:
    """Where the vectors of the lanes of a batch lie, form by form; not those that a lane holds by entries."""
    members: dict[int, tuple[Form, list[int]]] = {}
    for i, form in enumerate(forms):
        members.setdefault(id(form), (form, []))[1].append(i)
    sparse = {name for form, _ in members.values() for name in form.sparse}
    places: dict[str, list[Part]] = {}
    for form, lanes in members.values():
        where = None if len(members) == 1 else lanes
        for name, offset, size, trains in form.vectors:
            if name not in sparse:
                places.setdefault(name, []).append((where, offset, size, trains))
    return places


def _settled(lanes: Sequence[Lane], device: torch.device) -> list[Lane]:
    """The lanes without their start values, which the bank holds now; equal slots are held once."""
    known: dict[tuple[Slot, ...], tuple[Slot, ...]] = {}
    settled = []
    for lane in lanes:
        slots = tuple(s if s.index is None else replace(s, index=s.index.to(device)) for s in lane.slots)
        if all(slot.index is None for slot in slots):
            slots = known.setdefault(slots, slots)
        settled.append(Lane(slots, torch.empty(0), lane.trained))
    return settled


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
