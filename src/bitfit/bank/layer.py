"""One encoder layer on packed tokens, with forward and backward written by hand.

Autograd would record some thirty operations per layer; here a layer is one node. By
benchmarks/autograd_layer.py on a quiet machine, the same layer under autograd takes:

    model, lanes      time of a step   tensors kept for backward
    MiniLM, 1               1.04x            2.07x
    MiniLM, 4               1.06x            1.33x
    BERT-base, 1            1.03x            1.58x
    BERT-base, 4            1.11x            1.34x

The forward of each component (linear layers, a LayerNorm, attention) appends the tensors that its backward needs to a
tape. The backward takes them from the end of the tape and stores the gradients of parameters by tensor. In a backward,
`above` is the gradient of the outputs and `below` that of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import GELUActivation

from ..model.precision import wide
from .additions import Addition, Gradients, Keep, Tape
from .blocked import Blocked
from .dropout import masked, pattern
from .layout import Group, Heads, Layout, Segments, running

Matrix = Tensor | list[Tensor]
"""A matrix of all lanes, or one per lane."""


@dataclass(frozen=True)
class Linear:
    """Linear layers on the same rows, with their outputs concatenated: matrices, biases, and additions of lanes."""

    matrices: Sequence[Matrix]
    biases: Sequence[Tensor]  # [n], or [lanes, n]
    segments: Segments
    additions: Sequence[Addition] = ()  # they read the inputs
    output_additions: Sequence[Addition] = ()  # they read the outputs
    blocked: Blocked | None = None  # the matrices, if all lanes share them and they are frozen

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        for matrix in self.matrices:
            yield from matrix if isinstance(matrix, list) else (matrix,)
        yield from self.biases
        for addition in (*self.additions, *self.output_additions):
            yield from addition.tensors

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        """The outputs for rows `x`."""
        out = self._outputs(x)
        for addition in self.additions:
            addition.forward(out, x, keep)
        for addition in self.output_additions:
            addition.forward(out, out, keep)
        if self._dense:
            keep(x)
        return out

    def _outputs(self, x: Tensor) -> Tensor:
        shared_biases = all(bias.dim() == 1 for bias in self.biases)
        if self.blocked is not None:
            return self.blocked.outputs(x, torch.cat(list(self.biases)) if shared_biases else self._bias_rows(x))
        if len(self.biases) == 1 and shared_biases and isinstance(self.matrices[0], Tensor):
            return torch.addmm(self.biases[0], x, wide(self.matrices[0]).t())
        out = self._bias_rows(x)
        for matrix, rows, columns in self._products:
            out[rows, columns].addmm_(x[rows], wide(matrix).t())
        return out

    def backward(
        self, above: Tensor, tape: Tape, gradients: Gradients, wanted: bool, added: Tensor | None = None
    ) -> Tensor | None:
        """Compute the gradients of the tensors; returns that of the inputs plus `added`, if wanted.

        `added` is lost: its memory may be used for the result.
        """
        x = tape.pop() if self._dense else None
        if self.output_additions:  # they add to `above`, which the caller may still need unchanged
            above = above.clone()
        for addition in reversed(self.output_additions):
            addition.backward(above, tape, gradients, above)
        if x is not None:
            for matrix, rows, columns in self._products:
                if matrix.requires_grad:
                    gradients[id(matrix)] = above[rows, columns].t() @ x[rows]
        below = self._input_gradients(above, added) if wanted else None
        for addition in reversed(self.additions):
            addition.backward(above, tape, gradients, below)
        self._bias_gradients(above, gradients)
        return below

    def _input_gradients(self, above: Tensor, added: Tensor | None) -> Tensor:
        if self.blocked is not None:
            return self.blocked.input_gradients(above, added)
        below = above.new_empty(len(above), self._products[0][0].shape[1]) if added is None else added
        for matrix, rows, columns in self._products:
            is_first = added is None and columns.start == 0
            below[rows].addmm_(above[rows, columns], wide(matrix), beta=0 if is_first else 1)
        return below

    def _bias_gradients(self, above: Tensor, gradients: Gradients) -> None:
        if not any(bias.requires_grad for bias in self.biases):
            return
        by_lane = any(bias.dim() == 2 for bias in self.biases)
        sums = self.segments.sums(above) if by_lane else above.sum(0)
        for bias, d_bias in zip(self.biases, torch.split_with_sizes(sums, self._sizes, -1), strict=True):
            if bias.requires_grad:
                gradients[id(bias)] = d_bias.sum(0) if bias.dim() < d_bias.dim() else d_bias

    @cached_property
    def _sizes(self) -> list[int]:
        return [bias.shape[-1] for bias in self.biases]

    @cached_property
    def _dense(self) -> bool:
        return any(matrix.requires_grad for matrix, _, _ in self._products)

    @cached_property
    def _products(self) -> list[tuple[Tensor, slice, slice]]:
        """Each matrix, the rows it multiplies and the columns of the output that it computes."""
        all_columns = [slice(*ends) for ends in pairwise(running(self._sizes))]
        lanes = [slice(*ends) for ends in pairwise(self.segments.bounds)]
        products: list[tuple[Tensor, slice, slice]] = []
        for matrix, columns in zip(self.matrices, all_columns, strict=True):
            if isinstance(matrix, Tensor):
                products.append((matrix, slice(None), columns))
            else:
                products += [(lane_matrix, rows, columns) for lane_matrix, rows in zip(matrix, lanes, strict=True)]
        return products

    def _bias_rows(self, x: Tensor) -> Tensor:
        """[rows, n]: the biases of each row's lane."""
        if all(bias.dim() == 1 for bias in self.biases):
            out = x.new_empty(len(x), sum(self._sizes))
            for columns, bias in zip(torch.split_with_sizes(out, self._sizes, 1), self.biases, strict=True):
                columns.copy_(bias)
            return out
        lanes = len(self.segments.bounds) - 1
        stacks = [bias.expand(lanes, -1) for bias in self.biases]
        stack = stacks[0] if len(stacks) == 1 else torch.cat(stacks, 1)
        return stack.index_select(0, self.segments.lane)


@dataclass(frozen=True)
class Norm:
    """A LayerNorm whose gamma and bias are of all lanes, [n], or of each lane, [lanes, n]."""

    gamma: Tensor
    bias: Tensor
    eps: float
    segments: Segments

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        yield from (self.gamma, self.bias)

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        """The normalised rows."""
        # The kernel takes a gamma and a bias that all lanes share. Vectors per lane are applied afterwards, and so is a
        # shared bias after a gamma per lane.
        shared_gamma = self.gamma.dim() == 1
        shared_bias = self.bias.dim() == 1
        gamma = self.gamma if shared_gamma else None
        bias = self.bias if shared_gamma and shared_bias else None
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma, bias, self.eps)
        keep(x, mean, rstd)
        if gamma is None:
            out.mul_(self.gamma.index_select(0, self.segments.lane))
        if bias is None:
            out.add_(self.bias if shared_bias else self.bias.index_select(0, self.segments.lane))
        return out

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, wanted: bool) -> Tensor:
        """Compute the gradients of gamma and bias; returns the gradient of the input, if wanted."""
        rstd = tape.pop()
        mean = tape.pop()
        x = tape.pop()
        if self.bias.requires_grad:
            gradients[id(self.bias)] = above.sum(0) if self.bias.dim() == 1 else self.segments.sums(above)
        trains = self.gamma.requires_grad
        gamma: Tensor | None = self.gamma
        if self.gamma.dim() == 2:  # one per lane, which the kernel does not take
            if trains:
                gradients[id(self.gamma)] = self.segments.sums((x - mean).mul_(rstd).mul_(above))
            above = above * self.gamma.index_select(0, self.segments.lane)
            gamma = None
            trains = False
        below, d_gamma, _ = torch.ops.aten.native_layer_norm_backward(
            above, x, x.shape[-1:], mean, rstd, gamma, None, [wanted, trains, False]
        )
        if trains:
            gradients[id(self.gamma)] = d_gamma
        return below  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Attention:
    """Attention within each text, on padded groups of texts, with keyed dropout of its probabilities.

    `padded` holds q, k and v. If only first tokens query, it holds k and v, and `queries` has one row per text in the
    order of the groups.
    """

    groups: Sequence[Group]
    heads: int
    masks: Sequence[Tensor | None]  # added to the scores of each group, [texts * heads, 1 or queries, keys]
    keys: Sequence[Tensor] | None  # of dropout, [texts * heads, queries, 1] for each group
    p: float

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that may train."""
        yield from (mask for mask in self.masks if mask is not None)

    def forward(self, padded: Tensor, queries: Tensor | None, keep: Keep) -> Tensor:
        """The outputs of each token (or of each text, if only first tokens query): rows [.., d], head by head."""
        out = padded.new_empty(sum(self._sizes(1, queries is not None)), padded.shape[1])
        for i, (q, k, v, target) in enumerate(self._split(padded, queries, out)):
            if self.keys is None:
                self._fused(q, k, v, i, target)
                continue
            probabilities = self._probabilities(q, k, i)
            target.baddbmm_(self._dropped(probabilities, self._bits(i)), v, beta=0, alpha=self._dropout_scale)
            keep(probabilities)
        keep(padded)
        if queries is not None:
            keep(queries)
        return out

    def _probabilities(self, q: Tensor, k: Tensor, i: int) -> Tensor:
        return _product(q, k.transpose(1, 2), 1 / math.sqrt(q.shape[-1]), self.masks[i]).softmax(-1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, i: int, target: Tensor) -> None:
        """Write the outputs by torch's kernel, which has no keyed dropout and returns no probabilities."""
        texts = self.groups[i].texts
        mask = self.masks[i]
        if mask is not None:
            mask = mask.view(texts, self.heads, *mask.shape[1:])
        q, k, v = (x.view(texts, self.heads, *x.shape[1:]) for x in (q, k, v))
        target.copy_(F.scaled_dot_product_attention(q, k, v, mask).reshape(target.shape))

    def backward(
        self, above: Tensor, tape: Tape, gradients: Gradients, first_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of `padded` and of `queries` (None unless `first_only`)."""
        queries = tape.pop() if first_only else None
        padded = tape.pop()
        below = torch.empty_like(padded)
        d_queries = None if queries is None else torch.empty_like(queries)
        inputs = list(self._split(padded, queries, above))
        d_inputs = list(self._split(below, d_queries, above))
        for i in reversed(range(len(self.groups))):  # the tape ends with the last group
            q, k, v, d_out = inputs[i]
            dq, dk, dv, _ = d_inputs[i]
            probabilities = self._probabilities(q, k, i) if self.keys is None else tape.pop()
            d_scores = self._backward_values(i, probabilities, v, d_out, dv)
            self._backward_scores(i, d_scores, q, k, dq, dk, gradients)
        return below, d_queries

    def _backward_values(self, i: int, probabilities: Tensor, v: Tensor, d_out: Tensor, dv: Tensor) -> Tensor:
        """Write the gradient of the values into `dv`; returns that of the scores. out = dropout(softmax(scores)) v."""
        bits = self._bits(i)
        dropped = self._dropped(probabilities, bits)
        dv.baddbmm_(dropped.transpose(1, 2), d_out, beta=0, alpha=self._dropout_scale)
        del dropped  # a copy of the probabilities, which is not needed beside those that follow
        d_probabilities = self._dropped(_product(d_out, v.transpose(1, 2), self._dropout_scale), bits)
        d_scores: Tensor = torch.ops.aten._softmax_backward_data(
            d_probabilities, probabilities, -1, d_probabilities.dtype
        )
        return d_scores

    def _backward_scores(
        self, i: int, d_scores: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, gradients: Gradients
    ) -> None:
        """Write the gradients of queries and keys into `dq` and `dk`. scores = q k' / sqrt(d) + mask."""
        scale = 1 / math.sqrt(q.shape[-1])
        dk.baddbmm_(d_scores.transpose(1, 2), q, beta=0, alpha=scale)
        dq.baddbmm_(d_scores, k, beta=0, alpha=scale)
        mask = self.masks[i]
        if mask is not None and mask.requires_grad:  # MPNet's distances train
            gradients[id(mask)] = d_scores.sum_to_size(mask.shape)

    @property
    def _dropout_scale(self) -> float:
        """The factor of what dropout keeps."""
        return 1.0 if self.keys is None else 1 / (1 - self.p)

    def _bits(self, i: int) -> Tensor | None:
        return None if self.keys is None else pattern(self.keys[i], self.groups[i].width)

    def _dropped(self, probabilities: Tensor, bits: Tensor | None) -> Tensor:
        return probabilities if bits is None else masked(probabilities, bits, self.p)

    def _sizes(self, vectors: int, first_only: bool) -> list[int]:
        """The rows of each group, for so many vectors (of q, k and v) per token and head."""
        return [vectors * group.texts * self.heads * (1 if first_only else group.width) for group in self.groups]

    def _split(
        self, padded: Tensor, queries: Tensor | None, out: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """q, k, v and outputs of each group, [texts * heads, width, d], as views."""
        d = padded.shape[1]
        first_only = queries is not None
        vectors = 2 if first_only else 3
        by_group = torch.split_with_sizes(padded, self._sizes(vectors, False))
        outs = torch.split_with_sizes(out, self._sizes(1, first_only))
        first_queries = None
        if queries is not None:
            first_queries = torch.split_with_sizes(queries.view(-1, d), self._sizes(1, first_only))
        for i, (group, rows, target) in enumerate(zip(self.groups, by_group, outs, strict=True)):
            qkv = rows.view(vectors, -1, group.width, d).unbind(0)
            q = qkv[0] if first_queries is None else first_queries[i].view(-1, 1, d)
            yield q, qkv[-2], qkv[-1], target.view(-1, q.shape[1], d)


@dataclass(frozen=True)
class Layer:
    """Self-attention and the feed-forward layers; with `queries`, for each text's first token only."""

    layout: Layout
    qkv_heads: Heads  # of q, k and v, or of k and v
    single_heads: Heads  # of one vector
    queries: Linear | None
    qkv: Linear  # of q, k and v, or of k and v
    attention: Attention
    m1: Linear
    LN1: Norm
    m2: Linear
    m3: Linear
    LN2: Norm
    activation: Callable[[Tensor], Tensor]
    keys: tuple[Tensor | None, Tensor | None]  # of dropout after m1 and after m3
    p: float

    @cached_property
    def components(self) -> Sequence[Linear | Norm | Attention]:
        """The components in the order of the forward; `queries` and `qkv` read the layer's input."""
        first = () if self.queries is None else (self.queries,)
        return (*first, self.qkv, self.attention, self.m1, self.LN1, self.m2, self.m3, self.LN2)

    @cached_property
    def trained(self) -> list[Tensor]:
        """The tensors of the layer that train."""
        tensors = chain.from_iterable(component.tensors for component in self.components)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def __call__(self, x: Tensor) -> Tensor:
        """The states of the tokens (or of each text's first) after the layer."""
        return _Node.apply(x, self, *self.trained)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor, keep: Keep | None) -> Tensor:
        """The outputs; `keep` takes the tensors that `backward` needs, None if there will be no backward."""
        record: Keep = keep or (lambda *_: None)
        layout = self.layout
        width = x.shape[1]
        d = width // self.attention.heads
        queries = None
        residual = x
        if self.queries is not None:
            residual = x.index_select(0, layout.first)
            queries = self.queries.forward(residual, record).index_select(0, layout.order)
        padded = self.qkv.forward(x, record).view(-1, d).index_select(0, self.qkv_heads.take)
        attended = self.attention.forward(padded, queries, record)
        if self.queries is not None:
            attended = attended.view(-1, width).index_select(0, layout.rank)
        else:
            attended = attended.index_select(0, self.single_heads.give).view(-1, width)
        h = _drop_add(self.m1.forward(attended, record), residual, self.keys[0], self.p)
        middle = self.LN1.forward(h, record)
        inner = self.m2.forward(middle, record)
        record(inner)
        h = _drop_add(self.m3.forward(self.activation(inner), record), middle, self.keys[1], self.p)
        return self.LN2.forward(h, record)

    def backward(self, above: Tensor, tape: Tape, gradients: Gradients, wanted: bool) -> Tensor | None:
        """The gradient of the layer's input, if wanted, else None; those of tensors go to `gradients`.

        It goes through the components from the last to the first and returns as soon as nothing before trains.
        """
        # The residual adds the layer's input to the outputs of m1, so both get this gradient.
        d_residual = self._backward_ffn(above, tape, gradients, wanted)
        if d_residual is None:
            return None

        d_m1 = _dropped(d_residual, self.keys[0], self.p)
        d_attended = self.m1.backward(d_m1, tape, gradients, self._trains_before(self.m1, wanted))
        del d_m1
        if d_attended is None:
            return None

        first_only = self.queries is not None
        d_padded, d_queries = self.attention.backward(self._by_head(d_attended), tape, gradients, first_only)
        if not self._trains_before(self.attention, wanted):
            return None

        d_qkv = d_padded.index_select(0, self.qkv_heads.give).view(len(self.layout.ids), -1)
        if d_queries is not None:
            return self._backward_first_only(d_qkv, d_queries, d_residual, tape, gradients, wanted)
        return self.qkv.backward(d_qkv, tape, gradients, wanted, added=d_residual)

    def _backward_first_only(
        self, d_qkv: Tensor, d_queries: Tensor, d_first: Tensor, tape: Tape, gradients: Gradients, wanted: bool
    ) -> Tensor | None:
        """The gradient of the layer's input, if wanted, where only the first token of each text goes on.

        `d_first` is the gradient of the first tokens by the residual; that by the queries is added to it.
        """
        assert self.queries is not None
        below = self.qkv.backward(d_qkv, tape, gradients, wanted)
        # The attention takes its queries in the order of the groups.
        above = d_queries.index_select(0, self.layout.rank)
        d_residual = self.queries.backward(above, tape, gradients, wanted, added=d_first)
        if below is None or d_residual is None:
            return None
        return below.index_add_(0, self.layout.first, d_residual)

    def _by_head(self, d_attended: Tensor) -> Tensor:
        """The gradient of the attention's outputs as the attention takes it: [.., d], padded, head by head."""
        d = d_attended.shape[1] // self.attention.heads
        if self.queries is not None:
            return d_attended.index_select(0, self.layout.order).view(-1, d)
        padded = d_attended.new_zeros(len(self.single_heads.take), d)
        return padded.index_copy_(0, self.single_heads.give, d_attended.view(-1, d))

    def _backward_ffn(self, above: Tensor, tape: Tape, gradients: Gradients, wanted: bool) -> Tensor | None:
        """The gradient of the input of LN1; None if nothing before it trains."""
        d_residual = self.LN2.backward(above, tape, gradients, self._trains_before(self.LN2, wanted))
        if d_residual is None:
            return None
        d_m3 = _dropped(d_residual, self.keys[1], self.p)
        d_activated = self.m3.backward(d_m3, tape, gradients, self._trains_before(self.m3, wanted))
        del d_m3
        if d_activated is None:
            return None
        d_inner = _activation_grad(self.activation, tape.pop(), d_activated)
        del d_activated
        before = self._trains_before(self.m2, wanted)
        d_middle = self.m2.backward(d_inner, tape, gradients, before, added=d_residual)
        if d_middle is None:
            return None
        return self.LN1.backward(d_middle, tape, gradients, self._trains_before(self.LN1, wanted))

    def _trains_before(self, component: Linear | Norm | Attention, wanted: bool) -> bool:
        """Whether the gradient of the component's input is needed: the layer's input, or a component before, trains."""
        if wanted:
            return True
        before = takewhile(lambda other: other is not component, self.components)
        tensors = chain.from_iterable(other.tensors for other in before)
        return any(tensor.requires_grad for tensor in tensors)


class _Node(torch.autograd.Function):
    """A layer as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *trained: Tensor) -> Tensor:
        tape: Tape = []
        keep = (lambda *tensors: tape.extend(tensors)) if any(ctx.needs_input_grad) else None
        out = layer.forward(x, keep)
        ctx.layer = layer
        ctx.save_for_backward(*tape)
        return out

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Any, ...]:
        gradients: Gradients = {}
        below = ctx.layer.backward(above[0], list(ctx.saved_tensors), gradients, ctx.needs_input_grad[0])
        return below, None, *(gradients.get(id(tensor)) for tensor in ctx.layer.trained)


def _product(a: Tensor, b: Tensor, scale: float, added: Tensor | None = None) -> Tensor:
    if added is None:
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
    return torch.baddbmm(added, a, b, alpha=scale)


def _drop_add(x: Tensor, residual: Tensor, keys: Tensor | None, p: float) -> Tensor:
    if keys is None:
        return x.add_(residual)
    return torch.add(residual, masked(x, pattern(keys, x.shape[1]), p), alpha=1 / (1 - p))


def _dropped(gradient: Tensor, keys: Tensor | None, p: float) -> Tensor:
    if keys is None:
        return gradient
    return masked(gradient, pattern(keys, gradient.shape[1]), p).mul_(1 / (1 - p))


def _activation_grad(activation: Callable[[Tensor], Tensor], x: Tensor, above: Tensor) -> Tensor:
    """The gradient of an activation's input."""
    if isinstance(activation, GELUActivation):
        return torch.ops.aten.gelu_backward(above, x)  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(activation(leaf), leaf, above)[0]
