"""Token rows of many texts, without padding: what the bank takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..arrays import Array


@dataclass(frozen=True)
class Known:
    """The outputs of a model's frozen layers for some rows: per token, or per text what the head reads."""

    layers: int
    by_text: bool
    states: Array


@dataclass(frozen=True)
class Rows:
    """Token rows of many texts without padding: one flat array and where each row starts."""

    ids: Array
    types: Array
    starts: Array  # where each row starts in `ids`, and the end of the last row
    cut: int = 0  # how many texts were longer than the maximum length
    known: Known | None = None
    own: Mapping[int, Known] = field(default_factory=dict)  # of lanes with values of their own in their frozen layers

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Array:
        """Tokens per row."""
        return np.diff(self.starts)

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Several sets of rows as one."""
        none = np.zeros(0, np.int64)
        lengths = np.concatenate([none, *(part.lengths for part in parts)])
        ids = np.concatenate([none, *(part.ids for part in parts)])
        types = np.concatenate([none, *(part.types for part in parts)])
        return cls(ids, types, np.concatenate([[0], np.cumsum(lengths)]), sum(part.cut for part in parts))

    def of_lane(self, k: int) -> Rows:
        """The rows as lane k takes them: with the states that its own frozen layers make of them, if there are some."""
        if k not in self.own:
            return self
        return replace(self, known=self.own[k], own={})

    def take(self, chosen: Array) -> Rows:
        """The chosen rows, in this order; of the states only those that all lanes share."""
        starts = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        source = self.tokens(chosen)
        known = self.known
        if known is not None:
            known = replace(known, states=known.states[chosen if known.by_text else source])
        return Rows(self.ids[source], self.types[source], starts, known=known)

    def tokens(self, chosen: Array) -> Array:
        """The indices of the tokens of the chosen rows in `ids`."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        source: Array = np.repeat(self.starts[:-1][chosen] - ends + lengths, lengths) + np.arange(lengths.sum())
        return source

    def padded(self, pad: int) -> tuple[Array, Array, Array]:
        """Ids, segment ids and mask of a batch, padded to the longest row."""
        position = np.arange(self.lengths.max(initial=1))
        mask = position < self.lengths[:, None]
        ids = np.full(mask.shape, pad, np.int64)
        ids[mask] = self.ids
        types = np.zeros(mask.shape, np.int64)
        types[mask] = self.types
        return ids, types, mask.astype(np.int64)


def by_length(rows: Rows, size: int) -> list[Array]:
    """All row numbers in batches of similar length, longest first, so that there is little padding."""
    order = np.argsort(-rows.lengths, kind="stable")
    return [order[i : i + size] for i in range(0, len(order), size)]
