"""Texts -> token rows without padding: what the bank takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .base import Base
from .errors import UsageError
from .rows import Rows

DEFAULT_LENGTH = 128
SLICE = 500


class Encoder:
    """A base's tokenizer at a maximum length."""

    def __init__(self, base: Base, max_length: int | None = None) -> None:
        self._base = base
        # A copy, because padding and truncation are set on the object and the base's own must not change.
        self._tokenizer: Any = Tokenizer.from_str(base.tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self.cut_at(min(DEFAULT_LENGTH, base.max_length) if max_length is None else max_length)
        self._filler = int(base.tokenizer.pad_token_id)  # an empty text under a tokenizer without special tokens

    def cut_at(self, max_length: int) -> None:
        """Cut texts to another maximum length from now on."""
        if not 3 <= max_length <= self._base.max_length:
            raise UsageError(f"--max-length {max_length}: {self._base.name} takes 3 to {self._base.max_length} tokens")
        self.max_length = max_length
        self._tokenizer.enable_truncation(max_length)

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Rows:
        """Encode all texts, or text pairs, cutting each to the maximum length."""
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        # In slices: an encoding is many times larger than its ids, and a signal waits for the call to return.
        parts = [self._slice(inputs[i : i + SLICE]) for i in range(0, len(inputs), SLICE)]
        return Rows.join(parts)

    def _slice(self, inputs: Sequence[Any]) -> Rows:
        encodings = self._tokenizer.encode_batch_fast(inputs)
        ids = [encoding.ids or [self._filler] for encoding in encodings]
        types = [encoding.type_ids or [0] for encoding in encodings]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)])
        flat_ids, flat_types = (np.fromiter(chain.from_iterable(rows), np.int64, starts[-1]) for rows in (ids, types))
        return Rows(flat_ids, flat_types, starts, sum(1 for encoding in encodings if encoding.overflowing))
