"""The layout of a packed batch: the tokens of all rows of all lanes, concatenated and sorted by lane.

Attention needs the tokens of a text together, head by head. Texts of similar length form a group, each padded to the
longest of them; `Heads` maps tokens to padded positions and back, so that one copy moves all of them.
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
    """The lane of each row of a packed tensor; the rows are sorted by lane."""

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
        """One sum per lane. Not by a product with zeros and ones, which would carry NaN from lane to lane."""
        # Measured once, on a busy machine, 4 lanes of width 384, microseconds at 100 / 400 / 1000 / 4000 rows:
        # index_add 26 / 26 / 103 / 182, a sum per slice 31 / 43 / 78 / 190, segment_reduce 37 / 239 / 629 / 3548.
        return x.new_zeros(len(self.bounds) - 1, x.shape[1]).index_add_(0, self.lane, x)


@dataclass(frozen=True)
class Group:
    """Texts of similar length whose attention is computed together, each padded to the longest of them."""

    texts: int
    width: int
    lengths: Tensor | None  # None: nothing is padded


@dataclass(frozen=True)
class Heads:
    """Indices between tokens [tokens * vectors * heads, d] and groups of padded texts.

    A group is [vectors, texts * heads, width, d]; `vectors` are queries, keys and values, or some of them.
    Padding repeats the first token of the same text. It is masked, and a NaN or infinity in one text never reaches
    another.
    """

    take: Tensor  # the token in each padded position
    give: Tensor  # the padded position of each token


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch, and the indices of its lanes, texts and groups."""

    ids: Tensor
    types: Tensor
    positions: Tensor
    lengths: Tensor  # tokens of each text
    first: Tensor  # the first token of each text
    tokens: Segments
    texts: Segments
    groups: tuple[Group, ...]
    order: Tensor  # the texts in the order of the groups
    rank: Tensor  # the rank of each text in that order
    padded_tokens: Array  # the token in each padded position
    padded_positions: Array  # the padded position of each token

    @classmethod
    def of(cls, rows: Sequence[Rows], typed: bool, padding: int | None, device: torch.device) -> Layout:
        """The layout of each lane's rows. `padding` is the index of padding tokens in the position embeddings, if the
        base counts positions from there."""
        lengths = np.concatenate([lane_rows.lengths for lane_rows in rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([lane_rows.ids for lane_rows in rows])
        types = np.concatenate([lane_rows.types for lane_rows in rows]) if typed else np.zeros_like(ids)
        order, groups = _groups(lengths)
        padded_tokens, padded_positions = _padding(starts, lengths, order, groups)

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

        return cls(
            ids=tensor(ids),
            types=tensor(types),
            positions=tensor(_positions(ids, starts, lengths, padding)),
            lengths=tensor(lengths),
            first=tensor(starts[:-1]),
            tokens=Segments.of([len(lane_rows.ids) for lane_rows in rows], device),
            texts=Segments.of([len(lane_rows) for lane_rows in rows], device),
            groups=tuple(_group(tensor, lengths[texts], width) for texts, width in _members(order, groups)),
            order=tensor(order),
            rank=tensor(np.argsort(order)),
            padded_tokens=padded_tokens,
            padded_positions=padded_positions,
        )

    def heads(self, heads: int, vectors: int) -> Heads:
        """The indices for `vectors` vectors (1 to 3 of queries, keys and values) of each head."""
        device = self.ids.device
        texts = np.array([group.texts for group in self.groups])
        widths = np.array([group.width for group in self.groups])
        sizes = texts * widths  # padded positions per group
        columns = vectors * heads  # rows [d] per token: those of the first vector, head by head, then of the second

        # Of each padded position: its group, where the group starts, its text in the group, its position in the text.
        group = np.repeat(np.arange(len(sizes)), sizes)
        start = (np.cumsum(sizes) - sizes)[group]
        text, position = np.divmod(np.arange(len(group)) - start, widths[group])

        # Of each column: its vector and its head.
        vector, head = np.divmod(np.arange(columns), heads)

        # A group is [vectors, texts, heads, width] and its first row is columns * start. So the row of a vector is at
        # ((vector * texts + text) * heads + head) * width + position; first what depends on the position alone.
        index = (columns * start + text * heads * widths[group] + position)[:, None]
        index = index + heads * sizes[group][:, None] * vector + widths[group][:, None] * head

        take = np.empty(index.size, np.int64)
        take[index] = self.padded_tokens[:, None] * columns + np.arange(columns)
        give = index[self.padded_positions].reshape(-1)
        return Heads(torch.from_numpy(take).to(device), torch.from_numpy(give).to(device))


def running(sizes: Sequence[int]) -> tuple[int, ...]:
    """The starts of consecutive runs of these sizes, and the end of the last."""
    return (0, *accumulate(sizes))


def _positions(ids: Array, starts: Array, lengths: Array, padding: int | None) -> Array:
    if padding is None:
        positions: Array = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return positions
    # RoBERTa and MPNet start after the padding index and do not count padding tokens in the text.
    is_token = ids != padding
    count = np.cumsum(is_token)
    before = np.repeat((count - is_token)[starts[:-1]], lengths)
    counted: Array = (count - before) * is_token + padding
    return counted


def _groups(lengths: Array) -> tuple[Array, list[tuple[int, int]]]:
    """The texts by length, longest first, and (number of texts, width) of each group of similar length."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[tuple[int, int]] = []
    for length in lengths[order].tolist():
        texts, width = groups[-1] if groups else (0, length)
        if not groups or width - length > max(16, width // 4):
            groups.append((1, length))
        else:
            groups[-1] = (texts + 1, width)
    return order, groups


def _members(order: Array, groups: Sequence[tuple[int, int]]) -> list[tuple[Array, int]]:
    """The texts and the width of each group."""
    ends = np.cumsum([texts for texts, _ in groups])
    widths = [width for _, width in groups]
    return list(zip(np.split(order, ends[:-1]), widths, strict=True))


def _padding(starts: Array, lengths: Array, order: Array, groups: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """The token in each padded position (padding: its text's first token), and the padded position of each token."""
    first_tokens = starts[:-1]
    # In the order of the groups: the padded width of each text, and the padded position where it starts.
    widths = np.repeat([width for _, width in groups], [texts for texts, _ in groups])
    padded_starts = np.cumsum(widths) - widths

    # From padded positions to tokens: position 0 of a text, its first token, fills the padding.
    position = np.arange(int(widths.sum())) - np.repeat(padded_starts, widths)
    is_token = position < np.repeat(lengths[order], widths)
    tokens = np.repeat(first_tokens[order], widths) + np.where(is_token, position, 0)

    # From tokens to padded positions: the tokens of a text all move by the same distance.
    padded_start_of_text = np.empty_like(padded_starts)
    padded_start_of_text[order] = padded_starts
    positions = np.repeat(padded_start_of_text - first_tokens, lengths) + np.arange(starts[-1])
    return tokens, positions


def _group(tensor: Any, lengths: Array, width: int) -> Group:
    padded = bool((lengths < width).any())
    return Group(len(lengths), width, tensor(lengths) if padded else None)
