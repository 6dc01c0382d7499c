"""One reader per kind of task: it finds the columns of a file and turns its records into examples.

A kind is a reader here and a class in bitfit.tasks. A package that adds a kind registers both under the same name, as
entry points of "bitfit.readers" and "bitfit.kinds".
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from ...errors import UsageError
from ...plugins import Registry
from .reader import Reader as Reader

BUILT_IN = {
    "classification": "bitfit.data.readers.texts:Classes",
    "regression": "bitfit.data.readers.texts:Numbers",
    "multilabel": "bitfit.data.readers.multilabel:LabelSets",
    "tagging": "bitfit.data.readers.tagging:Sentences",
    "answering": "bitfit.data.readers.answering:Questions",
}
READERS: Registry[type[Reader]] = Registry("bitfit.readers", BUILT_IN)


def reader_of(kind: str) -> Reader:
    """The reader of a kind of task; UsageError for an unknown name."""
    return READERS.member(kind, "kind of task")()


def all_readers() -> Iterator[Reader]:
    """The readers of all kinds; a reader that cannot be imported is left out with a warning."""
    for kind in READERS:
        try:
            yield reader_of(kind)
        except UsageError as error:
            warnings.warn(str(error), stacklevel=2)
