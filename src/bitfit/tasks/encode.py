"""Texts -> token rows without padding: what the bank takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..arrays import Array
from ..data.examples import Examples
from ..delta.meta import HEAD_OF_TEXT
from ..errors import DataError, UsageError
from ..model.base import Base
from ..model.rows import Rows

DEFAULT_LENGTH = 128
SLICE = 500
MOST_WINDOWS = 16  # of a text; of a longer one so many are read, spread evenly over it
HEAD_SHARE = 0.25  # of the tokens that head+tail reads of a text that is too long


@dataclass(frozen=True)
class Encoded:
    """Inputs as token rows: one for each, or several overlapping windows of a long one, side by side."""

    rows: Rows
    owner: Array  # the input that each row belongs to, ascending
    marks: Array  # what each token stands for in its input, -1 if for nothing; empty where whole texts count

    def rows_of(self, inputs: Array) -> Array:
        """The numbers of the rows of some inputs, in their order."""
        starts, counts = self._bounds(inputs)
        ends = np.cumsum(counts)
        chosen: Array = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
        return chosen

    def take(self, inputs: Array) -> Encoded:
        """Some of the inputs, numbered anew."""
        chosen, counts = self.rows_of(inputs), self._bounds(inputs)[1]
        marks = self.marks[self.rows.tokens(chosen)] if len(self.marks) else self.marks
        return Encoded(self.rows.take(chosen), np.repeat(np.arange(len(counts)), counts), marks)

    def _bounds(self, inputs: Array) -> tuple[Array, Array]:
        starts = np.searchsorted(self.owner, inputs, "left")
        return starts, np.searchsorted(self.owner, inputs, "right") - starts


@dataclass(frozen=True)
class _Tokens:
    """A text's tokens, of which some at the beginning and the end are special."""

    ids: list[int]
    type_ids: list[int]
    before: int
    behind: int

    @classmethod
    def of(cls, encoding: Any) -> _Tokens:
        """The tokens of an encoding."""
        special = np.array(encoding.special_tokens_mask, bool)
        inside = np.flatnonzero(~special)
        if not len(inside):
            return cls(encoding.ids, encoding.type_ids, len(special), 0)
        return cls(encoding.ids, encoding.type_ids, int(inside[0]), int(len(special) - 1 - inside[-1]))

    def ends(self, length: int) -> _Tokens:
        """So many tokens: the special ones, HEAD_SHARE of the others from the beginning, the rest from the end."""
        room = length - self.before - self.behind
        head = round(HEAD_SHARE * room)
        first, last = self.before + head, len(self.ids) - self.behind - (room - head)
        ids = self.ids[:first] + self.ids[last:]
        return replace(self, ids=ids, type_ids=self.type_ids[:first] + self.type_ids[last:])


class Encoder:
    """A base's tokenizer at one maximum length; long inputs that must be read whole become overlapping windows."""

    def __init__(
        self, base: Base, max_length: int | None = None, stride: int | None = None, default: int = DEFAULT_LENGTH
    ) -> None:
        self._base = base
        self._rules = json.loads(base.tokenizer.backend_tokenizer.to_str())
        self._tokenizer = self._copy()
        self.cut_at(min(default, base.max_length) if max_length is None else max_length, stride)
        self._filler = int(base.tokenizer.pad_token_id)  # an empty text under a tokenizer without special tokens
        self._unknown = base.tokenizer.unk_token

    def cut_at(self, max_length: int, stride: int | None = None, long: str = HEAD_OF_TEXT) -> None:
        """Read with another maximum length, other overlaps of windows, other parts of long texts, from now on."""
        if not 3 <= max_length <= self._base.max_length:
            raise UsageError(f"--max-length {max_length}: {self._base.name} takes 3 to {self._base.max_length} tokens")
        self.max_length, self.stride = max_length, max_length // 3 if stride is None else stride
        if not 0 <= self.stride <= max_length // 2:
            raise UsageError(f"--stride {stride}: windows of {max_length} tokens can share 0 to half of them")
        self.long = long
        if long == "head+tail":
            self._tokenizer.no_truncation()
            return
        room = max_length - self._tokenizer.num_special_tokens_to_add(False)
        self._tokenizer.enable_truncation(max_length, stride=min(self.stride, room // 2) if long == "windows" else 0)

    def _copy(self) -> Any:
        # A copy, because padding and truncation are set on the object and the base's own must not change.
        tokenizer: Any = Tokenizer.from_str(json.dumps(self._rules))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Rows:
        """Encode all texts, or text pairs; of those longer than the maximum length what `long` says."""
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        read = {"head": self._slice, "head+tail": self._ends, "windows": self._text_windows}[self.long]
        # In slices: an encoding is many times larger than its ids, and a signal waits for the call to return.
        parts = [read(inputs[i : i + SLICE]) for i in range(0, len(inputs), SLICE)]
        return Rows.join(parts)

    def _slice(self, inputs: Sequence[Any]) -> Rows:
        encodings = self._tokenizer.encode_batch_fast(inputs)
        return self._rows(encodings, sum(1 for encoding in encodings if encoding.overflowing))

    def _ends(self, inputs: Sequence[Any]) -> Rows:
        """The first and the last tokens of texts that are too long."""
        encodings = self._tokenizer.encode_batch_fast(inputs)
        found = [_Tokens.of(encoding) for encoding in encodings]
        long = [len(tokens.ids) > self.max_length for tokens in found]
        cut = [tokens.ends(self.max_length) if too else tokens for tokens, too in zip(found, long, strict=True)]
        return self._rows(cut, sum(long))

    def _text_windows(self, inputs: Sequence[Any]) -> Rows:
        """Texts in windows, end to end."""
        windows: list[Any] = []
        counts: list[int] = []
        thinned = 0
        for encoding in self._tokenizer.encode_batch_fast(inputs):
            every = [encoding, *encoding.overflowing]
            chosen = np.unique(np.linspace(0, len(every) - 1, min(len(every), MOST_WINDOWS)).round().astype(int))
            windows += [every[number] for number in chosen]
            counts.append(len(chosen))
            thinned += len(chosen) < len(every)
        rows = self._rows(windows, thinned)
        starts = rows.starts[np.concatenate([[0], np.cumsum(counts)])]
        return rows if len(starts) == len(rows.starts) else replace(rows, starts=starts, windows=rows.starts)

    def _rows(self, encodings: Sequence[Any], cut: int = 0) -> Rows:
        ids = [encoding.ids or [self._filler] for encoding in encodings]
        types = [encoding.type_ids or [0] for encoding in encodings]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)])
        flat_ids, flat_types = (np.fromiter(chain.from_iterable(rows), np.int64, starts[-1]) for rows in (ids, types))
        return Rows(flat_ids, flat_types, starts, cut)

    def encode(self, form: str, examples: Examples) -> Encoded:
        """Texts as the task's form asks: cut "texts", "words" each with its first piece, or "windows" on contexts."""
        if form == "texts":
            rows = self(examples.texts, examples.pairs)
            return Encoded(rows, np.arange(len(rows)), np.zeros((0, 0), np.int64))
        read = self._words if form == "words" else self._windows
        parts = []
        for i in range(0, len(examples), SLICE):
            parts.append(read(examples.take(range(i, min(i + SLICE, len(examples)))), i))
        return _join(parts)

    # ---- words: every word is one piece or more, and its first piece stands for it

    @cached_property
    def _word_tokenizer(self) -> Any:
        tokenizer = self._copy()
        pre = self._rules.get("pre_tokenizer") or {}
        steps = pre.get("pretokenizers", [pre])
        if any(step.get("type") == "ByteLevel" and not step.get("add_prefix_space") for step in steps):
            # A word in a list has no space before it, and would be read as the middle of a word.
            changed = [{**s, "add_prefix_space": True} if s.get("type") == "ByteLevel" else s for s in steps]
            rules = {**pre, "pretokenizers": changed} if "pretokenizers" in pre else changed[0]
            tokenizer = Tokenizer.from_str(json.dumps({**self._rules, "pre_tokenizer": rules}))
            tokenizer.no_padding()
            tokenizer.no_truncation()
        return tokenizer

    def _words(self, examples: Examples, before: int) -> Encoded:
        tokenizer = self._word_tokenizer
        room = self.max_length - tokenizer.num_special_tokens_to_add(False)
        tokenizer.enable_truncation(self.max_length, stride=min(self.stride, room // 2))
        step = room - min(self.stride, room // 2)
        encodings = tokenizer.encode_batch([list(words) for words in examples.texts], is_pretokenized=True)
        windows, owner, marks = [], [], []
        for number, (words, encoding) in enumerate(zip(examples.texts, encodings, strict=True)):
            parts = [encoding, *encoding.overflowing]
            if len({word for part in parts for word in part.word_ids} - {None}) < len(words):
                parts = self._filled(words, parts)
            windows += parts
            owner += [before + number] * len(parts)
            marks += _first_pieces([part.word_ids or [None] for part in parts], step)
        flat = np.concatenate([np.zeros(0, np.int64), *marks])[:, None]
        return Encoded(self._rows(windows), np.array(owner, np.int64), flat)

    def _filled(self, words: Sequence[str], parts: Sequence[Any]) -> list[Any]:
        """The same sentence, the unknown token standing for words of which the tokenizer leaves nothing."""
        known = {word for part in parts for word in part.word_ids}
        given = [word if number in known else self._unknown for number, word in enumerate(words)]
        encoding = None if self._unknown is None else self._word_tokenizer.encode(given, is_pretokenized=True)
        whole = [] if encoding is None else [encoding, *encoding.overflowing]
        if len({word for part in whole for word in part.word_ids} - {None}) < len(words):
            lost = next(word for number, word in enumerate(words) if number not in known)
            raise DataError(f"the base's tokenizer makes nothing of the word {lost!r}; replace it")
        return whole

    # ---- windows: a question with a part of its context that fits

    @cached_property
    def _whole_tokenizer(self) -> Any:
        return self._copy()

    @cached_property
    def _pair_tokenizer(self) -> Any:
        return self._copy()

    def _windows(self, examples: Examples, before: int) -> Encoded:
        room = self.max_length - self._tokenizer.num_special_tokens_to_add(True) - self.stride
        if room < 2:
            raise UsageError(f"--max-length {self.max_length}: too short for a question and a part of its context")
        asked = self._question(examples.texts, room // 2)
        self._pair_tokenizer.enable_truncation(self.max_length, stride=self.stride, strategy="only_second")
        encodings = self._pair_tokenizer.encode_batch(list(zip(asked, examples.pairs or [], strict=True)))
        windows = [[encoding, *encoding.overflowing] for encoding in encodings]
        flat = list(chain.from_iterable(windows))
        marks = np.concatenate([np.zeros((0, 2), np.int64), *(_offsets(window) for window in flat)])
        counts = [len(own) for own in windows]
        owner = np.repeat(np.arange(before, before + len(counts)), counts)
        shortened = sum(a != b for a, b in zip(asked, examples.texts, strict=True))
        return Encoded(self._rows(flat, shortened), owner, marks)

    def _question(self, questions: Sequence[str], room: int) -> list[str]:
        """The questions, each cut to so many tokens."""
        encodings = self._whole_tokenizer.encode_batch(list(questions), add_special_tokens=False)
        return [
            text if len(encoding.ids) <= room else text[: encoding.offsets[room - 1][1]]
            for text, encoding in zip(questions, encodings, strict=True)
        ]


def _join(parts: Sequence[Encoded]) -> Encoded:
    if not parts:
        return Encoded(Rows.join([]), np.zeros(0, np.int64), np.zeros((0, 1), np.int64))
    rows = Rows.join([part.rows for part in parts])
    owner = np.concatenate([part.owner for part in parts])
    marks = np.concatenate([part.marks for part in parts])
    return Encoded(rows, owner, marks)


def _first_pieces(windows: Sequence[Sequence[int | None]], step: int) -> list[Array]:
    """For each window the word that each token is the first piece of, or -1; a word counts where it stands furthest
    from an edge."""
    marks = [np.full(len(window), -1, np.int64) for window in windows]
    best: dict[int, tuple[int, int, int]] = {}  # word -> distance from the nearest edge, window, place
    seen = -1  # the last piece, counted through the whole text, that an earlier window held
    previous: int | None = None
    firsts: dict[int, int] = {}  # first piece -> word
    for number, window in enumerate(windows):
        inside = [place for place, word in enumerate(window) if word is not None]
        for rank, place in enumerate(inside):
            piece = number * step + rank
            if piece > seen:
                if window[place] != previous:
                    firsts[piece] = window[place] or 0
                seen, previous = piece, window[place]
            if piece in firsts:
                distance = min(rank, len(inside) - 1 - rank) if len(windows) > 1 else 0
                found = best.get(firsts[piece])
                if found is None or distance > found[0]:
                    best[firsts[piece]] = (distance, number, place)
    for word, (_, number, place) in best.items():
        marks[number][place] = word
    return marks


def _offsets(window: Any) -> Array:
    """Where each token lies in the context, in characters; -1 for tokens of the question and special ones."""
    places = np.array(window.offsets or [(0, 0)], np.int64).reshape(-1, 2)
    inside = np.array([sequence == 1 for sequence in window.sequence_ids or [None]])
    return np.where(inside[:, None], places, -1)
