"""File formats: every known format becomes a stream of rows. No other module knows formats."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from .decoding import lines as _lines
from .decoding import opened, refuse_other_formats
from .source import DataFile, Records, RowSource, StrPath, extension, source_of

# A quote that is never closed would otherwise pull the rest of a file of any size into one cell.
CELL_LIMIT = 1 << 26
UNITS = {".parquet": "row", ".json": "record"}  # how errors count records, in formats without lines
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
JSON_ARRAY = ".json array"
CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


class Broken(dict[str, object]):
    """The empty values of a record that cannot be read, in files that are read tolerantly; `message` says why."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message


class Row(NamedTuple):
    """One record, and the 1-based line where it starts (in Parquet: its row number)."""

    line: int
    values: dict[str, object]


def rows(path_or_source: StrPath | RowSource) -> Iterator[Row]:
    """The records of a source one by one; those of a file in constant memory."""
    source = source_of(path_or_source)
    records = _memory_rows(source) if isinstance(source, Records) else READERS[format_of(source)](source)
    row = None
    for row in records:
        yield row
    if row is None:
        raise DataError(f"{source} has no rows.")


def _memory_rows(records: Records) -> Iterator[Row]:
    for number, values in enumerate(records.rows, 1):
        yield Row(number, dict(values))


def existing(path: Path) -> Path:
    """The path; DataError if it is not a file of a known format."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; pass a file.")
    if not path.exists():
        similar = _similar_file(path)
        raise DataError(f"{path} does not exist." + (f' Did you mean "{similar}"?' if similar else ""))
    ending = extension(path)
    if ending in SPREADSHEETS:
        raise DataError(f"{path} is a spreadsheet; save it as CSV (UTF-8) and use that file.")
    if ending not in ENDINGS:
        raise DataError(f"{path} has no known extension. Known: {', '.join(ENDINGS)}, each also with .gz.")
    return path


def format_of(source: RowSource) -> str:
    """The key of READERS that reads a source: its ending, or JSON_ARRAY; "" for rows in memory."""
    if isinstance(source, Records):
        return ""
    ending = extension(existing(source.path))
    if ending != ".json":
        return ending
    with opened(source) as stream:
        start = stream.peek(64)[:64].removeprefix(codecs.BOM_UTF8).lstrip()
    return JSON_ARRAY if start.startswith(b"[") else ending


def _similar_file(path: Path) -> str | None:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    return next(iter(difflib.get_close_matches(path.name, names, n=1)), None)


def fault(source: RowSource, line: int, what: str) -> DataError:
    """A DataError that names the source and the line (or row) in it."""
    unit = "row" if isinstance(source, Records) else UNITS.get(extension(source), "line")
    return DataError(f"{source}, {unit} {line}: {what}")


def _broken(error: DataError, path: DataFile, line: int) -> Row:
    """A row for a record that cannot be read, if the file is read tolerantly; else the error is raised."""
    if not path.tolerant:
        raise error
    return Row(line, Broken(_without_line(error)))


def _without_line(error: DataError) -> str:
    """The message of an error without the file and the line at its beginning."""
    return str(error).partition(": ")[2] or str(error)


def _csv_rows(path: DataFile) -> Iterator[Row]:
    lines = _lines(path)
    start, header_line = _header_line(path, lines)
    delimiter = _delimiter(path, header_line)
    texts = chain([header_line], (text for _, text in lines))
    records = _records(path, start, texts, delimiter)
    line, names = next(records)
    if isinstance(names, Row):
        raise fault(path, line, "the header cannot be read.")
    header = _unique(path, [name.strip() for name in names])
    for line, fields in records:
        if isinstance(fields, Row):
            yield fields
        elif len(fields) == len(header):
            yield Row(line, dict(zip(header, fields, strict=True)))
        elif fields and (len(fields) > 1 or fields[0].strip()):
            yield _broken(fault(path, line, _wrong_field_count(len(fields), header, delimiter)), path, line)


def _header_line(path: DataFile, lines: Iterator[tuple[int, str]]) -> tuple[int, str]:
    """The first line with text, and its number. Excel may write a line sep=; before the header, which is skipped."""
    for number, text in lines:
        if text.strip() and not re.fullmatch("sep=.", text.strip()):
            return number, text
    raise DataError(f"{path} is empty.")


def _delimiter(path: DataFile, header: str) -> str:
    if extension(path) == ".tsv":
        return "\t"
    return max(",;\t|", key=header.count)  # the comma if none occurs


def _records(path: DataFile, first: int, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str] | Row]]:
    csv.field_size_limit(max(CELL_LIMIT, csv.field_size_limit()))
    # Most TSV files are written without quoting: a quote is a character there, unless it encloses the cell.
    plain = delimiter == "\t"
    reader = csv.reader(lines, delimiter=delimiter, strict=True, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL)
    while True:
        start = first + reader.line_num
        try:
            fields = next(reader)
            yield start, [_unquoted(field) for field in fields] if plain else fields
        except StopIteration:
            return
        except csv.Error as error:
            yield start, _broken(fault(path, start, _quoting_problem(str(error))), path, start)


def _unquoted(field: str) -> str:
    is_quoted = len(field) > 1 and field[0] == field[-1] == '"'
    return field[1:-1].replace('""', '"') if is_quoted else field


def _quoting_problem(error: str) -> str:
    if error.startswith("new-line character"):
        return "a carriage return without a line feed; save the file with ordinary line ends."
    return f"{error}; enclose a text with quotes in quotes, double the quotes inside it, and close every quote."


def _wrong_field_count(count: int, header: Sequence[str], delimiter: str) -> str:
    expected = f"{len(header)} fields ({', '.join(header)}) expected, {count} found"
    return f"{expected}; enclose a text that contains {delimiter!r} in quotes."


def _unique(path: DataFile, names: list[str]) -> list[str]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f'{path} has more than one column "{twice[0]}"; rename one of them.')
    return names


def _json_rows(path: DataFile) -> Iterator[Row]:
    for line, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = Row(line, _json_object(path, line, text))
        except DataError as error:
            row = _broken(error, path, line)
        yield row


def _json_object(path: DataFile, line: int, text: str) -> dict[str, object]:
    try:
        value = json.loads(text, object_pairs_hook=_with_unique_keys)
        # Only an escape sequence can contain half of a surrogate pair, and no later step could encode it.
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise fault(
            path, line, f"invalid JSON at column {error.colno}: {error.msg}; every line must be one JSON object."
        ) from error
    except UnicodeEncodeError as error:
        raise fault(path, line, "half of a surrogate pair (\\ud800 to \\udfff) is not text.") from error
    except (ValueError, RecursionError) as error:
        raise fault(path, line, f"unusable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise fault(path, line, f"every line must be a JSON object; this one is a {type(value).__name__}.")
    return value


def _with_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return values


def _parquet_rows(path: DataFile) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{path} needs pyarrow: pip install "bitfit[parquet]"') from error
    with opened(path) as stream:
        if not stream.peek(4).startswith(b"PAR1"):
            refuse_other_formats(path.path, stream.peek(16))
        try:
            source = io.BytesIO(stream.read()) if path.path.suffix.lower() == ".gz" else stream
            table = pyarrow.parquet.ParquetFile(source)
            _unique(path, table.schema_arrow.names)
            batches = table.iter_batches(batch_size=1024)
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from (Row(line, values) for line, values in enumerate(records, 1))
        except (pyarrow.ArrowException, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}.") from error


def _conllu_rows(path: DataFile) -> Iterator[Row]:
    """A record per sentence, each column a list over its words; multiword ranges and empty nodes are left out."""
    start = 1
    words: list[list[str]] = []
    for line, text in _lines(path):
        fields = text.rstrip("\r\n").split("\t")
        if fields == [""] or fields[0].startswith("#"):
            if words and fields == [""]:
                yield _sentence(start, words)
                words = []
            continue
        if len(fields) != len(CONLLU):
            raise fault(path, line, f"{len(CONLLU)} fields between tabs expected, {len(fields)} found.")
        if not re.fullmatch(r"\d+([-.]\d+)?", fields[0]):
            raise fault(path, line, f'"{fields[0]}" is not a CoNLL-U id (1, 1-2 or 1.1).')
        if fields[0].isdigit():
            if not words:
                start = line
            words.append(fields)
    if words:
        yield _sentence(start, words)


def _sentence(line: int, words: list[list[str]], names: Sequence[str] = CONLLU) -> Row:
    columns: dict[str, object] = {}
    for i, name in enumerate(names):
        columns[name] = [fields[i] for fields in words]
    return Row(line, columns)


def _conll_rows(path: DataFile) -> Iterator[Row]:
    """A record per sentence of a CoNLL-2003 file: one word per line, its tag last, empty lines between sentences."""
    start = 1
    words: list[list[str]] = []
    names: list[str] = []
    for line, text in _lines(path):
        fields = text.split()
        if not fields or fields[0] == "-DOCSTART-":
            if words:
                yield _sentence(start, words, names)
                words = []
            continue
        names = names or _conll_columns(path, line, len(fields))
        if len(fields) != len(names):
            raise fault(path, line, f"{len(names)} fields between spaces expected, {len(fields)} found.")
        if not words:
            start = line
        words.append(fields)
    if words:
        yield _sentence(start, words, names)


def _conll_columns(path: DataFile, line: int, count: int) -> list[str]:
    if count < 2:
        raise fault(path, line, "expected a word, a space and its tag, as in CoNLL-2003; save texts as a CSV file.")
    if count == 4:
        return ["tokens", "pos", "chunk", "tags"]
    return ["tokens", *(f"column{i}" for i in range(2, count)), "tags"]


def _array_rows(path: DataFile) -> Iterator[Row]:
    """A record per object of a JSON array."""
    for number, value in enumerate(_json_document(path), 1):
        yield Row(number, _table(path, number, value))


def _json_document(path: DataFile) -> Any:
    with opened(path) as stream:
        raw = stream.read()
    try:
        document = json.loads(raw)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
        raise DataError(f"{path} is not usable JSON: {error}.") from error
    return document


def _squad_rows(path: DataFile) -> Iterator[Row]:
    """A record per question of a SQuAD file, with its context."""
    document = _json_document(path)
    articles = document.get("data") if isinstance(document, dict) else None
    if not isinstance(articles, list):
        expected = 'a list of records, or SQuAD\'s form ("data" with paragraphs)'
        raise DataError(f"{path} is not {expected}; name it .jsonl if it has one object per line.")
    number = 0
    for article in articles:
        for paragraph in _members(path, number, article, "paragraphs"):
            for question in _members(path, number, paragraph, "qas"):
                number += 1
                yield Row(number, {"context": paragraph.get("context"), **_table(path, number, question)})


def _members(path: DataFile, number: int, holder: object, name: str) -> list[Any]:
    members = _table(path, number + 1, holder).get(name)
    if not isinstance(members, list):
        raise fault(path, number + 1, f'"{name}" is missing or not a list.')
    return members


def _table(path: DataFile, number: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fault(path, number, f"expected a JSON object, not a {type(value).__name__}.")
    return value


READERS: dict[str, Callable[[DataFile], Iterator[Row]]] = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".parquet": _parquet_rows,
    ".conllu": _conllu_rows,
    ".conll": _conll_rows,
    ".txt": _conll_rows,
    ".json": _squad_rows,
    JSON_ARRAY: _array_rows,
}
ENDINGS = tuple(name for name in READERS if name != JSON_ARRAY)
