"""Where everything of a packed batch lies: the tokens of all rows of all lanes end to end, sorted by lane.

Attention needs the tokens of a text side by side and head by head. Texts of like length form a group, each padded to
the longest of them; `Heads` says which place each token has there, so that one copy brings all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..model.rows import Rows


@dataclass(frozen=True)
class Segments:
    """Which lane each row of a packed tensor belongs to: lanes lie one after the other."""

    lane: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Segments:
        """Segments of these sizes."""
        lane = np.repeat(np.arange(len(sizes)), sizes)
        return cls(torch.from_numpy(lane).to(device), running(sizes))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each lane."""
        return torch.split(x, [b - a for a, b in pairwise(self.bounds)])

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
class Heads:
    """The way between tokens [tokens * sides * heads, d] and places: group by group [sides, texts * heads, width, d].

    Padding repeats the text's own first token: it is masked, and finite unless that text is not, so nothing of one
    text reaches another.
    """

    take: Tensor  # the token in each place
    give: Tensor  # the place of each token


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
    order: Tensor  # the texts in the order of the groups
    rank: Tensor  # the place of each text in that order
    spread: Array  # the token in each padded place
    place: Array  # the padded place of each token

    @classmethod
    def of(cls, rows: Sequence[Rows], typed: bool, padding: int | None, device: torch.device) -> Layout:
        """The layout of each lane's rows; positions count from behind a padding index, if there is one."""
        lengths = np.concatenate([own.lengths for own in rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([own.ids for own in rows])
        types = np.concatenate([own.types for own in rows]) if typed else np.zeros_like(ids)
        order, groups = _groups(lengths)
        spread, place = _padding(starts, lengths, order, groups)

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

        return cls(
            tensor(ids),
            tensor(types),
            tensor(_positions(ids, starts, lengths, padding)),
            tensor(lengths),
            tensor(starts[:-1]),
            Segments.of([len(own.ids) for own in rows], device),
            Segments.of([len(own) for own in rows], device),
            tuple(_group(tensor, lengths[part], width) for part, width in _parts(order, groups)),
            tensor(order),
            tensor(np.argsort(order)),
            spread,
            place,
        )

    def heads(self, heads: int, sides: int) -> Heads:
        """The places of `sides` vectors (of queries, keys, values) of each head."""
        device = self.ids.device
        texts = np.array([group.texts for group in self.groups])
        widths = np.array([group.width for group in self.groups])
        sizes = texts * widths
        group = np.repeat(np.arange(len(sizes)), sizes)
        before = (np.cumsum(sizes) - sizes)[group]
        text, inside = np.divmod(np.arange(len(group)) - before, widths[group])
        side, head = np.divmod(np.arange(sides * heads), heads)
        # [places, sides * heads]: where each vector of each padded place lies
        lies = (sides * heads * before + text * heads * widths[group] + inside)[:, None]
        lies = lies + heads * sizes[group][:, None] * side + widths[group][:, None] * head
        take = np.empty(lies.size, np.int64)
        take[lies] = self.spread[:, None] * (sides * heads) + np.arange(sides * heads)
        give = lies[self.place].reshape(-1)
        return Heads(torch.from_numpy(take).to(device), torch.from_numpy(give).to(device))


def running(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where parts of these sizes start, and where the last ends."""
    return (0, *accumulate(sizes))


def _positions(ids: Array, starts: Array, lengths: Array, padding: int | None) -> Array:
    if padding is None:
        inside: Array = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return inside
    # RoBERTa and MPNet count from behind the padding index and do not count a padding token in the text.
    real = ids != padding
    count = np.cumsum(real)
    before = np.repeat((count - real)[starts[:-1]], lengths)
    counted: Array = (count - before) * real + padding
    return counted


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
