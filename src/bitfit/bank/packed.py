"""The fast forward over a bank, for the BERT family: no padding, and no work the loss does not need.

The tokens of all rows of all lanes lie end to end, sorted by lane, and each linear layer sees real tokens only. What a
lane trains is added per lane; rows of different lanes meet in no sum, so that no lane can disturb another. Where the
head reads a text's first token only, the last layer computes only that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from ..model.architectures import architecture
from ..model.grafts import GRAFTS
from ..model.injection import Activation, locate
from ..model.rows import Rows
from ..model.task_model import Model
from .additions import Addition, Grafted, GraftGroup, LaneRows
from .dropout import Draws, Keyed, drop, token_keys
from .layer import Attention, Layer, Linear, Matrix, Norm
from .layout import Group, Layout, Segments, running
from .sparse import Patch, Patches, add_linear, write_rows
from .sparse import Place as PatchPlace

LINEARS, NORMS = ("q", "k", "v", "m1", "m2", "m3"), ("LN1", "LN2")
LAYER = {f"{form}_{place}" for forms, places in (("Wb", LINEARS), ("gb", NORMS)) for form in forms for place in places}
"""The terms of one layer."""


@dataclass(frozen=True)
class LaneTensors:
    """A lane's replacements for tensors of the base, and its patches on matrices that stay the base's."""

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
        self._own = {name for lane in lanes for name in lane.tensors}
        self._patched = {name for lane in lanes for name in lane.patches}

    def matrix(self, name: str) -> Matrix:
        """One matrix for all lanes where they agree, else one for each."""
        if name not in self._own:
            return self._originals[name]
        every = [lane.tensors.get(name, self._originals[name]) for lane in self._lanes]
        return every[0] if len(every) == 1 else every

    def patches(self, names: Sequence[str], sizes: Sequence[int], segments: Segments) -> list[PatchPlace]:
        """The lanes' patches on matrices whose outputs, of these sizes, lie side by side."""
        if self._patched.isdisjoint(names):
            return []
        places = []
        columns = [slice(*ends) for ends in pairwise(running(sizes))]
        for lane, ends in zip(self._lanes, pairwise(segments.bounds), strict=True):
            for name, outputs in zip(names, columns, strict=True):
                for patch in lane.patches.get(name, ()):
                    places.append(PatchPlace(patch, slice(*ends), outputs))
        return places

    def grafts(
        self, names: Sequence[str], sizes: Sequence[int], segments: Segments, activation: Activation
    ) -> tuple[list[Grafted], list[Grafted]]:
        """The lanes' grafts beside the same matrices: those that read the inputs, and those that read the outputs."""
        before: list[Grafted] = []
        behind: list[Grafted] = []
        for name, ends in zip(names, pairwise(running(sizes)), strict=True):
            for group in self._grafts.get(name.removesuffix(".weight"), ()):
                added = Grafted(group, self._lane_rows(segments, group.lanes), slice(*ends), activation)
                (behind if GRAFTS[group.place.graft].reads_output else before).append(added)
        return before, behind

    def _lane_rows(self, segments: Segments, lanes: tuple[int, ...]) -> LaneRows:
        key = (id(segments), lanes)
        if key not in self._rows:
            self._rows[key] = LaneRows.of(segments, lanes)
        return self._rows[key]

    def vector(self, name: str) -> Tensor:
        """[n] where all lanes agree, else [lanes, n]."""
        if name in self._stacks:
            return self._stacks[name]
        found = self.matrix(name)
        return torch.stack(found) if isinstance(found, list) else found


class Packed:
    """The forward of a base on packed tokens, then each lane's own head on its own rows."""

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
        self.originals = {name: model.original(name).detach() for name in self.inner}
        terms = {name: term for (term, _), name in self.names.items()}
        self.products = frozenset(name for name, term in terms.items() if term.startswith("W_"))
        self.look_ups = frozenset(name for name, term in terms.items() if term in ("words", "types", "positions"))

    def takes_grafts(self, names: Iterable[str]) -> bool:
        """Whether grafts with these tensors can be computed here: beside linear layers, by formulas for packed rows."""
        for name in names:
            found = locate(name)
            if found is None or not GRAFTS[found[0].graft].packed or f"{found[0].module}.weight" not in self.products:
                return False
        return True

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether this path computes the model: a known family with every tensor in its place."""
        config = model.base.config
        if architecture(config.model_type).packed is None or getattr(config, "is_decoder", False):
            return False
        names = _names(model)
        inside = {(term, layer) for term in LAYER for layer in range(model.base.anatomy.layers)}
        outside = {(part, None) for part in ("words", "positions", "g_emb", "b_emb")}
        return inside | outside <= set(names)

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
        """Each lane's outputs for its rows, by its own head; with streams, dropout is on above the frozen layers."""
        states = self._known(rows, frozen) if frozen else None
        if states is None or frozen < self.layers:
            layout = self._layout(rows)
            tensors = BatchTensors(self.originals, lanes, stacks, grafts)
            pools = [model.pool for model in models]
            if frozen and states is None:
                states = self._prefix(layout, frozen, tensors, pools)
            if frozen < self.layers:
                draws = None if streams is None else _draws(rows, streams, self._sites(self.layers), layout.ids.device)
                states = _Pass(self, tensors, layout, draws).run(states, frozen, self.layers, pools)
        assert states is not None
        counts = [model.output_count(own) for model, own in zip(models, rows, strict=True)]
        seen = torch.split_with_sizes(states, counts)
        heads = [self._head_tensors(lane) for lane in lanes]
        if streams is not None:  # a lane's dropout counts its own rows, so each head runs alone
            return [self._head(*each) for each in zip(models, heads, seen, streams, strict=True)]
        out: dict[int, Tensor] = {}
        for members in _by_model(models):
            model, own = models[members[0]], [heads[i] for i in members]
            out |= zip(members, self._heads(model, own, [seen[i] for i in members]), strict=True)
        return [out[i] for i in range(len(rows))]

    def prefix(
        self,
        rows: Rows,
        frozen: int,
        lane: LaneTensors,
        stacks: Mapping[str, Tensor],
        grafts: Sequence[GraftGroup],
        pool: str,
    ) -> Tensor:
        """What the first layers make of a lane's rows: a state per token, or what the head sees if they are all layers.

        Rows that carry the states of fewer layers go on from those.
        """
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
        known = [own.known for own in rows if own.known is not None and own.known.layers == frozen]
        if len(known) < len(rows):
            return None
        states = [torch.from_numpy(own.states) for own in known]
        return torch.cat(states).to(next(self.model.encoder.parameters()).device)

    def _sites(self, layers: int) -> int:
        """How many places of dropout lie before a layer."""
        return 1 + layers * (3 if self.m1_dropout else 2)

    def _head_tensors(self, lane: LaneTensors) -> dict[str, Tensor]:
        """What a lane has that is not part of the encoder."""
        return {name: tensor for name, tensor in lane.tensors.items() if name not in self.inner}

    def _head(self, model: Model, head: Mapping[str, Tensor], states: Tensor, stream: int | None) -> Tensor:
        with model.swapped(head), nullcontext() if stream is None else Keyed(stream, self._sites(self.layers)):
            return model.classify(states)

    def _heads(self, model: Model, heads: Sequence[Mapping[str, Tensor]], texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Heads of one shape: the model's head is called once, and its linear layers take each lane's own tensors."""
        names = {name for head in heads for name in head}
        linear = all(isinstance(module, nn.Linear) for name in names for module, _ in model.places[name])
        if len(heads) == 1 or not linear:
            return [self._head(model, head, own, None) for head, own in zip(heads, texts, strict=True)]
        stacks = {}
        for name in names:
            original = model.original(name)
            stacks[name] = torch.stack([head.get(name, original) for head in heads])
        segments = Segments.of([len(own) for own in texts], texts[0].device)
        with model.swapped(stacks), _ByLane(segments):
            return segments.split(model.classify(torch.cat(list(texts))))

    def _layout(self, rows: Sequence[Rows]) -> Layout:
        device = next(self.model.encoder.parameters()).device
        return Layout.of(rows, self.typed, self.embedding("positions").padding_idx, device)

    def embedding(self, part: str) -> nn.Embedding:
        """The module that holds an embedding matrix."""
        module, _ = self.model.places[self.names[part, None]][0]
        assert isinstance(module, nn.Embedding)
        return module

    def eps(self, term: str, layer: int | None) -> float:
        """The epsilon of the LayerNorm a gamma belongs to."""
        module, _ = self.model.places[self.names[term, layer]][0]
        return float(module.eps)  # type: ignore[arg-type]

    def distance_buckets(self, width: int) -> Tensor:
        """MPNet's bucket of each query and key position."""
        inside = torch.arange(width, device=self.embedding("distances").weight.device)
        buckets: Tensor = self.model.encoder.encoder.relative_position_bucket(inside[None, :] - inside[:, None])  # type: ignore[union-attr, operator]
        return buckets


class _Pass:
    """One forward pass: the lanes' tensors on one layout, dropout sites counted as the stock model meets them."""

    def __init__(self, packed: Packed, tensors: BatchTensors, layout: Layout, draws: Draws | None) -> None:
        self.packed, self.tensors, self.layout, self.draws = packed, tensors, layout, draws
        self.site = 0
        self.masks = self._attention_masks()
        self.heads, self.head = layout.heads(packed.heads, 3), layout.heads(packed.heads, 1)

    def run(self, states: Tensor | None, start: int, stop: int, pools: Sequence[str]) -> Tensor:
        """From the states of all tokens before layer `start` (None: from their ids) to those before layer `stop`.

        After the last layer it is what the lanes' heads see, lane after lane: of each text the mean of its states or
        the first of them, or the state of every token.
        """
        last = self.packed.layers - 1
        x = self._embed() if states is None else states
        self.site = self.packed._sites(start)
        alone = all(pool == "cls" for pool in pools)
        for layer in range(start, stop):
            x = self._layer(layer, first_only=layer == last and alone)(x)
        return x if stop <= last or alone else self._seen(x, pools)

    def _seen(self, x: Tensor, pools: Sequence[str]) -> Tensor:
        views = {pool: self._view(x, pool) for pool in dict.fromkeys(pools)}
        if len(views) == 1:
            return views[pools[0]]
        sides = {pool: self.layout.tokens if pool == "tokens" else self.layout.texts for pool in views}
        parts = {pool: sides[pool].split(view) for pool, view in views.items()}
        return torch.cat([parts[pool][lane] for lane, pool in enumerate(pools)])

    def _view(self, x: Tensor, pool: str) -> Tensor:
        if pool == "mean":
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

    def _look_up(self, part: str, index: Tensor) -> Tensor:
        name, tokens = self.packed.names[part, None], self.layout.tokens
        matrix = self.tensors.matrix(name)
        padding = self.packed.embedding(part).padding_idx
        if isinstance(matrix, list):
            pieces = zip(tokens.split(index), matrix, strict=True)
            x = torch.cat([F.embedding(own, weight, padding) for own, weight in pieces])
        else:
            x = F.embedding(index, matrix, padding)
        return write_rows(x, index, self.tensors.patches([name], [x.shape[1]], tokens), padding)

    def _layer(self, layer: int, first_only: bool) -> Layer:
        layout, packed = self.layout, self.packed
        segments = layout.texts if first_only else layout.tokens
        attention = self._attention(first_only)
        m1_keys = self._hidden_keys(first_only) if packed.m1_dropout else None
        return Layer(
            layout,
            layout.heads(packed.heads, 2) if first_only else self.heads,
            self.head,
            self._linear(("q",), layer, segments) if first_only else None,
            self._linear(("k", "v") if first_only else ("q", "k", "v"), layer, layout.tokens),
            attention,
            self._linear(("m1",), layer, segments),
            self._norm("LN1", layer, segments),
            self._linear(("m2",), layer, segments),
            self._linear(("m3",), layer, segments),
            self._norm("LN2", layer, segments),
            packed.activation,
            (m1_keys, self._hidden_keys(first_only)),
            packed.p_hidden,
        )

    def _linear(self, places: tuple[str, ...], layer: int | None, segments: Segments) -> Linear:
        names = [self.packed.names[f"W_{place}", layer] for place in places]
        biases = [self.tensors.vector(self.packed.names[f"b_{place}", layer]) for place in places]
        sizes = [bias.shape[-1] for bias in biases]
        matrices = [self.tensors.matrix(name) for name in names]
        patches = self.tensors.patches(names, sizes, segments)
        before, behind = self.tensors.grafts(names, sizes, segments, self.packed.activation)
        additions: list[Addition] = [*before]
        if patches:
            additions.append(Patches(patches))
        return Linear(matrices, biases, segments, additions, behind)

    def _norm(self, place: str, layer: int | None, segments: Segments) -> Norm:
        names = self.packed.names
        gamma, bias = (self.tensors.vector(names[f"{form}_{place}", layer]) for form in "gb")
        return Norm(gamma, bias, self.packed.eps(f"g_{place}", layer), segments)

    def _hidden_keys(self, first_only: bool = False) -> Tensor | None:
        self.site += 1
        if self.draws is None or self.packed.p_hidden == 0:
            return None
        keys = self.draws.hidden(self.site - 1)
        return keys.index_select(0, self.layout.first) if first_only else keys

    def _attention(self, first_only: bool) -> Attention:
        self.site += 1
        masks = [mask[:, :1] if first_only and mask is not None else mask for mask in self.masks]
        keys = None
        groups, heads, p = self.layout.groups, self.packed.heads, self.packed.p_attention
        if self.draws is not None and p:
            drawn = self.draws.attention(self.site - 1, heads)
            if first_only:
                places = drawn.index_select(0, self.layout.first.index_select(0, self.layout.order)).view(-1)
            else:
                places = drawn.view(-1).index_select(0, self.head.take)
            widths = [1 if first_only else group.width for group in groups]
            sizes = [heads * group.texts * width for group, width in zip(groups, widths, strict=True)]
            parts = torch.split_with_sizes(places, sizes)
            keys = [part.view(-1, width, 1) for part, width in zip(parts, widths, strict=True)]
        return Attention(groups, heads, masks, keys, p)

    def _attention_masks(self) -> list[Tensor | None]:
        """What is added to the scores of each group, [texts * heads, 1 or queries, keys]."""
        heads, groups = self.packed.heads, self.layout.groups
        masks = [_hidden_padding(group, heads) for group in groups]
        if ("distances", None) not in self.packed.names:
            return masks
        matrix = self.tensors.matrix(self.packed.names["distances", None])
        ordered = self.layout.texts.lane.index_select(0, self.layout.order)
        full: list[Tensor | None] = []
        for group, own, mask in zip(
            groups, torch.split_with_sizes(ordered, [group.texts for group in groups]), masks, strict=True
        ):
            buckets = self.packed.distance_buckets(group.width)
            if isinstance(matrix, list):
                bias = torch.stack(matrix).index_select(0, own)[:, buckets].permute(0, 3, 1, 2)
            else:
                bias = F.embedding(buckets, matrix).permute(2, 0, 1).expand(group.texts, -1, -1, -1)
            bias = bias.reshape(-1, group.width, group.width)
            full.append(bias if mask is None else bias + mask)
        return full


def linear(x: Tensor, part: Linear) -> Tensor:
    """Linear layers outside the encoder's layers, by autograd."""
    outputs = [_by_lane(x, m, b, part.segments) for m, b in zip(part.matrices, part.biases, strict=True)]
    places = [place for patches in part.additions if isinstance(patches, Patches) for place in patches.places]
    return add_linear(torch.cat(outputs, 1), x, places)


def _by_lane(x: Tensor, matrix: Matrix, bias: Tensor, segments: Segments) -> Tensor:
    if isinstance(matrix, Tensor) and bias.dim() == 1:
        return F.linear(x, matrix, bias)
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix) + bias.index_select(0, segments.lane)
    parts = segments.split(x)
    own = bias.unbind(0) if bias.dim() == 2 else [bias] * len(parts)
    return torch.cat([F.linear(*each) for each in zip(parts, matrix, own, strict=True)])


def norm(x: Tensor, part: Norm) -> Tensor:
    """A LayerNorm outside the encoder's layers, by autograd."""
    gamma, bias = (v if v.dim() == 1 else v.index_select(0, part.segments.lane) for v in (part.gamma, part.bias))
    return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], None, None, part.eps), gamma)


class _ByLane(TorchFunctionMode):
    """While it is on, a linear layer may hold stacks: a matrix or a bias for each lane of the rows it is given."""

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
        given = weight.new_zeros(weight.shape[-2]) if bias is None else bias
        return _by_lane(x, list(weight.unbind(0)) if weight.dim() == 3 else weight, given, self.segments)


def _names(model: Model) -> dict[tuple[str, int | None], str]:
    anatomy = model.base.anatomy
    inputs = architecture(model.base.config.model_type).inputs
    outside = {"g_emb": None, "b_emb": None}
    names: dict[tuple[str, int | None], str] = {
        (site.term, site.layer): site.name
        for site in anatomy.sites
        if (site.term in LAYER if site.layer is not None else site.term in outside)
    }
    return names | {(part, None): name for part, name in inputs.items() if name in anatomy.shapes}


def _draws(rows: Sequence[Rows], streams: Sequence[int], sites: int, device: torch.device) -> Draws:
    keys = []
    for own, stream in zip(rows, streams, strict=True):
        row = np.repeat(np.arange(len(own)), own.lengths)
        keys.append(token_keys(stream, row, np.arange(len(own.ids)) - np.repeat(own.starts[:-1], own.lengths)))
    return Draws(np.concatenate(keys), sites, device)


def _by_model(models: Sequence[Model]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for i, model in enumerate(models):
        found.setdefault(id(model), []).append(i)
    return list(found.values())


def _hidden_padding(group: Group, heads: int) -> Tensor | None:
    if group.lengths is None:
        return None
    beyond = torch.arange(group.width, device=group.lengths.device) >= group.lengths[:, None]
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, lowest)
    return mask.repeat_interleave(heads, 0)[:, None]
