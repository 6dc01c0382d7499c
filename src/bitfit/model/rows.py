"""Token rows of many texts, without padding: what the bank takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..arrays import Array
from ..data.on_disk import Numbers, in_memory


@dataclass(frozen=True)
class Known:
    """The outputs of a model's frozen layers for some rows: per token, or per window what the head reads."""

    layers: int
    by_text: bool
    states: Array


@dataclass(frozen=True)
class Rows:
    """Token rows of many texts without padding: one flat array and where each row starts.

    A row is what a model reads at once, or several windows of a long text end to end. The base sees each window by
    itself, and the outputs of a text are the mean of those of its windows, each with the weight of its tokens.
    """

    ids: Array
    types: Array
    starts: Array  # where each row starts in `ids`, and the end of the last row
    cut: int = 0  # how many texts were longer than the maximum length
    known: Known | None = None
    known_by_lane: Mapping[int, Known] = field(default_factory=dict)  # of lanes that trained layers and then froze them
    windows: Array | None = None  # where each window starts, one more than there are; None: every row is one window
    before: tuple[int, int] = (0, 0)  # windows and tokens of the same batch that come before, on other workers

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Array:
        """Tokens per row."""
        return np.diff(self.starts)

    @classmethod
    def join(cls, parts: Iterable[Rows]) -> Rows:
        """Several sets of rows, one after the other; in files, if that is where rows are kept."""
        ids, types = Numbers(np.int32), Numbers(np.int8)
        lengths, window_lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        has_windows = False
        cut = 0
        for part in parts:
            ids.add(part.ids)
            types.add(part.types)
            lengths.append(part.lengths)
            window_lengths.append(part.by_window.lengths)
            has_windows = has_windows or part.windows is not None
            cut += part.cut
        windows = _starts(np.concatenate(window_lengths)) if has_windows else None
        return cls(ids.array(), types.array(), _starts(np.concatenate(lengths)), cut, windows=windows)

    @property
    def by_window(self) -> Rows:
        """The same tokens with one row per window."""
        if self.windows is None:
            return self
        return Rows(self.ids, self.types, self.windows, self.cut, self.known, self.known_by_lane, before=self.before)

    @property
    def window_counts(self) -> Array:
        """Windows per row."""
        if self.windows is None:
            return np.ones(len(self), np.int64)
        return np.diff(np.searchsorted(self.windows, self.starts))

    def windows_of(self, chosen: Array) -> Array:
        """The numbers of the windows of the chosen rows, in their order."""
        if self.windows is None:
            return chosen
        counts = self.window_counts
        return _ranges((np.cumsum(counts) - counts)[chosen], counts[chosen])

    def of_lane(self, k: int) -> Rows:
        """The rows with the outputs of lane k's frozen layers, if there are any for this lane alone."""
        if k not in self.known_by_lane:
            return self
        return replace(self, known=self.known_by_lane[k], known_by_lane={})

    def take(self, chosen: Array) -> Rows:
        """The chosen rows, in this order, with the outputs of frozen layers that all lanes share."""
        source = self.tokens(chosen)
        numbers = self.windows_of(chosen)
        windows = None if self.windows is None else _starts(self.windows[numbers + 1] - self.windows[numbers])
        known = self.known
        if known is not None:
            known = replace(known, states=known.states[numbers if known.by_text else source])
        starts = _starts(self._lengths_of(chosen))
        ids, types = in_memory(self.ids[source]), in_memory(self.types[source])
        return Rows(ids, types, starts, known=known, windows=windows)

    def share(self, span: slice) -> Rows:
        """One worker's rows of a batch; they remember how many windows and tokens come before them."""
        chosen = np.arange(len(self))[span]
        first = int(chosen[0]) if len(chosen) else 0
        windows = int(self.window_counts[:first].sum())
        return replace(self.take(chosen), before=(windows, int(self.starts[first])))

    def tokens(self, chosen: Array) -> Array:
        """The indices of the tokens of the chosen rows in `ids`."""
        return _ranges(self.starts[:-1][chosen], self._lengths_of(chosen))

    def _lengths_of(self, chosen: Array) -> Array:
        """Tokens of the chosen rows; those of all rows would be computed for every batch."""
        lengths: Array = self.starts[chosen + 1] - self.starts[chosen]
        return lengths

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
    """All row numbers in batches of at most `size` windows, longest rows first, so that there is little padding."""
    order = np.argsort(-rows.lengths, kind="stable")
    return in_batches(order, rows.window_counts[order], size)


def in_batches(numbers: Array, counts: Array, size: int) -> list[Array]:
    """Numbers in batches whose counts add up to at most `size`; one with a larger count is alone in its batch."""
    batches = []
    start = 0
    while start < len(numbers):
        ends = np.cumsum(counts[start : start + size])
        taken = max(1, int(np.searchsorted(ends, size, side="right")))
        batches.append(numbers[start : start + taken])
        start += taken
    return batches


def _starts(lengths: Array) -> Array:
    starts: Array = np.concatenate([[0], np.cumsum(lengths)])
    return starts


def _ranges(starts: Array, lengths: Array) -> Array:
    """The numbers start, start + 1, ... of each start, `length` of them, one range after the other."""
    ends = np.cumsum(lengths)
    numbers: Array = np.repeat(starts - ends + lengths, lengths) + np.arange(lengths.sum())
    return numbers
