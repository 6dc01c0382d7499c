"""The packed path of a bank, for the BERT family: no padding, and no work the loss does not need.

The tokens of all rows are concatenated, sorted by lane, and each linear layer computes real tokens only. What a lane
trains is added per lane; rows of different lanes share no sum, so that no lane can disturb another. If the head reads
only a text's first token, the last layer computes only that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from ..model.anatomy import PAIR
from ..model.architectures import architecture
from ..model.grafts import GRAFTS
from ..model.injection import Activation, locate
from ..model.precision import wide
from ..model.rows import Rows
from ..model.task_model import Model
from .additions import Addition, Grafted, GraftGroup, LaneRows
from .blocked import Blocked, blocked_matrices
from .dropout import Draws, Keyed, drop, token_keys
from .layer import Attention, Layer, Linear, Matrix, Norm
from .layout import Group, Layout, Segments, running
from .sparse import Patch, Patches, PlacedPatch, add_linear, write_rows

LINEARS = ("q", "k", "v", "m1", "m2", "m3")
NORMS = ("LN1", "LN2")
LAYER = frozenset(
    [f"W_{module}" for module in LINEARS]
    + [f"b_{module}" for module in LINEARS]
    + [f"g_{module}" for module in NORMS]
    + [f"b_{module}" for module in NORMS]
)
"""The terms of one layer."""


@dataclass(frozen=True)
class LaneTensors:
    """A lane's replacements for tensors of the base, and its patches on matrices of the base."""

    tensors: Mapping[str, Tensor]
    patches: Mapping[str, Sequence[Patch]]


class BatchTensors:
    """The tensors of a batch: the base's, a stack [lanes, n] of vectors, or a matrix per lane."""

    def __init__(
        self,
        originals: Mapping[str, Tensor],
        lanes: Sequence[LaneTensors],
        stacks: Mapping[str, Tensor],
        grafts: Sequence[GraftGroup] = (),
    ) -> None:
        self._originals = originals
        self._lanes = lanes
        self._stacks = stacks
        self._grafts: dict[str, list[GraftGroup]] = {}
        for group in grafts:
            self._grafts.setdefault(group.place.module, []).append(group)
        self._rows: dict[tuple[int, tuple[int, ...]], LaneRows] = {}
        self._replaced = set(chain.from_iterable(lane.tensors for lane in lanes))
        self._patched = set(chain.from_iterable(lane.patches for lane in lanes))

    def matrix(self, name: str) -> Matrix:
        """The base's matrix if no lane replaces it, else one matrix per lane."""
        if name not in self._replaced:
            return self._originals[name]
        matrices = [lane.tensors.get(name, self._originals[name]) for lane in self._lanes]
        return matrices[0] if len(matrices) == 1 else matrices

    def patches(self, names: Sequence[str], sizes: Sequence[int], segments: Segments) -> list[PlacedPatch]:
        """The lanes' patches on matrices whose outputs, of these sizes, are concatenated."""
        if self._patched.isdisjoint(names):
            return []
        placed = []
        columns = [slice(*ends) for ends in pairwise(running(sizes))]
        for lane, ends in zip(self._lanes, pairwise(segments.bounds), strict=True):
            for name, outputs in zip(names, columns, strict=True):
                for patch in lane.patches.get(name, ()):
                    placed.append(PlacedPatch(patch, slice(*ends), outputs))
        return placed

    def grafts(
        self, names: Sequence[str], sizes: Sequence[int], segments: Segments, activation: Activation
    ) -> tuple[list[Grafted], list[Grafted]]:
        """The lanes' grafts beside these matrices: those that read the inputs, and those that read the outputs."""
        on_inputs: list[Grafted] = []
        on_outputs: list[Grafted] = []
        for name, ends in zip(names, pairwise(running(sizes)), strict=True):
            for group in self._grafts.get(name.removesuffix(".weight"), ()):
                grafted = Grafted(group, self._lane_rows(segments, group.lanes), slice(*ends), activation)
                if GRAFTS[group.place.graft].reads_output:
                    on_outputs.append(grafted)
                else:
                    on_inputs.append(grafted)
        return on_inputs, on_outputs

    def _lane_rows(self, segments: Segments, lanes: tuple[int, ...]) -> LaneRows:
        key = (id(segments), lanes)
        if key not in self._rows:
            self._rows[key] = LaneRows.of(segments, lanes)
        return self._rows[key]

    def vector(self, name: str) -> Tensor:
        """[n] if all lanes have the same vector, else [lanes, n]."""
        if name in self._stacks:
            return self._stacks[name]
        vector = self.matrix(name)
        return torch.stack(vector) if isinstance(vector, list) else vector


class Packed:
    """The forward of a base on packed tokens, then the head of each lane on the lane's rows."""

    def __init__(self, model: Model) -> None:
        config = model.base.config
        row = architecture(config.model_type)
        style = row.packed
        assert style is not None
        self.model = model
        self.names = _names(model)
        self.layers = model.base.anatomy.layers
        self.heads = int(config.num_attention_heads)
        self.activation = ACT2FN[getattr(config, row.activation)]
        self.p_hidden = float(getattr(config, style.hidden_dropout))
        self.p_attention = float(getattr(config, style.attention_dropout))
        self.m1_dropout = style.m1_dropout
        self.typed = model.base.segments
        self.inner = frozenset(self.names.values())
        self.originals = {name: model.stored(name).detach() for name in self.inner}
        terms = {name: term for (term, _), name in self.names.items()}
        self.products = frozenset(name for name, term in terms.items() if term.startswith("W_"))
        matrices = {name: self.originals[name] for name in self.products}
        self.blocked = blocked_matrices(model.base.encoder, matrices)
        self.look_ups = frozenset(name for name, term in terms.items() if term in ("words", "types", "positions"))

    def takes_grafts(self, names: Iterable[str]) -> bool:
        """Whether grafts with these tensors can be computed here: beside linear layers, by formulas for packed rows."""
        for name in names:
            located = locate(name)
            if located is None:
                return False
            place, _ = located
            if not GRAFTS[place.graft].packed or f"{place.module}.weight" not in self.products:
                return False
        return True

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether this path computes the model: its architecture has a packed style, and no tensor is missing."""
        config = model.base.config
        if architecture(config.model_type).packed is None or getattr(config, "is_decoder", False):
            return False
        names = _names(model)
        inside = product(LAYER, range(model.base.anatomy.layers))
        outside = product(("words", "positions", "g_emb", "b_emb"), (None,))
        return all(key in names for key in chain(inside, outside))

    def __call__(
        self,
        rows: Sequence[Rows],
        lanes: Sequence[LaneTensors],
        stacks: Mapping[str, Tensor],
        streams: Sequence[int] | None,
        models: Sequence[Model],
        frozen: int = 0,
        grafts: Sequence[GraftGroup] = (),
    ) -> list[Tensor]:
        """The logits of each lane's rows; with streams, dropout is on above the frozen layers."""
        states = self._known(rows, frozen) if frozen else None
        if states is None or frozen < self.layers:
            tensors = BatchTensors(self.originals, lanes, stacks, grafts)
            pools = [model.pool for model in models]
            states = self._encoded(rows, tensors, streams, pools, frozen, states)
        counts = [model.output_count(lane_rows) for model, lane_rows in zip(models, rows, strict=True)]
        by_lane = []
        for model, lane_states in zip(models, torch.split_with_sizes(states, counts), strict=True):
            by_lane.append(model.head_inputs(lane_states))
        heads = [self._head_tensors(lane) for lane in lanes]
        if streams is not None:
            return self._heads_with_dropout(models, heads, by_lane, streams, rows)
        return self._heads_by_model(models, heads, by_lane)

    def _encoded(
        self,
        rows: Sequence[Rows],
        tensors: BatchTensors,
        streams: Sequence[int] | None,
        pools: Sequence[str],
        frozen: int,
        states: Tensor | None,
    ) -> Tensor:
        """What the lanes' heads read, from the `states` after the frozen layers if they are known, else from the ids.

        The frozen layers are computed without dropout and without a graph.
        """
        layout = self._layout(rows)
        if frozen and states is None:
            states = self._prefix(layout, frozen, tensors, pools)
        if states is not None and frozen == self.layers:
            return states
        draws = None if streams is None else _draws(rows, streams, self._sites(self.layers), layout.ids.device)
        return _Pass(self, tensors, layout, draws).run(states, frozen, self.layers, pools)

    def _heads_with_dropout(
        self,
        models: Sequence[Model],
        heads: Sequence[Mapping[str, Tensor]],
        by_lane: Sequence[Tensor],
        streams: Sequence[int],
        rows: Sequence[Rows],
    ) -> list[Tensor]:
        """The outputs of each lane's head, one by one: a mask depends on the number of the row in its lane."""
        outputs = []
        for model, head, states, stream, lane_rows in zip(models, heads, by_lane, streams, rows, strict=True):
            windows, tokens = lane_rows.before
            before = {"tokens": tokens, PAIR: windows // 2}.get(model.pool, windows)
            outputs.append(self._head(model, head, states, stream, before))
        return outputs

    def _heads_by_model(
        self, models: Sequence[Model], heads: Sequence[Mapping[str, Tensor]], by_lane: Sequence[Tensor]
    ) -> list[Tensor]:
        """The outputs of each lane's head, those of one model in one call."""
        out: dict[int, Tensor] = {}
        for members in _by_model(models):
            outputs = self._heads(models[members[0]], [heads[i] for i in members], [by_lane[i] for i in members])
            out |= zip(members, outputs, strict=True)
        return [out[i] for i in range(len(models))]

    def prefix(
        self,
        rows: Rows,
        frozen: int,
        lane: LaneTensors,
        stacks: Mapping[str, Tensor],
        grafts: Sequence[GraftGroup],
        pool: str,
    ) -> Tensor:
        """The outputs of the first `frozen` layers for a lane's rows: a state per token; after all layers, what the
        head reads. Rows that carry the outputs of fewer layers are computed from those."""
        tensors = BatchTensors(self.originals, [lane], stacks, grafts)
        known = rows.known
        if known is None or known.layers >= frozen:
            return self._prefix(self._layout([rows]), frozen, tensors, [pool])
        states = torch.from_numpy(known.states).to(next(self.model.encoder.parameters()).device)
        return self._prefix(self._layout([rows]), frozen, tensors, [pool], states, known.layers)

    @torch.no_grad()
    def _prefix(
        self,
        layout: Layout,
        frozen: int,
        tensors: BatchTensors,
        pools: Sequence[str],
        states: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        return _Pass(self, tensors, layout, None).run(states, start, frozen, pools)

    def _known(self, rows: Sequence[Rows], frozen: int) -> Tensor | None:
        """The frozen layers' outputs, if all rows have them; else None."""
        states = []
        for lane_rows in rows:
            known = lane_rows.known
            if known is None or known.layers != frozen:
                return None
            states.append(torch.from_numpy(known.states))
        return torch.cat(states).to(next(self.model.encoder.parameters()).device)

    def _sites(self, layers: int) -> int:
        """The number of dropout sites before a layer."""
        return 1 + layers * (3 if self.m1_dropout else 2)

    def _head_tensors(self, lane: LaneTensors) -> dict[str, Tensor]:
        """The tensors of a lane that belong to its head."""
        return {name: tensor for name, tensor in lane.tensors.items() if name not in self.inner}

    def _head(
        self, model: Model, head: Mapping[str, Tensor], states: Tensor, stream: int | None, before: int = 0
    ) -> Tensor:
        dropout = nullcontext() if stream is None else Keyed(stream, self._sites(self.layers), before)
        with model.swapped(head), dropout:
            return model.classify(states)

    def _heads(self, model: Model, heads: Sequence[Mapping[str, Tensor]], texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Heads of one model in one call: its linear layers take the tensors of each lane for the lane's rows."""
        names = set(chain.from_iterable(heads))
        owners = chain.from_iterable(model.owners[name] for name in names)
        all_linear = all(isinstance(module, nn.Linear) for module, _ in owners)
        if len(heads) == 1 or not all_linear:
            return [self._head(model, head, states, None) for head, states in zip(heads, texts, strict=True)]
        stacks = {}
        for name in names:
            original = model.original(name)
            stacks[name] = torch.stack([head.get(name, original) for head in heads])
        segments = Segments.of([len(states) for states in texts], texts[0].device)
        with model.swapped(stacks), _ByLane(segments):
            return segments.split(model.classify(torch.cat(list(texts))))

    def _layout(self, rows: Sequence[Rows]) -> Layout:
        device = next(self.model.encoder.parameters()).device
        return Layout.of(rows, self.typed, self.embedding("positions").padding_idx, device)

    def embedding(self, role: str) -> nn.Embedding:
        """The module of an embedding matrix: "words", "types", "positions" or "distances"."""
        module, _ = self.model.owners[self.names[role, None]][0]
        assert isinstance(module, nn.Embedding)
        return module

    def eps(self, term: str, layer: int | None) -> float:
        """The epsilon of the LayerNorm a gamma belongs to."""
        module, _ = self.model.owners[self.names[term, layer]][0]
        return float(module.eps)  # type: ignore[arg-type]

    def distance_buckets(self, width: int) -> Tensor:
        """MPNet's bucket of each query and key position."""
        position = torch.arange(width, device=self.embedding("distances").weight.device)
        distance = position[None, :] - position[:, None]
        buckets: Tensor = self.model.encoder.encoder.relative_position_bucket(distance)  # type: ignore[union-attr, operator]
        return buckets


class _Pass:
    """One forward pass: the lanes' tensors on one layout. Dropout sites are numbered as in the stock model."""

    def __init__(self, packed: Packed, tensors: BatchTensors, layout: Layout, draws: Draws | None) -> None:
        self.packed = packed
        self.tensors = tensors
        self.layout = layout
        self.draws = draws
        self.site = 0
        self.masks = self._attention_masks()
        self.qkv_heads = layout.heads(packed.heads, 3)
        self.single_heads = layout.heads(packed.heads, 1)

    def run(self, states: Tensor | None, start: int, stop: int, pools: Sequence[str]) -> Tensor:
        """From the states of all tokens before layer `start` (None: from their ids) to those before layer `stop`.

        After the last layer, returns what the lanes' heads read, lane after lane: of each text the mean of its states
        or the first of them, or the state of every token.
        """
        last = self.packed.layers - 1
        x = self._embed() if states is None else states
        self.site = self.packed._sites(start)
        first_only = all(pool == "cls" for pool in pools)
        for layer in range(start, stop):
            x = self._layer(layer, first_only=layer == last and first_only)(x)
        if stop <= last or first_only:
            return x
        return self._pooled(x, pools)

    def _pooled(self, x: Tensor, pools: Sequence[str]) -> Tensor:
        """What the head of each lane reads, lane after lane."""
        by_pool = {pool: self._pool(x, pool) for pool in dict.fromkeys(pools)}
        if len(by_pool) == 1:
            return by_pool[pools[0]]
        by_lane = {}
        for pool, pooled in by_pool.items():
            segments = self.layout.tokens if pool == "tokens" else self.layout.texts
            by_lane[pool] = segments.split(pooled)
        return torch.cat([by_lane[pool][lane] for lane, pool in enumerate(pools)])

    def _pool(self, x: Tensor, pool: str) -> Tensor:
        if pool in ("mean", PAIR):
            return torch.segment_reduce(x, "mean", lengths=self.layout.lengths, unsafe=True)
        return x if pool == "tokens" else x.index_select(0, self.layout.first)

    def _embed(self) -> Tensor:
        layout = self.layout
        x = self._look_up("words", layout.ids)
        if ("types", None) in self.packed.names:
            x = x + self._look_up("types", layout.types)
        x = x + self._look_up("positions", layout.positions)
        x = norm(x, self._norm("emb", None, layout.tokens))
        x = drop(x, self._hidden_keys(), self.packed.p_hidden)
        if ("W_project", None) in self.packed.names:
            return linear(x, self._linear(("project",), None, layout.tokens))
        return x

    def _look_up(self, role: str, index: Tensor) -> Tensor:
        name = self.packed.names[role, None]
        tokens = self.layout.tokens
        matrix = self.tensors.matrix(name)
        padding = self.packed.embedding(role).padding_idx
        if isinstance(matrix, list):
            by_lane = zip(tokens.split(index), matrix, strict=True)
            x = torch.cat([wide(F.embedding(lane_index, weight, padding)) for lane_index, weight in by_lane])
        else:
            x = wide(F.embedding(index, matrix, padding))
        return write_rows(x, index, self.tensors.patches([name], [x.shape[1]], tokens), padding)

    def _layer(self, layer: int, first_only: bool) -> Layer:
        layout = self.layout
        packed = self.packed
        segments = layout.texts if first_only else layout.tokens
        # In the order of the stock model, since each call counts a dropout site.
        attention = self._attention(first_only)
        m1_keys = self._hidden_keys(first_only) if packed.m1_dropout else None
        m3_keys = self._hidden_keys(first_only)
        return Layer(
            layout=layout,
            qkv_heads=layout.heads(packed.heads, 2) if first_only else self.qkv_heads,
            single_heads=self.single_heads,
            queries=self._linear(("q",), layer, segments) if first_only else None,
            qkv=self._linear(("k", "v") if first_only else ("q", "k", "v"), layer, layout.tokens),
            attention=attention,
            m1=self._linear(("m1",), layer, segments),
            LN1=self._norm("LN1", layer, segments),
            m2=self._linear(("m2",), layer, segments),
            m3=self._linear(("m3",), layer, segments),
            LN2=self._norm("LN2", layer, segments),
            activation=packed.activation,
            keys=(m1_keys, m3_keys),
            p=packed.p_hidden,
        )

    def _linear(self, modules: tuple[str, ...], layer: int | None, segments: Segments) -> Linear:
        names = [self.packed.names[f"W_{module}", layer] for module in modules]
        biases = [self.tensors.vector(self.packed.names[f"b_{module}", layer]) for module in modules]
        sizes = [bias.shape[-1] for bias in biases]
        matrices = [self.tensors.matrix(name) for name in names]
        patches = self.tensors.patches(names, sizes, segments)
        on_inputs, on_outputs = self.tensors.grafts(names, sizes, segments, self.packed.activation)
        additions: list[Addition] = [*on_inputs]
        if patches:
            additions.append(Patches(patches))
        return Linear(matrices, biases, segments, additions, on_outputs, self._blocked(names, matrices))

    def _blocked(self, names: Sequence[str], matrices: Sequence[Matrix]) -> Blocked | None:
        """The blocked copies of matrices; None if one of them is not the base's."""
        originals = [self.packed.originals[name] for name in names]
        for matrix, original in zip(matrices, originals, strict=True):
            if matrix is not original:
                return None
        return self.packed.blocked.get(names, originals)

    def _norm(self, module: str, layer: int | None, segments: Segments) -> Norm:
        gamma = self.tensors.vector(self.packed.names[f"g_{module}", layer])
        bias = self.tensors.vector(self.packed.names[f"b_{module}", layer])
        return Norm(gamma, bias, self.packed.eps(f"g_{module}", layer), segments)

    def _hidden_keys(self, first_only: bool = False) -> Tensor | None:
        self.site += 1
        if self.draws is None or self.packed.p_hidden == 0:
            return None
        keys = self.draws.hidden(self.site - 1)
        return keys.index_select(0, self.layout.first) if first_only else keys

    def _attention(self, first_only: bool) -> Attention:
        self.site += 1
        masks = self.masks
        if first_only:
            masks = [None if mask is None else mask[:, :1] for mask in masks]
        keys = None
        if self.draws is not None and self.packed.p_attention:
            keys = self._attention_keys(self.draws.attention(self.site - 1, self.packed.heads), first_only)
        return Attention(self.layout.groups, self.packed.heads, masks, keys, self.packed.p_attention)

    def _attention_keys(self, by_token: Tensor, first_only: bool) -> list[Tensor]:
        """The dropout keys of the queries of each group, [texts * heads, queries, 1], from those of each token."""
        layout = self.layout
        if first_only:
            first = layout.first.index_select(0, layout.order)
            by_query = by_token.index_select(0, first).view(-1)
        else:
            by_query = by_token.view(-1).index_select(0, self.single_heads.take)
        queries = [1 if first_only else group.width for group in layout.groups]
        sizes = [self.packed.heads * group.texts * n for group, n in zip(layout.groups, queries, strict=True)]
        by_group = torch.split_with_sizes(by_query, sizes)
        return [keys.view(-1, n, 1) for keys, n in zip(by_group, queries, strict=True)]

    def _attention_masks(self) -> list[Tensor | None]:
        """What is added to the scores of each group, [texts * heads, 1 or queries, keys]."""
        groups = self.layout.groups
        masks = [_hidden_padding(group, self.packed.heads) for group in groups]
        if ("distances", None) not in self.packed.names:
            return masks
        matrix = self.tensors.matrix(self.packed.names["distances", None])
        lanes = self.layout.texts.lane.index_select(0, self.layout.order)
        by_group = torch.split_with_sizes(lanes, [group.texts for group in groups])
        full: list[Tensor | None] = []
        for group, group_lanes, mask in zip(groups, by_group, masks, strict=True):
            buckets = self.packed.distance_buckets(group.width)
            if isinstance(matrix, list):
                bias = torch.stack(matrix).index_select(0, group_lanes)[:, buckets].permute(0, 3, 1, 2)
            else:
                bias = F.embedding(buckets, matrix).permute(2, 0, 1).expand(group.texts, -1, -1, -1)
            bias = bias.reshape(-1, group.width, group.width)
            full.append(bias if mask is None else bias + mask)
        return full


def linear(x: Tensor, layer: Linear) -> Tensor:
    """Linear layers outside the encoder's layers, by autograd."""
    outputs = []
    for matrix, bias in zip(layer.matrices, layer.biases, strict=True):
        outputs.append(_by_lane(x, matrix, bias, layer.segments))
    patches: list[PlacedPatch] = []
    for addition in layer.additions:
        if isinstance(addition, Patches):
            patches += addition.patches
    return add_linear(torch.cat(outputs, 1), x, patches)


def _by_lane(x: Tensor, matrix: Matrix, bias: Tensor, segments: Segments) -> Tensor:
    if isinstance(matrix, Tensor) and bias.dim() == 1:
        return F.linear(x, wide(matrix), bias)
    if isinstance(matrix, Tensor):
        return F.linear(x, wide(matrix)) + bias.index_select(0, segments.lane)
    rows = segments.split(x)
    biases = bias.unbind(0) if bias.dim() == 2 else [bias] * len(rows)
    return torch.cat([F.linear(x, wide(m), b) for x, m, b in zip(rows, matrix, biases, strict=True)])


def norm(x: Tensor, layer: Norm) -> Tensor:
    """A LayerNorm outside the encoder's layers, by autograd."""
    gamma = _by_row(layer.gamma, layer.segments)
    bias = _by_row(layer.bias, layer.segments)
    return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], None, None, layer.eps), gamma)


def _by_row(vector: Tensor, segments: Segments) -> Tensor:
    """A vector of all lanes as it is; the vectors of each lane repeated for its rows."""
    return vector if vector.dim() == 1 else vector.index_select(0, segments.lane)


class _ByLane(TorchFunctionMode):
    """While it is active, a linear layer may hold stacks: a matrix or a bias for each lane of its input rows."""

    def __init__(self, segments: Segments) -> None:
        super().__init__()
        self.segments = segments

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matrix = list(weight.unbind(0)) if weight.dim() == 3 else weight
        if bias is None:
            bias = weight.new_zeros(weight.shape[-2])
        return _by_lane(x, matrix, bias, self.segments)


def _names(model: Model) -> dict[tuple[str, int | None], str]:
    """(Term, layer) -> the name of every tensor that the packed path reads; (role, None) for those without a term."""
    anatomy = model.base.anatomy
    names: dict[tuple[str, int | None], str] = {}
    for site in anatomy.sites:
        terms = ("g_emb", "b_emb") if site.layer is None else LAYER
        if site.term in terms:
            names[site.term, site.layer] = site.name
    for role, name in architecture(model.base.config.model_type).inputs.items():
        if name in anatomy.shapes:
            names[role, None] = name
    return names


def _draws(rows: Sequence[Rows], streams: Sequence[int], sites: int, device: torch.device) -> Draws:
    keys = []
    for lane_rows, stream in zip(rows, streams, strict=True):
        row = np.repeat(lane_rows.before[0] + np.arange(len(lane_rows)), lane_rows.lengths)
        position = np.arange(len(lane_rows.ids)) - np.repeat(lane_rows.starts[:-1], lane_rows.lengths)
        keys.append(token_keys(stream, row, position))
    return Draws(np.concatenate(keys), sites, device)


def _by_model(models: Sequence[Model]) -> list[list[int]]:
    """The lanes in groups with the same model."""
    groups: dict[int, list[int]] = {}
    for i, model in enumerate(models):
        groups.setdefault(id(model), []).append(i)
    return list(groups.values())


def _hidden_padding(group: Group, heads: int) -> Tensor | None:
    if group.lengths is None:
        return None
    beyond = torch.arange(group.width, device=group.lengths.device) >= group.lengths[:, None]
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, lowest)
    return mask.repeat_interleave(heads, 0)[:, None]
