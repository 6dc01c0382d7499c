"""Texts and numbers that are kept in files instead of memory, for data that is larger than memory.

While `kept_on_disk` is on, a reader of texts writes them to a file and the examples hold a sequence that reads them
from there. The system keeps as much of a file in memory as there is room for, and shares it among all processes.
"""

from __future__ import annotations

import hashlib
import mmap
import pickle
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np

from ..arrays import Array

T = TypeVar("T")
POLL_SECONDS = 0.1
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def kept_on_disk(folder: Path | None) -> Iterator[None]:
    """Keep texts and tokens in files of a folder while the block runs; None keeps them in memory."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def new_file() -> Path | None:
    """A file for a new column; None: columns are kept in memory."""
    folder = _folder.get()
    return None if folder is None else folder / uuid.uuid4().hex


def text_column() -> list[str]:
    """An empty column of texts, in memory or on disk."""
    path = new_file()
    return [] if path is None else cast("list[str]", DiskTexts(path))  # it reads and appends as a list does


def number_column() -> list[int]:
    """An empty column of whole numbers: a list, or 8 bytes per number where data is kept on disk."""
    return [] if new_file() is None else cast("list[int]", array("q"))


class DiskTexts(Sequence[str]):
    """Texts in a file, end to end. `chosen` are the numbers of those that the sequence has; None: all."""

    def __init__(self, path: Path, ends: array[int] | None = None, chosen: Array | None = None) -> None:
        self._path = path
        self._ends = array("q", [0]) if ends is None else ends  # where each text ends; the first is a beginning
        self._chosen = chosen
        self._writer: Any = None
        self._bytes: Any = None

    def append(self, text: str) -> None:
        """Add a text; possible until the first one is read."""
        if self._writer is None:
            self._writer = self._path.open("wb")
        content = text.encode("utf-8", "surrogatepass")
        self._writer.write(content)
        self._ends.append(self._ends[-1] + len(content))

    def take(self, numbers: Iterable[int]) -> DiskTexts:
        """Some of the texts, in this order; they are not copied."""
        self._open()
        taken: Array = np.fromiter(numbers, np.int64)
        return DiskTexts(self._path, self._ends, taken if self._chosen is None else self._chosen[taken])

    def digests(self) -> Array:
        """16 bytes per text that are the same for equal texts."""
        found = np.empty((len(self), 2), np.uint64)
        for number in range(len(self)):
            digest = hashlib.blake2b(self._content(number), digest_size=16).digest()
            found[number] = np.frombuffer(digest, np.uint64)
        return found

    def __len__(self) -> int:
        return len(self._ends) - 1 if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._content(index).decode("utf-8", "surrogatepass")

    def __add__(self, other: Iterable[str]) -> list[str]:
        return [*self, *other]

    def _content(self, index: int) -> bytes:
        self._open()
        number = index if self._chosen is None else int(self._chosen[index])
        content: bytes = self._bytes[self._ends[number] : self._ends[number + 1]]
        return content

    def _open(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._bytes is None and self._ends[-1]:
            with self._path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        elif self._bytes is None:
            self._bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process of this machine reads the same file."""
        self._open()
        return DiskTexts, (self._path, self._ends, self._chosen)


class Numbers:
    """Whole numbers that are written to a file, or gathered in memory, and come back as one array."""

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._path = new_file()
        self._dtype = dtype
        self._parts: list[Array] = []
        self._file = None if self._path is None else self._path.open("wb")

    def add(self, numbers: Array) -> None:
        """Add numbers at the end."""
        if self._file is None:
            self._parts.append(numbers)
        else:
            self._file.write(numbers.astype(self._dtype).tobytes())

    def array(self) -> Array:
        """All numbers; those in a file are mapped."""
        if self._file is None:
            return np.concatenate([np.zeros(0, np.int64), *self._parts])
        assert self._path is not None
        self._file.close()
        if not self._path.stat().st_size:
            return np.zeros(0, self._dtype)
        return np.memmap(self._path, self._dtype, "r")


def in_memory(numbers: Array) -> Array:
    """Some numbers of a column, as 8-byte integers of this process."""
    return np.asarray(numbers, np.int64)


class NodeRows:
    """The rows of a training, read and tokenised by one process of a machine for all of its processes."""

    def __init__(self, folder: Path, leader: bool) -> None:
        self.folder = folder
        self._leader = leader

    def get(self, name: str, make: Callable[[], T]) -> T:
        """What the leader makes. The others wait for it and map the same files."""
        path = self.folder / f"{name}.pickle"
        if self._leader:
            path.unlink(missing_ok=True)  # of a process that was killed
            with kept_on_disk(self.folder):
                made = make()
            with path.with_suffix(".part").open("wb") as file:
                _Pickler(file).dump(made)
            path.with_suffix(".part").rename(path)
        while not path.exists():  # a leader that fails ends all workers
            time.sleep(POLL_SECONDS)
        with path.open("rb") as file:
            found: T = pickle.load(file)
        return found


class _Pickler(pickle.Pickler):
    """Writes mapped arrays as the names of their files."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap) and value.nbytes == Path(str(value.filename)).stat().st_size:
            return np.memmap, (value.filename, value.dtype, "r", 0, value.shape)
        return NotImplemented
