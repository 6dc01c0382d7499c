"""Scoring tables: every row of many files answered, written in parts that a second run does not compute again.

A part holds PART_ROWS rows of one input file in their order, with the input's columns, the answer and a column `error`,
which says why a row has no answer. A Parquet file is scored part by part, any other file as a whole, since its rows
cannot be found without reading those before them.

An input behind a URL (s3://...) is copied into the folder of the parts while its rows are answered; all workers see it
there. The copy is removed even if a worker is killed. Every scoring has a folder of copies for itself, .inputs-ID; only
that of a command that was killed stays.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from .. import __version__, files
from ..data import loading, storage
from ..data.columns import Sample
from ..data.examples import Columns
from ..data.formats import ENDINGS, Broken, Row, existing, rows
from ..data.source import DataFile, Records, extension, is_table
from ..delta.delta import Delta
from ..delta.meta import Meta
from ..errors import BitfitError, DataError, DeltaError, UsageError, suggest
from ..tasks import Task, Text
from .output import WRITERS, beside, flat_row
from .predictor import CHUNK, MixedPredictor, Predictor, columns_of

PART_ROWS = 8 * CHUNK  # whole chunks, so that a part is computed in the batches of `predict`
ERROR = "error"
MANIFEST = "scoring.json"
COPIES = ".inputs-"  # what begins the name of the folder of the copies of inputs behind URLs


@dataclass(frozen=True)
class Scoring:
    """What is asked of every row. It is plain, so that it can be sent to other processes."""

    delta: str  # a delta file; a folder of them if a column names the task
    base: str | None = None
    dtype: str | None = None
    task_column: str | None = None
    long: str | None = None  # what is read of a text that is too long; None: what the delta says
    text: str | None = None
    text_pair: str | None = None
    encoding: str | None = None
    format: str | None = None  # of the parts; None: that of the input, CSV where rows cannot be written so
    part_rows: int = PART_ROWS

    def __post_init__(self) -> None:
        if self.part_rows % CHUNK:
            raise UsageError(f"part_rows must be a multiple of {CHUNK}")
        folder = Path(self.delta).is_dir()
        if folder and self.task_column is None:
            raise UsageError(f"{self.delta} is a folder: name the column that says each row's task with --task-column")
        if folder and self.long is not None:
            raise UsageError("--long is for one delta; those of a folder read texts as they were trained to")
        if not folder and self.task_column is not None:
            raise UsageError(f"--task-column needs a folder of deltas, and {self.delta} is not a folder")

    def ending(self, file: Path) -> str:
        """The ending of the parts of an input file."""
        if self.format is not None:
            return f".{self.format}"
        ending = extension(file)
        return ending if ending in WRITERS else ".csv"


@dataclass(frozen=True)
class Input:
    """A file of rows."""

    file: Path
    below: Path  # its path below the folder that all inputs are in
    url: str | None = None  # what `file` is a copy of; None: `file` is the input itself

    @property
    def name(self) -> str:
        """What messages call it."""
        return storage.shown(self.url) if self.url is not None else str(self.file)

    def fetch(self) -> None:
        """Make the copy, if it is needed and is not there."""
        if self.url is not None and not self.file.is_file():
            storage.fetch(self.url, self.file)

    def stamp(self) -> list[int | str]:
        """What changes when the file changes."""
        if self.url is not None:
            return storage.stamp(self.url)
        status = self.file.stat()
        return [status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class Unit:
    """What one worker does at a time: a part of a Parquet file, or a whole file of another format."""

    input: Input
    target: Path  # the parts are target-00000.ending and so on
    part: int | None  # None: all parts

    def path(self, part: int, ending: str) -> Path:
        """Where a part is written."""
        return self.target.with_name(f"{self.target.name}-{part:05d}{ending}")


@dataclass(frozen=True)
class Scored:
    """What became of a unit."""

    file: str
    parts: int = 0  # written
    kept: int = 0  # there already
    rows: int = 0  # in the parts written
    errors: int = 0  # rows without an answer
    failure: str | None = None  # why the file could not be read to its end


@dataclass
class Summary:
    """What became of all units of a scoring."""

    parts: int = 0
    kept: int = 0
    rows: int = 0
    errors: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, found: Scored) -> None:
        """Count a unit."""
        self.parts += found.parts
        self.kept += found.kept
        self.rows += found.rows
        self.errors += found.errors
        if found.failure is not None:
            self.failures[found.file] = found.failure


Engine = Callable[[Scoring, Sequence[Unit]], Iterator[Scored]]
"""Scores units in any order."""


def score(
    scoring: Scoring,
    pattern: str,
    out: Path,
    engine: Engine | None = None,
    force: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Answer every row of the files that a pattern (or a file, or a folder) names, in parts in the folder `out`.

    Parts that exist are kept, if the deltas, the inputs and the options are those of before; `force` starts again.
    `watch` is told how many units are done, and of how many.
    """
    url = storage.url_of(str(out))
    if url is not None:
        raise UsageError(f"--out {storage.shown(url)}: parts are written to a folder that all workers see; name one")
    folder = out / f"{COPIES}{uuid.uuid4().hex}"
    summary = Summary()
    stamps: dict[Input, list[int | str]] = {}
    for each in _inputs(pattern, folder):
        try:
            stamps[each] = each.stamp()
        except OSError as error:
            summary.failures[each.name] = str(error)
    units = list(_units(stamps, scoring, out))
    _claim(scoring, {str(each.below): stamp for each, stamp in stamps.items()}, out, force)
    watch(0, len(units))
    copies = _Copies(units, folder)
    results = (engine or local)(scoring, units) if units else iter(())
    try:
        for done, found in enumerate(results, 1):
            summary.add(found)
            copies.done(found)
            watch(done, len(units))
    finally:
        copies.remove()
    for left in out.rglob(".*.tmp"):  # of workers that were killed while they wrote
        left.unlink(missing_ok=True)
    return summary


def local(scoring: Scoring, units: Sequence[Unit]) -> Iterator[Scored]:
    """The default engine: one unit after the other, in this process."""
    scorer = Scorer(scoring)
    for unit in units:
        yield scorer.score(unit)


# ---- the inputs and the folder of the parts


class _Copies:
    """The copies of inputs behind URLs: each is removed when the last of its units is done."""

    def __init__(self, units: Sequence[Unit], folder: Path) -> None:
        self._folder = folder
        self._files = {unit.input.name: unit.input.file for unit in units if unit.input.url is not None}
        self._units = Counter(unit.input.name for unit in units)

    def done(self, scored: Scored) -> None:
        """Take note of a unit that is done."""
        self._units[scored.file] -= 1
        if scored.file in self._files and not self._units[scored.file]:
            self._files[scored.file].unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _inputs(pattern: str, copies: Path) -> list[Input]:
    """The files that a pattern, a path or a URL names; those behind a URL are copied to the folder `copies`."""
    url = storage.url_of(pattern)
    if url is not None:
        return _remote_inputs(url, copies)
    if Path(pattern).is_file() or not is_table(pattern):
        file = existing(Path(pattern))
        return [Input(file, Path(file.name))]
    if Path(pattern).is_dir():
        root, rest = Path(pattern), "*"
    else:
        parts = Path(pattern).parts
        fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        root, rest = Path(*parts[:fixed]), str(Path(*parts[fixed:]))
    found = sorted(path for path in root.glob(rest) if path.is_file())
    if Path(pattern).is_dir():
        found = [path for path in found if extension(path) in ENDINGS]
    if not found:
        raise DataError(f"{pattern}: no such files")
    return [Input(path, path.relative_to(root)) for path in found]


def _remote_inputs(url: str, copies: Path) -> list[Input]:
    found = []
    for name, below in storage.matching(url).items():
        if glob.has_magic(url) or extension(Path(below)) in ENDINGS:
            if not _stays_below(below):
                raise DataError(f"{storage.shown(name)}: cannot be the name of a file; rename it or name other files")
            found.append(Input(copies / below, Path(below), name))
    if not found:
        raise DataError(f"{storage.shown(url)}: no such files")
    return found


def _stays_below(name: str) -> bool:
    """Whether the name of an object is a path below any folder, on every system."""
    return not any(part in ("", ".", "..") or "\\" in part or ":" in part for part in name.split("/"))


def _units(inputs: Iterable[Input], scoring: Scoring, out: Path) -> Iterator[Unit]:
    targets: dict[Path, str] = {}
    for each in inputs:
        name = each.below.name.removesuffix(".gz")
        target = out / each.below.with_name(Path(name).stem)
        if target in targets:
            raise UsageError(f"{targets[target]} and {each.name} would be written to the same parts; rename one")
        targets[target] = each.name
        if extension(each.file) != ".parquet" or each.file.suffix == ".gz":
            yield Unit(each, target, None)
            continue
        count = _parquet_rows(each)
        if count is None:
            yield Unit(each, target, None)  # a worker tells why it is not readable
            continue
        for part in range(-(-count // scoring.part_rows)):
            yield Unit(each, target, part)


def _parquet_rows(each: Input) -> int | None:
    """How many rows a Parquet file says it has; None if it is not readable."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{each.name} needs pyarrow: pip install "bitfit[parquet]"') from error
    try:
        source = each.file if each.url is None else io.BytesIO(_footer(each.url))
        return int(pyarrow.parquet.read_metadata(source).num_rows)
    except (pyarrow.ArrowException, OSError):
        return None


def _footer(url: str) -> bytes:
    """The end of a Parquet file, which has its metadata; if it is none, no more than a few bytes."""
    end = storage.tail(url, 8)
    if not end.endswith(b"PAR1"):
        return end
    return storage.tail(url, int.from_bytes(end[:4], "little") + len(end))


def _claim(scoring: Scoring, stamps: dict[str, list[int | str]], out: Path, force: bool) -> None:
    """Make the folder ready for the parts of this scoring; refuse one that holds others.

    A file whose stamp is its size only counts as changed: nothing tells that it is the same.
    """
    manifest = out / MANIFEST
    key = _key(scoring)
    if out.is_dir() and any(out.iterdir()) and not manifest.is_file():
        raise UsageError(f"{out}: is not empty and not the folder of an earlier scoring; name another with --out")
    before = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {"key": None, "files": {}}
    known = before["files"]
    changed = [name for name, stamp in stamps.items() if name in known and (known[name] != stamp or len(stamp) == 1)]
    same = before["key"] in (None, key) and not changed
    if not same and not force:
        what = f"{changed[0]} has changed" if changed else "the deltas or options were others"
        if changed and known[changed[0]] == stamps[changed[0]]:
            what = f"{changed[0]} may have changed, its storage does not tell"
        raise UsageError(f"{out}: holds parts of an earlier scoring ({what}); pass --force to start again")
    if force:
        for path in out.rglob("*-[0-9][0-9][0-9][0-9][0-9].*"):
            path.unlink()
    if same and not force:
        stamps = {**known, **stamps}
    out.mkdir(parents=True, exist_ok=True)
    files.replace(manifest, json.dumps({"key": key, "files": stamps}, indent=1, sort_keys=True).encode())


def _key(scoring: Scoring) -> str:
    """A digest of what decides the answers."""
    table = asdict(scoring)
    del table["delta"]
    state = hashlib.sha256(json.dumps([__version__, table], sort_keys=True).encode())
    for path in _delta_files(scoring):
        state.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()


def _delta_files(scoring: Scoring) -> list[Path]:
    path = Path(scoring.delta)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not found:
        raise UsageError(f"{path}: holds no deltas (NAME.safetensors)")
    if not found[0].is_file():
        raise DeltaError(f"{path}: no such delta file")
    return found


# ---- the work


@dataclass(frozen=True)
class _Member:
    """A delta that rows can name, and its number in the predictor."""

    number: int
    task: Task
    meta: Meta


class Scorer:
    """A base and deltas, loaded once, that answer the rows of any number of units."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self.refused: dict[str, str] = {}  # by task: why its delta cannot be used
        if scoring.task_column is None:
            predictor = Predictor(scoring.delta, scoring.base, scoring.long, scoring.dtype)
            self._members = {"": _Member(0, predictor.task, predictor.delta.meta)}
            self.echo = predictor.task.echo
            self._answer: Callable[[list[tuple[int, Text]]], Iterable[dict[str, Any]]] = lambda requests: (
                predictor.answers([text for _, text in requests])
            )
        else:
            mixed, self._members = self._mixed(scoring)
            self.echo = ()
            self._answer = mixed.answers
        self._columns = self._answer_columns()

    def _mixed(self, scoring: Scoring) -> tuple[MixedPredictor, dict[str, _Member]]:
        deltas: dict[str, Delta] = {}
        for path in _delta_files(scoring):
            try:
                deltas[path.stem] = Delta.load(path)
            except DeltaError as error:
                self.refused[path.stem] = str(error)
        if not deltas:
            raise DeltaError(f"{scoring.delta}: none of its deltas can be used ({next(iter(self.refused.values()))})")
        mixed = MixedPredictor(list(deltas.values()), scoring.base, scoring.dtype)
        members = {}
        for number, (name, delta) in enumerate(deltas.items()):
            members[name] = _Member(number, mixed.residents[number].task, delta.meta)
        return mixed, members

    def _answer_columns(self) -> dict[str, type]:
        """The columns of answers and what they hold, found by asking every delta once."""
        columns: dict[str, type] = {}
        for member in self._members.values():
            words = member.task.sample_input(member.meta.pairs)
            text: Text = words[0] if len(words) == 1 else words
            (answer,) = self._answer([(member.number, text)])
            for name, value in self._cells(answer).items():
                kind = type(value)
                columns[name] = kind if columns.get(name, kind) in (kind, type(None)) else str
        return columns

    def _cells(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """An answer by column: scores have a column per label, unless tasks with many labels are mixed."""
        flat = dict(answer) if self.scoring.task_column is not None else flat_row(answer)
        for name, value in flat.items():
            if isinstance(value, dict | list | tuple):
                flat[name] = json.dumps(value, ensure_ascii=False)
        return flat

    def score(self, unit: Unit) -> Scored:
        """Answer the rows of a unit and write its parts; those that exist are kept."""
        ending = self.scoring.ending(unit.input.file)
        scored = Scored(unit.input.name)
        if unit.part is not None and unit.path(unit.part, ending).is_file():
            return replace(scored, kept=1)
        try:
            unit.input.fetch()
            source = _read(unit, self.scoring)
            table = _Table(self, Sample.of(_data_file(unit, self.scoring)))
            part = unit.part or 0
            while chunk := list(islice(source, self.scoring.part_rows)):
                scored = self._score_part(table, unit.path(part, ending), chunk, scored)
                part += 1
        except (DataError, OSError) as error:
            return replace(scored, failure=str(error))
        return scored

    def _score_part(self, table: _Table, path: Path, chunk: Sequence[Row], scored: Scored) -> Scored:
        """Write a part unless it exists; returns the counts with those of the part."""
        if path.is_file():
            return replace(scored, kept=scored.kept + 1)
        errors = table.write(path, chunk)
        return replace(scored, parts=scored.parts + 1, rows=scored.rows + len(chunk), errors=scored.errors + errors)

    def answers(self, requests: Sequence[tuple[int, Text] | str]) -> list[dict[str, Any] | str]:
        """The answer to each request, or why there is none; a text stands for a request that has failed already."""
        asked = [request for request in requests if not isinstance(request, str)]
        answered = iter(self._all(asked))
        return [request if isinstance(request, str) else next(answered) for request in requests]

    def _all(self, requests: list[tuple[int, Text]]) -> list[dict[str, Any] | str]:
        if not requests:
            return []
        try:
            return list(self._answer(requests))
        except BitfitError as error:
            if len(requests) == 1:
                return [str(error)]
        return [self._all([request])[0] for request in requests]  # one bad text must not cost the others


def _read(unit: Unit, scoring: Scoring) -> Iterator[Row]:
    """The rows of a unit."""
    if unit.part is None:
        return rows(_data_file(unit, scoring))
    return _parquet_part(unit.input, unit.part * scoring.part_rows, scoring.part_rows)


def _data_file(unit: Unit, scoring: Scoring) -> DataFile:
    shown = None if unit.input.url is None else unit.input.name
    return DataFile(unit.input.file, scoring.encoding, tolerant=True, shown=shown)


def _parquet_part(each: Input, start: int, count: int) -> Iterator[Row]:
    """Some rows of a Parquet file; only the row groups that hold them are read."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(each.file)
        groups, first = _row_groups(table, start, start + count)
        for batch in table.iter_batches(batch_size=CHUNK, row_groups=groups):
            # Of a batch that begins before the part, or ends behind it, only the rows in between.
            begin, end = max(0, start - first), min(len(batch), start + count - first)
            if begin < end:
                values = batch.slice(begin, end - begin).to_pylist()
                yield from (Row(line, row) for line, row in enumerate(values, first + begin + 1))
            first += len(batch)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{each.name} is not a readable Parquet file: {error}.") from error


def _row_groups(table: Any, start: int, end: int) -> tuple[list[int], int]:
    """The row groups of a Parquet file with the rows from `start` to `end`, and the number of their first row."""
    groups: list[int] = []
    first_of_all = 0
    first = 0
    for number in range(table.num_row_groups):
        count = table.metadata.row_group(number).num_rows
        if first < end and first + count > start:
            if not groups:
                first_of_all = first
            groups.append(number)
        first += count
    return groups, first_of_all


class _Table:
    """One input file: which of its columns each task reads, and the form of its parts."""

    def __init__(self, scorer: Scorer, sample: Sample) -> None:
        self.scorer = scorer
        self.sample = sample
        self.names = sample.names
        self._found: dict[str, Columns] = {}
        column = scorer.scoring.task_column
        if column is not None and column not in self.names:
            raise DataError(f'{sample.path} has no column "{column}".{suggest(column, self.names)}')
        if column is None:
            self._columns("")  # a file without the columns of the delta is refused as a whole

    def write(self, path: Path, chunk: Sequence[Row]) -> int:
        """Answer the rows of a part and write it, all or nothing; returns how many have no answer."""
        table = []
        errors = 0
        for start in range(0, len(chunk), CHUNK):
            some = chunk[start : start + CHUNK]
            for row, answer in zip(some, self.scorer.answers([self._request(row) for row in some]), strict=True):
                errors += isinstance(answer, str)
                table.append(self._line(row, answer))
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(path) as file:
            if path.suffix == ".parquet":
                _write_parquet(file, table, self._schema())
            else:
                WRITERS[path.suffix](file, table)
        return errors

    def _line(self, row: Row, answer: dict[str, Any] | str) -> dict[str, Any]:
        """A row of the part: the input's columns, the answer's and the error."""
        given = {name: row.values.get(name) for name in self.names}
        cells: dict[str, Any] = dict.fromkeys(self.scorer._columns)
        if not isinstance(answer, str):
            cells |= self.scorer._cells(answer)
        return beside(given, {**cells, ERROR: answer if isinstance(answer, str) else None}, self.scorer.echo)

    def _schema(self) -> Any:
        """The types of the parts: those of a Parquet input stay as they are."""
        import pyarrow
        import pyarrow.parquet

        kinds = {str: pyarrow.string(), float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_()}
        given: dict[str, Any] = {}
        if extension(self.sample.path) == ".parquet":
            schema = pyarrow.parquet.read_schema(self.sample.path)
            given = {name: schema.field(name).type for name in schema.names}
        elif extension(self.sample.path) in (".csv", ".tsv"):
            given = dict.fromkeys(self.names, pyarrow.string())
        answers = {name: kinds.get(kind, pyarrow.string()) for name, kind in self.scorer._columns.items()}
        typed = beside(dict.fromkeys(self.names), {**answers, ERROR: pyarrow.string()}, self.scorer.echo)
        return {name: given.get(name, kind) for name, kind in typed.items()}

    def _request(self, row: Row) -> tuple[int, Text] | str:
        """The number of the delta and the text that a row asks about, or what is wrong with it."""
        if isinstance(row.values, Broken):
            return row.values.message
        column = self.scorer.scoring.task_column
        name = "" if column is None else str(row.values.get(column))
        member = self.scorer._members.get(name)
        if member is None:
            why = self.scorer.refused.get(name)
            return f'no task "{name}"' if why is None else why
        try:
            records = Records((row.values,), f"line {row.line}")
            _, text, pair = next(loading.stream_rows(records, self._columns(name), member.task.kind))
        except DataError as error:
            return str(error).partition(": ")[2] or str(error)
        return member.number, text if pair is None else (text, pair)

    def _columns(self, name: str) -> Columns:
        if name not in self._found:
            member, scoring = self.scorer._members[name], self.scorer.scoring
            given = {"text": scoring.text, "text_pair": scoring.text_pair}
            self._found[name] = columns_of(member.task, member.meta.columns, self.sample, False, given)
        return self._found[name]


def _write_parquet(file: Any, table: Sequence[Mapping[str, Any]], types: Mapping[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name, kind in types.items():
        columns[name] = pyarrow.array([row[name] for row in table], type=kind)
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
