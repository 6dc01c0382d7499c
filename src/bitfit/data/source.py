"""Sources of rows: a file, or rows in memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .storage import url_of

StrPath = str | os.PathLike[str]


@dataclass
class DataFile:
    """A file of rows. Without an encoding it is UTF-8, unless its bytes show another."""

    path: Path
    encoding: str | None = None
    tolerant: bool = False  # whether a record that cannot be read becomes a Broken row instead of an error
    shown: str | None = None  # what messages call it, if not its path
    recognised: str | None = field(
        default=None, compare=False
    )  # the encoding, if its bytes showed that it is not UTF-8

    def __str__(self) -> str:
        return self.shown or str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.shown or self.path.name

    @property
    def notes(self) -> list[str]:
        """What was noticed while the file was read."""
        if self.recognised is None:
            return []
        return [f"{self.name} is not UTF-8; it was read as {self.recognised}. If that is wrong, pass --encoding."]


@dataclass(frozen=True, eq=False)
class Records:
    """Rows in memory, one mapping per row."""

    rows: Sequence[Mapping[str, object]]
    name: str = "the data"
    index: Sequence[object] | None = None  # of a frame that has one

    def index_of(self, line: int) -> object:
        """What its owner calls a row, whose line counts from 1: the frame's index, else the position from 0."""
        return line - 1 if self.index is None else self.index[line - 1]

    def __str__(self) -> str:
        return self.name

    @property
    def notes(self) -> list[str]:
        """Nothing: rows in memory have no encoding."""
        return []


RowSource = DataFile | Records


def source_of(path_or_source: StrPath | RowSource) -> RowSource:
    """A path as a data file; a source as it is."""
    if isinstance(path_or_source, DataFile | Records):
        return path_or_source
    return DataFile(Path(path_or_source))


def plain_name(file: Path) -> Path:
    """A file's name without .gz, in lower case."""
    return Path(file.name.lower().removesuffix(".gz"))


def extension(source: Path | RowSource) -> str:
    """The extension that names the format, without .gz; empty for rows in memory."""
    if isinstance(source, Records):
        return ""
    return plain_name(source if isinstance(source, Path) else source.path).suffix


def is_table(path: str) -> bool:
    """Whether a path names several files: a folder, a URL, or a pattern such as rows/*.parquet."""
    return url_of(path) is not None or Path(path).is_dir() or (glob.has_magic(path) and not Path(path).exists())
