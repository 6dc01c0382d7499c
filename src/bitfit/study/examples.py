"""The result of each test row of a trial, stored compactly: bits where a metric counts hits, float16 where it does not.

A paired bootstrap over test rows needs them. A thousand rows take 170 characters as bits.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import DataError

Form = Literal["hits", "classes", "values", "ratio"]
FORMS: tuple[Form, ...] = ("hits", "classes", "values", "ratio")
HITS = ("accuracy", "exact_match")  # metrics that are a mean of hits


@dataclass(frozen=True)
class Rows:
    """Two columns over the test rows, by `form`.

    hits: whether the row is right, and nothing. classes: true and predicted class. values: true and predicted number.
    ratio: what the row adds above and below the metric's fraction line.
    """

    form: Form
    columns: tuple[Any, Any]

    def __len__(self) -> int:
        return len(self.columns[0])

    def encode(self) -> str:
        """The rows as text: FORM ROWS DATA."""
        import numpy as np

        first, second = (np.asarray(column) for column in self.columns)
        if self.form == "hits":
            data = np.packbits(first.astype(bool)).tobytes()
        elif self.form == "classes":
            data = np.stack([first, second]).astype(np.uint8).tobytes()
        else:
            data = np.stack([first, second]).astype(np.float16).tobytes()
        return f"{self.form} {len(first)} {base64.b85encode(zlib.compress(data, 9)).decode()}"

    @classmethod
    def decode(cls, text: str) -> Rows:
        """The rows of a text that `encode` made."""
        import numpy as np

        try:
            form, count, packed = text.split(" ")
            rows, data = int(count), zlib.decompress(base64.b85decode(packed))
            known = next(name for name in FORMS if name == form)
            if known == "hits":
                hits = np.unpackbits(np.frombuffer(data, np.uint8), count=rows).astype(np.float32)
                return cls(known, (hits, np.zeros(rows, np.float32)))
            kind = np.uint8 if known == "classes" else np.float16
            table = np.frombuffer(data, kind).reshape(2, rows)
        except (ValueError, StopIteration, zlib.error) as error:
            raise DataError("the stored results of the test rows cannot be read; remove the trial's file") from error
        wider = np.int64 if known == "classes" else np.float64
        return cls(known, (table[0].astype(wider), table[1].astype(wider)))


def of_texts(metric: str, golds: Sequence[Any], predictions: Sequence[Any], numbers: bool) -> Rows:
    """Rows of a task with one class, or one number, for each text."""
    import numpy as np

    if numbers:
        return Rows("values", (np.asarray(golds, np.float64), np.asarray(predictions, np.float64)))
    true, predicted = np.asarray(golds, np.int64), np.asarray(predictions, np.int64)
    if metric in HITS or max(true.max(), predicted.max()) > 255:
        return Rows("hits", (true == predicted, np.zeros(len(true))))
    return Rows("classes", (true, predicted))
