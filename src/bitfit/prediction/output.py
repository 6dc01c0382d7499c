"""Output files of predictions, written as a stream: CSV, TSV, JSON lines or Parquet by the file's extension."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from ..data.columns import IDS, Sample, normalised
from ..data.source import DataFile
from ..errors import BitfitError, UsageError
from ..files import check_target, require_folder, writing

STANDARD = Path("-")  # standard input or output
CHUNK = 1024  # rows of a Parquet row group
FIRST_BYTES = {b"PAR1": ".parquet", b"{": ".jsonl", b"[": ".json"}  # of standard input; anything else is CSV

Row = Mapping[str, Any]


def check_output(path: Path, *inputs: Path) -> None:
    """Refuse a file of unknown format, in a folder that does not exist, or that is an input."""
    if path == STANDARD:
        return
    if _is_regular(path) and path.suffix.lower() not in WRITERS:
        endings = ", ".join(WRITERS)
        raise UsageError(f"{path}: the format is unknown; end the name in {endings}, or write - for standard output")
    require_folder(path)
    check_target(path, *inputs)


def write_rows(path: Path, rows: Iterable[Row], force: bool = False, ending: str = ".csv") -> int:
    """Write rows atomically and return their number; standard output is written row by row.

    A file with other columns is not replaced without `force`. `ending` is the format if the path has no extension.
    """
    source = iter(rows)
    first = next(source, None)
    if first is None:
        source, first = iter(()), {}
    ending = path.suffix.lower() if path != STANDARD and _is_regular(path) else ending
    if not force:
        columns = list(first) if ending == ".jsonl" else list(flat_row(first))
        require_earlier_output(path, columns)
    counted = _Counter(chain([first] if first else [], source))
    with _opened(path) as file:
        WRITERS[ending](file, counted)
    return counted.count


def beside(values: Row, answer: Row, echo: Sequence[str] = ()) -> dict[str, Any]:
    """A row of input and answer: ids first, then the other columns, then the answer.

    A key of the answer that is also a column becomes predicted_NAME, unless it is in `echo`: those keys repeat the
    input and are left out.
    """
    ids = {name: value for name, value in values.items() if normalised(name) in IDS}
    row = {**ids, **values}
    for name, value in answer.items():
        if name not in values:
            row[name] = _rounded(value)
        elif name not in echo:
            row[f"predicted_{name}"] = _rounded(value)
    return row


def _rounded(value: Any) -> Any:
    """Probabilities with the six digits that they have in single precision."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value


def flat_columns(answers: Iterable[Row]) -> dict[str, list[Any]]:
    """Answers as columns, one column per label for scores."""
    columns: dict[str, list[Any]] = {}
    for answer in answers:
        for name, value in flat_row(answer).items():
            columns.setdefault(name, []).append(value)
    return columns


@contextmanager
def standard_input(encoding: str | None = None) -> Iterator[DataFile]:
    """Standard input as a temporary file; the format is recognised by the first bytes."""
    import tempfile

    data = sys.stdin.buffer.read()
    start = data[:64].lstrip()
    ending = next((ending for first, ending in FIRST_BYTES.items() if start.startswith(first)), ".csv")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"standard input{ending}"
        path.write_bytes(data)
        yield DataFile(path, encoding, shown="standard input")


class _Counter:
    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            self.count += 1
            yield row


def _is_regular(path: Path) -> bool:
    return path.is_file() or not path.exists()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path != STANDARD:
        with writing(path) as file:
            yield file
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def require_earlier_output(path: Path, columns: Sequence[str], more: bool = False) -> None:
    """Refuse to replace a file whose columns are not those that would be written: it is not an earlier output.

    With `more` it may have further columns.
    """
    if path == STANDARD or not path.is_file() or path.stat().st_size == 0:
        return
    try:
        existing = Sample.of(path).names
    except BitfitError:
        existing = []
    expected = set(columns) <= set(existing) if more else existing == list(columns)
    if not expected:
        raise UsageError(f"{path}: exists and is not an earlier output of this command; pass --force to replace it")


def flat_row(row: Row) -> dict[str, Any]:
    """A row as cells by column; a table of scores becomes one cell per label."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            prefix = "p" if name == "scores" else name
            cells |= {f"{prefix}({label})": score for label, score in value.items()}
        else:
            cells[name] = value
    return cells


def _write_csv(file: BinaryIO, rows: Iterable[Row], delimiter: str = ",") -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, delimiter=delimiter)
    header: list[str] = []
    for row in rows:
        cells = flat_row(row)
        if not header:
            header = list(cells)
            writer.writerow(header)
        writer.writerow(_cell(cells.get(name)) for name in header)
    text.detach()


def _write_tsv(file: BinaryIO, rows: Iterable[Row]) -> None:
    _write_csv(file, rows, "\t")


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple) else value


def _write_jsonl(file: BinaryIO, rows: Iterable[Row]) -> None:
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")


def _write_parquet(file: BinaryIO, rows: Iterable[Row]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError('writing Parquet needs pyarrow: pip install "bitfit[parquet]"') from error
    source = iter(rows)
    writer = None
    while chunk := [flat_row(row) for row in islice(source, CHUNK)]:
        table = pyarrow.Table.from_pylist(chunk, schema=None if writer is None else writer.schema)
        writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


WRITERS: dict[str, Callable[[BinaryIO, Iterable[Row]], None]] = {
    ".csv": _write_csv,
    ".tsv": _write_tsv,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
