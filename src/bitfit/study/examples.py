"""The result of each test row of a trial, stored compactly: bits where a metric counts hits, float16 where it does not.

A paired bootstrap over test rows needs them. A thousand rows take 170 characters as bits.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import DataError

Form = Literal["hits", "classes", "values", "ratio"]
FORMS: tuple[Form, ...] = ("hits", "classes", "values", "ratio")


@dataclass(frozen=True)
class Rows:
    """Two columns over the test rows, by `form`.

    hits: whether the row is right, and nothing. classes: true and predicted class. values: true and predicted number.
    ratio: what the row adds above and below the metric's fraction line.
    """

    form: Form
    columns: tuple[Any, Any]

    @classmethod
    def of(cls, form: str, first: Any, second: Any) -> Rows:
        """Rows of a form that is given by its name."""
        return cls(next(known for known in FORMS if known == form), (first, second))

    def __len__(self) -> int:
        return len(self.columns[0])

    def encode(self) -> str:
        """The rows as text: FORM ROWS DATA."""
        import numpy as np

        first, second = (np.asarray(column) for column in self.columns)
        if self.form == "hits":
            data = np.packbits(first.astype(bool)).tobytes()
        elif self.form == "classes":
            data = np.stack([first, second]).astype(np.min_scalar_type(int(max(first.max(), second.max())))).tobytes()
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
            kind = np.dtype(f"u{len(data) // (2 * rows)}") if known == "classes" else np.dtype(np.float16)
            table = np.frombuffer(data, kind).reshape(2, rows)
        except (ValueError, TypeError, StopIteration, ZeroDivisionError, zlib.error) as error:
            raise DataError("the stored results of the test rows cannot be read; remove the trial's file") from error
        wider = np.int64 if known == "classes" else np.float64
        return cls(known, (table[0].astype(wider), table[1].astype(wider)))
