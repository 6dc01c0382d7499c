"""Files -> examples: the only module that knows file formats, column names, label kinds and how a split is made."""

from __future__ import annotations

import csv
import difflib
import gzip
import heapq
import io
import json
import math
import os
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

from bitfit.errors import DataError, suggest

Kind = Literal["classification", "regression", "multilabel", "tagging", "answering"]
StrPath = str | os.PathLike[str]

DEV_SHARE, DEV_MOST = 0.1, 2000
MANY_CLASSES, FEW_FLOATS = 50, 20
SAMPLE_ROWS = 500
# A quote that is never closed would otherwise pull the rest of a file of any size into one cell.
CELL_LIMIT = 1 << 26

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("texta", "textb"),
    ("sentencea", "sentenceb"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "passage"),
)
# In order of preference, compared without case, spaces and underscores.
TEXTS = (
    "text sentence review reviewtext content body comment commenttext tweet message document description abstract "
    "utterance phrase question query prompt input headline title subject"
)
LABELS = (
    "label labels target class category sentiment y gold goldlabel score rating stars star intent emotion topic "
    "polarity similarity labelname labeltext labelid"
)
# "" is the index column that pandas writes; "unnamed0" is the same column after one more round trip.
IDS = {"", "id", "ids", "idx", "index", "guid", "uuid", "uid", "rowid", "pairid", "unnamed0"}
# What a folder may call its files: the first name is the role itself.
ROLES = {
    "train": ("train", "train_sample"),
    "dev": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched", "heldout", "heldout_sample"),
    "test": ("test",),
}


class Row(NamedTuple):
    """One record, and the 1-based line where it starts (in Parquet: its row number)."""

    line: int
    values: dict[str, object]


@dataclass(frozen=True)
class Columns:
    """Which columns hold the text, its pair and the label."""

    text: str
    text_pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Files:
    """The files a data set consists of."""

    train: Path
    dev: Path | None = None
    test: Path | None = None
    more: Mapping[str, Path] = field(default_factory=dict)  # further sets to score, by name


@dataclass(frozen=True)
class Examples:
    """Texts with labels (class indices or floats) and the lines they came from."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int] | list[float]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> Examples:
        """The examples at these indices, in this order."""
        indices = list(indices)
        pairs = None if self.pairs is None else [self.pairs[i] for i in indices]
        labels = [self.labels[i] for i in indices]
        return Examples([self.texts[i] for i in indices], pairs, labels, [self.lines[i] for i in indices])


@dataclass(frozen=True)
class Dataset:
    """Everything training needs to know about the data, with notes for the user, one sentence each."""

    train: Examples
    dev: Examples
    test: Examples | None
    kind: Kind
    labels: tuple[str, ...]
    columns: Columns
    notes: tuple[str, ...]
    more: Mapping[str, Examples] = field(default_factory=dict)


# ---------------------------------------------------------------- files -> rows


def rows(path: StrPath) -> Iterator[Row]:
    """The records of a file one by one, in constant memory."""
    path = _existing(Path(path))
    row = None
    for row in READERS[_extension(path)](path):
        yield row
    if row is None:
        raise DataError(f"{path} has no rows.")


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder where a file is needed.")
    if not path.exists():
        near = _near_file(path)
        raise DataError(f"{path} does not exist." + (f' Did you mean "{near}"?' if near else ""))
    if _extension(path) not in READERS:
        raise DataError(f"{path} has no known extension. Known: {', '.join(READERS)}, each also with .gz.")
    return path


def _near_file(path: Path) -> str | None:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    return next(iter(difflib.get_close_matches(path.name, names, n=1)), None)


def _plain_name(path: Path) -> Path:
    return Path(path.name.lower().removesuffix(".gz"))


def _extension(path: Path) -> str:
    return _plain_name(path).suffix


def _fault(path: Path, line: int, what: str) -> DataError:
    unit = "row" if _extension(path) == ".parquet" else "line"
    return DataError(f"{path}, {unit} {line}: {what}")


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read to its end: {error}.") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with _opened(path) as stream:
        for line, raw in enumerate(stream, 1):
            yield line, _decoded(path, line, raw)


def _decoded(path: Path, line: int, raw: bytes) -> str:
    if b"\0" in raw:
        raise _fault(path, line, f"a NUL byte at byte {raw.index(0) + 1}; save the file as UTF-8 text.")
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # The codec counts from behind a byte order mark that it has removed.
        bad, place = error.object[error.start], raw.index(error.object) + error.start + 1
        raise _fault(path, line, f"byte 0x{bad:02x} at byte {place} is not UTF-8; save the file as UTF-8.") from error


def _csv_rows(path: Path) -> Iterator[Row]:
    lines = _lines(path)
    first = next((item for item in lines if item[1].strip()), None)
    if first is None:
        raise DataError(f"{path} is empty.")
    delimiter = _delimiter(path, first[1])
    records = _records(path, first[0], chain([first[1]], (text for _, text in lines)), delimiter)
    header = _unique(path, [name.strip() for name in next(records)[1]])
    for line, fields in records:
        if len(fields) == len(header):
            yield Row(line, dict(zip(header, fields, strict=True)))
        elif fields and (len(fields) > 1 or fields[0].strip()):
            raise _fault(path, line, _ragged(len(fields), header, delimiter))


def _delimiter(path: Path, header: str) -> str:
    if _extension(path) == ".tsv":
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def _records(path: Path, first: int, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(max(CELL_LIMIT, csv.field_size_limit()))
    # Most TSV files are written without quoting: there a quote is a character, unless it embraces a whole cell.
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
            raise _fault(path, start, _quoting(str(error))) from error


def _unquoted(field: str) -> str:
    whole = len(field) > 1 and field[0] == field[-1] == '"'
    return field[1:-1].replace('""', '"') if whole else field


def _quoting(error: str) -> str:
    if error.startswith("new-line character"):
        return "a carriage return without a line feed; save the file with ordinary line ends."
    return f"{error}; put a text with quotes between quotes and double those inside, and close every quote."


def _ragged(found: int, header: Sequence[str], delimiter: str) -> str:
    expected = f"{len(header)} fields ({', '.join(header)}) expected, {found} found"
    return f"{expected}; a text that contains {delimiter!r} must stand between quotes."


def _unique(path: Path, names: list[str]) -> list[str]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f'{path} has more than one column "{twice[0]}"; rename one of them.')
    return names


def _json_rows(path: Path) -> Iterator[Row]:
    for line, text in _lines(path):
        if text.strip():
            yield Row(line, _json_object(path, line, text))


def _json_object(path: Path, line: int, text: str) -> dict[str, object]:
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
        # Only an escape can bring half of a surrogate pair in, and nothing after this point could encode it.
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _fault(
            path, line, f"broken JSON at column {error.colno}: {error.msg}; one object per line is needed."
        ) from error
    except UnicodeEncodeError as error:
        raise _fault(path, line, "half of a surrogate pair (\\ud800 to \\udfff) is not text.") from error
    except (ValueError, RecursionError) as error:
        raise _fault(path, line, f"unusable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise _fault(path, line, f"a JSON object is needed on every line, this is a {type(value).__name__}.")
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{path} needs pyarrow: pip install "bitfit[parquet]"') from error
    with _opened(path) as stream:
        try:
            source = io.BytesIO(stream.read()) if path.suffix.lower() == ".gz" else stream
            table = pyarrow.parquet.ParquetFile(source)
            _unique(path, table.schema_arrow.names)
            batches = table.iter_batches(batch_size=1024)
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from (Row(line, values) for line, values in enumerate(records, 1))
        except (pyarrow.ArrowException, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}.") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".parquet": _parquet_rows,
}


# ---------------------------------------------------------------- rows -> columns


def find_columns(
    path: StrPath, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Columns:
    """What was asked for, completed by well-known names and then by looking; label is None if nothing tells it.

    A text given without a pair means a single text, whatever else the file holds.
    """
    sample = [row.values for row in islice(rows(path), SAMPLE_ROWS)]
    names = list(dict.fromkeys(chain(*sample)))
    given = [name for name in (text, text_pair, label) if name is not None]
    _check_given(path, given, names)
    free = {n: [values.get(n) for values in sample] for n in names if n not in given and _bare(n) not in IDS}
    if text is None:
        text, text_pair = _find_text(path, free, text_pair, names)
    rest = {n: values for n, values in free.items() if n not in (text, text_pair)}
    return Columns(text, text_pair, label if label is not None else _find_label(path, rest))


def _check_given(path: StrPath, given: list[str], names: list[str]) -> None:
    for name in given:
        if name not in names:
            raise DataError(f'{path} has no column "{name}".{suggest(name, names)}')
        if given.count(name) > 1:
            raise DataError(f'Column "{name}" of {path} cannot be two of text, text pair and label at once.')


def _bare(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _find_text(
    path: StrPath, free: dict[str, list[object]], pair: str | None, names: list[str]
) -> tuple[str, str | None]:
    known = {_bare(name): name for name in reversed(free)}
    for one, other in PAIRS:
        if one in known and pair is None and other in known:
            return known[one], known[other]
        if one in known and pair is not None and _bare(pair) == other:
            return known[one], pair
    named = [known[name] for name in TEXTS.split() if name in known]
    wordy = [name for name in free if _bare(name) not in LABELS.split() and _is_wordy(free[name])]
    if not named and not wordy:
        raise DataError(f"{path}: no column looks like text; pass --text with one of: {', '.join(names)}.")
    return (named or [max(wordy, key=lambda name: _text_likeness(free[name]))])[0], pair


def _is_wordy(values: list[object]) -> bool:
    words = [v for v in values if isinstance(v, str) and v.strip() and _number(v) is None]
    return 2 * len(words) > len(values)


def _text_likeness(values: list[object]) -> tuple[bool, float]:
    return not _is_class_like(values), sum(len(str(v)) for v in values) / len(values)


def _find_label(path: StrPath, rest: dict[str, list[object]]) -> str | None:
    known = {_bare(name): name for name in reversed(rest)}
    named = [known[name] for name in LABELS.split() if name in known]
    if named:
        return named[0]
    found = _only_candidate(rest)
    if found is not None and found in _distinct(rest[found]):
        raise DataError(f'{path}: the first line seems to be data ("{found}" is also a value); add a header line.')
    return found


def _only_candidate(rest: dict[str, list[object]]) -> str | None:
    """The one column that could be a label; two are no decision, since a wrong one would train without complaint."""
    classes = [name for name, values in rest.items() if _is_class_like(values)]
    varied = [name for name in classes if len(_distinct(rest[name])) > 1]
    numeric = [name for name, values in rest.items() if _is_numeric(values)]
    strongest = varied or classes or numeric
    return strongest[0] if len(strongest) == 1 else None


def _is_numeric(values: list[object]) -> bool:
    distinct = _distinct(values)
    return bool(distinct) and all(_number(value) is not None for value in distinct)


def _distinct(values: list[object]) -> set[str]:
    return {str(v) for v in values if not _is_missing(v)}


def _is_class_like(values: list[object]) -> bool:
    scalar = all(v is None or isinstance(v, str | int | float) for v in values)
    distinct = _distinct(values) if scalar else set()
    few = 0 < len(distinct) <= max(2, min(MANY_CLASSES, len(values) // 2))
    return few and max(map(len, distinct)) <= 40


# ---------------------------------------------------------------- rows -> texts and raw labels


@dataclass(frozen=True)
class _Table:
    path: Path
    texts: list[str]
    pairs: list[str] | None
    labels: list[object]
    lines: list[int]
    notes: list[str]


def stream_texts(path: StrPath, columns: Columns) -> Iterator[tuple[int, str, str | None]]:
    """Line, text and pair of every record, empty texts included, so that answers match the file row by row."""
    find_columns(path, text=columns.text, text_pair=columns.text_pair)
    return ((line, *_texts(Path(path), line, values, columns)) for line, values in rows(path))


def _texts(path: Path, line: int, values: dict[str, object], columns: Columns) -> tuple[str, str | None]:
    text = _text(path, line, columns.text, values.get(columns.text))
    if columns.text_pair is None:
        return text, None
    return text, _text(path, line, columns.text_pair, values.get(columns.text_pair))


def _text(path: Path, line: int, name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict | bytes):
        raise _fault(path, line, f'column "{name}" holds a {type(value).__name__}, not a text.')
    return "" if value is None else str(value)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _read(path: Path, columns: Columns) -> _Table:
    kept: list[tuple[int, str, str | None, object]] = []
    empty, unlabelled = [], []
    for line, values in rows(path):
        text, pair = _texts(path, line, values, columns)
        label = values.get(columns.label or "")
        if not text.strip() or (pair is not None and not pair.strip()):
            empty.append(line)
        elif _is_missing(label):
            unlabelled.append(line)
        else:
            kept.append((line, text, pair, _scalar(path, line, label)))
    notes = [*_skipped(path, "an empty text", empty), *_skipped(path, "no label", unlabelled)]
    if not kept:
        raise DataError(f"{path} has no usable row. {' '.join(notes)}")
    lines, texts, pairs, labels = (list(column) for column in zip(*kept, strict=True))
    return _Table(path, texts, pairs if columns.text_pair else None, labels, lines, notes)


def _scalar(path: Path, line: int, label: object) -> object:
    if isinstance(label, list | tuple | dict | bytes):
        raise _fault(path, line, f"a {type(label).__name__} is not a label; one word or number per row is needed.")
    return label


def _skipped(path: Path, what: str, lines: list[int]) -> list[str]:
    shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    rows_, lines_ = ("row", "line") if len(lines) == 1 else ("rows", "lines")
    return [f"Skipped {len(lines):,} {rows_} of {path.name} with {what} ({lines_} {shown})."] if lines else []


# ---------------------------------------------------------------- raw labels -> kind and labels


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return None


def _is_float(value: object) -> bool:
    """Whether it is written as a float: by its type, or with a decimal point or an exponent."""
    if isinstance(value, str):
        return _number(value) is not None and any(sign in value for sign in ".eE")
    return isinstance(value, float | Decimal)


def _class_name(value: object) -> str:
    """The name of a class; 1, "1", 1.0 and "1.0" are the same, because pandas turns the first into the last."""
    name = str(value).strip()
    if isinstance(value, bool):
        return name.lower()
    whole = re.fullmatch(r"(-?\d+)\.0*", name)
    return whole[1] if whole else name


def _infer_kind(table: _Table) -> tuple[Kind, list[str]]:
    """Float labels mean regression, unless they are a few whole numbers."""
    numbers = [_number(label) for label in table.labels]
    if not any(map(_is_float, table.labels)) or not _all_numbers(table, numbers):
        return "classification", []
    values = {_finite(table.path, *item) for item in zip(table.lines, table.labels, strict=True)}
    if len(values) <= FEW_FLOATS and all(value.is_integer() for value in values):
        return "classification", ["The float labels are all whole numbers, so they are taken as classes."]
    if len(values) == 1:
        raise DataError(f"{table.path}: every label is {values.pop()}; there is nothing to learn.")
    return "regression", [f"Float labels, so this is a regression, from {min(values):g} to {max(values):g}."]


def _all_numbers(table: _Table, numbers: list[float | None]) -> bool:
    if None not in numbers:
        return True
    if len(set(numbers)) > MANY_CLASSES and 2 * sum(map(_is_float, table.labels)) > len(numbers):
        _finite(table.path, table.lines[numbers.index(None)], table.labels[numbers.index(None)])
    return False


def _finite(path: Path, line: int, label: object) -> float:
    value = _number(label)
    if value is None or not math.isfinite(value):
        raise _fault(path, line, f'label "{label}" is not a finite number as the other labels are.')
    return value


def _class_names(table: _Table) -> tuple[str, ...]:
    names = {_class_name(label) for label in table.labels}
    if len(names) == 1:
        raise DataError(f'{table.path}: every label is "{names.pop()}"; at least two classes are needed.')
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _examples(table: _Table, kind: Kind, labels: Sequence[str], numbered: bool = False) -> Examples:
    raw = zip(table.lines, table.labels, strict=True)
    if kind == "regression":
        return Examples(table.texts, table.pairs, [_finite(table.path, *item) for item in raw], table.lines)
    # The files of a named task give its labels by name or by number.
    index = {str(i): i for i in range(len(labels)) if numbered} | {name: i for i, name in enumerate(labels)}
    ids = [index.get(_class_name(label), -1) for _, label in raw]
    if -1 in ids:
        place = ids.index(-1)
        name = _class_name(table.labels[place])
        where = "no label of the task" if numbered else "not in the training data"
        what = f'label "{name}" is {where}.{suggest(name, labels)}'
        raise _fault(table.path, table.lines[place], what)
    return Examples(table.texts, table.pairs, ids, table.lines)


def load_labelled(
    path: StrPath, columns: Columns, kind: Kind, labels: Sequence[str] = (), numbered: bool = False
) -> tuple[Examples, tuple[str, ...]]:
    """The examples of a file whose columns, kind and labels are known, with notes.

    `numbered`: a label may also be given by its place among the labels, as the files of named tasks do.
    """
    _require_label(path, columns)
    find_columns(path, text=columns.text, text_pair=columns.text_pair, label=columns.label)
    table = _read(Path(path), columns)
    return _examples(table, kind, labels, numbered), tuple(table.notes)


def _require_label(path: StrPath, columns: Columns) -> None:
    if columns.label is None:
        names = ", ".join(column_names(path))
        raise DataError(f"{path}: cannot tell which column is the label; pass --label with one of: {names}.")


def column_names(path: StrPath) -> list[str]:
    """The columns of a file's first rows, in order."""
    return list(dict.fromkeys(chain(*(row.values for row in islice(rows(path), SAMPLE_ROWS)))))


# ---------------------------------------------------------------- splits and subsets


def _strata(examples: Examples, kind: Kind) -> list[int]:
    return [int(label) for label in examples.labels] if kind == "classification" else [0] * len(examples)


def _duplicates(examples: Examples) -> list[list[int]]:
    """Indices grouped by equal text and pair, in order of first appearance."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, key in enumerate(zip(examples.texts, examples.pairs or examples.texts, strict=True)):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _agrees(examples: Examples, group: list[int]) -> bool:
    return len(group) == 1 or len({examples.labels[i] for i in group}) == 1


def split(examples: Examples, kind: Kind, seed: int, share: float | None = None) -> tuple[list[int], list[int]]:
    """Indices of train and dev: this share (10%, at most about 2,000) of every class, equal texts on one side.

    A text with conflicting labels stays in train, so that every class keeps an example there and dev is clean.
    """
    strata = _strata(examples, kind)
    groups: defaultdict[int, list[list[int]]] = defaultdict(list)
    for group in _duplicates(examples):
        if _agrees(examples, group):
            groups[strata[group[0]]].append(group)
    share = share or min(DEV_SHARE, DEV_MOST / max(1, len(examples)))
    rng = random.Random(f"split {seed}")
    sizes = sorted(Counter(strata).items())
    dev = set(chain.from_iterable(_dev_part(groups[stratum], size, share, rng) for stratum, size in sizes))
    return [i for i in range(len(examples)) if i not in dev], sorted(dev)


def _dev_part(groups: list[list[int]], size: int, share: float, rng: random.Random) -> list[int]:
    rng.shuffle(groups)
    wanted = max(1, round(share * size)) if size > 1 else 0
    chosen: list[int] = []
    for group in groups:
        if len(chosen) + len(group) <= wanted:
            chosen += group
    smallest = min(groups, key=len, default=[])
    return smallest if wanted and not chosen and len(smallest) < size else chosen


def subset(examples: Examples, kind: Kind, size: int, seed: int) -> list[int]:
    """Indices of exactly so many examples, each class with its share; a smaller subset lies within a larger one."""
    if not 1 <= size <= len(examples):
        raise DataError(f"Train size {size:,} is not between 1 and the {len(examples):,} training rows there are.")
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, stratum in enumerate(_strata(examples, kind)):
        members[stratum].append(i)
    pools = [members[stratum] for stratum in sorted(members)]
    rng = random.Random(f"subset {seed}")
    for pool in pools:
        rng.shuffle(pool)
    return sorted(pools[k].pop() for k in islice(_interleaved([len(pool) for pool in pools]), size))


def _interleaved(sizes: list[int]) -> Iterator[int]:
    """Class after class so that every prefix holds each class's share rounded down or up.

    The j-th member of a class must appear in the slots where its class's share passes from j to j + 1;
    taking the earliest deadline first always meets all of them (unit jobs with release times).
    """
    total = sum(sizes)
    jobs = ((j * total // size, -(-(j + 1) * total // size), k) for k, size in enumerate(sizes) for j in range(size))
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[int, int]] = []
    for slot in range(total):
        while waiting and waiting[-1][0] <= slot:
            heapq.heappush(ready, waiting.pop()[1:])
        yield heapq.heappop(ready)[1]


# ---------------------------------------------------------------- the whole data set


def load(
    path: StrPath | Files,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    labels: Sequence[str] = (),
    dev: StrPath | None = None,
    test: StrPath | None = None,
    train_size: int | None = None,
    seed: int = 0,
    holdout: float | None = None,
) -> Dataset:
    """A labelled file, or a folder with train, dev and test files, as what training needs.

    `labels` are those of a named task, which files may also give by number. `holdout` is the share of the training
    rows to hold out as dev; the dev file is then the test.
    """
    files, notes = (path, []) if isinstance(path, Files) else find_files(path)
    files = replace(files, dev=Path(dev) if dev else files.dev, test=Path(test) if test else files.test)
    columns = find_columns(files.train, text=text, text_pair=text_pair, label=label)
    _require_label(files.train, columns)
    table = _read(files.train, columns)
    kind, reasons = (kind, []) if kind else _infer_kind(table)
    numbered = bool(labels)
    labels = tuple(labels) or (_class_names(table) if kind == "classification" else ())
    whole = _examples(table, kind, labels, numbered)

    def read(file: Path | None) -> tuple[Examples | None, tuple[str, ...]]:
        return _tested(file, columns, kind, labels, numbered)

    if holdout is None:
        train, held_out, how = _train_and_dev(whole, files, columns, kind, labels, seed, numbered)
        tested, remarks = read(files.test)
        train, cut = _cut(train, kind, labels, train_size, seed)
    else:
        taken, cut = _cut(whole, kind, labels, train_size, seed)
        train, held_out, how = _hold_out(taken, files, kind, seed, holdout)
        tested, remarks = read(files.dev or files.test)
    more = {name: read(file) for name, file in files.more.items()}
    notes += [
        _taken(columns),
        *reasons,
        *(how if holdout is None else ()),
        *cut,
        *(() if holdout is None else how),
        _sizes(train, held_out, tested),
        *table.notes,
        *remarks,
        *chain.from_iterable(said for _, said in more.values()),
        *_doubts(whole, labels),
    ]
    further = {name: examples for name, (examples, _) in more.items() if examples is not None}
    return Dataset(train, held_out, tested, kind, labels, columns, tuple(notes), further)


def find_files(path: StrPath) -> tuple[Files, list[str]]:
    """The files of a data set by their names, with a note for every name that is not train, dev or test itself."""
    path = Path(path)
    if not path.is_dir():
        return Files(_existing(path)), []
    found = {role: one_of(by_stem(path), names) for role, names in ROLES.items()}
    train = found["train"]
    if train is None:
        held = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise DataError(f"{path} has no train file ({', '.join(READERS)}, each also with .gz); it holds: {held}.")
    renamed = [(role, file) for role, file in found.items() if file and stem(file) != role]
    return Files(train, found["dev"], found["test"]), [f"{file.name} is taken as {role}." for role, file in renamed]


def stem(file: Path) -> str:
    """A file's name in small letters without extensions."""
    return _plain_name(file).stem


def by_stem(folder: Path) -> dict[str, list[Path]]:
    """The readable files of a folder, by stem."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.iterdir()):
        if _extension(file) in READERS:
            found[stem(file)].append(file)
    return found


def one_of(files: Mapping[str, list[Path]], names: Sequence[str]) -> Path | None:
    """The file with the first of these stems that is there."""
    found = next((files[name] for name in names if name in files), [])
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} stand for the same part of the data; remove one of them.")
    return found[0] if found else None


def _train_and_dev(
    whole: Examples, files: Files, columns: Columns, kind: Kind, labels: tuple[str, ...], seed: int, numbered: bool
) -> tuple[Examples, Examples, tuple[str, ...]]:
    if files.dev is not None:
        return whole, *load_labelled(files.dev, columns, kind, labels, numbered)
    train, dev, how = _split_off(whole, files.train, kind, seed)
    return train, dev, (f"No dev file, so {how}",)


def _split_off(
    whole: Examples, path: Path, kind: Kind, seed: int, share: float | None = None
) -> tuple[Examples, Examples, str]:
    train, dev = split(whole, kind, seed, share)
    if not dev:
        raise DataError(f"{path} has too few different rows to split off a dev set; add rows or a dev file.")
    how = "of every class " if kind == "classification" else ""
    note = f"{len(dev) / len(whole):.0%} {how}is split off (seed {seed}), equal texts together."
    return whole.take(train), whole.take(dev), note


def _hold_out(
    taken: Examples, files: Files, kind: Kind, seed: int, share: float
) -> tuple[Examples, Examples, tuple[str, ...]]:
    train, dev, how = _split_off(taken, files.train, kind, seed, share)
    held = files.dev or files.test
    test = "there is no file to test on" if held is None else f"{held.name} is the test"
    return train, dev, (f"To pick the best checkpoint {how}", f"By the holdout protocol {test}.")


def _tested(
    path: Path | None, columns: Columns, kind: Kind, labels: tuple[str, ...], numbered: bool
) -> tuple[Examples | None, tuple[str, ...]]:
    if path is None:
        return None, ()
    if all(_is_unlabelled(row, columns.label or "", labels) for row in rows(path)):
        return None, (f"{path.name} has no labels and is ignored.",)
    return load_labelled(path, columns, kind, labels, numbered)


def _is_unlabelled(row: Row, label: str, labels: tuple[str, ...]) -> bool:
    """Whether the label is missing, or the -1 by which public test sets hide theirs."""
    value = row.values.get(label)
    return _is_missing(value) or ("-1" not in labels and _class_name(value) == "-1")


def _cut(
    train: Examples, kind: Kind, labels: tuple[str, ...], size: int | None, seed: int
) -> tuple[Examples, list[str]]:
    if size is None:
        return train, []
    taken = train.take(subset(train, kind, size, seed))
    lost = len(labels) - len(set(taken.labels)) if kind == "classification" else 0
    notes = [f"{size:,} of {len(train):,} training rows were drawn (seed {seed})."]
    return taken, notes + ([f"{lost} of {len(labels)} classes have no example among them."] if lost else [])


def _taken(columns: Columns) -> str:
    pair = f' with "{columns.text_pair}"' if columns.text_pair else ""
    return f'The text is column "{columns.text}"{pair}, the label is column "{columns.label}".'


def _sizes(train: Examples, dev: Examples, test: Examples | None) -> str:
    tested = "no" if test is None else f"{len(test):,}"
    return f"There are {len(train):,} train, {len(dev):,} dev and {tested} test rows."


def _doubts(examples: Examples, labels: tuple[str, ...]) -> list[str]:
    notes = []
    conflicts = sum(not _agrees(examples, group) for group in _duplicates(examples))
    if conflicts:
        notes.append(f"{conflicts:,} repeated {'texts have' if conflicts > 1 else 'text has'} conflicting labels.")
    if len(labels) > MANY_CLASSES:
        notes.append(f"{len(labels):,} classes are many; if the labels are amounts, write them as floats (3.0, 4.5).")
    counts = Counter(examples.labels)
    single = [name for i, name in enumerate(labels) if counts[i] == 1]
    if single:
        notes.append(f"{len(single):,} of {len(labels):,} classes have one example, kept in train: {_some(single)}.")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
