"""Tokenisation: texts become rows of tokens without padding, as the bank takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
SLICE = 500  # texts tokenised in one call
MOST_WINDOWS = 16  # read of one text; those of a longer text are spaced evenly over it
HEAD_SHARE = 0.25  # the share of tokens that head+tail takes from the beginning of a text that is too long


@dataclass(frozen=True)
class Encoded:
    """Inputs as token rows: one row per input, or several overlapping windows of a long input in consecutive rows."""

    rows: Rows
    owner: Array  # the input that each row belongs to, ascending
    # Per token: in tagging the word whose first piece it is, in answering its start and end in the context; -1 for
    # other tokens. Empty for tasks with one output per text.
    marks: Array

    def rows_of(self, inputs: Array) -> Array:
        """The row numbers of some inputs, in the order of the inputs."""
        starts, counts = self._bounds(inputs)
        ends = np.cumsum(counts)
        chosen: Array = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
        return chosen

    def take(self, inputs: Array) -> Encoded:
        """Some of the inputs, renumbered from 0."""
        chosen = self.rows_of(inputs)
        _, counts = self._bounds(inputs)
        owner = np.repeat(np.arange(len(counts)), counts)
        marks = self.marks[self.rows.tokens(chosen)] if len(self.marks) else self.marks
        return Encoded(self.rows.take(chosen), owner, marks)

    def _bounds(self, inputs: Array) -> tuple[Array, Array]:
        """The first row and the number of rows of each input."""
        starts = np.searchsorted(self.owner, inputs, "left")
        ends = np.searchsorted(self.owner, inputs, "right")
        return starts, ends - starts


@dataclass(frozen=True)
class _Tokens:
    """A text's tokens, with special tokens at the beginning and at the end."""

    ids: list[int]
    type_ids: list[int]
    before: int  # special tokens at the beginning
    behind: int  # special tokens at the end

    @classmethod
    def of(cls, encoding: Any) -> _Tokens:
        """The tokens of an encoding."""
        special = np.array(encoding.special_tokens_mask, bool)
        inside = np.flatnonzero(~special)
        if not len(inside):
            return cls(encoding.ids, encoding.type_ids, len(special), 0)
        return cls(encoding.ids, encoding.type_ids, int(inside[0]), int(len(special) - 1 - inside[-1]))

    def ends(self, length: int) -> _Tokens:
        """Cut to this number of tokens: the special ones, and the first and last of the others, by HEAD_SHARE."""
        room = length - self.before - self.behind
        head = round(HEAD_SHARE * room)
        first, last = self.before + head, len(self.ids) - self.behind - (room - head)
        ids = self.ids[:first] + self.ids[last:]
        return replace(self, ids=ids, type_ids=self.type_ids[:first] + self.type_ids[last:])


class Encoder:
    """A base's tokenizer with a maximum length. Long inputs are cut, or split into overlapping windows."""

    def __init__(
        self, base: Base, max_length: int | None = None, stride: int | None = None, default: int = DEFAULT_LENGTH
    ) -> None:
        self._base = base
        self._rules = json.loads(base.tokenizer.backend_tokenizer.to_str())
        self._tokenizer = self._copy()
        if max_length is None:
            max_length = min(default, base.max_length)
        self.cut_at(max_length, stride)
        # The only token of an empty text, if the tokenizer adds no special tokens.
        self._filler = int(base.tokenizer.pad_token_id)
        self._unknown = base.tokenizer.unk_token

    def cut_at(self, max_length: int, stride: int | None = None, long: str = HEAD_OF_TEXT, apart: bool = False) -> None:
        """Change the maximum length, the tokens that windows share (a third of it), and what is read of long texts.

        With `apart` the texts of a pair are two windows of a row, each with its own maximum length.
        """
        if not 3 <= max_length <= self._base.max_length:
            raise UsageError(
                f"--max-length {max_length}: must be 3 to {self._base.max_length} tokens for {self._base.name}"
            )
        self.max_length = max_length
        self.stride = max_length // 3 if stride is None else stride
        if not 0 <= self.stride <= max_length // 2:
            raise UsageError(
                f"--stride {stride}: windows of {max_length} tokens can share 0 to {max_length // 2} tokens"
            )
        self.long = long
        self.apart = apart
        if long == "head+tail":
            self._tokenizer.no_truncation()
            return
        room = max_length - self._tokenizer.num_special_tokens_to_add(False)
        self._tokenizer.enable_truncation(max_length, stride=min(self.stride, room // 2) if long == "windows" else 0)

    def _copy(self) -> Any:
        """A copy of the base's tokenizer, whose padding and truncation can be set without changing the base's."""
        return _tokenizer(self._rules)

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Rows:
        """Encode texts or pairs of texts; `self.long` says what is read of those that are too long."""
        read = {"head": self._slice, "head+tail": self._ends, "windows": self._text_windows}[self.long]

        def slices() -> Iterator[Rows]:
            # An encoding is many times larger than its ids, and a signal waits for the call to return.
            for start in range(0, len(texts), SLICE):
                inputs: Sequence[Any] = texts[start : start + SLICE]
                if pairs is not None:
                    inputs = list(zip(inputs, pairs[start : start + SLICE], strict=True))
                yield self._apart(inputs) if self.apart else read(inputs)

        return Rows.join(slices())

    def _slice(self, inputs: Sequence[Any]) -> Rows:
        encodings = self._tokenizer.encode_batch_fast(inputs)
        return self._rows(encodings, sum(1 for encoding in encodings if encoding.overflowing))

    def _apart(self, pairs: Sequence[tuple[str, str]]) -> Rows:
        """Rows of two windows, one for each text of a pair."""
        rows = self._slice(list(chain.from_iterable(pairs)))
        return replace(rows, starts=rows.starts[::2], windows=rows.starts)

    def _ends(self, inputs: Sequence[Any]) -> Rows:
        """The first and the last tokens of texts that are too long."""
        rows = []
        cut = 0
        for encoding in self._tokenizer.encode_batch_fast(inputs):
            tokens = _Tokens.of(encoding)
            if len(tokens.ids) > self.max_length:
                tokens = tokens.ends(self.max_length)
                cut += 1
            rows.append(tokens)
        return self._rows(rows, cut)

    def _text_windows(self, inputs: Sequence[Any]) -> Rows:
        """Rows that are all windows of a text, end to end; of very long texts, evenly spaced ones."""
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
        flat_ids = np.fromiter(chain.from_iterable(ids), np.int64, starts[-1])
        flat_types = np.fromiter(chain.from_iterable(types), np.int64, starts[-1])
        return Rows(flat_ids, flat_types, starts, cut)

    def encode(self, form: str, examples: Examples) -> Encoded:
        """Encode the examples in the form of their task.

        "texts" are cut to the maximum length. In "words" the first piece of every word is marked. "windows" are
        questions, each with as much of its context as fits.
        """
        if form == "texts":
            rows = self(examples.texts, examples.pairs)
            return Encoded(rows, np.arange(len(rows)), np.zeros((0, 0), np.int64))
        encode_slice = self._words if form == "words" else self._windows
        slices = []
        for start in range(0, len(examples), SLICE):
            stop = min(start + SLICE, len(examples))
            slices.append(encode_slice(examples.take(range(start, stop)), start))
        return _join(slices)

    # ---- words: every word is one piece or more, and its first piece represents it

    @cached_property
    def _word_tokenizer(self) -> Any:
        """A tokenizer for lists of words. A byte-level tokenizer would read a word without a space before it as the
        middle of a word, so it is set to add the space."""
        pre = self._rules.get("pre_tokenizer")
        if not pre:
            return self._copy()
        steps = [_with_prefix_space(step) for step in pre.get("pretokenizers", [pre])]
        changed = {**pre, "pretokenizers": steps} if "pretokenizers" in pre else steps[0]
        return _tokenizer({**self._rules, "pre_tokenizer": changed})

    def _words(self, examples: Examples, before: int) -> Encoded:
        """Encode sentences of words. `before`: the number of examples in earlier slices."""
        tokenizer = self._word_tokenizer
        room = self.max_length - tokenizer.num_special_tokens_to_add(False)
        shared = min(self.stride, room // 2)
        tokenizer.enable_truncation(self.max_length, stride=shared)
        encodings = tokenizer.encode_batch([list(words) for words in examples.texts], is_pretokenized=True)
        rows: list[Any] = []
        owner: list[int] = []
        marks: list[Array] = []
        for number, (words, encoding) in enumerate(zip(examples.texts, encodings, strict=True)):
            windows = [encoding, *encoding.overflowing]
            if len(_words_in(windows)) < len(words):
                windows = self._with_unknown(words, _words_in(windows))
            rows += windows
            owner += [before + number] * len(windows)
            marks += _first_pieces([window.word_ids or [None] for window in windows], step=room - shared)
        flat = np.concatenate([np.zeros(0, np.int64), *marks])[:, None]
        return Encoded(self._rows(rows), np.array(owner, np.int64), flat)

    def _with_unknown(self, words: Sequence[str], known: set[int]) -> list[Any]:
        """The windows of a sentence in which the words that the tokenizer drops become the unknown token."""
        windows: list[Any] = []
        if self._unknown is not None:
            replaced = [word if number in known else self._unknown for number, word in enumerate(words)]
            encoding = self._word_tokenizer.encode(replaced, is_pretokenized=True)
            windows = [encoding, *encoding.overflowing]
        if len(_words_in(windows)) < len(words):
            dropped = next(word for number, word in enumerate(words) if number not in known)
            raise DataError(f"the base's tokenizer has no token for the word {dropped!r}; replace it")
        return windows

    # ---- windows: a question with as much of its context as fits

    @cached_property
    def _question_tokenizer(self) -> Any:
        return self._copy()

    @cached_property
    def _pair_tokenizer(self) -> Any:
        return self._copy()

    def _windows(self, examples: Examples, before: int) -> Encoded:
        room = self.max_length - self._tokenizer.num_special_tokens_to_add(True) - self.stride
        if room < 2:
            raise UsageError(f"--max-length {self.max_length}: too short for a question with some of its context")
        questions = self._cut_questions(examples.texts, room // 2)
        self._pair_tokenizer.enable_truncation(self.max_length, stride=self.stride, strategy="only_second")
        encodings = self._pair_tokenizer.encode_batch(list(zip(questions, examples.pairs or [], strict=True)))
        windows: list[Any] = []
        owner: list[int] = []
        for number, encoding in enumerate(encodings):
            windows += [encoding, *encoding.overflowing]
            owner += [before + number] * (1 + len(encoding.overflowing))
        marks = np.concatenate([np.zeros((0, 2), np.int64), *(_offsets(window) for window in windows)])
        cut = sum(a != b for a, b in zip(questions, examples.texts, strict=True))
        return Encoded(self._rows(windows, cut), np.array(owner, np.int64), marks)

    def _cut_questions(self, questions: Sequence[str], most: int) -> list[str]:
        """The questions, each cut to at most this number of tokens."""
        encodings = self._question_tokenizer.encode_batch(list(questions), add_special_tokens=False)
        cut = []
        for text, encoding in zip(questions, encodings, strict=True):
            if len(encoding.ids) > most:
                _, end = encoding.offsets[most - 1]
                text = text[:end]
            cut.append(text)
        return cut


def _tokenizer(rules: dict[str, Any]) -> Any:
    """A tokenizer without padding and truncation, from the rules in a tokenizer.json."""
    tokenizer: Any = Tokenizer.from_str(json.dumps(rules))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _with_prefix_space(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, "add_prefix_space": True} if step.get("type") == "ByteLevel" else step


def _words_in(windows: Sequence[Any]) -> set[int]:
    """The numbers of the words that have a token in these windows."""
    return set(chain.from_iterable(window.word_ids for window in windows)) - {None}


def _join(slices: Sequence[Encoded]) -> Encoded:
    if not slices:
        return Encoded(Rows.join([]), np.zeros(0, np.int64), np.zeros((0, 1), np.int64))
    rows = Rows.join([encoded.rows for encoded in slices])
    owner = np.concatenate([encoded.owner for encoded in slices])
    marks = np.concatenate([encoded.marks for encoded in slices])
    return Encoded(rows, owner, marks)


def _first_pieces(windows: Sequence[Sequence[int | None]], step: int) -> list[Array]:
    """For each token of each window, the word whose first piece it is, or -1.

    `windows` hold the word of each token, None for special tokens; each begins `step` pieces after the one before. A
    word in several windows is marked once, where it is furthest from an edge of the window.
    """
    first_pieces = _word_starts(windows, step)
    best: dict[int, tuple[int, int, int]] = {}  # word -> distance from the nearest edge, window, position
    for number, window in enumerate(windows):
        positions = [position for position, word in enumerate(window) if word is not None]
        for rank, position in enumerate(positions):
            word = first_pieces.get(number * step + rank)
            if word is None:
                continue
            distance = min(rank, len(positions) - 1 - rank)
            if word not in best or distance > best[word][0]:
                best[word] = (distance, number, position)
    marks = [np.full(len(window), -1, np.int64) for window in windows]
    for word, (_, number, position) in best.items():
        marks[number][position] = word
    return marks


def _word_starts(windows: Sequence[Sequence[int | None]], step: int) -> dict[int, int]:
    """Piece -> word, for the first piece of every word. Pieces are counted through the text, not in each window."""
    starts: dict[int, int] = {}
    last_piece = -1
    last_word: int | None = None
    for number, window in enumerate(windows):
        words = [word for word in window if word is not None]
        for rank, word in enumerate(words):
            piece = number * step + rank
            if piece <= last_piece:  # an earlier window holds it
                continue
            if word != last_word:
                starts[piece] = word
            last_piece, last_word = piece, word
    return starts


def _offsets(window: Any) -> Array:
    """The start and end of each token in the context, in characters; -1 for the question and special tokens."""
    offsets = np.array(window.offsets or [(0, 0)], np.int64).reshape(-1, 2)
    in_context = np.array([sequence == 1 for sequence in window.sequence_ids or [None]])
    return np.where(in_context[:, None], offsets, -1)
