"""Texts -> token rows without padding: what the bank takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .base import Base
from .errors import UsageError
from .rows import Rows

DEFAULT_LENGTH = 128


class Encoder:
    """A base's tokenizer at one maximum length."""

    def __init__(self, base: Base, max_length: int | None = None) -> None:
        if max_length is not None and not 3 <= max_length <= base.max_length:
            raise UsageError(f"--max-length {max_length}: {base.name} takes 3 to {base.max_length} tokens")
        self.max_length = max_length or min(DEFAULT_LENGTH, base.max_length)
        # A copy, because padding and truncation are set on the object and the base's own must not change.
        self._tokenizer: Any = Tokenizer.from_str(base.tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_length)

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Rows:
        """Encode all texts, or text pairs, cutting each to the maximum length."""
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        encodings = self._tokenizer.encode_batch_fast(inputs)
        lengths = [len(encoding.ids) for encoding in encodings]
        ids = np.fromiter((i for encoding in encodings for i in encoding.ids), np.int64, sum(lengths))
        types = np.fromiter((i for encoding in encodings for i in encoding.type_ids), np.int64, sum(lengths))
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return Rows(ids, types, starts, sum(1 for encoding in encodings if encoding.overflowing))
