"""The hand-written backward of a layer (bank/layer.py) against the same layer under autograd.

python benchmarks/autograd_layer.py [--batches 100]

Both compute the same numbers by the same products, which is checked first. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from bench import kept_bytes
from sides import Ours, bert_base, mini

from bitfit import Base
from bitfit.bank import blocked
from bitfit.bank.dropout import drop
from bitfit.bank.layer import Attention, Layer, Linear
from bitfit.bank.packed import _by_lane, norm


def linear(x: Tensor, part: Linear) -> Tensor:
    """Linear layers side by side, without additions."""
    assert not part.additions and not part.output_additions
    if len(part.matrices) > 1 and all(isinstance(m, Tensor) for m in part.matrices):
        bias = torch.cat(list(part.biases), -1)
        product = F.linear(x, torch.cat([m for m in part.matrices if isinstance(m, Tensor)]))
        return product + (bias if bias.dim() == 1 else bias.index_select(0, part.segments.lane))
    outputs = [_by_lane(x, m, b, part.segments) for m, b in zip(part.matrices, part.biases, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def attend(part: Attention, places: Tensor, queries: Tensor | None) -> Tensor:
    """Attention of each group of texts, outputs end to end."""
    d = places.shape[1]
    first_only = queries is not None
    sides = 2 if first_only else 3
    wide = torch.split_with_sizes(places, [sides * g.texts * part.heads * g.width for g in part.groups])
    asked = None
    if queries is not None:
        asked = torch.split_with_sizes(queries.view(-1, d), [g.texts * part.heads for g in part.groups])
    outputs = []
    for i, (group, own) in enumerate(zip(part.groups, wide, strict=True)):
        parts = own.view(sides, -1, group.width, d).unbind(0)
        q = parts[0] if asked is None else asked[i].view(-1, 1, d)
        outputs.append(_mixed(part, i, q, parts[-2], parts[-1]).reshape(-1, d))
    return torch.cat(outputs)


def _mixed(part: Attention, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = part.masks[i]
    if part.keys is None:
        shape = (part.groups[i].texts, part.heads)
        own = None if mask is None else mask.view(*shape, *mask.shape[1:])
        return F.scaled_dot_product_attention(*(x.view(*shape, *x.shape[1:]) for x in (q, k, v)), own)
    scale = 1 / math.sqrt(q.shape[-1])
    start = q.new_zeros(1, 1, 1) if mask is None else mask
    probabilities = torch.baddbmm(start, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    return drop(probabilities, part.keys[i], part.p) @ v


def call(layer: Layer, x: Tensor) -> Tensor:
    """The layer, every operation recorded by autograd."""
    layout, width = layer.layout, x.shape[1]
    residual, queries = x, None
    if layer.queries is not None:
        residual = x.index_select(0, layout.first)
        queries = linear(residual, layer.queries).index_select(0, layout.order)
    places = linear(x, layer.qkv).view(-1, width // layer.attention.heads).index_select(0, layer.qkv_heads.take)
    mixed = attend(layer.attention, places, queries)
    if layer.queries is not None:
        mixed = mixed.view(-1, width).index_select(0, layout.rank)
    else:
        mixed = mixed.index_select(0, layer.single_heads.give).view(-1, width)
    middle = norm(residual + drop(linear(mixed, layer.m1), layer.keys[0], layer.p), layer.LN1)
    inner = layer.activation(linear(middle, layer.m2))
    return norm(middle + drop(linear(inner, layer.m3), layer.keys[1], layer.p), layer.LN2)


@contextmanager
def under_autograd() -> Iterator[None]:
    """While it is on, layers are computed so."""
    written = Layer.__call__
    Layer.__call__ = call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Layer.__call__ = written  # type: ignore[method-assign]


def check(side: Ours) -> float:
    """The largest difference of the two gradients, as a share of the largest gradient."""
    found = []
    for recorded in (False, True):
        side.bank.gradients.zero_()
        with under_autograd() if recorded else warnings.catch_warnings():
            side.loss(0).backward()
        found.append(side.bank.gradients.clone())
    side.bank.gradients.zero_()
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def compare(side: Ours, batches: int) -> tuple[float, float]:
    """CPU seconds of a step, written out and under autograd, in turns; the first two do not count."""
    seconds = [0.0, 0.0]
    for i in range(batches + 2):
        for recorded in (0, 1):
            with under_autograd() if recorded else warnings.catch_warnings():
                began = time.process_time()
                side(i)
                if i > 1:
                    seconds[recorded] += time.process_time() - began
    return seconds[0] / batches, seconds[1] / batches


def kept(side: Ours, base: Base) -> float:
    """Bytes kept for the backward pass under autograd, as a multiple of those of the written-out layer."""
    aside = [*base.encoder.parameters(), side.bank.values]
    written = kept_bytes(lambda: side.loss(0), aside)
    with under_autograd():
        recorded = kept_bytes(lambda: side.loss(0), aside)
    return recorded / written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=100)
    batches = parser.parse_args().batches
    torch.set_num_threads(1)
    blocked.has_fast_products = lambda: False  # both sides multiply in the usual layout
    print("| model, task | lanes | gradients differ by | written out | autograd | ratio | kept |")
    print("|---|---|---|---|---|---|---|")
    for name, base, task, size in (
        ("MiniLM, sst2 batch 8", mini, "sst2", 8),
        ("BERT-base, rte batch 8", bert_base, "rte", 8),
    ):
        for lanes in (1, 4):
            side = Ours(base(), task, size, lanes=lanes, pool="mean")
            differ = check(side)
            written, recorded = compare(side, batches if base is mini else max(2, batches // 10))
            times = f"{1000 * written:.1f} ms | {1000 * recorded:.1f} ms | {recorded / written:.3f}x"
            print(f"| {name} | {lanes} | {differ:.1e} | {times} | {kept(side, base()):.2f}x |", flush=True)


if __name__ == "__main__":
    main()
