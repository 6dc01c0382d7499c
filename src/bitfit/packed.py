"""The fast forward over a bank, for the BERT family: no padding, and no work the loss does not need.

The tokens of all rows of all lanes lie end to end, sorted by lane, and each linear layer sees real tokens only. What a
lane trains is added per lane; rows of different lanes meet in no sum, so that no lane can disturb another. Where the
head reads a text's first token only, the last layer computes only that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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

from .anatomy import INPUTS
from .dropout import Draws, Keyed, drop, drop_add, masked, pattern, token_keys
from .model import Model
from .rows import Rows
from .sparse import Patch, Place, add_changes, add_gradients, add_linear, write_rows
from .tensorfile import Array


@dataclass(frozen=True)
class Style:
    """What the configurations of a family call their settings, and where the families differ."""

    hidden_dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"
    activation: str = "hidden_act"
    m1_dropout: bool = True


_BERT = Style()
STYLES: Mapping[str, Style] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet"), _BERT),
    "distilbert": Style("dropout", "attention_dropout", "activation", m1_dropout=False),
}
"""The architectures this path computes, by their `model_type`."""

LINEARS, NORMS = ("q", "k", "v", "m1", "m2", "m3"), ("LN1", "LN2")
LAYER = {f"{form}_{place}" for forms, places in (("Wb", LINEARS), ("gb", NORMS)) for form in forms for place in places}
"""The terms of one layer."""

Matrix = Tensor | list[Tensor]
"""A matrix of all lanes, or one for each."""


@dataclass(frozen=True)
class Segments:
    """Which lane each row of a packed tensor belongs to: lanes lie one after the other."""

    lane: Tensor
    bounds: tuple[int, ...]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each lane."""
        return _split(x, [b - a for a, b in pairwise(self.bounds)])

    def sums(self, x: Tensor) -> Tensor:
        """One sum per lane; never a product with zeros, which would carry NaN from lane to lane."""
        # Measured once, on a busy machine, 4 lanes of width 384, microseconds at 100 / 400 / 1000 / 4000 rows:
        # index_add 26 / 26 / 103 / 182, a sum per slice 31 / 43 / 78 / 190, segment_reduce 37 / 239 / 629 / 3548.
        return x.new_zeros(len(self.bounds) - 1, x.shape[1]).index_add_(0, self.lane, x)


@dataclass(frozen=True)
class Group:
    """Texts of like length that attend side by side, each padded to the longest of them."""

    texts: int
    width: int
    lengths: Tensor | None  # None: nothing is padded


@dataclass(frozen=True)
class Layout:
    """Where everything of a batch lies."""

    ids: Tensor
    types: Tensor
    positions: Tensor
    lengths: Tensor  # tokens of each text
    first: Tensor  # the first token of each text
    tokens: Segments
    texts: Segments
    groups: tuple[Group, ...]
    spread: Tensor  # the token in each padded place; a text's first token where there is none
    place: Tensor  # the padded place of each token
    order: Tensor  # the texts in the order of the groups
    rank: Tensor  # the place of each text in that order


@dataclass(frozen=True)
class Wear:
    """What one lane wears: tensors in the places of the base's, and patches on matrices that stay the base's."""

    tensors: Mapping[str, Tensor]
    patches: Mapping[str, Sequence[Patch]]


class Worn:
    """The tensors that the lanes of a batch wear: the base's, a stack [lanes, n] of vectors, or a matrix per lane."""

    def __init__(self, model: Model, lanes: Sequence[Wear], stacks: Mapping[str, Tensor]) -> None:
        self._model, self._lanes, self._stacks = model, lanes, stacks

    def matrix(self, name: str) -> Matrix:
        """One matrix for all lanes where they agree, else one for each."""
        own = [lane.tensors.get(name) for lane in self._lanes]
        if all(tensor is None for tensor in own):
            return self._original(name)
        every = [self._original(name) if tensor is None else tensor for tensor in own]
        return every[0] if len(every) == 1 else every

    def patches(self, names: Sequence[str], sizes: Sequence[int], segments: Segments) -> list[Place]:
        """The lanes' patches on matrices whose outputs, of these sizes, lie side by side."""
        outputs = [slice(a, b) for a, b in pairwise(_bounds(sizes))]
        return [
            Place(patch, slice(*rows), columns)
            for lane, rows in zip(self._lanes, pairwise(segments.bounds), strict=True)
            for name, columns in zip(names, outputs, strict=True)
            for patch in lane.patches.get(name, ())
        ]

    def vector(self, name: str) -> Tensor:
        """[n] where all lanes agree, else [lanes, n]."""
        if name in self._stacks:
            return self._stacks[name]
        found = self.matrix(name)
        return torch.stack(found) if isinstance(found, list) else found

    def _original(self, name: str) -> Tensor:
        return self._model.original(name).detach()


class Packed:
    """The forward of a base on packed tokens, then each lane's own head on its own rows."""

    def __init__(self, model: Model) -> None:
        config = model.base.config
        style = STYLES[config.model_type]
        self.model = model
        self.names = _names(model)
        self.layers = model.base.anatomy.layers
        self.heads = int(config.num_attention_heads)
        self.activation = ACT2FN[getattr(config, style.activation)]
        self.p_hidden = float(getattr(config, style.hidden_dropout))
        self.p_attention = float(getattr(config, style.attention_dropout))
        self.m1_dropout = style.m1_dropout
        self.typed = model.base.segments
        self.inner = frozenset(self.names.values())
        terms = {name: term for (term, _), name in self.names.items()}
        self.products = frozenset(name for name, term in terms.items() if term.startswith("W_"))
        self.look_ups = frozenset(name for name, term in terms.items() if term in ("words", "types", "positions"))

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether this path computes the model: a known family with every tensor in its place."""
        config = model.base.config
        if config.model_type not in STYLES or getattr(config, "is_decoder", False):
            return False
        names = _names(model)
        inside = {(term, layer) for term in LAYER for layer in range(model.base.anatomy.layers)}
        outside = {(part, None) for part in ("words", "positions", "g_emb", "b_emb")}
        return inside | outside <= set(names)

    def __call__(
        self,
        rows: Sequence[Rows],
        lanes: Sequence[Wear],
        stacks: Mapping[str, Tensor],
        streams: Sequence[int] | None,
        models: Sequence[Model],
        frozen: int = 0,
    ) -> list[Tensor]:
        """Each lane's outputs for its rows, by its own head; with streams, dropout is on above the frozen layers."""
        states = self._known(rows, frozen) if frozen else None
        if states is None or frozen < self.layers:
            layout = self._layout(rows)
            if frozen and states is None:
                states = self._prefix(layout, frozen)
            if frozen < self.layers:
                draws = None if streams is None else _draws(rows, streams, self._sites(self.layers), layout.ids.device)
                step = _Pass(self, Worn(self.model, lanes, stacks), layout, draws)
                states = step.run(states, frozen, self.layers, [model.pool for model in models])
        assert states is not None
        seen = _split(states, [model.output_count(own) for model, own in zip(models, rows, strict=True)])
        heads = [{name: lane.tensors[name] for name in lane.tensors.keys() - self.inner} for lane in lanes]
        if streams is not None:  # a lane's dropout counts its own rows, so each head runs alone
            return [self._head(*each) for each in zip(models, heads, seen, streams, strict=True)]
        out: dict[int, Tensor] = {}
        for members in _by_model(models):
            model, own = models[members[0]], [heads[i] for i in members]
            out |= zip(members, self._heads(model, own, [seen[i] for i in members]), strict=True)
        return [out[i] for i in range(len(rows))]

    def prefix(self, rows: Rows, frozen: int) -> Tensor:
        """What the first layers make of rows: a state per token, or what the head sees if these are all layers."""
        return self._prefix(self._layout([rows]), frozen)

    @torch.no_grad()
    def _prefix(self, layout: Layout, frozen: int) -> Tensor:
        base = [Wear({}, {})] * (len(layout.texts.bounds) - 1)
        pools = [self.model.pool] * len(base)
        return _Pass(self, Worn(self.model, base, {}), layout, None).run(None, 0, frozen, pools)

    def _known(self, rows: Sequence[Rows], frozen: int) -> Tensor | None:
        known = [own.known for own in rows if own.known is not None and own.known.layers == frozen]
        if len(known) < len(rows):
            return None
        states = [torch.from_numpy(own.states) for own in known]
        return torch.cat(states).to(next(self.model.encoder.parameters()).device)

    def _sites(self, layers: int) -> int:
        """How many places of dropout lie before a layer."""
        return 1 + layers * (3 if self.m1_dropout else 2)

    def _head(self, model: Model, head: Mapping[str, Tensor], states: Tensor, stream: int | None) -> Tensor:
        with model.wearing(head), nullcontext() if stream is None else Keyed(stream, self._sites(self.layers)):
            return model.classify(states)

    def _heads(self, model: Model, heads: Sequence[Mapping[str, Tensor]], texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Heads of one shape: the model's head is called once, and its linear layers take each lane's own tensors."""
        names = {name for head in heads for name in head}
        linear = all(isinstance(module, nn.Linear) for name in names for module, _ in model.places[name])
        if len(heads) == 1 or not linear:
            return [self._head(model, head, own, None) for head, own in zip(heads, texts, strict=True)]
        stacks = {name: torch.stack([head.get(name, model.original(name)) for head in heads]) for name in names}
        sizes = torch.tensor([len(own) for own in texts])
        lane = torch.arange(len(texts)).repeat_interleave(sizes).to(texts[0].device)
        segments = Segments(lane, _bounds(sizes.tolist()))
        with model.wearing(stacks), _ByLane(segments):
            return segments.split(model.classify(torch.cat(list(texts))))

    def _layout(self, rows: Sequence[Rows]) -> Layout:
        device = next(self.model.encoder.parameters()).device
        lengths = np.concatenate([own.lengths for own in rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([own.ids for own in rows])
        inside = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        types = np.concatenate([own.types for own in rows]) if self.typed else np.zeros_like(ids)
        texts, tokens = [len(own) for own in rows], [len(own.ids) for own in rows]
        order, widths = _groups(lengths)
        spread, place = _padding(starts, lengths, order, widths)

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

        groups = tuple(_group(tensor, lengths[part], width) for part, width in _parts(order, widths))
        return Layout(
            tensor(ids),
            tensor(types),
            tensor(self._positions(ids, inside, starts, lengths)),
            tensor(lengths),
            tensor(starts[:-1]),
            Segments(tensor(np.repeat(np.arange(len(rows)), tokens)), _bounds(tokens)),
            Segments(tensor(np.repeat(np.arange(len(rows)), texts)), _bounds(texts)),
            groups,
            tensor(spread),
            tensor(place),
            tensor(order),
            tensor(np.argsort(order)),
        )

    def _positions(self, ids: Array, inside: Array, starts: Array, lengths: Array) -> Array:
        padding = self.embedding("positions").padding_idx
        if padding is None:
            return inside
        # RoBERTa and MPNet count from behind the padding index and do not count a padding token in the text.
        real = ids != padding
        count = np.cumsum(real)
        before = np.repeat((count - real)[starts[:-1]], lengths)
        counted: Array = (count - before) * real + padding
        return counted

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

    def __init__(self, packed: Packed, worn: Worn, layout: Layout, draws: Draws | None) -> None:
        self.packed, self.worn, self.layout, self.draws = packed, worn, layout, draws
        self.site = 0
        self.masks = self._attention_masks()

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
            x = self._layer(layer, x, first_only=layer == last and alone)
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
        x = self._norm(x, "emb", None, layout.tokens)
        x = drop(x, self._hidden_keys(), self.packed.p_hidden)
        if ("W_project", None) in self.packed.names:
            return self._linear(x, ("project",), None, layout.tokens)
        return x

    def _look_up(self, part: str, index: Tensor) -> Tensor:
        name, tokens = self.packed.names[part, None], self.layout.tokens
        matrix = self.worn.matrix(name)
        padding = self.packed.embedding(part).padding_idx
        if isinstance(matrix, list):
            pieces = zip(tokens.split(index), matrix, strict=True)
            x = torch.cat([F.embedding(own, weight, padding) for own, weight in pieces])
        else:
            x = F.embedding(index, matrix, padding)
        return write_rows(x, index, self.worn.patches([name], [x.shape[1]], tokens), padding)

    def _layer(self, layer: int, x: Tensor, first_only: bool) -> Tensor:
        segments = self.layout.texts if first_only else self.layout.tokens
        attended = self._attend(layer, x, first_only)
        residual = _apply(_First, x, self.layout.first) if first_only else x
        x = self._linear(attended, ("m1",), layer, segments)
        keys = self._hidden_keys(first_only) if self.packed.m1_dropout else None
        x = drop_add(x, residual, keys, self.packed.p_hidden)
        middle = self._norm(x, "LN1", layer, segments)
        x = self.packed.activation(self._linear(middle, ("m2",), layer, segments))
        x = self._linear(x, ("m3",), layer, segments)
        x = drop_add(x, middle, self._hidden_keys(first_only), self.packed.p_hidden)
        return self._norm(x, "LN2", layer, segments)

    def _attend(self, layer: int, x: Tensor, first_only: bool) -> Tensor:
        layout, heads = self.layout, self.packed.heads
        keys = self._attention_keys(first_only)
        masks = self.masks
        asking = None
        if first_only:
            masks = [None if mask is None else mask[:, :1] for mask in masks]
            first = _apply(_First, x, layout.first)
            asking = self._linear(first, ("q",), layer, layout.texts).index_select(0, layout.order)
        sides = ("k", "v") if first_only else ("q", "k", "v")
        wide = _apply(_Spread, self._linear(x, sides, layer, layout.tokens), layout.spread, layout.place)
        if keys is None:
            joined = attention(wide, asking, layout.groups, heads, masks)
        else:
            joined = _apply(_Attention, wide, asking, layout.groups, heads, self.packed.p_attention, keys, *masks)
        if first_only:
            return joined.index_select(0, layout.rank)
        return _apply(_Gather, joined, layout.place)

    def _linear(self, x: Tensor, places: tuple[str, ...], layer: int | None, segments: Segments) -> Tensor:
        names = [self.packed.names[f"W_{place}", layer] for place in places]
        biases = [self.worn.vector(self.packed.names[f"b_{place}", layer]) for place in places]
        patches = self.worn.patches(names, [bias.shape[-1] for bias in biases], segments)
        return linear(x, [self.worn.matrix(name) for name in names], biases, segments, patches)

    def _norm(self, x: Tensor, place: str, layer: int | None, segments: Segments) -> Tensor:
        names = self.packed.names
        gamma, bias = (self.worn.vector(names[f"{form}_{place}", layer]) for form in "gb")
        return norm(x, gamma, bias, self.packed.eps(f"g_{place}", layer), segments)

    def _hidden_keys(self, first_only: bool = False) -> Tensor | None:
        self.site += 1
        if self.draws is None or self.packed.p_hidden == 0:
            return None
        keys = self.draws.hidden(self.site - 1)
        return keys.index_select(0, self.layout.first) if first_only else keys

    def _attention_keys(self, first_only: bool) -> list[Tensor] | None:
        self.site += 1
        if self.draws is None or self.packed.p_attention == 0:
            return None
        keys = self.draws.attention(self.site - 1, self.packed.heads)
        layout = self.layout
        places = layout.first.index_select(0, layout.order) if first_only else layout.spread
        widths = [1 if first_only else group.width for group in layout.groups]
        sizes = [group.texts * width for group, width in zip(layout.groups, widths, strict=True)]
        parts = _split(keys.index_select(0, places), sizes)
        return [
            part.view(group.texts, width, -1).transpose(1, 2).reshape(-1, width, 1)
            for part, group, width in zip(parts, layout.groups, widths, strict=True)
        ]

    def _attention_masks(self) -> list[Tensor | None]:
        """What is added to the scores of each group, [texts * heads, 1 or queries, keys]."""
        heads, groups = self.packed.heads, self.layout.groups
        masks = [_hidden_padding(group, heads) for group in groups]
        if ("distances", None) not in self.packed.names:
            return masks
        matrix = self.worn.matrix(self.packed.names["distances", None])
        ordered = self.layout.texts.lane.index_select(0, self.layout.order)
        full: list[Tensor | None] = []
        for group, own, mask in zip(groups, _split(ordered, [group.texts for group in groups]), masks, strict=True):
            buckets = self.packed.distance_buckets(group.width)
            if isinstance(matrix, list):
                bias = torch.stack(matrix).index_select(0, own)[:, buckets].permute(0, 3, 1, 2)
            else:
                bias = F.embedding(buckets, matrix).permute(2, 0, 1).expand(group.texts, -1, -1, -1)
            bias = bias.reshape(-1, group.width, group.width)
            full.append(bias if mask is None else bias + mask)
        return full


def attention(
    wide: Tensor, asking: Tensor | None, groups: Sequence[Group], heads: int, masks: Sequence[Tensor | None]
) -> Tensor:
    """Attention within each text, on padded places.

    `wide` holds q, k and v side by side, or k and v where the queries (of first tokens) are given apart.
    """
    out = []
    queries = None if asking is None else _split(asking, [group.texts for group in groups])
    for i, (group, part) in enumerate(zip(groups, _split(wide, _places(groups)), strict=True)):
        parts = _by_head(part, group.texts, heads, 3 if queries is None else 2).unbind(0)
        q = parts[0] if queries is None else queries[i].view(group.texts, heads, 1, -1)
        mask = masks[i]
        if mask is not None:
            mask = mask.view(group.texts, heads, *mask.shape[1:])
        context = F.scaled_dot_product_attention(q, parts[-2], parts[-1], mask)
        out.append(context.transpose(1, 2).reshape(-1, heads * q.shape[-1]))
    return out[0] if len(out) == 1 else torch.cat(out)


class _Attention(torch.autograd.Function):
    """`attention` with keyed dropout: fewer operations than autograd would record, and scaling costs none."""

    @staticmethod
    def forward(
        ctx: Any,
        wide: Tensor,
        asking: Tensor | None,
        groups: Sequence[Group],
        heads: int,
        p: float,
        keys: Sequence[Tensor],
        *masks: Tensor | None,
    ) -> Tensor:
        sides = 3 if asking is None else 2
        width = wide.shape[1] // sides
        joined = wide.new_empty(wide.shape[0] if asking is None else asking.shape[0], width)
        outs = _split(joined, _places(groups, asking is not None))
        saved: list[Tensor] = []
        for i, (group, part, out) in enumerate(zip(groups, _split(wide, _places(groups)), outs, strict=True)):
            apart = _by_head(part, group.texts, heads, sides).flatten(1, 2).contiguous()
            queries = None if asking is None else _split(asking, [g.texts for g in groups])[i]
            q = apart[0] if queries is None else queries.view(group.texts * heads, 1, -1)
            chances = _product(q, apart[-2].transpose(1, 2), 1 / math.sqrt(q.shape[-1]), masks[i]).softmax(-1)
            context = _product(masked(chances, pattern(keys[i], group.width), p), apart[-1], 1 / (1 - p))
            _by_head(out, group.texts, heads, 1)[0].copy_(context.view(group.texts, heads, -1, q.shape[-1]))
            saved += (apart, q, chances)
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.heads, ctx.p, ctx.keys, ctx.alone = groups, heads, p, keys, asking is not None
        ctx.mask_shapes = [None if mask is None else mask.shape for mask in masks]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        groups, heads, kept, saved = ctx.groups, ctx.heads, 1 / (1 - ctx.p), ctx.saved_tensors
        sides = 2 if ctx.alone else 3
        wide = gradients[0].new_empty(sum(_places(groups)), sides * gradients[0].shape[1])
        parts, aboves = _split(wide, _places(groups)), _split(gradients[0], _places(groups, ctx.alone))
        asking, masks = [], []
        for i, group in enumerate(groups):
            apart, q, chances = saved[3 * i : 3 * i + 3]
            scale, bits, below = 1 / math.sqrt(q.shape[-1]), pattern(ctx.keys[i], group.width), torch.empty_like(apart)
            above = _by_head(aboves[i], group.texts, heads, 1)[0].flatten(0, 1)
            below[-1].baddbmm_(masked(chances, bits, ctx.p).transpose(1, 2), above, beta=0, alpha=kept)
            change = masked(_product(above, apart[-1].transpose(1, 2), kept), bits, ctx.p)
            change = torch.ops.aten._softmax_backward_data(change, chances, -1, change.dtype)
            below[-2].baddbmm_(change.transpose(1, 2), q, beta=0, alpha=scale)
            asked = torch.empty_like(q) if ctx.alone else below[0]
            asked.baddbmm_(change, apart[-2], beta=0, alpha=scale)
            target = _by_head(parts[i], group.texts, heads, sides)
            target.copy_(below.view(target.shape))
            asking.append(asked.view(group.texts, -1))
            masks.append(change.sum_to_size(ctx.mask_shapes[i]) if ctx.needs_input_grad[6 + i] else None)
        return wide, torch.cat(asking) if ctx.alone else None, None, None, None, None, *masks


def _places(groups: Sequence[Group], first_only: bool = False) -> list[int]:
    return [group.texts if first_only else group.texts * group.width for group in groups]


def _by_head(wide: Tensor, texts: int, heads: int, sides: int) -> Tensor:
    """[sides, texts, heads, places, d], a view."""
    return wide.view(texts, -1, sides, heads, wide.shape[1] // (sides * heads)).permute(2, 0, 3, 1, 4)


def _product(a: Tensor, b: Tensor, scale: float, plus: Tensor | None = None) -> Tensor:
    if plus is None:
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
    return torch.baddbmm(plus, a, b, alpha=scale)


def linear(
    x: Tensor, matrices: Sequence[Matrix], biases: Sequence[Tensor], segments: Segments, patches: Sequence[Place] = ()
) -> Tensor:
    """One or more linear layers on the same rows, their outputs side by side."""
    shared = [m for m in matrices if isinstance(m, Tensor) and not m.requires_grad]
    if len(shared) == len(matrices):
        values = [place.patch.values for place in patches]
        return _apply(_Linear, x, segments, len(shared), patches, *shared, *biases, *values)
    outputs = [_linear_by_lane(x, m, b, segments) for m, b in zip(matrices, biases, strict=True)]
    return add_linear(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), x, patches)


def _linear_by_lane(x: Tensor, matrix: Matrix, bias: Tensor, segments: Segments) -> Tensor:
    if isinstance(matrix, Tensor) and bias.dim() == 1:
        return F.linear(x, matrix, bias)
    if isinstance(matrix, Tensor):
        return F.linear(x, matrix) + bias.index_select(0, segments.lane)
    parts = segments.split(x)
    own = bias.unbind(0) if bias.dim() == 2 else [bias] * len(parts)
    return torch.cat([F.linear(*each) for each in zip(parts, matrix, own, strict=True)])


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
        return _linear_by_lane(x, list(weight.unbind(0)) if weight.dim() == 3 else weight, given, self.segments)


def norm(x: Tensor, gamma: Tensor, bias: Tensor, eps: float, segments: Segments) -> Tensor:
    """LayerNorm with a gamma and a bias of all lanes or of each."""
    shape = x.shape[-1:]
    if gamma.dim() == 1 and bias.dim() == 1:
        return F.layer_norm(x, shape, gamma, bias, eps)
    if gamma.dim() == 1:
        return _apply(_Shift, F.layer_norm(x, shape, gamma, None, eps), bias, segments)
    shift = bias if bias.dim() == 1 else bias.index_select(0, segments.lane)
    return torch.addcmul(shift, F.layer_norm(x, shape, None, None, eps), gamma.index_select(0, segments.lane))


class _Linear(torch.autograd.Function):
    """Frozen matrices side by side, each with a bias of all lanes or of each, and the lanes' patches on them.

    A bias gradient is a sum per lane."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, segments: Segments, count: int, patches: Sequence[Place], *tensors: Tensor
    ) -> Tensor:
        matrices, biases = tensors[:count], tensors[count : 2 * count]
        ctx.segments, ctx.matrices, ctx.dims = segments, matrices, [bias.dim() for bias in biases]
        sizes = [len(matrix) for matrix in matrices]
        if count == 1 and biases[0].dim() == 1:
            out = torch.addmm(biases[0], x, matrices[0].t())
        else:
            out = _side_by_side(biases, segments)
            for part, matrix in zip(_split(out, sizes, 1), matrices, strict=True):
                part.addmm_(x, matrix.t())
        ctx.patches = patches
        ctx.save_for_backward(*add_changes(out, x, patches))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, matrices = gradients[0], ctx.matrices
        sizes = [len(matrix) for matrix in matrices]
        below = None
        if ctx.needs_input_grad[0]:
            parts = _split(gradient, sizes, 1)
            below = parts[0] @ matrices[0]
            for part, matrix in zip(parts[1:], matrices[1:], strict=True):
                below.addmm_(part, matrix)
        wanted = ctx.needs_input_grad[4 + len(matrices) :]
        values = add_gradients(below, gradient, ctx.patches, ctx.saved_tensors, wanted[len(matrices) :])
        biases: list[Tensor | None] = [None] * len(matrices)
        if any(wanted[: len(matrices)]):
            sums = ctx.segments.sums(gradient) if max(ctx.dims) == 2 else gradient.sum(0)
            for i, (own, dim) in enumerate(zip(_split(sums, sizes, -1), ctx.dims, strict=True)):
                if wanted[i]:
                    biases[i] = own.sum(0) if dim < own.dim() else own
        return below, None, None, None, *[None] * len(matrices), *biases, *values


def _side_by_side(biases: Sequence[Tensor], segments: Segments) -> Tensor:
    """[rows, n]: the biases of each row's lane."""
    if all(bias.dim() == 1 for bias in biases):
        return torch.cat(list(biases)).repeat(int(segments.bounds[-1]), 1)
    lanes = len(segments.bounds) - 1
    stacks = [bias.expand(lanes, -1) for bias in biases]
    return (stacks[0] if len(stacks) == 1 else torch.cat(stacks, 1)).index_select(0, segments.lane)


class _Shift(torch.autograd.Function):
    """Add each lane's bias to its rows, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.mark_dirty(x)
        return x.add_(bias.index_select(0, segments.lane))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.segments.sums(gradients[0]) if ctx.needs_input_grad[1] else None, None


class _Spread(torch.autograd.Function):
    """From packed tokens to padded places. Padding repeats the text's own first token: it is masked, and finite unless
    that text is not, so nothing of one text reaches another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return x.index_select(0, spread)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.place), None, None


class _Gather(torch.autograd.Function):
    """From padded places back to packed tokens; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.place, ctx.rows = place, x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        wide = gradient.new_zeros(ctx.rows, gradient.shape[1])
        return wide.index_copy_(0, ctx.place, gradient), None


class _First(torch.autograd.Function):
    """Each text's first token."""

    forward = _Gather.forward
    backward = _Gather.backward


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    return function.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _split(x: Tensor, sizes: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    return torch.split(x, sizes, dim)


def _names(model: Model) -> dict[tuple[str, int | None], str]:
    anatomy = model.base.anatomy
    outside = {"g_emb": None, "b_emb": None}
    names: dict[tuple[str, int | None], str] = {
        (site.term, site.layer): site.name
        for site in anatomy.sites
        if (site.term in LAYER if site.layer is not None else site.term in outside)
    }
    return names | {(part, None): name for part, name in INPUTS.items() if name in anatomy.shapes}


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


def _bounds(sizes: Sequence[int]) -> tuple[int, ...]:
    return (0, *np.cumsum(sizes).tolist())


def _groups(lengths: Array) -> tuple[Array, list[tuple[int, int]]]:
    """The texts by length, longest first, and (texts, width) of each group of like length."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[tuple[int, int]] = []
    for length in lengths[order].tolist():
        texts, width = groups[-1] if groups else (0, length)
        if not groups or width - length > max(16, width // 4):
            groups.append((1, length))
        else:
            groups[-1] = (texts + 1, width)
    return order, groups


def _parts(order: Array, groups: Sequence[tuple[int, int]]) -> list[tuple[Array, int]]:
    ends = np.cumsum([texts for texts, _ in groups])
    return [(part, width) for part, (_, width) in zip(np.split(order, ends[:-1]), groups, strict=True)]


def _padding(starts: Array, lengths: Array, order: Array, groups: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """The token in each padded place (a text's first token where there is none), and the padded place of each token."""
    widths = np.repeat([width for _, width in groups], [texts for texts, _ in groups])
    begins = np.cumsum(widths) - widths
    inside = np.arange(int(widths.sum())) - np.repeat(begins, widths)
    spread = np.repeat(starts[:-1][order], widths) + np.where(inside < np.repeat(lengths[order], widths), inside, 0)
    begin = np.empty_like(begins)
    begin[order] = begins
    place = np.repeat(begin - starts[:-1], lengths) + np.arange(starts[-1])
    return spread, place


def _group(tensor: Any, lengths: Array, width: int) -> Group:
    padded = bool((lengths < width).any())
    return Group(len(lengths), width, tensor(lengths) if padded else None)


def _hidden_padding(group: Group, heads: int) -> Tensor | None:
    if group.lengths is None:
        return None
    beyond = torch.arange(group.width, device=group.lengths.device) >= group.lengths[:, None]
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, lowest)
    return mask.repeat_interleave(heads, 0)[:, None]
